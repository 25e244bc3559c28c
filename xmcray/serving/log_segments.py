"""The copy of a label log at a URL, in files that are written once.

    URL/label_log/FIRST-LAST-SHA.log          lines of these operations; SHA: 16 hex digits of the
                                              file's SHA-256
    URL/label_log/archive/FIRST-LAST-SHA.log  the same, of operations that a compacted bundle holds;
    the
                                              newest one stays, because it says where the log goes
                                              on

The same operations may be there twice, if an upload that seemed to fail arrived later. Then both
files agree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_lines import Line, split_lines

FOLDER = "label_log"
ARCHIVE = "archive"
_NAME = re.compile(r"([0-9]{12,})-([0-9]{12,})-([0-9a-f]{16})\.log")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Name of a file with the operations first ... last.

    Attributes:
        first: number of its first operation.
        last: number of its last operation.
        digest: the first 16 hex digits of its SHA-256.
    """

    first: int
    last: int
    digest: str

    @classmethod
    def of(cls, first: int, last: int, data: bytes) -> Segment:
        """The segment that consists of these bytes."""
        return cls(first, last, hashlib.sha256(data).hexdigest()[:16])

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.first:012}-{self.last:012}-{self.digest}.log"


class SegmentStore:
    """The segments below a folder or URL.

    Raises (each method):
        StorageError: the URL cannot be reached, or a segment is damaged or missing.
    """

    def __init__(self, url: str) -> None:
        """Opens the copy below a folder or fsspec URL."""
        self.url = f"{url.rstrip('/')}/{FOLDER}"
        self._files, self._root = storage.filesystem_of(self.url)

    def segments(self) -> tuple[int, list[Segment]]:
        """The last number that is archived, and the segments that are not, in order."""
        archived = max((segment.last for segment in self._list(ARCHIVE)), default=0)
        return archived, [segment for segment in self._list() if segment.last > archived]

    def put(self, lines: Sequence[Line]) -> None:
        """Writes lines that follow each other as one segment: whole or not at all.

        Args:
            lines: at least one line.
        """
        data = b"".join(line.data for line in lines)
        self._write(Segment.of(lines[0].first, lines[-1].last, data), data)

    def begin_after(self, number: int) -> None:
        """Records that the operations up to `number` are in no segment."""
        # An empty segment, whose name says where the log begins.
        self._write(Segment.of(number + 1, number, b""), b"", ARCHIVE)

    def archive(self, number: int) -> None:
        """Moves the segments of operations up to `number` into the archive.

        Args:
            number: number of an operation. Segments that end after it stay.
        """
        for segment in self.segments()[1]:
            if segment.last <= number:
                with storage.reaching(self.url):
                    self._files.makedirs(f"{self._root}/{ARCHIVE}", exist_ok=True)
                    self._files.mv(self._path(segment), self._path(segment, ARCHIVE))

    def lines(self, model: str, begin: int, segments: Sequence[Segment]) -> Iterator[Line]:
        """All lines after operation `begin`, in order and each once.

        Args:
            begin: operations up to this number are archived.
            segments: as `segments()` returns them.
        """
        last = begin
        digests: dict[int, bytes] = {}  # of the lines that were yielded, by first operation
        for segment in segments:
            where = f"{self.url}/{segment.name}"
            with storage.reaching(self.url):
                data = self._files.cat_file(self._path(segment))
            if Segment.of(segment.first, segment.last, data) != segment:
                raise StorageError(
                    f"{where} is damaged (its SHA-256 differs from its name); restore the file"
                )
            for line in split_lines(data, where, model):
                digest = line.data[:32]
                if line.first > last + 1:
                    raise StorageError(
                        f"{where}: found operation {line.first}, expected {last + 1}:"
                        " a segment is missing; restore it"
                    )
                # Lines that came before are compared, but not yielded again.
                if line.first == last + 1:
                    digests[line.first] = digest
                    last = line.last
                    yield line
                elif line.last > begin and digests.get(line.first) != digest:
                    raise StorageError(
                        f"{where}: another segment has other operations from {line.first} on:"
                        " two writers used this URL; keep the segments of one"
                    )

    def _list(self, within: str = "") -> list[Segment]:
        """All segments in a subfolder, in order."""
        folder = f"{self._root}/{within}".rstrip("/")
        with storage.reaching(self.url):
            # Another process may have written segments since.
            self._files.invalidate_cache(folder)
            try:
                paths = self._files.ls(folder, detail=False)
            except FileNotFoundError:
                return []
        segments = []
        for path in paths:
            match = _NAME.fullmatch(str(path).rsplit("/", 1)[-1])
            if match:
                segments.append(Segment(int(match[1]), int(match[2]), match[3]))
        return sorted(segments)

    def _write(self, segment: Segment, data: bytes, within: str = "") -> None:
        with storage.reaching(self.url):
            path = self._path(segment, within)
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            if not isinstance(self._files, LocalFileSystem):
                self._files.pipe_file(path, data)
                return
            # Unlike other file systems, a local one shows a file while it is being written.
            with storage.whole_file(Path(path)) as temporary:
                temporary.write_bytes(data)

    def _path(self, segment: Segment, within: str = "") -> str:
        return "/".join(filter(None, (self._root, within, segment.name)))
