"""Limits of connections, which hold before any token is checked.

uvicorn waits for the end of a request's head as long as its client likes, keeps all of it, keeps
all requests that are sent before the answers are read, and accepts connections until no file can
be opened. The protocol here ends such connections.

When there is no room, a new connection takes the place of the oldest one that neither has a request
with a token nor reads the answer to one. Clients without a token therefore cannot block others.
"""

from __future__ import annotations

import asyncio
import resource
import select
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from xmcray.errors import ResourceError
from xmcray.serving.upgrades import UpgradeIgnoringParser

MAX_HEAD = 32 * 1024  # bytes of request line and headers
MAX_HEADERS = 100  # lines of a head after the first
HEAD_S = 10.0  # from the connection, or the first byte of a later request, to the head's end
LINGER_S = 2.0  # for a client to read an answer that refuses the rest of its request
SEND_S = 30.0  # for a client to read an answer that is larger than the buffers, or the last one
PROGRESS_S = 5.0  # for a client to read some of an answer, if its place is wanted
PIPELINED = 4  # requests of a connection that wait for the answers to the requests before them
LEAVING = 64  # connections that have no place any more and may read why
# Connections that wait in the system. It drops what does not fit without a word, and the client
# waits for its own time limit.
BACKLOG = 1024
# Connections that asyncio accepts in one round of its loop, and that count only in the next one. If
# they were as many as all places, none would be left to a client whose request comes a round later.
# uvloop accepts one in each round.
ACCEPTED = 8
FILES = 440  # open files of the process itself: bundles, log, threads, libraries
KEEP_PLACE = "xmcray.keep_place"  # ASGI extension: this request has a valid token
REASONS = {
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

# Given the scope of a request, the answer that refuses it, or None for the application to answer.
Refusal = Callable[[Any], Response | None]


def refuse_nothing(scope: Any) -> None:
    """Leaves every request to the application."""


class ConnectionRoom:
    """The connections of one server: at most `size`.

    Args:
        size: largest number of connections.
        max_body: bytes of a request's body.
        refusal: asked before the application. Under overload most requests are refused, and each
            should cost little.
    """

    def __init__(
        self,
        size: int,
        max_body: int,
        refusal: Refusal = refuse_nothing,
    ) -> None:
        self.refusal = refusal
        # A body in chunks has more bytes than its content, and may have headers at its end.
        self.max_request = 2 * max_body + MAX_HEAD
        self._size = size
        self._all: set[LimitedProtocol] = set()
        # Those whose place a new one may take. Dictionaries keep the order of insertion: the first
        # one has been there longest. Requests without a token do not change the order.
        self._evictable: dict[LimitedProtocol, None] = {}
        # They count no more, and close as soon as their clients have read the refusal.
        self._leaving: dict[LimitedProtocol, None] = {}

    def admit(self, connection: LimitedProtocol) -> bool:
        """Adds a connection, in place of the oldest evictable one if there is no room.

        Returns:
            Whether it was added; it is evictable at first.
        """
        if len(self._all) >= self._size:
            oldest = next((other for other in self._evictable if not other.keeps_place()), None)
            if oldest is None:
                return False
            oldest.refuse(503)
        self._all.add(connection)
        self._evictable[connection] = None
        return True

    def make_evictable(self, connection: LimitedProtocol) -> None:
        """Lets others take a connection's place, from now on if they could not before."""
        if connection in self._all:
            self._evictable[connection] = None

    def protect(self, connection: LimitedProtocol) -> None:
        """Keeps the place of a connection from others: it has a request with a token."""
        self._evictable.pop(connection, None)

    def has(self, connection: LimitedProtocol) -> bool:
        """Whether a connection has a place."""
        return connection in self._all

    def leave(self, connection: LimitedProtocol) -> None:
        """Frees the place of a connection that may read a little longer."""
        self.remove(connection)
        self._leaving[connection] = None
        if len(self._leaving) > LEAVING:
            next(iter(self._leaving)).abort()

    def remove(self, connection: LimitedProtocol) -> None:
        """Frees the place of a connection that ends."""
        self._all.discard(connection)
        self._evictable.pop(connection, None)
        self._leaving.pop(connection, None)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of bytes, time, requests and connections.

    Args:
        room: the connections of the server.
        arguments: see uvicorn's protocol.
    """

    def __init__(self, room: ConnectionRoom, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ignoring_parser = UpgradeIgnoringParser(self)
        self.parser = self._ignoring_parser  # type: ignore[assignment]
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        # Received of the present head, or since its end.
        self._num_bytes = 0
        # Otherwise a body is received.
        self._is_in_head = True
        # What still comes is dropped, and what was written is still sent.
        self._is_leaving = False
        self._has_token = False
        # The application may have done what the present request asks for.
        self._may_have_acted = False
        # Since when the client has had an answer to read, by the loop's clock.
        self._answered_s = 0.0
        # Bytes that were unsent when the client was last seen to read some, and when that was.
        self._unread_bytes = 0
        self._progress_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """Starts the time in which a head has to come."""
        super().connection_made(transport)
        if self._room.admit(self):
            self._end_after(HEAD_S)
        else:
            self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees the place."""
        self._room.remove(self)
        self._cancel_timer()
        self.resume_writing()
        super().connection_lost(exc)
        self._ignoring_parser.close()

    def data_received(self, data: bytes) -> None:
        """Counts what comes, and refuses a request with too long a head."""
        # What comes on a connection that is ended is read, so that the system does not reset it
        # before its client has read the answer.
        if self._is_leaving or self.transport.is_closing():
            return
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        is_waiting = cycle is None or (cycle.response_complete and not cycle.more_body)
        is_first = self._num_bytes == 0
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            # The request was malformed.
            self._set_timer(LINGER_S, self.abort)
        elif self.cycle is not cycle:
            # uvicorn makes a new cycle at the end of each head.
            self._num_bytes = 0
            self._cancel_timer()
        elif self._is_in_head and self._num_bytes > MAX_HEAD:
            if is_answering:
                # The answer to an earlier request is on its way, so nothing can be put in between.
                self.abort()
            else:
                self.refuse(431)
        elif self._num_bytes > self._room.max_request:
            if cycle is not None and cycle.response_complete:
                # The client has not read yet that it need not send this.
                self._end()
            else:
                self.abort()
        elif is_waiting and is_first and cycle is not None:
            # The first byte ended uvicorn's own limit of idle time.
            self._end_after(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header; what follows a body (trailers) is none, and could be much."""
        # A short line takes twenty times its bytes of memory. The application refuses a head with
        # one line more than is allowed, so further ones need not be kept.
        if self._is_in_head and len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts a request, or ends a connection that has sent too many of them."""
        self._is_in_head = False
        if not self.transport.get_write_buffer_size():
            self._unread_bytes = 0
        if len(self.pipeline) >= PIPELINED:
            self.abort()
            # uvicorn reads all requests of one piece, unless the parser fails.
            raise ConnectionAbortedError
        self.scope["extensions"] = {KEEP_PLACE: {"call": self._keep_place}}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends a request; what comes now belongs to the next head."""
        self._is_in_head = True
        self._num_bytes = 0
        super().on_message_complete()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and cycle.more_body:
            # The rest of a request that was answered before. The next one may take its time.
            cycle.more_body = False
            self._set_timer(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def end_after_answer(self, cycle: RequestResponseCycle) -> None:
        """Ends the connection, because the client or the application wants no further request."""
        if cycle.more_body:
            # The client is still sending, and a closed connection would be reset.
            self._end()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Lets the connection rest, or ends it if the rest of a request is not wanted."""
        if self._is_leaving:
            return
        self._num_bytes = 0
        self._may_have_acted = False
        now = self.loop.time()
        # An answer that waits behind another one gives its client no further time.
        if not self._unread_bytes:
            self._answered_s = now
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._progress_s = now
        super().on_response_complete()
        if self.transport.is_closing():
            # Closing waits until the client has read the answer.
            self._set_timer(SEND_S, self.abort)
            return
        self._room.make_evictable(self)
        # Otherwise a further request of this connection is being answered.
        if self.cycle.response_complete and self.cycle.more_body:
            self._end_after(LINGER_S)

    def timeout_keep_alive_handler(self) -> None:
        """Ends a connection without a further request."""
        if self._is_leaving or self.transport.is_closing():
            return
        if self._reads_answer():
            # uvicorn counts from the moment at which it was written.
            self._set_timer(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        # uvloop looks at the time first. A request that waits in the system is not too late.
        if not poll.poll(0):
            self._end()

    def pause_writing(self) -> None:
        """Called when the client does not read what is sent."""
        super().pause_writing()
        # A client that reads slowly could keep its place for ever, request after request. While it
        # makes progress, its place is not taken; see `keeps_place`.
        self._room.make_evictable(self)
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(SEND_S, self.abort)

    def resume_writing(self) -> None:
        """Called when the client reads again."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def keeps_place(self) -> bool:
        """Whether no other connection may take the place, because an answer is being read."""
        return self._has_token and self._reads_answer()

    def refuse(self, status: int) -> None:
        """Answers without the application, and ends the connection.

        A client may be sending a request on a connection that looks idle here. It reads that nothing
        was done, and when to ask again.
        """
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        # If a part of an answer is on its way, nothing can be put in between. If something was done,
        # the client must not read the contrary.
        is_too_late = is_answering and (
            self.pipeline or cycle.response_started or self._may_have_acted
        )
        if is_too_late or self.transport.is_closing():
            self.abort()
            return
        if is_answering:
            # What the application answers is not sent.
            cycle.disconnected = True
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

    def abort(self) -> None:
        """Ends the connection at once."""
        self._room.remove(self)
        self.transport.abort()

    def _keep_place(self) -> bool:
        """Keeps the connection's place until the answer; whether it still has one.

        Before the client has read earlier answers, this request's cannot be sent: its place stays one
        that others may take.
        """
        self._has_token = True
        if not self.flow.write_paused:
            self._room.protect(self)
        self._may_have_acted = self._room.has(self)
        return self._may_have_acted

    def _reads_answer(self) -> bool:
        """Whether a part of an answer is unsent, and the client reads on.

        What the system has taken counts as read: it delivers that after the connection's end too.
        """
        now = self.loop.time()
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes < self._unread_bytes:
            self._unread_bytes = unread_bytes
            self._progress_s = now
        is_in_time = now - self._progress_s < PROGRESS_S and now - self._answered_s < SEND_S
        return unread_bytes > 0 and is_in_time

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Starts the application, or answers without it what would be refused."""
        cycle.transport = _AnswerTransport(self, cycle)
        # The application waits until a client has read earlier answers.
        is_asked = cycle.scope["method"] == "POST" and not self.flow.write_paused
        response = self._room.refusal(cycle.scope) if is_asked else None
        if response is None:
            super()._start_asgi_task(cycle, app)
        else:
            # Once all of what has come is parsed, as before a task of the application starts.
            self.loop.call_soon(self._answer, cycle, response)

    def _answer(self, cycle: RequestResponseCycle, response: Response) -> None:
        """Sends a whole answer at once."""
        if not self._keep_place() or cycle.disconnected or self.transport.is_closing():
            return
        content = [STATUS_LINE[response.status_code]]
        for name, value in (*self.server_state.default_headers, *response.raw_headers):
            content += [name, b": ", value, b"\r\n"]
        if not cycle.keep_alive:
            content.append(b"connection: close\r\n")
        content += [b"\r\n", bytes(response.body)]
        self.transport.write(b"".join(content))
        cycle.response_started = True
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.end_after_answer(cycle)
        self.on_response_complete()

    def _end_after(self, seconds: float) -> None:
        self._set_timer(seconds, self._end)

    def _end(self) -> None:
        """Ends the connection; its client has a little time to read what was sent."""
        if self.transport.is_closing():
            self.abort()
            return
        self._is_leaving = True
        self._set_timer(LINGER_S, self.abort)
        # It may have been paused for a body that is not wanted any more.
        self.flow.resume_reading()
        # The client reads the end, and closes. Closing here would reset a connection whose client
        # is still sending, and what it did not read yet would be lost.
        self.transport.write_eof()
        self._room.leave(self)

    def _set_timer(self, seconds: float, function: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, function)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _AnswerTransport(asyncio.Transport):
    """What uvicorn uses of a transport while it answers a request.

    Args:
        protocol: the connection.
        cycle: the request.
    """

    def __init__(self, protocol: LimitedProtocol, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._protocol = protocol
        self._cycle = cycle

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.end_after_answer(self._cycle)


def check_open_files(max_connections: int) -> None:
    """Refuses a limit of connections that the system's limit of open files does not allow.

    Args:
        max_connections: largest number of connections.
    Raises:
        ResourceError: fewer files may be open.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + LEAVING + ACCEPTED + FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ResourceError(
            f"this process may open {allowed} files, expected {needed} for {max_connections}"
            f" connections; run `ulimit -n {needed}`, or lower max_connections"
        )
