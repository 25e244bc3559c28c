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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httptools
import numpy as np

LEAST = 10  # requests of each connection in a closed loop
MAX_CONNECTIONS = 1000
GIVE_UP_S = 30.0


class Connection(asyncio.Protocol):
    """A kept connection, one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._answered = None
        self.open = True
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """The answer to come; of status 0 if the connection is lost before."""
        self._body = bytearray()
        self._has_retry_after = False
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._has_retry_after = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        status = self._parser.get_status_code()
        self._end(Answer(status, self._has_retry_after, bytes(self._body)))

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
    """What a server answered.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        retry_after: whether it had the header Retry-After.
        body: of the answer.
    """

    status: int
    retry_after: bool = False
    body: bytes = b""


class Connections:
    """A pool with as many connections as there are requests at a time, MAX_CONNECTIONS at most."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle = list[Connection]()
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    async def ask(self, request: bytes) -> Answer:
        """Sends a request over an idle connection or a new one."""
        async with self._room:
            try:
                connection = self._take_idle() or await self._connect()
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

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            # The server may have closed it meanwhile.
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer; times are seconds since the start.

    Attributes:
        due_s: when it was to be sent.
        sent_s: when it was sent.
        answered_s: when the answer was complete.
        status: of the answer.
        retry_after: whether the answer had the header Retry-After.
    """

    due_s: float
    sent_s: float
    answered_s: float
    status: int
    retry_after: bool


@dataclass(frozen=True)
class Log:
    """What happened under load.

    Attributes:
        exchanges: in the order of the answers.
    """

    exchanges: Sequence[Exchange]

    @property
    def statuses(self) -> list[int]:
        """Of all answers."""
        return [exchange.status for exchange in self.exchanges]

    def part(self, begin_s: float, end_s: float = math.inf) -> Log:
        """The requests that were due in a span of time."""
        return Log([exchange for exchange in self.exchanges if begin_s <= exchange.due_s < end_s])

    def with_status(self, *statuses: int) -> Log:
        """The requests that were answered in one of some ways."""
        return Log([exchange for exchange in self.exchanges if exchange.status in statuses])

    def latency_ms(self) -> np.ndarray:
        """Time of each request, from when it was due: waiting for this program counts, too."""
        latency_s = [exchange.answered_s - exchange.due_s for exchange in self.exchanges]
        return 1000 * np.array(latency_s)

    def lag_ms(self) -> float:
        """99 % of requests were sent at most this late."""
        lag_s = [exchange.sent_s - exchange.due_s for exchange in self.exchanges]
        return 1000 * float(np.percentile(lag_s, 99))


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
        num_requests = max(1, round(rate * seconds))
        if arrivals == "poisson":
            # Given their number, the arrivals of a Poisson process are uniform.
            times = np.sort(draw.uniform(0, seconds, num_requests))
        else:
            times = np.arange(num_requests) / rate
        due += (begin + times).tolist()
        begin += seconds
    return due


async def open_loop(port: int, requests: Sequence[bytes], due_s: Sequence[float]) -> Log:
    """Sends each request at its time, however many are unanswered."""
    connections = Connections(port)
    exchanges = list[Exchange]()
    clock = asyncio.get_running_loop().time
    start = clock() + 0.05

    async def exchange(due: float, request: bytes) -> None:
        sent = clock() - start
        answer = await connections.ask(request)
        answered = clock() - start
        exchanges.append(Exchange(due, sent, answered, answer.status, answer.retry_after))

    running = set[asyncio.Task[None]]()
    with without_collection():
        for number, due in enumerate(due_s):
            # A sleep of 0 if this program is late: answers are read in between.
            await asyncio.sleep(max(0.0, start + due - clock()))
            task = asyncio.create_task(exchange(due, requests[number % len(requests)]))
            # The loop itself keeps only weak references to tasks.
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    connections.close()
    return Log(exchanges)


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
    num_sent = 0

    async def ask_again() -> None:
        nonlocal num_sent
        while num_sent < LEAST * connections or clock() < begin + seconds:
            request = requests[num_sent % len(requests)]
            num_sent += 1
            answer = await pool.ask(request)
            if answer.status != 200:
                raise SystemExit(
                    f"error: status {answer.status} in a closed loop: {answer.body[:200]!r}, expected 200"
                )

    await asyncio.gather(*(ask_again() for _ in range(connections)))
    pool.close()
    return num_sent / (clock() - begin)


async def peak(
    port: int, requests: Sequence[bytes], numbers: Sequence[int], seconds: float
) -> tuple[float, int]:
    """Most answers per second, and with how many connections."""
    # Warms up.
    await closed_loop(port, requests, 2, seconds / 2)
    rates = [await closed_loop(port, requests, connections, seconds) for connections in numbers]
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
