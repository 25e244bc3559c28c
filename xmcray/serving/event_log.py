"""The durable log of searches and of what users did with the answers. One process writes it.

Searches wait in a bounded queue for the thread that writes. If there is no room, or the disk fails,
they are dropped and counted, and searching goes on. Feedback is acknowledged when it is on the disk
together with the search that it is about, so everything acknowledged can be exported.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from xmcray.errors import StorageError, one_line
from xmcray.serving.event_files import EventFile, event_files, file_lines, new_event_file
from xmcray.serving.events import (
    MAX_QUEUED,
    EventT,
    FeedbackEvent,
    SearchEvent,
    redacted,
    redaction_key,
)
from xmcray.serving.log_database import LogDatabase
from xmcray.serving.log_lines import encode_line
from xmcray.serving.problems import ProblemError
from xmcray.storage.artifact import exclusive
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import make_folder

MAX_REQUESTS = 100_000  # newest searches that can get feedback
FLUSH_S = 0.5  # for which searches wait for others
LOOK_S = 60.0  # between two looks for files that are too old
FILES = 10  # into which the time and the bytes of a log are divided
_DAY_S = 86_400

log = logging.getLogger("xmcray.serving")


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Counts of one event log: events written and dropped since the start, and bytes on disk."""

    written: int
    dropped: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Feedback:
    """Feedback that waits, and what its number will be."""

    event: FeedbackEvent
    number: Future[int]


