"""Limits of connections, which hold before any token is checked.

uvicorn waits for the end of a request's head as long as its client likes, keeps all of it, and
accepts connections until no file can be opened. The protocol here ends such connections. When
there is no room, the connection that has been idle longest makes place for a new one, so idle
sockets cannot keep others out.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from xmcray.errors import ResourceError

MAX_HEAD = 32 * 1024  # bytes of request line and headers
HEAD_S = 10.0  # from the connection, or the first byte of a later request, to the head's end
LINGER_S = 2.0  # for a client to read an answer that refuses the rest of its request
SEND_S = 30.0  # for a client to read an answer that is larger than the buffers
BACKLOG = 256  # connections that the system may accept at a time, before they are counted
FILES = 256  # open files of the process itself: bundles, log, threads, libraries
REASONS = {
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class ConnectionRoom:
    """The connections of one server: at most `size`.

    Args:
        size: largest number of connections.
        max_body: bytes of a request's body.
    """

    def __init__(self, size: int, max_body: int) -> None:
        # A body in chunks has more bytes than its content, and may have headers at its end.
        self.max_request = 2 * max_body + MAX_HEAD
        self._size = size
        self._all: set[LimitedProtocol] = set()
        # Dictionaries keep the order of insertion: the first one has been idle longest.
        self._idle: dict[LimitedProtocol, None] = {}

    def admit(self, connection: LimitedProtocol) -> bool:
        """Whether there is room for a new connection, which is idle at first."""
        if len(self._all) >= self._size:
            if not self._idle:
                return False
            longest_idle = next(iter(self._idle))
            self.forget(longest_idle)
            longest_idle.transport.abort()
        self._all.add(connection)
        self._idle[connection] = None
        return True

    def rest(self, connection: LimitedProtocol) -> None:
        """Counts a connection as idle from now on."""
        if connection in self._all:
            self._idle[connection] = None

    def work(self, connection: LimitedProtocol) -> None:
        """Counts a connection as having a request."""
        self._idle.pop(connection, None)

    def forget(self, connection: LimitedProtocol) -> None:
        """Frees the place of a connection that ends."""
        self._all.discard(connection)
        self._idle.pop(connection, None)


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, httptools' or h11's, with limits of bytes, time and connections.

    Args:
        room: the connections of the server.
        arguments: see uvicorn's protocols.
    """

    def __init__(self, room: ConnectionRoom, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        # Received since the last head that was complete.
        self._num_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Starts the time in which a head has to come."""
        super().connection_made(transport)
        if self._room.admit(self):
            self._end_after(HEAD_S)
        else:
            self._refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees the place."""
        self._room.forget(self)
        self._cancel_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what comes, and refuses a request with too long a head."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_head = cycle is None or (cycle.response_complete and not cycle.more_body)
        is_first = self._num_bytes == 0
        self._num_bytes += len(data)
        super().data_received(data)
        # uvicorn makes a new cycle at the end of each head.
        if self.cycle is not cycle:
            self._num_bytes = 0
            self._cancel_timer()
            self._room.work(self)
        elif is_head and self._num_bytes > MAX_HEAD:
            self._refuse(431)
        elif self._num_bytes > self._room.max_request:
            # An answer may be on its way, so nothing can be put in between.
            self.transport.abort()
        elif is_head and is_first and cycle is not None:
            # The first byte ended uvicorn's own limit of idle time.
            self._end_after(HEAD_S)

    def on_response_complete(self) -> None:
        """Lets the connection rest, or ends it if the rest of a request is not wanted."""
        self._num_bytes = 0
        super().on_response_complete()
        if self.transport.is_closing():
            # Closing waits until the client has read the answer.
            self._set_timer(LINGER_S, self.transport.abort)
        elif self.cycle.response_complete:
            # Otherwise a further request of this connection is being answered.
            self._room.rest(self)
            if self.cycle.more_body:
                self._end_after(LINGER_S)

    def timeout_keep_alive_handler(self) -> None:
        """Ends a connection without a further request."""
        self._end()

    def pause_writing(self) -> None:
        """Called when the client does not read what is sent."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when the client reads again."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def _refuse(self, status: int) -> None:
        """Answers without the application, and ends the connection."""
        reason = REASONS[status]
        lines = [
            f"HTTP/1.1 {status} {reason}",
            "content-type: text/plain",
            f"content-length: {len(reason)}",
            "retry-after: 1",
            "connection: close",
            "",
            reason,
        ]
        self.transport.write("\r\n".join(lines).encode())
        self._end()

    def _end_after(self, seconds: float) -> None:
        self._set_timer(seconds, self._end)

    def _end(self) -> None:
        """Closes the connection; a client that does not read has a little time."""
        self._room.forget(self)
        self._set_timer(LINGER_S, self.transport.abort)
        self.transport.close()

    def _set_timer(self, seconds: float, function: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, function)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_open_files(max_connections: int) -> None:
    """Refuses a limit of connections that the system's limit of open files does not allow.

    Args:
        max_connections: largest number of connections.
    Raises:
        ResourceError: fewer files may be open.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + BACKLOG + FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ResourceError(
            f"this process may open {allowed} files, expected {needed} for {max_connections}"
            f" connections; run `ulimit -n {needed}`, or lower max_connections"
        )
