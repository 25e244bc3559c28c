"""Keeps the copy of a label log at a URL up to date, in a thread of its own that no append waits for."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from xmcray.errors import StorageError
from xmcray.serving.log_copy import LogCopy, Segment
from xmcray.serving.log_lines import Line, after, read

_LONGEST_WAIT_S = 60.0
_CLOSING_S = 10.0  # for the last upload


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the copy is behind: in operations, in seconds since the oldest of them, and why ("" if it goes well)."""

    operations: int = 0
    seconds: float = 0.0
    problem: str = ""


class Source(Protocol):
    """The log, as far as it is uploaded."""

    def lines(self) -> tuple[list[Line], int]:
        """Its lines, and the number after which they begin."""
        ...

    def refuse(self, reason: str) -> None:
        """Appends are refused from now on."""
        ...


class Uploader:
    """Uploads a log's lines as segments, those of a closed file at once and others after some seconds.

    Attributes:
        uploaded: number of the last operation that the copy has, as far as is known.
    """

    def __init__(self, log: Source, copy: LogCopy, every_s: float, segment_bytes: int) -> None:
        """Looks what the copy holds, if it can be reached; `start` then begins."""
        self.uploaded = 0
        self._log, self._copy, self._every_s, self._segment_bytes = (
            log,
            copy,
            every_s,
            segment_bytes,
        )
        self._compared, self._archived, self._problem = False, 0, ""
        self._lock, self._wake, self._closing = (
            threading.Lock(),
            threading.Event(),
            threading.Event(),
        )
        self._thread = threading.Thread(target=self._run, name="label-log-upload", daemon=True)
        self._attempt(only_compare=True)

    def start(self) -> None:
        """Uploads from now on."""
        self._thread.start()

    def hurry(self) -> None:
        """There is something that should not wait."""
        self._wake.set()

    def close(self) -> None:
        """Uploads what is left, and gives up after some seconds."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSING_S)

    def upload(self) -> int:
        """See `LabelLog.upload`."""
        with self._lock:
            self._compare()
            while lines := self._next():
                data = b"".join(data for _, data in read(lines))
                self._copy.put(Segment.of(lines[0].first, lines[-1].last, data), data)
                self.uploaded = lines[-1].last
            begin = self._log.lines()[1]
            if begin > self._archived:
                self._copy.archive(begin)
                self._archived = begin
            return self.uploaded

    def lag(self) -> Lag:
        """How far the copy is behind."""
        lines, begin = self._log.lines()
        uploaded = max(self.uploaded, begin)
        waiting = lines[after(lines, uploaded) :]
        if not waiting:
            return Lag(problem=self._problem)
        return Lag(
            waiting[-1].last - uploaded, max(0.0, time.time() - waiting[0].at), self._problem
        )

    def _next(self) -> list[Line]:
        """The next lines to upload together."""
        lines, size = list[Line](), 0
        known = self._log.lines()[0]
        for line in known[after(known, self.uploaded) :]:
            if size >= self._segment_bytes:
                break
            lines.append(line)
            size += line.size
        return lines

    def _compare(self) -> None:
        """Whether the copy is of this log, and how much of it; asked once.

        Raises:
            StorageError: it is not, and so nobody may append any more; or the URL cannot be read.
        """
        if self._compared:
            return
        known, begin = self._log.lines()
        archived, segments = self._copy.segments()
        last = max([archived, *(segment.last for segment in segments)])
        newest = next((segment for segment in segments if segment.last == last), None)
        if last < begin:
            if last:
                raise StorageError(
                    f"{self._copy.url} ends with operation {last}, the local log begins after {begin}; choose an empty"
                    " URL"
                )
            self._copy.begin_after(begin)
            last = begin
        ours = max([begin, *(line.last for line in known[-1:])])
        differs = last > ours
        if newest and newest.first > begin and not differs:
            lines = known[after(known, newest.first - 1) : after(known, newest.last)]
            data = b"".join(data for _, data in read(lines))
            differs = Segment.of(newest.first, newest.last, data) != newest
        if differs:
            reason = (
                f"{self._copy.url}, which ends with operation {last}, is no copy of the local log, which ends with"
                f" {ours}: the folder is old, or the URL another log's; to start from the URL, move the folder away"
            )
            self._log.refuse(reason)
            raise StorageError(reason)
        self.uploaded, self._compared = last, True

    def _attempt(self, only_compare: bool = False) -> bool:
        """Uploads, or only compares; whether that went well is in `lag` too."""
        try:
            if only_compare:
                self._compare()
            else:
                self.upload()
        except Exception as error:  # whatever it is, appends go on
            self._problem = " ".join(str(error).split()) or type(error).__name__
            return False
        self._problem = ""
        return True

    def _run(self) -> None:
        failures, wait_s, closing = 0, self._every_s, False
        while not closing:
            self._wake.wait(wait_s)
            self._wake.clear()
            closing = self._closing.is_set()  # asked before the upload, which is then the last
            failures = 0 if self._attempt() else failures + 1
            wait_s = self._every_s
            if failures:  # apart from other writers that wait for the same server
                wait_s = min(_LONGEST_WAIT_S, self._every_s * 2**failures) * random.uniform(
                    0.5, 1.0
                )
