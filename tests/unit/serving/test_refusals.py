"""Requests that are refused without the application, because too many are in progress."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from served import ADMIN, TOKEN

from xmcray.serving import connections, local
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.http import refusal
from xmcray.serving.local import LocalGateway, listening
from xmcray.serving.security import new_token_file
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

BODY = b'{"texts": ["a"]}'
STATUS = re.compile(rb"HTTP/1.1 (\d+) ")


class NoModels(SnapshotCoordinator):
    """Serves nothing: what is tested here comes before the models."""

    def snapshots(self) -> Mapping[str, Snapshot | None]:
        return {}


class Server:
    """A server that listens, and its gateway."""

    def __init__(self, gateway: LocalGateway, port: int) -> None:
        self.gateway = gateway
        self._port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, *parts: bytes) -> bytes:
        """The answers to all requests of one connection, whose parts the server gets one by one."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.05)
        answers = b""
        for _ in range(b"".join(parts).count(b" HTTP/1.1\r\n")):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            answers += head + await reader.readexactly(int(length))
        writer.close()
        return answers

    async def until_the_end(self, *parts: bytes) -> bytes:
        """What comes on a connection until the server ends it."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)
        answer = await reader.read()
        writer.close()
        return answer

    def refused(self) -> float:
        """How many searches the metrics have as refused."""
        (family,) = self.gateway.metrics.requests.collect()
        counted = {"route": "/v1/search", "status": "503"}
        return sum(
            sample.value
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels == counted
        )


@contextlib.asynccontextmanager
async def full_server(folder: Path) -> AsyncIterator[Server]:
    """A server with as many requests in progress as it may have."""
    for name, token in (("token", TOKEN), ("admin-token", ADMIN)):
        new_token_file(folder / name).write_text(token)
    config = ServeConfig(bundles={"a": "none"}, state_dir=str(folder), in_flight=1)
    gateway = LocalGateway(config, NoModels(config))
    gateway.service.working = 1
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with asyncio.timeout(20), listening(gateway, "127.0.0.1", port, 0):
        yield Server(gateway, port)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was answered without the application: a response, or None."""
    answered: list[Any] = []

    def noted(gateway: Any, scope: Any) -> Any:
        answered.append(refusal(gateway, scope))
        return answered[-1]

    monkeypatch.setattr(local, "refusal", noted)
    return answered


def search(*headers: str, token: str = TOKEN, version: str = "1.1") -> bytes:
    lines = [
        f"POST /v1/search HTTP/{version}",
        "Host: x",
        f"Authorization: Bearer {token}",
        f"Content-Length: {len(BODY)}",
        *headers,
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + BODY


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in STATUS.findall(answers)]


async def test_an_early_refusal_is_what_the_application_would_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: list[Any]
) -> None:
    async def answer() -> tuple[set[bytes], bytes]:
        """Headers but the date, and body."""
        async with full_server(tmp_path) as server:
            head, body = (await server.ask(search("X-Request-Id: mine"))).split(b"\r\n\r\n")
            assert server.refused() == 1
        return {line for line in head.split(b"\r\n") if not line.startswith(b"date: ")}, body

    headers, body = await answer()
    assert refusals.pop() is not None
    assert {b"x-request-id: mine", b"retry-after: 1"} <= headers
    monkeypatch.setattr(local, "refusal", lambda gateway, scope: None)  # the application answers
    assert (headers, body) == await answer()


async def test_without_a_token_the_application_answers(tmp_path: Path, refusals: list[Any]) -> None:
    async with full_server(tmp_path) as server:
        answers = await server.ask(search(token="wrong"))
    assert statuses(answers) == [401]
    assert refusals == [None]


async def test_with_room_and_on_other_paths_the_application_answers(
    tmp_path: Path, refusals: list[Any]
) -> None:
    async with full_server(tmp_path) as server:
        server.gateway.service.working = 0
        answers = await server.ask(search())
        server.gateway.service.working = 1
        answers += await server.ask(search().replace(b"search", b"models"))
    # No model answers, and that path is not for POST.
    assert statuses(answers) == [422, 405]
    assert refusals == [None, None]


async def test_after_a_refusal_a_connection_goes_on(tmp_path: Path, refusals: list[Any]) -> None:
    models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    async with full_server(tmp_path) as server:
        one_by_one = await server.ask(search(), search(), models)
        at_once = await server.ask(search() + search() + models)
    assert statuses(one_by_one) == [503, 503, 401]
    assert statuses(at_once) == [503, 503, 401]
    # The third request of each is no search.
    assert len(refusals) == 4
    assert None not in refusals


@pytest.mark.parametrize(
    "request_", [search("Connection: close"), search(version="1.0")], ids=["close", "1.0"]
)
async def test_a_connection_ends_where_the_client_wants_it(
    tmp_path: Path, refusals: list[Any], request_: bytes
) -> None:
    async with full_server(tmp_path) as server:
        answer = await server.until_the_end(request_)
    assert statuses(answer) == [503]
    assert b"connection: close\r\n" in answer
    assert refusals[0] is not None


async def test_a_body_that_does_not_come_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: list[Any]
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    async with full_server(tmp_path) as server:
        # Sooner than a connection ends that is only idle.
        async with asyncio.timeout(3):
            answer = await server.until_the_end(search().removesuffix(BODY))
    assert statuses(answer) == [503]
    assert refusals[0] is not None


async def test_after_a_late_body_a_connection_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: list[Any]
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.3)
    async with full_server(tmp_path) as server:
        head = search().removesuffix(BODY)
        reader, writer = await server.connect()
        writer.write(head)
        await reader.readuntil(b"}")
        writer.write(BODY)
        # Longer than a body may take.
        await asyncio.sleep(0.6)
        writer.write(search())
        answer = await reader.readuntil(b"}")
        writer.close()
    assert statuses(answer) == [503]
    assert None not in refusals


async def test_a_client_that_is_still_sending_reads_why_it_is_refused(
    tmp_path: Path, refusals: list[Any]
) -> None:
    async with full_server(tmp_path) as server:
        head = search("Connection: close").removesuffix(BODY)
        # The answer comes after the head.
        answer = await server.until_the_end(head, BODY, BODY, BODY)
    assert statuses(answer) == [503]
    assert refusals[0] is not None


async def test_the_next_head_has_no_more_time_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: list[Any]
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    async with full_server(tmp_path) as server:
        reader, writer = await server.connect()
        writer.write(search())
        await reader.readuntil(b"}")
        writer.write(b"POST /v1/search HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
    assert refusals[0] is not None
