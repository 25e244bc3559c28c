"""Idle and slow clients lose their places to others, who are answered during a flood, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import served
from bundles import write_bundle_of
from http_connections import (
    HEALTH,
    NoModels,
    Server,
    answer,
    ended,
    free_port,
    server_of,
    server_with,
    status_of,
)
from served import ADMIN, TOKEN

from xmcray.errors import ResourceError
from xmcray.serving import connections
from xmcray.serving.connections import KEEP_PLACE, LEAVING, LimitedProtocol, check_open_files
from xmcray.serving.http import create_app
from xmcray.serving.local import LocalGateway, listening
from xmcray.serving.security import new_token_file
from xmcray.serving.settings import ServeConfig

# An answer of more than the system keeps for a client that does not read.
LARGE = b"a" * (16 << 20)


async def test_idle_connections_make_room_for_new_ones(tmp_path: Path) -> None:
    async with server_with(tmp_path, max_connections=8) as server:
        idle = [await server.connect() for _ in range(20)]
        for _ in range(20):
            reader, _ = await server.connect(HEALTH)
            assert await status_of(reader) == 200
        # The oldest had to go.
        await ended(idle[0][0])


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
