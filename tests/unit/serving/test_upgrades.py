"""A request that offers another protocol is read and answered as one that does not."""

from __future__ import annotations

from typing import Any

import pytest
from http_connections import answer, server_of, status_of

from xmcray.serving.upgrades import UpgradeIgnoringParser

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARA\r\n"
BODY = b'{"texts": ["matrix"], "k": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])


class Recorder:
    """Requests as a protocol gets them."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, int, bytes]] = []
        self.num_ended = 0

    def on_message_begin(self) -> None:
        self.url = b""
        self.num_headers = 0

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_headers += 1

    def on_headers_complete(self) -> None:
        self.requests.append((self.url, self.num_headers, b""))

    def on_body(self, body: bytes) -> None:
        url, num_headers, before = self.requests[-1]
        self.requests[-1] = (url, num_headers, before + body)

    def on_message_complete(self) -> None:
        self.num_ended += 1
        assert self.num_ended == len(self.requests)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_the_requests_are_those_without_the_offer(piece: int) -> None:
    lines = b"Host: x\r\n"
    sent = b"".join(
        [
            b"POST /one HTTP/1.1\r\n%b%b%b\r\n%b" % (lines, UPGRADE, LENGTH, BODY),
            b"GET /two HTTP/1.1\r\n%b%b\r\n" % (lines, UPGRADE),
            b"POST /three HTTP/1.1\r\n%b%b%b\r\n%b" % (lines, CHUNKED, UPGRADE, CHUNKS),
            b"POST /four HTTP/1.1\r\n%b%b\r\n%b" % (lines, LENGTH, BODY),
            b"GET /five HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        ]
    )
    recorder = Recorder()
    parser = UpgradeIgnoringParser(recorder)
    for first in range(0, len(sent), piece):
        parser.feed_data(sent[first : first + piece])
    assert recorder.requests == [
        (b"/one", 5, BODY),
        (b"/two", 4, b""),
        (b"/three", 5, BODY),
        (b"/four", 2, BODY),
        (b"/five", 2, b""),
    ]
    assert recorder.num_ended == 5


async def test_a_server_reads_the_body_and_the_next_request() -> None:
    async def echo(_: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        await answer(send, body)

    head = b"POST / HTTP/1.1\r\nHost: x\r\n%b%b\r\n" % (UPGRADE, LENGTH)
    async with server_of(echo) as server:
        reader, writer = await server.connect(head)
        for _ in range(2):
            writer.write(BODY)
            assert await status_of(reader) == 200
            assert await reader.readexactly(len(BODY)) == BODY
            writer.write(head)
