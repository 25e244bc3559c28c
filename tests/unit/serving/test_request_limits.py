"""Heads and bodies that are too long, or do not come, end without a token; others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from http_connections import HEALTH, answer, ended, server_of, server_with, status_of
from served import TOKEN

from xmcray.serving import connections
from xmcray.serving.connections import MAX_HEAD, MAX_HEADERS, PIPELINED


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "LINGER_S"):
        monkeypatch.setattr(connections, name, 0.2)
    # By default, uvicorn waits 5 s for the next request.
    monkeypatch.setattr(uvicorn, "Config", functools.partial(uvicorn.Config, timeout_keep_alive=1))


async def test_an_endless_header_ends_at_its_limit(tmp_path: Path) -> None:
    async with server_with(tmp_path) as server:
        begin = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "
        # In one piece, in many, and after a request that was answered.
        complete, _ = await server.connect(begin + b"a" * MAX_HEAD + b"\r\n\r\n")
        assert await status_of(complete) == 431
        for first in (b"", HEALTH):
            reader, writer = await server.connect(first)
            if first:
                assert await status_of(reader) == 200
                await reader.readexactly(len('{"status":"ok"}'))
            with contextlib.suppress(ConnectionError):
                writer.write(begin)
                for _ in range(64):
                    writer.write(b"a" * 1024)
                    await writer.drain()
            assert await status_of(reader) in (431, 0)
            await ended(reader)
        allowed, _ = await server.connect(begin + b"a" * (MAX_HEAD // 2) + b"\r\n\r\n")
        assert await status_of(allowed) == 200


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("sent", [b"", b"GET /heal", HEALTH + b"GET"])
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes, tmp_path: Path) -> None:
    async with server_with(tmp_path) as server:
        reader, _ = await server.connect(sent)
        assert (await ended(reader)).count(b"200 OK") == sent.count(HEALTH)


@pytest.mark.usefixtures("short_times")
async def test_a_body_that_does_not_come_ends_the_connection(tmp_path: Path) -> None:
    async with server_with(tmp_path, deadline_ms=200) as server:
        for token, status in ((TOKEN, b"408"), ("wrong", b"401")):
            head = f"POST /v1/search HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            lengths = (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1")
            for length in lengths:
                reader, _ = await server.connect(head.encode() + length)
                assert status in await ended(reader)


async def test_without_a_token_no_body_is_waited_for(tmp_path: Path) -> None:
    """A connection that waits for a body counts as working, and no other may take its place."""
    async with server_with(tmp_path, max_connections=4) as server:
        for method, path in (("POST", "/healthz"), ("GET", "/healthz"), ("POST", "/v1/search")):
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
            for _ in range(6):
                reader, _ = await server.connect(head.encode())
                assert await status_of(reader) in (200, 401, 405)
            other, _ = await server.connect(HEALTH)
            assert await status_of(other) == 200


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b""])
async def test_a_client_that_is_still_sending_reads_why_it_is_refused(
    head: bytes, tmp_path: Path
) -> None:
    """A closed connection would be reset by what it still sends, and lose the answer."""
    async with server_with(tmp_path) as server:
        for token, expected in ((b"", 401), (TOKEN.encode(), 413)):
            reader, writer = await server.connect(
                b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n"
                + head
                + b"Authorization: Bearer "
                + token
                + b"\r\n\r\n"
            )
            # Until it has sent everything, the client reads nothing.
            for _ in range(80):
                writer.write(b"a" * 100_000)
                await writer.drain()
            assert await status_of(reader) == expected
            await reader.readuntil(b"}")
            if head:
                assert await reader.read() == b"", "the end, and no reset"


async def test_few_requests_wait_for_the_answers_before_them(tmp_path: Path) -> None:
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with server_with(tmp_path) as server:
        # The first one is being answered while the others wait.
        reader, _ = await server.connect(HEALTH * PIPELINED + last)
        assert (await ended(reader)).count(b"200 OK") == PIPELINED + 1
        reader, _ = await server.connect(HEALTH * (PIPELINED + 1) + last)
        assert await ended(reader) == b""


async def test_a_head_behind_a_request_ends_at_its_limit() -> None:
    """Short headers take twenty times their bytes of memory."""
    called = asyncio.Event()
    answered = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.set()
        await answered.wait()

    async with server_of(app) as server:
        reader, writer = await server.connect(HEALTH)
        await called.wait()
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\n")
            for _ in range(64):
                writer.write(b"a:\r\n" * 256)
                await writer.drain()
        assert await ended(reader) == b""
        answered.set()


async def test_a_head_has_a_largest_number_of_lines(tmp_path: Path) -> None:
    """Each line costs memory and time, however short it is."""
    async with server_with(tmp_path) as server:
        # The host is a header too.
        for num_more, status in ((MAX_HEADERS - 1, 200), (MAX_HEADERS, 431), (5_000, 431)):
            lines = b"a:\r\n" * num_more
            reader, _ = await server.connect(HEALTH[:-2] + lines + b"\r\n")
            assert await status_of(reader) == status


async def test_lines_beyond_the_largest_number_are_not_kept() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, str(len(scope["headers"])).encode())

    async with server_of(app) as server:
        head = HEALTH[:-2] + b"Connection: close\r\n" + b"a:\r\n" * 5_000 + b"\r\n"
        reader, _ = await server.connect(head)
        assert (await ended(reader)).endswith(b"\r\n\r\n%d" % (MAX_HEADERS + 1))


def test_the_documentation_names_the_limits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"| request line and headers | 32 kB ({MAX_HEAD:,} bytes) | 431" in page
    assert f"| headers of a request | {MAX_HEADERS} | 431 |" in page
    assert f"| {PIPELINED} wait |" in page
    assert f"| {connections.HEAD_S:.0f} s | the connection is closed |" in page
    assert f"| {connections.SEND_S:.0f} s when the buffers are full" in page
    assert f"| {connections.PROGRESS_S:.0f} s | the connection may be closed" in page


async def test_what_follows_a_body_is_no_header() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await answer(send, str(len(scope["headers"])).encode())

    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with server_of(app) as server:
        reader, _ = await server.connect(head + b"1\r\na\r\n0\r\nAuthorization: b\r\n\r\n")
        assert (await ended(reader)).endswith(b"\r\n\r\n3")


async def test_malformed_requests_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_with(tmp_path) as server:
        reader, _ = await server.connect(b"\x00\x01\r\n\r\n")
        assert await status_of(reader) == 400
    assert not caplog.records
