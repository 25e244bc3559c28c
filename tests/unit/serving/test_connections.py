"""Connections that waste a server's time, room or memory end without a token; others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import resource
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import served
import uvicorn
from bundles import write_bundle_of
from served import ADMIN, TOKEN

from xmcray.errors import ResourceError
from xmcray.serving import connections, local
from xmcray.serving.connections import (
    KEEP_PLACE,
    LEAVING,
    MAX_HEAD,
    MAX_HEADERS,
    PIPELINED,
    LimitedProtocol,
    check_open_files,
)
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.http import create_app
from xmcray.serving.local import LocalGateway, http_server, listening
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.serving.search_pb2_grpc import RetrieverStub
from xmcray.serving.security import new_token_file
from xmcray.serving.service import Service
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

GRPC_TOKEN = [("authorization", f"Bearer {TOKEN}")]
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
# What a client of HTTP/2 says first; the frame of settings is empty.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
# An answer of more than the system keeps for a client that does not read.
LARGE = b"a" * (16 << 20)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NoModels(SnapshotCoordinator):
    """Serves nothing: all that is tested here comes before the models."""

    def snapshots(self) -> Mapping[str, Snapshot | None]:
        return {}


class Server:
    """A server that listens, and connections to it."""

    def __init__(self, port: int, closing: contextlib.AsyncExitStack) -> None:
        self._port = port
        self._closing = closing

    async def connect(self, sent: bytes = b"", receive_buffer: int = 0) -> Streams:
        """A new connection; with a receive buffer of so many bytes, or of the system's size."""
        client = socket.socket()
        if receive_buffer:
            # Before it connects: a buffer that shrinks later drops packets and what they acknowledge.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=client)
        self._closing.callback(writer.close)
        writer.write(sent)
        return reader, writer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def server_with(folder: Path, grpc_port: int = 0, **settings: int) -> AsyncIterator[Server]:
    for name, token in (("token", TOKEN), ("admin-token", ADMIN)):
        new_token_file(folder / name).write_text(token)
    config = ServeConfig(bundles={"a": "none"}, state_dir=str(folder), **settings)
    port = free_port()
    gateway = LocalGateway(config, NoModels(config))
    async with (
        asyncio.timeout(20),
        listening(gateway, "127.0.0.1", port, grpc_port),
        contextlib.AsyncExitStack() as closing,
    ):
        yield Server(port, closing)


@contextlib.asynccontextmanager
async def server_of(app: Any) -> AsyncIterator[Server]:
    """A server whose requests an ASGI application of the test answers."""
    server = http_server(app, 4, 1 << 20)
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield Server(listener.getsockname()[1], closing)
        finally:
            server.should_exit = True
            await running


async def answer(send: Any, body: bytes) -> None:
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body})


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the next answer; 0 if the connection ends first."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    return int(head.split()[1])


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def greeting(reader: asyncio.StreamReader) -> bytes:
    """The first bytes that come; none if the connection ends before."""
    with contextlib.suppress(ConnectionError):
        return await reader.read(1)
    return b""


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


async def test_idle_connections_make_room_for_new_ones(tmp_path: Path) -> None:
    async with server_with(tmp_path, max_connections=8) as server:
        idle = [await server.connect() for _ in range(20)]
        for _ in range(20):
            reader, _ = await server.connect(HEALTH)
            assert await status_of(reader) == 200
        # The oldest had to go.
        await ended(idle[0][0])


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


