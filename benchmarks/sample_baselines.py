"""How far plain word matching gets on the embedded sample: 10 nearest training queries by TF-IDF cosine.

python benchmarks/sample_baselines.py [FOLDER]     # a folder of plain JSON lines instead of the sample
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from xmcray.data.formats import BadRow, Source, detect
from xmcray.data.sample import write_sample
from xmcray.errors import DataError
from xmcray.evaluation.baselines import NearestQueries
from xmcray.evaluation.metrics import Metrics
from xmcray.types import Ragged


def fail(bad: BadRow) -> None:
    raise DataError(str(bad))


def measure(source: Source) -> dict[str, float]:
    num_labels = sum(1 for _ in source.labels(fail))
    train, test = (list(source.queries(split, num_labels, fail)) for split in ("train", "test"))
    train_labels, test_labels = (
        Ragged.from_rows([row.label_ids for row in rows]) for rows in (train, test)
    )
    pairs = source.filters("test")
    excluded = Ragged.from_rows([pairs[pairs[:, 0] == row, 1] for row in range(len(test))])
    baseline = NearestQueries([row.text for row in train], train_labels, num_labels)
    counts = np.bincount(train_labels.values, minlength=num_labels)
    metrics = Metrics(counts, len(train), 0.55, 1.5, num_labels)
    metrics.update(
        baseline.top_labels([row.text for row in test], min(100, num_labels), excluded), test_labels
    )
    print(f"{len(test)} test queries, {num_labels} labels")
    return metrics.result()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            write_sample(folder)
        found = measure(detect(folder))
    for name in ("P@1", "P@3", "P@5", "PSP@5"):
        print(f"{name} {found[name]:.3f}")


if __name__ == "__main__":
    main()
