"""Servers of HTTP without models, and connections to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from served import ADMIN, TOKEN

from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.local import LocalGateway, http_server, listening
from xmcray.serving.security import new_token_file
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
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
