"""Rows that were left out of a corpus: `rejected.jsonl`, by split and in the order of the raw files.

They are kept in a nameless file until the corpus is finished, so any number of them takes no memory.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from xmcray.data.corpus import Card
from xmcray.data.formats import BadRow
from xmcray.errors import DataError, readable

SPLITS = ("labels", "train", "test")
_FILE = "rejected.jsonl"
_LONGEST_LINE = 1 << 20  # a reason quotes the beginning of a text at most

Rejected = tuple[str, BadRow]  # split and reason


class RejectedRows:
    """Collects the rows that were left out, a shard at a time; shards come in any order.

    Args:
        folder: of the new corpus.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        # Open until the corpus is written; closed, its content is gone.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        # By split and number of a shard: where its rows begin in the file, and how many they are.
        self._places: dict[tuple[str, int], tuple[int, int]] = {}

    def add(self, split: str, shard: int, rows: list[BadRow]) -> None:
        """Takes the rows that were left out since the previous shard of a split."""
        if not rows:
            return
        self._places[split, shard] = (self._file.tell(), len(rows))
        for bad in rows:
            self._file.write(_line_of(split, bad))

    def write(self, earlier: Iterable[Rejected]) -> Counter[str]:
        """Writes `rejected.jsonl`, if there are rows.

        Args:
            earlier: those of the corpus that is appended to; they come first in each split.
        Returns:
            The number of rows by split.
        """
        num_rows: Counter[str] = Counter()
        with self._path.open("wb") as file:
            # Both are sorted by split. Of equal splits `merge` takes its first argument first.
            for split, bad in heapq.merge(earlier, self._in_order(), key=_split_of):
                file.write(_line_of(split, bad))
                num_rows[split] += 1
        if not num_rows:
            self._path.unlink()
        return num_rows

    def close(self) -> None:
        """Ends the nameless file, as `TextKeys.close` does."""
        self._file.close()

    def _in_order(self) -> Iterator[Rejected]:
        """All rows by split, then in the order of the raw files."""
        for place in sorted(self._places):
            start, num_rows = self._places[place]
            self._file.seek(start)
            for _ in range(num_rows):
                yield _parsed(self._file.readline())


def earlier_rejected(folder: Path, card: Card) -> Iterator[Rejected]:
    """Split and reason of each row that was left out of a corpus.

    They are read one after the other, at most as many as the card counts, and at most as much of a
    line as a row can need.

    Raises:
        DataError: the file is malformed, or has another number of rows than the card says.
    """
    expected = sum(card.rejected.values())
    path = folder / _FILE
    if not path.is_file() and not expected:
        return
    with readable(f"{path} is damaged", "prepare the corpus again", DataError):
        num_rows = 0
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                num_rows += 1
                if num_rows > expected:
                    break
                yield _parsed(line)
        if num_rows != expected:
            raise ValueError(f"another number of rows than the card, which has {expected}")


def _split_of(rejected: Rejected) -> str:
    split, _ = rejected
    return split


def _line_of(split: str, bad: BadRow) -> bytes:
    """The line of a row; it names the file without its folder."""
    record = {"split": split, **asdict(bad), "file": Path(bad.file).name}
    line = json.dumps(record, ensure_ascii=False) + "\n"
    # Half a character, of a reason, becomes JSON's own escape for it.
    return line.encode(errors="backslashreplace")


def _parsed(line: bytes) -> Rejected:
    """Split and reason of a row, from its line; any error if that is malformed."""
    record = json.loads(line)
    split = record.pop("split")
    bad = BadRow(**record)
    if split not in SPLITS or type(bad.line) is not int:
        raise ValueError(f"found the row {bad.line!r} of the split {split!r}")
    if not (isinstance(bad.file, str) and isinstance(bad.reason, str)):
        raise TypeError("file and reason are no texts")
    return split, bad
