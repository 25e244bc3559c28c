"""Sends HTTP requests at intended times, or as fast as they are answered, and writes down when and what was answered.

On raw connections: httpx takes as much of the processor for a request as a search does. What this program itself adds
and takes can be measured against `null_server`, which does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import numpy as np

LEAST = 10  # requests of each connection in a closed loop
MAX_CONNECTIONS = 1000
GIVE_UP_S = 30.0


class Connection(asyncio.Protocol):
    """A kept connection, one request at a time. httpx would take as much of the processor as a search does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._answered = None
        self.open = True
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """The answer to come; of status 0 if the connection is lost before."""
        self._body = bytearray()
        self._told = False
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._told |= name.lower() == b"retry-after"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end(Answer(self._parser.get_status_code(), self._told, bytes(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(Answer(0))

    def close(self) -> None:
        self.open = False
        self._transport.close()

    def _end(self, answer: Answer) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(answer)


@dataclass(slots=True)
class Answer:
    status: int
    retry_after: bool = False
    body: bytes = b""


class Connections:
    """As many connections as there are requests at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle = list[Connection]()
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    async def ask(self, request: bytes) -> Answer:
        async with self._room:
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                connection = connection if connection.open else None
            if connection is None:
                try:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(
                        Connection, "127.0.0.1", self._port
                    )
                except OSError:
                    return Answer(0)
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    answer = await connection.ask(request)
            except TimeoutError:
                connection.close()
                return Answer(0)
            if connection.open:
                self._idle.append(connection)
            return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


@dataclass
class Log:
    """Seconds since the start at which each request was due, sent and answered; its status; if it had Retry-After."""

    due: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    retry_after: list[bool] = field(default_factory=list)

    def latency_ms(self, chosen: Any = slice(None)) -> np.ndarray:
        """From the intended start."""
        return 1000 * (np.asarray(self.done) - np.asarray(self.due))[chosen]

    def part(self, begin: float, end: float = math.inf) -> Log:
        """The requests that were due in a span of time."""
        kept = [i for i, due in enumerate(self.due) if begin <= due < end]
        columns = (self.due, self.sent, self.done, self.status, self.retry_after)
        return Log(*([column[i] for i in kept] for column in columns))

    def lag_ms(self) -> float:
        """99 % of requests were sent at most this late."""
        return 1000 * float(np.percentile(np.asarray(self.sent) - np.asarray(self.due), 99))


def due_times(phases: Sequence[tuple[float, float]], arrivals: str) -> list[float]:
    """Seconds from the start at which requests are to be sent.

    Args:
        phases: (rate, seconds), one after the other.
        arrivals: "poisson" or "constant".
    """
    due = list[float]()
    begin = 0.0
    draw = np.random.default_rng(0)
    for rate, seconds in phases:
        number = max(1, round(rate * seconds))
        times = (
            np.sort(draw.uniform(0, seconds, number))
            if arrivals == "poisson"
            else np.arange(number) / rate
        )
        due += (begin + times).tolist()
        begin += seconds
    return due


async def open_loop(port: int, requests: Sequence[bytes], due_s: Sequence[float]) -> Log:
    """Sends each request at its time, however many are unanswered."""
    connections = Connections(port)
    log = Log()
    clock = asyncio.get_running_loop().time
    start = clock() + 0.05

    async def one(due: float, request: bytes) -> None:
        sent = clock() - start
        answer = await connections.ask(request)
        log.due.append(due)
        log.sent.append(sent)
        log.done.append(clock() - start)
        log.status.append(answer.status)
        log.retry_after.append(answer.retry_after)

    running = set[asyncio.Task[None]]()
    with without_collection():
        for i, due in enumerate(due_s):
            # 0 where we are late: answers are read in between.
            await asyncio.sleep(max(0.0, start + due - clock()))
            task = asyncio.create_task(one(due, requests[i % len(requests)]))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    connections.close()
    return log


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Searches for no cycles of garbage: that would stop this program for a tenth of a second."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def closed_loop(
    port: int, requests: Sequence[bytes], connections: int, seconds: float
) -> float:
    """Answers per second of so many connections that ask again at once; all of them must be 200."""
    pool = Connections(port)
    clock = asyncio.get_running_loop().time
    begin = clock()
    turn = iter(range(sys.maxsize))

    async def one() -> None:
        while (number := next(turn)) < LEAST * connections or clock() < begin + seconds:
            answer = await pool.ask(requests[number % len(requests)])
            if answer.status != 200:
                raise SystemExit(
                    f"error: status {answer.status} in a closed loop: {answer.body[:200]!r}, expected 200"
                )

    await asyncio.gather(*(one() for _ in range(connections)))
    pool.close()
    return (next(turn) - connections) / (
        clock() - begin
    )  # each took a number more, and did not ask


async def peak(
    port: int, requests: Sequence[bytes], numbers: Sequence[int], seconds: float
) -> tuple[float, int]:
    """Most answers per second, and with how many connections."""
    await closed_loop(port, requests, 2, seconds / 2)  # warm
    rates = [await closed_loop(port, requests, number, seconds) for number in numbers]
    best = int(np.argmax(rates))
    return rates[best], numbers[best]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NullConnection(asyncio.Protocol):
    """Answers everything at once with as many bytes as a search."""

    ANSWER = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1200\r\n\r\n"
        + 1200 * b" "
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(self.ANSWER)


async def null_server(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(NullConnection, "127.0.0.1", port)
    await server.serve_forever()
