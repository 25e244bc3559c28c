"""Reads the label logs that earlier versions wrote, so that they go on as a database.

    STATE_DIR/label_log/NNNNNNNNNNNN.log          lines; the name is the first operation's number
    STATE_DIR/label_log/archive/NNNNNNNNNNNN.log  lines that a compacted bundle holds

The files stay under the name NNNNNNNNNNNN.log.imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_lines import Line, split_lines
from xmcray.serving.log_segments import ARCHIVE, SegmentStore

_NAME = re.compile(r"[0-9]{12,}\.log")


def old_log_exists(folder: Path) -> bool:
    """Whether a log of an earlier version is here."""
    return bool(_files(folder))


def read_old_log(folder: Path, model: str, archive: SegmentStore) -> tuple[int, Iterator[Line]]:
    """Copies the archived lines into `archive`, and reads the others.

    Returns:
        Number of the operation before the first line, and the lines.
    Raises:
        StorageError: a line is damaged or missing, also while the lines are iterated over.
    """
    for path in _files(folder / ARCHIVE):
        lines = list(split_lines(path.read_bytes(), str(path), model))
        if lines:
            archive.put(lines, ARCHIVE)
    files = _files(folder)
    begin = int(files[0].stem) - 1
    return begin, _lines(files, model, begin)


def set_old_log_aside(folder: Path) -> None:
    """Renames the files of a log that was imported."""
    for path in [*_files(folder / ARCHIVE), *_files(folder)]:
        path.rename(path.with_name(f"{path.name}.imported"))
        storage.fsync(path.parent)


def _lines(files: list[Path], model: str, begin: int) -> Iterator[Line]:
    number = begin
    for path in files:
        if int(path.stem) != number + 1:
            raise StorageError(
                f"{path} begins with operation {int(path.stem)}, expected {number + 1}:"
                " a file is missing; restore it"
            )
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for line in split_lines(whole, str(path), model):
            if line.first != number + 1:
                raise StorageError(
                    f"{path}: found operation {line.first}, expected {number + 1}; restore the file"
                )
            number = line.last
            yield line
        if len(whole) < len(data):
            raise StorageError(
                f"{path}, byte {len(whole)}: the line is incomplete; restore the file, or, if its writer"
                f" was killed there, `truncate -s {len(whole)} {path}`: it was never acknowledged"
            )


def _files(folder: Path) -> list[Path]:
    """Files of an earlier version's log in a folder, by their first numbers."""
    files = [path for path in folder.glob("*.log") if _NAME.fullmatch(path.name)]
    return sorted(files, key=lambda path: int(path.stem))
