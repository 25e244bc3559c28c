"""Shards are read back row by row, across shards, in any order; chunks and samples are what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from xmcray.data.chunks import pack_chunk, read_chunks, survey
from xmcray.data.corpus import frequency_histogram
from xmcray.data.formats import BadRow, Row
from xmcray.data.shards import ShardedRows, pack
from xmcray.data.tokens import train_wordpiece
from xmcray.errors import DataError
from xmcray.types import Ragged

NO_PAIRS = np.empty((0, 2), np.int64)


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
    return [Row(f"q{i}", f"text {i}", (i % 3, 5)) for i in range(count)]


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_sharded_rows_equal_the_rows_written(tmp_path: Path, vocab_size: int) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, vocab_size, draw.integers(0, 6)) for _ in range(23)]
    for shard in range(5):
        block = rows[5 * shard : 5 * shard + 5]
        texts = pa.table({"uid": ["x"] * len(block), "text": ["y"] * len(block)})
        for name, content in pack(shard, texts, Ragged.from_rows(block), vocab_size, None).items():
            (tmp_path / name).write_bytes(content)
    reader = ShardedRows(tmp_path, "token", 23, 5, vocab_size)
    asked = draw.permutation(np.concatenate([np.arange(23), [4, 4, 22]]))
    got = reader.take(asked)
    assert got.values.dtype == np.int64
    assert [got[i].tolist() for i in range(len(asked))] == [rows[i].tolist() for i in asked]
    assert len(reader.take(np.empty(0, np.int64))) == 0
    assert np.load(tmp_path / "00000.tokens.npy").dtype == (
        np.uint16 if vocab_size == 100 else np.uint32
    )
    for wrong in (23, -1):
        with pytest.raises(IndexError, match="expected 0 to 22"):
            reader.take(np.array([0, wrong]))


@pytest.mark.parametrize("num_rows", [0, 4, 5, 6, 8, 9, 13])
def test_another_number_of_rows_than_the_files_have_is_noticed(
    tmp_path: Path, num_rows: int
) -> None:
    for shard, block in enumerate(([[1]] * 5, [[1]] * 2)):
        texts = pa.table({"uid": ["x"] * len(block), "text": ["y"] * len(block)})
        for name, content in pack(shard, texts, Ragged.from_rows(block), 100, None).items():
            (tmp_path / name).write_bytes(content)
    ShardedRows(tmp_path, "token", 7, 5, 100).check_num_rows()
    with pytest.raises(DataError, match="prepare the corpus again"):
        ShardedRows(tmp_path, "token", num_rows, 5, 100).check_num_rows()


def test_a_mapped_shard_keeps_no_descriptor(tmp_path: Path) -> None:
    for shard in range(40):
        texts = pa.table({"uid": ["x"], "text": ["y"]})
        for name, content in pack(shard, texts, Ragged.from_rows([[shard]]), 100, None).items():
            (tmp_path / name).write_bytes(content)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    reader = ShardedRows(tmp_path, "token", 40, 1, 100)
    assert reader.take(np.arange(40)).values.tolist() == list(range(40))
    assert len(list(descriptors.iterdir())) == before


def test_chunks_have_equal_sizes_and_carry_the_rejected() -> None:
    rows = queries(7)
    rows[2] = None
    rows[6] = None
    chunks = list(read_chunks(FakeSource(train=rows), "train", 6, 3, skip=True))  # type: ignore[arg-type]
    assert [chunk.rows["uid"].to_pylist() for chunk in chunks] == [["q0", "q1", "q3"], ["q4", "q5"]]
    assert [[bad.line for bad in chunk.rejected] for chunk in chunks] == [[3], [7]]
    with pytest.raises(DataError, match="train:3: broken; repair"):
        list(read_chunks(FakeSource(train=rows), "train", 6, 3, skip=False))  # type: ignore[arg-type]


def test_rejected_labels_keep_their_place() -> None:
    labels: list[Row | None] = [None, Row("a", "a"), None, None, Row("b", "b"), None]
    (chunk,) = read_chunks(FakeSource(labels=labels), "labels", 0, 9, skip=True)  # type: ignore[arg-type]
    assert chunk.rows["text"].to_pylist() == ["", "a", "", "", "b", ""]
    assert len(chunk.rejected) == 4


def test_filter_pairs_leave_positives_and_relevance_together() -> None:
    rows: list[Row | None] = [
        None,
        Row("q1", "one", (0, 2, 4), (0.5, 1.0, 2.0)),
        Row("q2", "two", (2,)),
        Row("q3", "three", (1, 2), (3.0, 4.0)),
    ]
    (chunk,) = read_chunks(FakeSource(train=rows), "train", 5, 9, skip=True)  # type: ignore[arg-type]
    pairs = np.array([[0, 2], [1, 2], [2, 2], [3, 0]])  # the first belongs to the rejected row
    shard = pack_chunk(chunk, train_wordpiece(["one two three"] * 2), pairs, 5, 9)
    assert shard.label_ids.tolist() == [0, 4, 1, 2]
    assert shard.filters.tolist() == [[0, 2], [1, 2], [2, 0]]
    assert +shard.odd == {"train: all positives filtered": 1}
    table = pa.parquet.read_table(pa.BufferReader(shard.files["00000.parquet"]))
    assert table["relevance"].to_pylist() == [[0.5, 2.0], [], [3.0, 4.0]]


def test_the_sample_is_uniform_and_repeats() -> None:
    source: Any = FakeSource(labels=[Row("l", f"label {i}") for i in range(40)], train=queries(160))
    samples = [
        [
            (count, len(texts), texts)
            for count, texts in survey(source, 50, seed, False, block_rows=30)
        ]
        for seed in (0, 0, 1)
    ]
    assert samples[0] == samples[1]
    assert samples[0][-1] != samples[2][-1]
    assert sum(count for count, _, _ in samples[0]) == 200
    hits = np.zeros(200)
    for seed in range(200):
        *_, (_, texts) = survey(source, 50, seed, False, block_rows=30)
        assert len(set(texts)) == 50
        hits[[int(t.split()[1]) + (0 if t.startswith("label") else 40) for t in texts]] += 1
    # Each row is drawn with probability 1/4: 50 +- 6.1 times of 200. Five deviations fail once in 10^4 suites.
    assert abs(hits - 50).max() < 31
    assert abs(hits[:40].mean() - 50) < 5


def test_frequency_bins_hold_every_label() -> None:
    histogram = frequency_histogram(np.array([0, 0, 1, 2, 5, 6, 1000, 1001, 10**7]))
    assert histogram == {
        "0": 2, "1": 1, "2-5": 2, "6-10": 1, "11-50": 0, "51-100": 0, "101-1000": 1, ">1000": 2,
    }  # fmt: skip
