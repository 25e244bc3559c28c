"""How far plain word matching gets on the embedded sample: 10 nearest training queries by TF-IDF cosine.

python benchmarks/sample_baselines.py [FOLDER]     # a folder of JSON lines instead of the sample
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from common import new_parser

from xmcray.data.formats import BadRow, RawFiles, detect
from xmcray.data.sample import write_sample
from xmcray.errors import DataError
from xmcray.evaluation.metrics import Metrics
from xmcray.retrieval.baselines import NearestQueries
from xmcray.types import Ragged

PROPENSITY_A = 0.55
PROPENSITY_B = 1.5
MAX_ANSWERS = 100


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: the embedded sample")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        metrics = measure(detect(arguments.folder))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_sample(folder)
            metrics = measure(detect(folder))
    for name in ("P@1", "P@3", "P@5", "PSP@5"):
        print(f"{name} {metrics[name]:.3f}")


def measure(source: RawFiles) -> dict[str, float]:
    num_labels = sum(1 for _ in source.labels(fail))
    train = list(source.queries("train", num_labels, fail))
    test = list(source.queries("test", num_labels, fail))
    train_labels = Ragged.from_rows([row.label_ids for row in train])
    test_labels = Ragged.from_rows([row.label_ids for row in test])
    pairs = source.filters("test")
    excluded = Ragged.from_rows([pairs[pairs[:, 0] == row, 1] for row in range(len(test))])
    baseline = NearestQueries([row.text for row in train], train_labels, num_labels)
    k = min(MAX_ANSWERS, num_labels)
    answers = baseline.top_labels([row.text for row in test], k, excluded)
    counts = np.bincount(train_labels.values, minlength=num_labels)
    metrics = Metrics(counts, len(train), PROPENSITY_A, PROPENSITY_B, num_labels)
    metrics.update(answers, test_labels)
    print(f"{len(test)} test queries, {num_labels} labels")
    return metrics.result()


def fail(bad: BadRow) -> None:
    raise DataError(str(bad))


if __name__ == "__main__":
    main()
