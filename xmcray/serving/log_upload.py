"""Keeps the copy of a label log at a URL up to date, in a thread of its own that no append waits
for.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from xmcray.errors import StorageError
from xmcray.serving.log_database import LogDatabase
from xmcray.serving.log_segments import Segment, SegmentStore

_LONGEST_WAIT_S = 60.0
_CLOSING_S = 10.0  # for the last upload


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the copy is behind.

    Attributes:
        operations: number of operations that it lacks.
        seconds: age of the oldest of them.
        problem: why the last upload failed; "" if it did not.
    """

    operations: int = 0
    seconds: float = 0.0
    problem: str = ""


class Uploader:
    """Uploads a log's commits as segments: full segments at once, and others after some seconds.

    Args:
        log: the log; other threads append to it.
        copy: the segments at the URL.
        every_s: seconds between uploads.
        segment_bytes: size of a segment.

    Attributes:
        uploaded: number of the last operation that the copy is known to have.
    """

    def __init__(
        self, log: LogDatabase, copy: SegmentStore, every_s: float, segment_bytes: int
    ) -> None:
        """Compares log and copy, if the copy can be reached. `start` begins to upload."""
        self.uploaded = 0
        self._log = log
        self._copy = copy
        self._every_s = every_s
        self._segment_bytes = segment_bytes
        self._compared = False
        self._archived = 0
        self._problem = ""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="label-log-upload", daemon=True)
        # A server that is down must not stop the start.
        self._attempt(only_compare=True)

    def start(self) -> None:
        """Uploads from now on."""
        self._thread.start()

    def hurry(self) -> None:
        """Begins the next upload now."""
        self._wake.set()

    def close(self) -> None:
        """Uploads the rest, and gives up after some seconds."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSING_S)

    def upload(self) -> int:
        """See `LabelLog.upload`."""
        # `upload` may be called while the thread uploads.
        with self._lock:
            # Once, and before the first write to the copy.
            self._compare()
            while lines := self._log.lines_after(self.uploaded, max_bytes=self._segment_bytes):
                self._copy.put(lines)
                self.uploaded = lines[-1].last
            begin = self._log.begin
            if begin > self._archived:
                self._copy.archive(begin)
                self._archived = begin
            return self.uploaded

    def lag(self) -> Lag:
        """How far the copy is behind."""
        uploaded = max(self.uploaded, self._log.begin)
        num_operations = self._log.last - uploaded
        if num_operations <= 0:
            return Lag(problem=self._problem)
        oldest = self._log.lines_after(uploaded, max_bytes=0)[0]
        return Lag(num_operations, max(0.0, time.time() - oldest.at), self._problem)

    def _compare(self) -> None:
        """Checks once that the copy is one of this log, and how much of it.

        Raises:
            StorageError: it is another log's copy, and all later appends are refused; or the URL
                cannot be read.
        """
        if self._compared:
            return
        begin = self._log.begin
        archived, segments = self._copy.segments()
        copied = max([archived, *(segment.last for segment in segments)])
        if copied and copied < begin:
            raise StorageError(
                f"{self._copy.url} ends with operation {copied}, the local log begins after {begin};"
                " choose an empty URL"
            )
        if copied < begin:
            self._copy.begin_after(begin)
            copied = begin
        newest = [segment for segment in segments if segment.last == copied][:1]
        # The newest segment stands for all: each holds the numbers of its operations.
        if copied > self._log.last or (newest and not self._holds(newest[0])):
            reason = (
                f"{self._copy.url}, which ends with operation {copied}, is no copy of the local log,"
                f" which ends with {self._log.last}: the folder is old, or the URL another log's;"
                " to start from the URL, move the folder away"
            )
            self._log.refuse(reason)
            raise StorageError(reason)
        self.uploaded = copied
        self._compared = True

    def _holds(self, segment: Segment) -> bool:
        """Whether the log has the same operations as a segment; True if it has archived them."""
        if segment.first <= self._log.begin:
            return True
        data = b""
        number = segment.first - 1
        while number < segment.last:
            line = self._log.lines_after(number, max_bytes=0)[0]
            data += line.data
            number = line.last
        return Segment.of(segment.first, segment.last, data) == segment

    def _attempt(self, only_compare: bool = False) -> bool:
        """Uploads, or only compares, and keeps the reason of a failure for `lag`."""
        try:
            if only_compare:
                self._compare()
            else:
                self.upload()
        except Exception as error:  # appends go on, whatever is wrong with the copy
            self._problem = " ".join(str(error).split()) or type(error).__name__
            return False
        self._problem = ""
        return True

    def _run(self) -> None:
        failures = 0
        wait_s = self._every_s
        is_last = False
        while not is_last:
            self._wake.wait(wait_s)
            self._wake.clear()
            # Read before the upload: operations that were appended before `close` are in the last
            # one.
            is_last = self._closing.is_set()
            failures = 0 if self._attempt() else failures + 1
            wait_s = self._every_s
            if failures:
                # A random share of it, so that writers that wait for the same server come back
                # apart.
                longest = min(_LONGEST_WAIT_S, self._every_s * 2**failures)
                wait_s = longest * random.uniform(0.5, 1.0)