async def test_no_idle_connection_means_a_refusal(tmp_path: Path) -> None:
    async with server_with(tmp_path, max_connections=2) as server:
        head = f"POST /v1/search HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        busy = head.encode() + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        for _ in range(2):
            reader, _ = await server.connect(busy)
            # The server waits for the body now.
            assert await status_of(reader) == 100
        refused, _ = await server.connect(HEALTH)
        assert await status_of(refused) == 503


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[LimitedProtocol]:
    """The server's sides of the connections, whose buffers are small."""
    found = []
    original = LimitedProtocol.connection_made

    def connection_made(self: LimitedProtocol, transport: asyncio.Transport) -> None:
        found.append(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        transport.set_write_buffer_limits(high=0)
        original(self, transport)

    monkeypatch.setattr(LimitedProtocol, "connection_made", connection_made)
    return found


async def test_few_requests_wait_for_the_answers_before_them(tmp_path: Path) -> None:
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with server_with(tmp_path) as server:
        # The first one is being answered while the others wait.
        reader, _ = await server.connect(HEALTH * PIPELINED + last)
        assert (await ended(reader)).count(b"200 OK") == PIPELINED + 1
        reader, _ = await server.connect(HEALTH * (PIPELINED + 1) + last)
        assert await ended(reader) == b""


async def unread(
    server: Server, protocols: list[LimitedProtocol], request: bytes
) -> asyncio.StreamWriter:
    """A connection that sends requests until one of its answers, which it never reads, is stuck."""
    number = len(protocols)
    _, writer = await server.connect(receive_buffer=1)
    writer.transport.pause_reading()
    while len(protocols) <= number:
        await asyncio.sleep(0)
    connection = protocols[number]
    while not connection.flow.write_paused:
        # One at a time: a connection with many requests that wait is ended.
        answered = connection.cycle
        writer.write(request)
        while connection.cycle is answered or not (
            connection.cycle.response_complete or connection.flow.write_paused
        ):
            await asyncio.sleep(0)
    return writer


async def test_requests_without_a_token_hold_no_place(
    tmp_path: Path, protocols: list[LimitedProtocol]
) -> None:
    async with server_with(tmp_path, max_connections=4) as server:
        for _ in range(4):
            await unread(server, protocols, HEALTH)
        other, _ = await server.connect(HEALTH)
        assert await status_of(other) == 200


@pytest.mark.parametrize("limit", ["PROGRESS_S", "SEND_S"])
async def test_a_client_with_a_token_that_does_not_read_holds_no_place(
    limit: str,
    tmp_path: Path,
    protocols: list[LimitedProtocol],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a little now and then, it could otherwise keep its place for ever."""
    head = f"GET /nothing HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    async with server_with(tmp_path, max_connections=4) as server:
        for number in range(4):
            writer = await unread(server, protocols, head.encode())
            # A further request, whose answer waits for the client.
            writer.write(head.encode())
            while protocols[number].cycle.response_complete:
                await asyncio.sleep(0)
        refused, _ = await server.connect(HEALTH)
        assert await status_of(refused) == 503
        monkeypatch.setattr(connections, limit, 0.0)
        other, _ = await server.connect(HEALTH)
        assert await status_of(other) == 200


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
    assert f"| {connections.PROGRESS_S:.0f} s | the connection counts as" in page


async def test_what_follows_a_body_is_no_header() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await answer(send, str(len(scope["headers"])).encode())

    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with server_of(app) as server:
        reader, _ = await server.connect(head + b"1\r\na\r\n0\r\nAuthorization: b\r\n\r\n")
        assert (await ended(reader)).endswith(b"\r\n\r\n3")


async def test_a_client_that_asks_to_close_has_time_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, LARGE)

    async with server_of(app) as server:
        reader, _ = await server.connect(HEALTH.replace(b"Host", b"Connection: close\r\nHost"))
        assert (await ended(reader)).endswith(LARGE)


async def token_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers a request with a token by more than the system keeps for a client, others by nothing."""
    body = b""
    if scope["path"] == "/large":
        assert scope["extensions"][KEEP_PLACE]["call"]()
        body = LARGE
    await answer(send, body)


async def test_a_client_that_reads_an_answer_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.0)
    async with server_of(token_app) as server:
        reader, _ = await server.connect(HEALTH.replace(b"/healthz", b"/large"))
        assert await status_of(reader) == 200
        # There are places for four connections.
        for _ in range(8):
            other, _ = await server.connect(HEALTH)
            assert await status_of(other) == 200
        assert await reader.readexactly(len(LARGE)) == LARGE


async def test_an_answer_may_be_read_for_longer_than_a_connection_may_rest(
    monkeypatch: pytest.MonkeyPatch, protocols: list[LimitedProtocol]
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.0)
    async with server_of(token_app) as server:
        reader, _ = await server.connect(HEALTH.replace(b"/healthz", b"/large"))
        assert await status_of(reader) == 200
        protocols[0].timeout_keep_alive_handler()
        assert await reader.readexactly(len(LARGE)) == LARGE
        # Then the connection rests, and ends.
        protocols[0].timeout_keep_alive_handler()
        assert await ended(reader) == b""


async def test_a_client_that_reads_nothing_of_an_answer_does_not_rest_for_ever(
    monkeypatch: pytest.MonkeyPatch, protocols: list[LimitedProtocol]
) -> None:
    async with server_of(token_app) as server:
        # Nothing is read beyond the head.
        reader, _ = await server.connect(HEALTH.replace(b"/healthz", b"/large"))
        assert await status_of(reader) == 200
        protocols[0].timeout_keep_alive_handler()
        assert not protocols[0].transport.is_closing()
        for name in ("PROGRESS_S", "LINGER_S"):
            monkeypatch.setattr(connections, name, 0.0)
        protocols[0].timeout_keep_alive_handler()
        while not protocols[0].transport.is_closing():
            await asyncio.sleep(0)


async def test_who_loses_his_place_reads_when_to_come_back(tmp_path: Path) -> None:
    """A client may have sent its next request already. It must not wait, nor wonder."""
    async with server_with(tmp_path, max_connections=2) as server:
        kept, writer = await server.connect(HEALTH)
        assert await status_of(kept) == 200
        await kept.readexactly(len('{"status":"ok"}'))
        for _ in range(2):
            other, _ = await server.connect(HEALTH)
            assert await status_of(other) == 200
        writer.write(HEALTH)
        answer = await kept.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer


async def test_who_loses_his_place_during_a_request_reads_no_refusal(
    protocols: list[LimitedProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal says that nothing was done, so a client would do it again."""
    monkeypatch.setattr(connections, "PROGRESS_S", 0.0)
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["extensions"][KEEP_PLACE]["call"]()
        is_first = scope["path"] == "/large"
        if not is_first:
            begun.set()
        await answer(send, b"." * (1 << 20) if is_first else b"")

    async with server_of(app) as server:
        reader, writer = await server.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        # A part of the answer: the rest waits for the client.
        await reader.readexactly(1)
        while not protocols[0].flow.write_paused:
            await asyncio.sleep(0)
        writer.write(HEALTH)
        await begun.wait()
        for _ in range(4):
            await server.connect()
        while len(protocols) < 5:
            await asyncio.sleep(0)
        assert b"503" not in await ended(reader)


async def test_few_connections_wait_until_their_clients_leave(
    tmp_path: Path, protocols: list[LimitedProtocol]
) -> None:
    async with server_with(tmp_path, max_connections=2) as server:
        num_clients = 2 + LEAVING + 8
        # None of them closes its side.
        clients = [await server.connect() for _ in range(num_clients)]
        while len(protocols) < num_clients:
            await asyncio.sleep(0)
        num_open = sum(not protocol.transport.is_closing() for protocol in protocols)
        assert num_open == 2 + LEAVING
        assert len(clients) == num_clients


async def test_a_request_that_arrives_when_the_idle_time_ends_is_answered(
    tmp_path: Path, protocols: list[LimitedProtocol]
) -> None:
    async with server_with(tmp_path) as server:
        reader, writer = await server.connect(HEALTH)
        assert await status_of(reader) == 200
        await reader.readexactly(len('{"status":"ok"}'))
        # The request is in the system's buffers, and the event loop has not seen it.
        os.write(writer.get_extra_info("socket").fileno(), HEALTH)
        protocols[0].timeout_keep_alive_handler()
        assert await status_of(reader) == 200


async def test_a_request_without_a_place_is_not_worked_on(tmp_path: Path) -> None:
    """Its client was told so."""
    for name, token in (("token", TOKEN), ("admin-token", ADMIN)):
        new_token_file(tmp_path / name).write_text(token)
    config = ServeConfig(bundles={"a": "none"}, state_dir=str(tmp_path))
    app = create_app(LocalGateway(config, NoModels(config)))

    async def without_place(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"] = {KEEP_PLACE: {"call": lambda: False}}
        await app(scope, receive, send)

    transport = httpx.ASGITransport(without_place)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:xmcray:overloaded"


async def test_many_clients_may_connect_at_the_same_moment(tmp_path: Path) -> None:
    """The system drops connections for which its queue has no room, and tells nobody."""
    port = free_port()
    for name, token in (("token", TOKEN), ("admin-token", ADMIN)):
        new_token_file(tmp_path / name).write_text(token)
    config = ServeConfig(bundles={"a": "none"}, state_dir=str(tmp_path), max_connections=2)
    gateway = LocalGateway(config, NoModels(config))
    async with listening(gateway, "127.0.0.1", port, 0):
        with contextlib.ExitStack() as closing:
            # The server accepts nothing meanwhile: this is its thread.
            for _ in range(600):
                address = ("127.0.0.1", port)
                closing.enter_context(socket.create_connection(address, timeout=0.5))


def test_too_few_open_files_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    check_open_files(512)
    with pytest.raises(ResourceError, match="may open 1024 files, expected 1025 for 513"):
        check_open_files(513)


async def test_malformed_requests_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_with(tmp_path) as server:
        reader, _ = await server.connect(b"\x00\x01\r\n\r\n")
        assert await status_of(reader) == 400
    assert not caplog.records


async def test_connections_of_grpc_are_limited_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "HEAD_S", 0.5)
    port = free_port()

    async with server_with(tmp_path, grpc_port=port):
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        # The server says hello, and ends the connection of a client that does not.
        await ended(silent)
        writer.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = RetrieverStub(channel).Search
            large = [*GRPC_TOKEN, ("x", "a" * 2 * MAX_HEAD)]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(SearchRequest(texts=["a"]), metadata=large)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(SearchRequest(texts=["a" * 5_000_000]), metadata=GRPC_TOKEN)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_idle_connections_of_grpc_leave_room_for_http_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRPC_IDLE_S", 1.0)
    port = free_port()
    async with server_with(tmp_path, grpc_port=port, max_connections=8) as server:
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _, writer in flood:
            writer.write(PREFACE)
        # gRPC gets four, and closes the others before it says anything.
        greetings = [await greeting(reader) for reader, _ in flood]
        assert sum(map(bool, greetings)) == 4
        for _ in range(8):
            reader, _ = await server.connect(HEALTH)
            assert await status_of(reader) == 200
        for reader, writer in flood:
            await ended(reader)
            writer.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = RetrieverStub(channel).Search(SearchRequest(texts=["a"]), wait_for_ready=True)
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


async def no_message() -> AsyncIterator[bytes]:
    """The messages of a client that never sends one."""
    await asyncio.Event().wait()
    yield b""


async def test_a_call_of_grpc_without_a_token_ends_before_its_message(tmp_path: Path) -> None:
    port = free_port()
    async with (
        server_with(tmp_path, grpc_port=port, in_flight=1),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.stream_unary("/xmcray.Retriever/Search")
        # More calls than the server has places for.
        for _ in range(3):
            assert await call(no_message()).code() == grpc.StatusCode.UNAUTHENTICATED


async def test_calls_of_grpc_without_a_message_do_not_keep_their_places(tmp_path: Path) -> None:
    """A client with a token could otherwise take all places, for as long as it likes."""
    port = free_port()
    async with (
        server_with(tmp_path, grpc_port=port, in_flight=1, deadline_ms=500),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.stream_unary("/xmcray.Retriever/Search")
        silent = [call(no_message(), metadata=GRPC_TOKEN) for _ in range(2)]
        for one in silent:
            assert await one.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        # There is a place for a call that is answered: no model of that name is served.
        request = SearchRequest(texts=["a"], model="b")
        search = RetrieverStub(channel).Search(request, metadata=GRPC_TOKEN)
        assert await search.code() == grpc.StatusCode.NOT_FOUND


async def test_a_mistake_of_ours_says_nothing_to_a_client_of_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("/private/path")

    monkeypatch.setattr(Service, "search", fail)
    port = free_port()
    async with (
        server_with(tmp_path, grpc_port=port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = RetrieverStub(channel).Search(SearchRequest(texts=["a"]), metadata=GRPC_TOKEN)
        assert await call.code() == grpc.StatusCode.INTERNAL
        assert "/private/path" not in await call.details()
    assert "/private/path" in caplog.text


async def test_searches_are_answered_during_a_flood(tmp_path: Path) -> None:
    """Idle sockets, endless heads and slow bodies with a token, all at once, and more than fit."""
    head = b"POST /v1/search HTTP/1.1\r\nHost: x\r\n"
    body = head + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 5000\r\n\r\n".encode()
    # What each connection sends first, and then again and again.
    idle = (b"", b"")
    endless = (head, b"X-More: " + b"a" * 100 + b"\r\n")
    slow = (body, b" ")
    bundles = {"a": write_bundle_of(tmp_path / "b", "texts")}
    with served.listening(tmp_path, bundles, max_connections=32) as address:
        port = httpx.URL(address).port
        assert port is not None
        headers = {"Authorization": f"Bearer {TOKEN}"}
        working = re.compile(r"^xmcray_requests_in_flight.* 11\.0$", re.MULTILINE)
        async with (
            asyncio.timeout(60),
            httpx.AsyncClient(base_url=address, timeout=30) as client,
            asyncio.TaskGroup() as group,
        ):
            flood = []
            for first, piece in [idle] * 50 + [endless] * 5 + [slow] * 10:
                flood.append(group.create_task(hold(port, first, piece)))
            # The bodies are being waited for, and this request is the eleventh.
            while not working.search((await client.get("/metrics", headers=headers)).text):
                await asyncio.sleep(0.01)
            num_answered = 0
            while num_answered < 20:
                answer = await client.post(
                    "/v1/search",
                    json={"texts": ["matrix"]},
                    headers=headers | {"Connection": "close"},
                )
                # With so few places a connection may lose its own before its request is read.
                if answer.status_code != 503:
                    assert len(answer.json()["results"][0]["answers"]) == 10
                    num_answered += 1
            for task in flood:
                task.cancel()


async def hold(port: int, first: bytes, piece: bytes) -> None:
    """A connection that sends slowly, and comes back when the server has closed it."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            while not reader.at_eof():
                writer.write(piece)
                # Reads what comes, so that the end is noticed.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await reader.read(4096)
            writer.close()
        await asyncio.sleep(0.1)
