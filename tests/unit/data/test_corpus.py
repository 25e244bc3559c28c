"""Shards are read back row by row, across shards, in any order.

Chunks and samples are what they should be.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from xmcray.data.chunks import RawChunk, pack_chunk, read_chunks, survey
from xmcray.data.corpus import frequency_histogram
from xmcray.data.formats import BadRow, Row
from xmcray.data.shards import ShardedRows, pack
from xmcray.data.tokens import train_wordpiece
from xmcray.errors import DataError
from xmcray.types import Ragged


class FakeSource:
    """Rows given in advance; None stands for a malformed one."""

    def __init__(self, **rows: list[Row | None]) -> None:
        self.rows = rows

    def first_shard(self, split: str, shard_rows: int) -> int:
        return 0

    def labels(self, on_bad: Any) -> Iterator[Row]:
        return self._rows("labels", on_bad)

    def queries(self, split: str, num_labels: int, on_bad: Any) -> Iterator[Row]:
        return self._rows(split, on_bad)

    def side_vectors(self, split: str) -> None:
        return None

    def _rows(self, split: str, on_bad: Any) -> Iterator[Row]:
        for place, row in enumerate(self.rows[split]):
            if row is None:
                on_bad(BadRow(split, place + 1, "broken"))
            else:
                yield Row(row.uid, row.text, row.label_ids, row.relevance, place)


def queries(count: int) -> list[Row | None]:
    rows: list[Row | None] = []
    for number in range(count):
        label_ids = (number % 3, 5)
        rows.append(Row(f"q{number}", f"text {number}", label_ids))
    return rows


def chunks_of(
    split: str,
    rows: list[Row | None],
    num_labels: int,
    shard_rows: int,
    skip: bool = True,
) -> list[RawChunk]:
    """The chunks of one split. Malformed rows are left out if `skip`."""
    source: Any = FakeSource(**{split: rows})
    return list(read_chunks(source, split, num_labels, shard_rows, skip=skip))


def write_shard(
    folder: Path,
    shard: int,
    token_rows: list[Any],
    vocab_size: int = 100,
) -> None:
    """One shard of token rows, whose texts do not matter."""
    texts = pa.table(
        {
            "uid": ["x"] * len(token_rows),
            "text": ["y"] * len(token_rows),
        }
    )
    files = pack(shard, texts, Ragged.from_rows(token_rows), vocab_size, None)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def rows_of_shards(
    folder: Path,
    num_rows: int,
    shard_rows: int,
    vocab_size: int = 100,
) -> ShardedRows:
    """The token rows that `write_shard` wrote."""
    return ShardedRows(folder, "token", num_rows, shard_rows, limit=vocab_size)


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_sharded_rows_equal_the_rows_written(tmp_path: Path, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(23):
        length = rng.integers(0, 6)
        rows.append(rng.integers(0, vocab_size, length))
    for shard in range(5):
        first = 5 * shard
        write_shard(tmp_path, shard, rows[first : first + 5], vocab_size)
    # Every row once, and three of them again.
    every_row = np.arange(23)
    asked = rng.permutation(np.append(every_row, [4, 4, 22]))

    reader = rows_of_shards(tmp_path, num_rows=23, shard_rows=5, vocab_size=vocab_size)
    tokens = reader.take(asked)

    assert tokens.values.dtype == np.int64
    assert len(tokens) == len(asked)
    for place, row in enumerate(asked):
        assert tokens[place].tolist() == rows[row].tolist()
    assert len(reader.take(np.empty(0, np.int64))) == 0
    # Two bytes are enough for the tokens of a small vocabulary.
    stored = np.load(tmp_path / "00000.tokens.npy")
    assert stored.dtype == (np.uint16 if vocab_size == 100 else np.uint32)
    for outside in (23, -1):
        with pytest.raises(IndexError, match="expected 0 to 22"):
            reader.take(np.array([0, outside]))


@pytest.mark.parametrize("num_rows", [0, 4, 5, 6, 8, 9, 13])
def test_another_number_of_rows_than_the_files_have_is_noticed(
    tmp_path: Path, num_rows: int
) -> None:
    write_shard(tmp_path, 0, [[1]] * 5)
    write_shard(tmp_path, 1, [[1]] * 2)

    right = rows_of_shards(tmp_path, num_rows=7, shard_rows=5)
    wrong = rows_of_shards(tmp_path, num_rows, shard_rows=5)

    right.check_num_rows()
    with pytest.raises(DataError, match="prepare the corpus again"):
        wrong.check_num_rows()


def test_a_mapped_shard_keeps_no_descriptor(tmp_path: Path) -> None:
    for shard in range(40):
        write_shard(tmp_path, shard, [[shard]])
    descriptors = Path("/proc/self/fd")
    gc.collect()  # garbage of other tests would close some in between
    num_before = len(list(descriptors.iterdir()))

    reader = rows_of_shards(tmp_path, num_rows=40, shard_rows=1)
    tokens = reader.take(np.arange(40))

    assert tokens.values.tolist() == list(range(40))
    assert len(list(descriptors.iterdir())) == num_before


def test_chunks_have_equal_sizes_and_carry_the_rejected() -> None:
    rows = queries(7)
    rows[2] = None
    rows[6] = None

    first, second = chunks_of("train", rows, num_labels=6, shard_rows=3)

    assert first.rows["uid"].to_pylist() == ["q0", "q1", "q3"]
    assert second.rows["uid"].to_pylist() == ["q4", "q5"]
    assert [bad.line for bad in first.rejected] == [3]
    assert [bad.line for bad in second.rejected] == [7]

    with pytest.raises(DataError, match="train:3: broken; repair"):
        chunks_of("train", rows, num_labels=6, shard_rows=3, skip=False)


def test_rejected_labels_keep_their_place() -> None:
    labels = [
        None,
        Row("a", "a"),
        None,
        None,
        Row("b", "b"),
        None,
    ]

    (chunk,) = chunks_of("labels", labels, num_labels=0, shard_rows=9)

    assert chunk.rows["text"].to_pylist() == ["", "a", "", "", "b", ""]
    assert len(chunk.rejected) == 4


def test_filter_pairs_leave_positives_and_relevance_together() -> None:
    rows = [
        None,
        Row("q1", "one", (0, 2, 4), (0.5, 1.0, 2.0)),
        Row("q2", "two", (2,)),
        Row("q3", "three", (1, 2), (3.0, 4.0)),
    ]
    # Rows and labels; the first pair belongs to the rejected row.
    filter_pairs = np.array(
        [
            [0, 2],
            [1, 2],
            [2, 2],
            [3, 0],
        ]
    )
    tokenizer = train_wordpiece(["one two three"] * 2)

    (chunk,) = chunks_of("train", rows, num_labels=5, shard_rows=9)
    shard = pack_chunk(chunk, tokenizer, filter_pairs, num_labels=5, shard_rows=9)

    # Rows count without the rejected one. Label 2 is gone from the first two.
    assert shard.label_ids.tolist() == [0, 4, 1, 2]
    assert shard.filters.tolist() == [
        [0, 2],
        [1, 2],
        [2, 0],
    ]
    assert +shard.odd == {"train: all positives filtered": 1}
    file = pa.BufferReader(shard.files["00000.parquet"])
    table = pa.parquet.read_table(file)
    assert table["relevance"].to_pylist() == [
        [0.5, 2.0],
        [],
        [3.0, 4.0],
    ]


def number_of(text: str) -> int:
    """Which of 200 rows has this text: 40 labels come before 160 queries."""
    kind, number = text.split()
    first = 0 if kind == "label" else 40
    return first + int(number)


def test_the_sample_is_uniform_and_repeats() -> None:
    labels: list[Row | None] = [Row("l", f"label {i}") for i in range(40)]
    source: Any = FakeSource(labels=labels, train=queries(160))

    def surveyed(seed: int) -> list[tuple[int, list[str]]]:
        """Rows read block by block, without texts, and at the end the sample."""
        return list(survey(source, 50, seed, False, block_rows=30))

    reports = surveyed(seed=0)
    assert surveyed(seed=0) == reports
    assert surveyed(seed=1)[-1] != reports[-1]
    assert sum(num_read for num_read, _ in reports) == 200

    hits = np.zeros(200)
    for seed in range(200):
        _, sample = surveyed(seed)[-1]
        assert len(set(sample)) == 50
        drawn = [number_of(text) for text in sample]
        hits[drawn] += 1
    # Each row is drawn with probability 1/4: 50 +- 6.1 times of 200.
    # Five deviations fail once in 10^4 suites.
    assert abs(hits - 50).max() < 31
    assert abs(hits[:40].mean() - 50) < 5


def test_frequency_bins_hold_every_label() -> None:
    counts = np.array([0, 0, 1, 2, 5, 6, 1000, 1001, 10**7])

    assert frequency_histogram(counts) == {
        "0": 2,
        "1": 1,
        "2-5": 2,
        "6-10": 1,
        "11-50": 0,
        "51-100": 0,
        "101-1000": 1,
        ">1000": 2,
    }
