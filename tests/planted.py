"""Small synthetic data with a known answer: a label is found by the few words that only it has.

A query holds some words of each of its labels, and noise words that say nothing. Label frequencies fall like Zipf's
law, as in real sets. Every oddity a reader must bear is there: queries without positives, filter pairs, labels that
only the test split carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from xmcray.data.formats import BadRow, detect
from xmcray.types import Float64Array, Int64Array

WORDS_PER_LABEL = 4
MAX_POSITIVES = 4


def write_planted(
    folder: Path,
    num_queries: int = 500,
    num_labels: int = 80,
    seed: int = 0,
    *,
    num_test: int | None = None,
    noise_words: int = 3,
    filtered: float = 0.1,
    without_positives: float = 0.02,
    only_in_test: int = 2,
    graded: bool = False,
) -> None:
    """Writes the plain JSON lines layout (train, test, labels, filter files) into `folder`.

    Args:
        num_queries: training queries.
        num_test: test queries; None means a fifth of `num_queries`, at least one.
        noise_words: words per query that belong to no label.
        filtered: share of queries that are themselves a label: their text holds its words too, it is no positive.
        without_positives: share of training queries whose label list is empty.
        only_in_test: labels that no training query carries; the rarest ones.
        graded: the positives of a query have relevance 1, 2, 3 and so on.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = [[f"w{label}x{n}" for n in range(WORDS_PER_LABEL)] for label in range(num_labels)]
    labels = (
        {"uid": f"label{label}", "text": " ".join(words[label][:3])} for label in range(num_labels)
    )
    _write(folder / "labels.jsonl", labels)

    def write_split(split: str, size: int, fixed: list[int], drawable: int, empty: float) -> None:
        """The first queries carry one `fixed` label each, all others labels drawn from [0, drawable)."""
        rows, pairs = [], []
        for row in range(size):
            positives = [fixed[row]] if row < len(fixed) else _draw(rng, drawable).tolist()
            tokens = [
                word for label in positives for word in rng.choice(words[label], 2, replace=False)
            ]
            if len(positives) > 1 and rng.random() < filtered:
                pairs.append((row, positives.pop()))
            elif rng.random() < empty:
                positives, tokens = [], []
            text = [*tokens, *rng.integers(0, 50, noise_words).astype(str)]
            rng.shuffle(text)
            record = {"uid": f"{split}{row}", "text": " ".join(text), "labels": sorted(positives)}
            if graded:
                record["relevance"] = list(range(1, len(positives) + 1))
            rows.append(record)
        _write(folder / f"{split}.jsonl", rows)
        lines = "".join(f"{row} {label}\n" for row, label in pairs)
        (folder / f"filter_labels_{split}.txt").write_text(lines, encoding="utf-8")

    seen = num_labels - only_in_test
    write_split("train", num_queries, [], seen, without_positives)
    num_test = max(1, num_queries // 5) if num_test is None else num_test
    write_split("test", num_test, list(range(seen, num_labels)), num_labels, 0.0)


def write_side_vectors(
    folder: Path,
    width: int = 64,
    *,
    planted: bool = True,
    noise: float = 0.5,
    seed: int = 0,
) -> None:
    """Writes side vectors next to raw files of any layout.

    Args:
        planted: a label's vector is a random direction, and a query's is the direction of the sum of its labels', each
            with noise; otherwise they are noise alone.
        noise: expected length of the noise.
    """
    rng = np.random.default_rng(seed)
    source = detect(folder)
    num_labels = sum(1 for _ in source.labels(_refuse))
    label_LW = _directions(rng.standard_normal((num_labels, width))) if planted else None

    def save(split: str, signal: Float64Array | None, num_rows: int) -> None:
        vectors = noise * rng.standard_normal((num_rows, width)) / width**0.5
        if signal is not None:
            vectors += signal
        np.save(folder / f"{split}.vectors.npy", vectors.astype(np.float32))

    save("labels", label_LW, num_labels)
    for split in source.splits:
        positives = [list(row.label_ids) for row in source.queries(split, num_labels, _refuse)]
        signal = None
        if label_LW is not None:
            signal = _directions(np.stack([label_LW[row].sum(axis=0) for row in positives]))
        save(split, signal, len(positives))


def _directions(vectors: Float64Array) -> Float64Array:
    """Rows divided by their lengths; rows of zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: Float64Array = vectors / np.maximum(lengths, 1e-9)
    return directions


def _refuse(bad: BadRow) -> None:
    raise AssertionError(str(bad))


def _draw(rng: np.random.Generator, drawable: int) -> Int64Array:
    """1 to 4 different labels of [0, drawable), label l with a weight of 1 / (l + 5)."""
    weights = 1.0 / (np.arange(drawable) + 5.0)
    count = min(int(rng.integers(1, MAX_POSITIVES + 1)), drawable)
    return np.asarray(
        rng.choice(drawable, count, replace=False, p=weights / weights.sum()), dtype=np.int64
    )


def _write(path: Path, rows: Iterable[object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
