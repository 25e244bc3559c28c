"""What the client tries again, how long, and what it says when it gives up."""

from __future__ import annotations

import asyncio
import email.utils
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_calls import (
    ANSWERS,
    FOUND,
    READS,
    SWAPPED,
    TOKEN,
    URL,
    WRITES,
    Ask,
    Clock,
    Server,
    problem,
)

from xmcray.client import AsyncClient, Client, ClientError
from xmcray.client.call import UNSENT


@pytest.mark.parametrize(
    "failure",
    [
        408,
        429,
        500,
        502,
        503,
        504,
        *UNSENT,
        httpx.ReadError,
        httpx.WriteError,
        httpx.RemoteProtocolError,
    ],
)
def test_reads_are_tried_again(ask: Ask, failure: Any) -> None:
    for call in READS:
        server = Server(failure, ANSWERS[call[0]])
        ask(server, *call)
        first, second = server.requests
        assert first.content == second.content
        assert first.headers["X-Request-ID"] == second.headers["X-Request-ID"]


@pytest.mark.parametrize(
    "failure",
    [
        408,
        429,
        500,
        502,
        503,
        504,
        httpx.ReadError,
        httpx.WriteError,
        httpx.RemoteProtocolError,
        httpx.ReadTimeout,
    ],
)
def test_a_write_that_may_have_been_done_is_not_repeated(ask: Ask, failure: Any) -> None:
    for call in WRITES:
        server = Server(failure)
        error = ask.error(server, *call)
        assert len(server.requests) == 1
        assert isinstance(failure, int) or "may have been done" in str(error)


@pytest.mark.parametrize("kind", ["overloaded", "not-ready", None])
def test_a_write_that_was_not_done_is_repeated(ask: Ask, kind: str | None) -> None:
    for call in WRITES:
        server = Server(problem(503, kind) if kind else httpx.ConnectError, ANSWERS[call[0]])
        ask(server, *call)
        assert len(server.requests) == 2


def test_only_a_503_promises_that_nothing_was_done(ask: Ask) -> None:
    server = Server(problem(504, "overloaded"))
    assert ask.error(server, "swap", "b").status == 504
    assert len(server.requests) == 1


def test_waits_grow_until_the_time_is_over(ask: Ask, clock: Clock) -> None:
    server = Server(httpx.ConnectError)
    error = ask.error(server, "models", settings={"timeout_s": 8})
    assert error.kind == "unreachable"
    assert "is the server running?" in str(error)
    assert clock.sleeps == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]
    )  # another 2 s would be too long
    left = [request.extensions["timeout"]["read"] for request in server.requests]
    assert left == pytest.approx([8, 7.9, 7.7, 7.3, 6.5, 4.9, 2.9, 0.9])


def test_jitter_is_full(ask: Ask, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(random, "uniform", lambda *bounds: drawn.append(bounds) or 0.0)
    ask(Server(500, 500, FOUND), "search", ["x"])
    assert drawn == [(0.0, 0.1), (0.0, 0.2)]
    assert clock.sleeps == [0.0, 0.0]


@pytest.mark.parametrize("retries", [0, 2])
def test_number_of_retries(ask: Ask, retries: int) -> None:
    server = Server(500)
    ask.error(server, "search", ["x"], settings={"retries": retries})
    assert len(server.requests) == 1 + retries


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("written", "seconds"), [("3", 3.0), ("date", 3.0), ("soon", 0.0), ("-1", 0.0), ("nan", 0.0)]
)
def test_retry_after(ask: Ask, clock: Clock, status: int, written: str, seconds: float) -> None:
    value = email.utils.formatdate(clock.now + 3, usegmt=True) if written == "date" else written
    ask(
        Server(problem(status, "overloaded", headers={"Retry-After": value}), FOUND),
        "search",
        ["x"],
    )
    assert clock.sleeps == pytest.approx([seconds + 0.1])


def test_retry_after_the_deadline_is_not_waited_for(ask: Ask, clock: Clock) -> None:
    server = Server(problem(503, "overloaded", headers={"Retry-After": "30"}))
    assert ask.error(server, "search", ["x"]).kind == "overloaded"
    assert clock.sleeps == []


def test_a_swap_has_a_time_of_its_own(ask: Ask) -> None:
    server = Server(SWAPPED)
    ask(server, "swap", "b", settings={"timeout_s": 1})
    ask(server, "swap", "b", timeout_s=20, settings={"timeout_s": 1})
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [600, 20]


def test_an_attempt_without_answer_ends_the_call(ask: Ask) -> None:
    server = Server(500, httpx.ReadTimeout)
    error = ask.error(server, "search", ["x"])
    assert (error.kind, error.status) == ("deadline", None)
    assert "no answer within 10 s" in str(error)
    assert len(server.requests) == 2


def test_a_sync_call_ends_though_bytes_keep_coming(clock: Clock) -> None:
    def dribs() -> Iterator[bytes]:
        while True:
            clock.now += 3
            yield b" "

    server = Server(lambda: httpx.Response(200, content=dribs()))
    assert Ask(Client).error(server, "search", ["x"]).kind == "deadline"
    assert clock.now == 1012


def test_an_async_call_ends_though_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def call() -> None:
        async with AsyncClient(
            URL, TOKEN, timeout_s=0.02, transport=httpx.MockTransport(never)
        ) as client:
            await client.search(["x"])

    with pytest.raises(ClientError, match=r"within 0\.02 s") as caught:
        asyncio.run(call())
    assert caught.value.kind == "deadline"
