"""Keeps the copy of a label log at a URL up to date, in a thread of its own that no append waits
for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from xmcray.credentials import mask
from xmcray.errors import StorageError, one_line
from xmcray.serving.log_database import LogDatabase
from xmcray.serving.log_lines import Line
from xmcray.serving.log_segments import Segment, SegmentStore

log = logging.getLogger("xmcray.serving")
SEGMENT_BYTES = 8 << 20  # largest segment, unless a single commit is larger
_LONGEST_WAIT_S = 60.0
_CLOSING_S = 10.0  # for the last upload


class Uploader:
    """Uploads a log's commits as segments every few seconds.

    Args:
        database: the log; another thread appends to it.
        copy: the segments at the URL.
        every_s: seconds between uploads.
    """

    def __init__(self, database: LogDatabase, copy: SegmentStore, every_s: float) -> None:
        """Compares log and copy, if the copy can be reached. `start` begins to upload."""
        self._uploaded = database.begin  # number of the last operation that the copy has
        self._database = database
        self._copy = copy
        self._every_s = every_s
        self._has_compared = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="label-log-upload", daemon=True)
        # A server that is down must not stop the start.
        self._succeeds(self._compare)

    def start(self) -> None:
        """Uploads from now on."""
        self._thread.start()

    def close(self) -> None:
        """Uploads the rest, and gives up after some seconds."""
        self._closing.set()
        self._thread.join(_CLOSING_S)

    def upload(self) -> None:
        """Uploads now what the copy lacks.

        Raises:
            StorageError: the URL cannot be used, or its log is another one.
        """
        # Before the first write to the copy, and after one that failed.
        self._compare()
        while lines := self._database.lines_after(self._uploaded, SEGMENT_BYTES):
            # A write that fails may leave part of a segment behind.
            self._has_compared = False
            self._copy.put(lines)
            self._has_compared = True
            self._uploaded = lines[-1].last

    def lag_s(self) -> float:
        """Age of the oldest operation that the copy lacks, in seconds; 0 if it lacks none."""
        missing = self._database.lines_after(self._uploaded, max_bytes=0)
        return max(0.0, time.time() - missing[0].at) if missing else 0.0

    def _compare(self) -> None:
        """Checks that the copy is of this log, and how much of it; completes its newest segment.

        Raises:
            StorageError: it is another log's copy, and all later appends are refused; or the URL
                cannot be read.
        """
        if self._has_compared:
            return
        begin = self._database.begin
        segments = self._copy.segments()
        if not segments:
            self._copy.put(self._database.lines_after(begin - 1, max_bytes=0))
            segments = self._copy.segments()
        newest = max(segments, key=lambda segment: segment.last)
        if newest.last < begin:
            raise StorageError(
                f"{self._copy.url} ends with operation {newest.last}, the local log begins after"
                f" {begin}; choose an empty URL"
            )
        # The newest segment stands for all: each holds the numbers of its operations.
        own_lines = self._lines_of(newest)
        is_own = bool(own_lines) and Segment.of(own_lines) == newest
        if not (self._began(segments) and is_own):
            reason = (
                f"{self._copy.url}, which ends with operation {newest.last}, is no copy of the"
                f" local log, which ends with {self._database.last}: the folder is old, or the URL"
                " another log's; to start from the URL, move the folder away"
            )
            self._database.refuse(reason)
            raise StorageError(reason)
        # Some file systems write in place, and a connection or this process may end meanwhile.
        if not self._copy.is_whole(newest):
            self._copy.put(own_lines)
        self._uploaded = newest.last
        self._has_compared = True

    def _began(self, segments: Sequence[Segment]) -> bool:
        """Whether this log began the copy: its first line has its identity, and is a segment."""
        own = Segment.of([self._database.first_line])
        return all(segment == own for segment in segments if segment.first > segment.last)

    def _lines_of(self, segment: Segment) -> list[Line]:
        """The log's lines with the operations of a segment; none if it lacks some of them."""
        if segment.last > self._database.last or segment.first <= self._database.begin:
            return []
        if segment.first > segment.last:
            return [self._database.first_line]
        lines = self._database.lines_after(segment.first - 1)
        return [line for line in lines if line.last <= segment.last]

    def _succeeds(self, function: Callable[[], None]) -> bool:
        """Calls a function; appends go on, whatever is wrong with the copy."""
        try:
            function()
        except Exception as error:
            # Messages of stores have URLs that are signed.
            log.warning("the copy of a label log is behind (%s)", mask(one_line(error)))
            return False
        return True

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._closing.wait(wait_s):
            # A server that is down is asked less and less often.
            longer_s = min(2 * wait_s, _LONGEST_WAIT_S)
            wait_s = self._every_s if self._succeeds(self.upload) else longer_s
        # What was appended before `close`.
        self._succeeds(self.upload)
