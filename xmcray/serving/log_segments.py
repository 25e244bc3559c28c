"""The copy of a label log at a URL, in files that are written once.

    URL/label_log/FIRST-LAST-SHA.log    lines of these operations; SHA: 16 hex digits of the file's
                                        SHA-256

The first segment holds the log's first line alone. The same operations may be there twice, if an
upload that seemed to fail arrived later. Then both files agree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from xmcray.errors import StorageError
from xmcray.serving.log_lines import Line, split_lines
from xmcray.storage.remote import filesystem_of, reaching
from xmcray.storage.whole_files import whole_file

FOLDER = "label_log"
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
    def of(cls, lines: Sequence[Line]) -> Segment:
        """The segment that consists of these lines, at least one."""
        data = b"".join(line.data for line in lines)
        return cls(lines[0].first, lines[-1].last, _digest(data))

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
        self._files, self._root = filesystem_of(self.url)

    def segments(self) -> list[Segment]:
        """All segments, in order."""
        with reaching(self.url):
            # Another process may have written segments since.
            self._files.invalidate_cache(self._root)
            try:
                paths = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        segments = []
        for path in paths:
            match = _NAME.fullmatch(str(path).rsplit("/", 1)[-1])
            if match:
                segments.append(Segment(int(match[1]), int(match[2]), match[3]))
        return sorted(segments)

    def is_whole(self, segment: Segment) -> bool:
        """Whether the content of a segment is that of its name."""
        return _digest(self._read(segment)) == segment.digest

    def put(self, lines: Sequence[Line]) -> None:
        """Writes lines that follow each other as one segment, in place of what is there.

        Some file systems, such as SFTP, may keep part of a segment if that fails.

        Args:
            lines: at least one line.
        """
        data = b"".join(line.data for line in lines)
        path = f"{self._root}/{Segment.of(lines).name}"
        with reaching(self.url):
            self._files.makedirs(self._root, exist_ok=True)
            if not isinstance(self._files, LocalFileSystem):
                self._files.pipe_file(path, data)
                return
            # Unlike other file systems, a local one shows a file while it is being written.
            with whole_file(Path(path)) as temporary:
                temporary.write_bytes(data)

    def lines(self, model: str, segments: Sequence[Segment]) -> Iterator[Line]:
        """All lines, in order and each once.

        Args:
            model: name of the model that the lines must have.
            segments: as `segments()` returns them, at least one.
        """
        last = segments[0].last
        # Only the first line of a log has no operations.
        if segments[0].first <= last:
            raise StorageError(
                f"{self.url} begins with operation {segments[0].first}, expected the beginning of"
                " the log: a segment is missing; restore it"
            )
        yielded: set[bytes] = set()
        for segment in segments:
            where = f"{self.url}/{segment.name}"
            data = self._read(segment)
            if _digest(data) != segment.digest:
                raise StorageError(
                    f"{where} is damaged (its SHA-256 differs from its name); restore the file"
                )
            for line in split_lines(data, where, model):
                # The same lines may be there twice.
                if line.digest in yielded:
                    continue
                if yielded and not line.operations:
                    raise StorageError(
                        f"{where} is the beginning of another log: two writers used this URL; keep"
                        " the segments of one"
                    )
                if line.first != last + 1:
                    raise StorageError(
                        f"{where}: found operation {line.first}, expected {last + 1}: a segment is"
                        " missing, or two writers used this URL; restore it, or keep the segments"
                        " of one"
                    )
                yielded.add(line.digest)
                last = line.last
                yield line

    def _read(self, segment: Segment) -> bytes:
        with reaching(self.url):
            data: bytes = self._files.cat_file(f"{self._root}/{segment.name}")
        return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