class _LoggedSearch(NamedTuple):
    """What feedback has to fit: the number of the search's event, and how many texts it has."""

    number: int
    num_texts: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events that are written together.

    Attributes:
        events: as they are stored.
        searches: those among them, by request id.
        acknowledged: the feedback among them, with the numbers of its events.
    """

    events: list[SearchEvent | FeedbackEvent] = field(default_factory=list)
    searches: dict[str, _LoggedSearch] = field(default_factory=dict)
    acknowledged: list[tuple[_Feedback, int]] = field(default_factory=list)


class EventLog:
    """The event log of one model, open for writing. All methods may be called by any thread.

    Args:
        folder: local folder of this log alone; locked until `close`.
        model: name of the model.
        redact: whether hashes are stored instead of texts.
        max_days: days for which an event is kept, at most.
        max_bytes: bytes of the log; the oldest files are removed beyond.
        clock: gives the Unix time, seconds.
    Raises:
        StorageError: another process writes this log, it is damaged, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        redact: bool,
        max_days: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._model = model
        self._max_s = max_days * _DAY_S
        self._max_bytes = max_bytes
        self._clock = clock
        self._queue: list[SearchEvent | _Feedback] = []
        self._num_letters = 0
        self._num_written = 0
        self._num_dropped = 0
        self._closing = False
        self._is_urgent = False
        self._logged = ""
        self._changed = threading.Condition()
        # By request id, the oldest first.
        self._searches: dict[str, _LoggedSearch] = {}
        with contextlib.ExitStack() as stack, disk_errors(folder):
            make_folder(folder)
            # The system ends this lock when the process dies.
            stack.enter_context(exclusive(folder))
            self._key = redaction_key(folder) if redact else None
            self._open(stack)
            self._thread = threading.Thread(target=self._run, name="events", daemon=True)
            self._thread.start()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what waits, and lets others open the log."""
        with self._changed:
            self._closing = True
            self._is_urgent = True
            self._changed.notify()
        self._thread.join()
        self._stack.close()

    def note(self, event: SearchEvent) -> None:
        """Queues a search; it is dropped if too many wait."""
        with self._changed:
            has_room = self._num_letters + event.num_letters <= MAX_QUEUED
            if self._closing or not has_room:
                self._num_dropped += 1
                return
            self._num_letters += event.num_letters
            self._put(event)

    def add_feedback(self, event: FeedbackEvent) -> Future[int]:
        """Queues feedback.

        Returns:
            The number of the event when it is durable. Its errors are ProblemError, if the search
            is unknown, and StorageError, if the disk is full or fails.
        """
        feedback = _Feedback(event, Future())
        # From now on a caller that gives up cannot cancel it.
        feedback.number.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                feedback.number.set_exception(StorageError("the event log is closed"))
            else:
                self._is_urgent = True
                self._put(feedback)
        return feedback.number

    def count_dropped(self, number: int) -> None:
        """Adds searches that another process had to drop."""
        with self._changed:
            self._num_dropped += number

    def counts(self) -> EventCounts:
        """What has happened since the start."""
        num_bytes = sum(file.num_bytes for file in event_files(self._folder))
        return EventCounts(self._num_written, self._num_dropped, num_bytes)

    def _put(self, entry: SearchEvent | _Feedback) -> None:
        self._queue.append(entry)
        # The thread sleeps while nothing waits. It wakes for the first entry, and for feedback.
        if len(self._queue) == 1 or self._is_urgent:
            self._changed.notify()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Opens the newest file, and reads which searches can get feedback."""
        for unfinished in self._folder.glob(".*.sqlite.*"):
            unfinished.unlink()
        now = self._clock()
        if not event_files(self._folder):
            new_event_file(self._folder, self._model, 0, now)
        files = event_files(self._folder)
        self._file = files[-1]
        self._database = LogDatabase(self._file.path, self._model)
        # A later file may be the one that is open at the end.
        stack.callback(lambda: self._database.close())
        for file in reversed(files):
            if len(self._searches) < MAX_REQUESTS:
                # Searches of older files come first, and do not replace newer ones.
                self._searches = {**self._searches_in(file), **self._searches}
        self._remove_old(now)

    def _searches_in(self, file: EventFile) -> dict[str, _LoggedSearch]:
        searches = {}
        for line in file_lines(file, self._model, has_writer=file == self._file):
            for number, event in enumerate(line.operations, line.first):
                if event["kind"] == "search":
                    search = _LoggedSearch(number, len(event["texts"]))
                    searches[str(event["request"])] = search
        return searches

    def _run(self) -> None:
        """Writes what waits, until the log is closed."""
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_urgent, LOOK_S)
                if self._queue:
                    # More searches may come, and cost one sync together.
                    self._changed.wait_for(lambda: self._is_urgent, FLUSH_S)
                entries = self._queue
                self._queue = []
                self._num_letters = 0
                self._is_urgent = False
                closing = self._closing
            self._write(entries)

    def _write(self, entries: Sequence[SearchEvent | _Feedback]) -> None:
        """Makes a batch durable, and acknowledges the feedback in it."""
        try:
            self._make_room()
            batch = self._batch(entries)
            if batch.events:
                now = round(self._clock(), 3)
                first = self._database.last + 1
                self._database.append(encode_line(self._model, first, now, batch.events))
        except Exception as error:
            # Whatever it is, searches go on, and clients learn that nothing was acknowledged.
            self._fail(entries, error)
            return
        self._num_written += len(batch.events)
        for request in batch.searches:
            # A request id that comes again names the newer search, which also comes last.
            self._searches.pop(request, None)
        self._searches |= batch.searches
        while len(self._searches) > MAX_REQUESTS:
            # Dictionaries keep the order of insertion: the first one is the oldest.
            del self._searches[next(iter(self._searches))]
        for feedback, number in batch.acknowledged:
            feedback.number.set_result(number)

    def _batch(self, entries: Sequence[SearchEvent | _Feedback]) -> _Batch:
        """The events of entries; feedback about an unknown search fails, and is left out."""
        batch = _Batch()
        for entry in entries:
            number = self._database.last + len(batch.events) + 1
            if isinstance(entry, SearchEvent):
                stored = self._stored(entry)
                batch.searches[stored.request] = _LoggedSearch(number, len(stored.texts))
                batch.events.append(stored)
                continue
            feedback = self._stored(entry.event)
            request = feedback.request
            search = batch.searches.get(request) or self._searches.get(request)
            problem = self._problem(entry.event, search)
            if problem is None:
                batch.events.append(feedback)
                batch.acknowledged.append((entry, number))
            else:
                entry.number.set_exception(problem)
        return batch

    def _stored(self, event: EventT) -> EventT:
        return event if self._key is None else redacted(event, self._key)

    def _problem(self, event: FeedbackEvent, search: _LoggedSearch | None) -> ProblemError | None:
        """Why feedback is refused, if it is; `search` is the one that it names."""
        if search is None or search.number <= self._begin:
            return ProblemError(
                "not-found",
                f"no search {event.request!r} of this model is in the event log: it was dropped,"
                " is too old, or was answered before events were collected",
            )
        if event.text >= search.num_texts:
            return ProblemError(
                "invalid",
                f"text is {event.text}, but the search has {search.num_texts} texts, counted from 0",
            )
        return None

    def _fail(self, entries: Sequence[SearchEvent | _Feedback], error: Exception) -> None:
        """Drops a batch that could not be written."""
        reason = one_line(error)
        if reason != self._logged:
            log.error("model %s: events are dropped (%s)", self._model, reason)
            self._logged = reason
        for entry in entries:
            if isinstance(entry, SearchEvent):
                self.count_dropped(1)
            elif not entry.number.done():
                failure = StorageError(f"the feedback was not acknowledged: {reason}")
                entry.number.set_exception(failure)

    def _make_room(self) -> None:
        """Begins a new file if the newest one is too old or too large; removes the oldest ones."""
        now = self._clock()
        # First, because it makes room for a new file on a full disk.
        self._remove_old(now)
        is_old = now - self._file.at > self._max_s / FILES
        if is_old or self._file.num_bytes > self._max_bytes // FILES:
            self._begin_file(now)
        self._remove_old(now)

    def _begin_file(self, now: float) -> None:
        file = new_event_file(self._folder, self._model, self._database.last, now)
        if file == self._file:
            return
        database = LogDatabase(file.path, self._model)
        self._database.close()
        self._database = database
        self._file = file

    def _remove_old(self, now: float) -> None:
        """Removes the oldest files, but not the one that is written."""
        files = event_files(self._folder)
        num_bytes = sum(file.num_bytes for file in files)
        while files[0] != self._file:
            if now - files[0].at <= self._max_s and num_bytes <= self._max_bytes:
                break
            num_bytes -= files[0].num_bytes
            files.pop(0).remove()
        self._begin = files[0].begin
