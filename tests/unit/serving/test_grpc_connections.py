"""Connections and calls of gRPC have limits too, and leave room for HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from http_connections import HEALTH, ended, free_port, server_with, status_of
from served import TOKEN

from xmcray.serving import local
from xmcray.serving.connections import MAX_HEAD
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.serving.search_pb2_grpc import RetrieverStub
from xmcray.serving.service import Service

GRPC_TOKEN = [("authorization", f"Bearer {TOKEN}")]
# What a client of HTTP/2 says first; the frame of settings is empty.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


async def greeting(reader: asyncio.StreamReader) -> bytes:
    """The first bytes that come; none if the connection ends before."""
    with contextlib.suppress(ConnectionError):
        return await reader.read(1)
    return b""


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
