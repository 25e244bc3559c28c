"""Side vectors from raw files to the rows of a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import appended, corpus_of

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.chunks import read_chunks
from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.errors import DataError
from xmcray.types import Float32Array, Ragged, SidedRagged, side_vectors_of

WIDTH = 3
LABELS = 5
# The second one is the text of a test query.
TRAIN = ["red kettle", "blue pan", "green pot", "red pan", "blue pot", "green kettle", "red pot"]


def write_raw(folder: Path) -> Path:
    folder.mkdir()
    labels: list[dict[str, Any]] = [{"uid": f"l{i}", "text": f"thing {i}"} for i in range(LABELS)]
    train = [{"uid": f"q{i}", "text": text, "labels": [i % LABELS]} for i, text in enumerate(TRAIN)]
    test = [{"uid": "t0", "text": "blue pan", "labels": [1]}]
    for name, rows in (("labels", labels), ("train", train), ("test", test)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        # Half precision holds these numbers exactly.
        np.save(folder / f"{name}.vectors.npy", vectors_of(name, len(rows)).astype(np.float16))
    return folder


def vectors_of(split: str, num_rows: int) -> Float32Array:
    """Numbers that name their split and row, float32."""
    first = {"labels": 100, "train": 200, "test": 300}[split]
    numbers = np.arange(first, first + num_rows, dtype=np.float32)
    vectors: Float32Array = numbers[:, None] + np.eye(WIDTH, dtype=np.float32)[0]
    return vectors


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("sided")
    raw = write_raw(folder / "raw")
    return corpus_of(raw, folder / "corpus", shard_rows=2, array_rows=4, on_leak="drop")


def test_rows_keep_the_vectors_of_their_raw_rows(corpus: Corpus) -> None:
    # Three files of parts of four shards: the query whose text leaks is left out with its vector.
    rows = np.array([5, 0, 1, 0])
    tokens = corpus.split("train").tokens(rows)
    raw_rows = np.array([6, 0, 2, 0])
    assert isinstance(tokens, SidedRagged)
    assert tokens.vectors.dtype == np.float32
    assert tokens.vectors.tolist() == vectors_of("train", 7)[raw_rows].tolist()
    assert corpus.card.side_width == WIDTH
    assert len(corpus.split("train")) == 6


def test_queries_and_label_texts_of_a_batch_keep_theirs(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(validation=0))
    label = 3
    source_id = corpus.label_order[label]
    tokens = data.tokens(np.array([data.num_train + label, 2]))
    expected = [
        vectors_of("labels", LABELS)[source_id].tolist(),
        vectors_of("train", 7)[3].tolist(),
    ]
    assert side_vectors_of(tokens, WIDTH).tolist() == expected
    plain = Ragged.from_rows([[1, 2]])
    joined = Ragged.concatenate([plain, tokens.slice(1, 2)])
    assert side_vectors_of(joined, WIDTH).tolist() == [[0.0] * WIDTH, expected[1]]


def test_vectors_of_labels_alone_do_not_stand_for_texts_of_queries(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    for name in ("train", "test"):
        (raw / f"{name}.vectors.npy").unlink()
        path = raw / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"text"', '"txt"'))
    with pytest.raises(DataError, match="no training query has text"):
        corpus_of(raw, tmp_path / "corpus")


def test_a_rejected_label_has_no_vector(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    lines = (raw / "labels.jsonl").read_text().splitlines()
    lines[2] = "broken"
    (raw / "labels.jsonl").write_text("\n".join(lines) + "\n")
    (chunk,) = read_chunks(detect(raw), "labels", 0, 100, skip=True)
    assert chunk.vectors is not None
    assert chunk.vectors[2].tolist() == [0.0] * WIDTH
    assert chunk.vectors[3].tolist() == vectors_of("labels", LABELS)[3].tolist()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train", np.zeros((6, WIDTH), np.float32), "has 6 rows, expected"),
        ("train", np.zeros((9, WIDTH), np.float32), "has 9 rows, expected 7"),
        ("train", np.full((7, WIDTH), np.nan, np.float32), "row 0 .* holds NaN or infinity"),
        ("train", np.zeros((7, WIDTH), np.float64), "expected float32 or float16"),
        ("train", np.full((7, WIDTH), None), "cannot be read"),
        ("labels", np.zeros((LABELS, 4), np.float32), "several widths .labels 4, train 3"),
        ("test", None, "no test.vectors.npy"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    tmp_path: Path, name: str, array: np.ndarray[Any, Any] | None, message: str
) -> None:
    raw = write_raw(tmp_path / "raw")
    path = raw / f"{name}.vectors.npy"
    path.unlink()
    if array is not None:
        np.save(path, array, allow_pickle=True)
    with pytest.raises(DataError, match=message) as error:
        read_all(raw)
    assert "\n" not in str(error.value)


def read_all(raw: Path) -> None:
    source = detect(raw)
    source.side_width()
    for split in ("labels", *source.splits):
        list(read_chunks(source, split, LABELS, 2, skip=False))


def test_append_refuses_side_vectors(corpus: Corpus, tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    for name in ("labels", "train", "test"):
        (raw / f"{name}.vectors.npy").unlink()
    with pytest.raises(DataError, match="--append does not carry"):
        appended(corpus, raw, tmp_path / "out")
