"""A second copy of a label log at a URL, in segments that are written once.

    URL/label_log/FIRST-LAST-SHA.log          lines of these operations; SHA: 16 hex digits of the file's SHA-256
    URL/label_log/archive/FIRST-LAST-SHA.log  the same, of operations that a compacted bundle holds; the newest one
                                              stays for ever, because it says where the log goes on

The same operations may be there twice, if an upload that seemed to fail arrived later; then both copies agree.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_lines import Line, scan

FOLDER, ARCHIVE = "label_log", "archive"
_NAME = re.compile(r"([0-9]{12,})-([0-9]{12,})-([0-9a-f]{16})\.log")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The operations first .. last in one object, with the first 16 hex digits of its SHA-256."""

    first: int
    last: int
    digest: str

    @classmethod
    def of(cls, first: int, last: int, data: bytes) -> Segment:
        """The segment that consists of these bytes."""
        return cls(first, last, hashlib.sha256(data).hexdigest()[:16])

    @property
    def name(self) -> str:
        """Of the object."""
        return f"{self.first:012}-{self.last:012}-{self.digest}.log"


class LogCopy:
    """The segments at a URL.

    Raises (each method):
        StorageError: the URL cannot be reached, or what is there is damaged or not whole.
    """

    def __init__(self, url: str) -> None:
        self.url = f"{url.rstrip('/')}/{FOLDER}"
        self._files, self._root = storage.filesystem_of(self.url)

    def segments(self) -> tuple[int, list[Segment]]:
        """The last number that is archived, and the segments that are not, in order."""
        archived = max((segment.last for segment in self._list(ARCHIVE)), default=0)
        return archived, sorted(segment for segment in self._list() if segment.last > archived)

    def put(self, segment: Segment, data: bytes, within: str = "") -> None:
        """Writes one segment: whole or not at all."""
        with storage.reaching(self.url):
            path = self._path(segment, within)
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            if not isinstance(self._files, LocalFileSystem):
                self._files.pipe_file(path, data)
                return
            target = Path(path)  # alone among file systems it shows a file that is being written
            temporary = storage.aside(target)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            storage.fsync(target.parent)

    def begin_after(self, number: int) -> None:
        """Says that the operations up to `number` are in no segment."""
        empty = Segment.of(number + 1, number, b"")
        self.put(empty, b"", ARCHIVE)

    def archive(self, number: int) -> None:
        """Sets aside the segments of operations up to `number`."""
        for segment in self.segments()[1]:
            if segment.last <= number:
                with storage.reaching(self.url):
                    self._files.makedirs(f"{self._root}/{ARCHIVE}", exist_ok=True)
                    self._files.mv(self._path(segment), self._path(segment, ARCHIVE))

    def lines(
        self, model: str, archived: int, segments: Sequence[Segment]
    ) -> Iterator[tuple[Line, bytes]]:
        """All lines, in order and each once, of what `segments()` told."""
        last, known = archived, dict[int, bytes]()
        for segment in segments:
            where = f"{self.url}/{segment.name}"
            with storage.reaching(self.url):
                data = self._files.cat_file(self._path(segment))
            if Segment.of(segment.first, segment.last, data) != segment:
                raise StorageError(
                    f"{where} is damaged (its SHA-256 differs from its name); restore the file"
                )
            for line in scan(data, where, model, segment.first)[0]:
                text = data[line.offset : line.offset + line.size]
                if line.first > last + 1:
                    raise StorageError(
                        f"{where}: found operation {line.first}, expected {last + 1}: a segment is missing; restore it"
                    )
                if line.first == last + 1:
                    known[line.first], last = text[:32], line.last
                    yield line, text
                elif line.last > archived and known.get(line.first) != text[:32]:
                    raise StorageError(
                        f"{where}: another segment has other operations from {line.first} on: two writers used this"
                        " URL; keep the segments of one"
                    )

    def _list(self, within: str = "") -> list[Segment]:
        folder = f"{self._root}/{within}".rstrip("/")
        with storage.reaching(self.url):
            self._files.invalidate_cache(folder)
            try:
                names = [
                    str(path).rsplit("/", 1)[-1] for path in self._files.ls(folder, detail=False)
                ]
            except FileNotFoundError:
                return []
        return [
            Segment(int(m[1]), int(m[2]), m[3]) for name in names if (m := _NAME.fullmatch(name))
        ]

    def _path(self, segment: Segment, within: str = "") -> str:
        return "/".join(filter(None, (self._root, within, segment.name)))
