"""Whether probabilities of answers are right on the test split, and after labels have joined.

    python benchmarks/calibration.py RUN...             # runs of xmcray train --refit, or their bundles
    python benchmarks/calibration.py RUN... --fused     # also fused; the search of weights takes minutes
    python benchmarks/calibration.py RUN... --keep      # adds to the rows of the table there is

Each run's bundle is calibrated on the queries that its selection held out, as `xmcray calibrate RUN` does it, and
measured on the test split. Then 1,000 labels (a tenth, if there are fewer than 10,000) leave the bundle and join again
by their texts alone.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
from common import RESULTS, new_parser, refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.evaluation.metrics import relevant
from xmcray.evaluation.reliability import Reliability
from xmcray.retrieval.labels import NewLabel, load_label_sides, with_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.training.calibrate import calibrate
from xmcray.training.fuse import fuse
from xmcray.training.outcome import searcher
from xmcray.training.probability_curves import answers_to, calibration_of
from xmcray.training.run import Run
from xmcray.types import Int64Array, Ragged, TopLabels, offsets_of

JOINING = 1000
LEVEL = 0.9  # min_probability
WIDTH = 10  # answers per query
RESAMPLES = 1000
STORE = RESULTS / "calibration.json"
HEADER = [
    "set",
    "method",
    "held-out queries",
    "test queries",
    "ECE@5",
    "by chance",
    "from half of the test queries",
    f"precision at {LEVEL}",
    f"coverage at {LEVEL}",
    "ECE@5 after joining",
    "of these alone",
]
NOTES = (
    "percent; ECE@5: 15 bins of equal width, the first five answers",
    "by chance: the mean ECE@5 of answers that are right exactly as often as their probabilities say",
    "from half of the test queries: ECE@5 on the other half, with probabilities fitted to the answers that the one half"
    " gets; the difference to ECE@5 is what held-out queries do not know of test queries",
    f"precision of answers with probability {LEVEL} or more among the first {WIDTH}, with a 95 % bootstrap interval"
    " over queries; coverage: queries with such an answer",
    "after joining: 1,000 labels, or a tenth, were removed and added by their texts; of these alone: of the answers"
    " that are such a label",
)


def main() -> None:
    parser = new_parser(__doc__, out="calibration.md")
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--fused", action="store_true", help="also fuse each run")
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the table")
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    rows: dict[str, list[object]] = {}
    if arguments.keep and STORE.is_file():
        rows = json.loads(STORE.read_text(encoding="utf-8"))
    for path in arguments.runs:
        run = Run.open(path)
        corpus = Corpus.open(run.corpus)
        method = run.config.method_name
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder) / "alone"
            calibrate(path, corpus, alone)
            bundles = {method: alone}
            if arguments.fused:
                fused = Path(folder) / "fused"
                fuse([path], corpus, fused)
                bundles[f"{method}, fused"] = fused
            for name, bundle in bundles.items():
                row = [corpus.card.name, name, *measured(bundle, corpus)]
                rows[f"{corpus.card.name} {name}"] = row
                print(row, flush=True)
    rows = dict(sorted(rows.items()))
    STORE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table = list(rows.values())
    write_table(arguments.out, "Probabilities of answers", HEADER, table, [*NOTES, load])


def measured(bundle: Path, corpus: Corpus) -> list[object]:
    """A row of the table, without set and method."""
    retriever = Retriever.load(bundle)
    assert retriever.calibration is not None
    test = corpus.split("test")
    all_rows = np.arange(len(test))
    truth = test.positives(all_rows)
    top = searcher(retriever, corpus, "test")(all_rows).first(WIDTH)
    num_labels = corpus.card.num_labels
    joined, old_ids = after_joining(bundle, corpus)
    new_top = searcher(joined, corpus, "test")(all_rows).first(WIDTH)
    # A label that joined has a new id; the test split knows it by the old one.
    corpus_ids = np.concatenate([np.arange(num_labels), old_ids])
    ids = np.where(new_top.ids >= 0, corpus_ids[new_top.ids], -1)
    joined_top = TopLabels(ids, new_top.scores, new_top.probabilities)
    ids_of_joined = np.where(new_top.ids >= num_labels, ids, -1)
    alone = TopLabels(ids_of_joined, new_top.scores, new_top.probabilities)
    return [
        retriever.calibration.curves.queries,
        int((truth.lengths > 0).sum()),
        f"{100 * calibration_error(top, truth, num_labels):.1f}",
        f"{100 * error_by_chance(top, truth):.1f}",
        f"{100 * error_from_half(retriever, corpus, truth):.1f}",
        *at_level(top, truth, num_labels),
        f"{100 * calibration_error(joined_top, truth, num_labels):.1f}",
        f"{100 * calibration_error(alone, truth, num_labels):.1f}",
    ]


def after_joining(bundle: Path, corpus: Corpus) -> tuple[Retriever, Int64Array]:
    """The bundle after labels have left and joined again; the old ids of those that joined."""
    retriever = Retriever.load(bundle)
    num_labels = corpus.card.num_labels
    candidates = np.setdiff1d(np.arange(num_labels), corpus.labels_without_tokens())
    count = JOINING if num_labels >= 10 * JOINING else num_labels // 10
    chosen = np.random.default_rng(0).choice(candidates, count, replace=False)
    label_sides = load_label_sides(bundle, retriever.settings)
    for side in label_sides:
        assert side.cluster_L is None, "clusters of labels that leave"
    new_labels = []
    for text in corpus.label_texts(chosen):
        new_labels.append(NewLabel(f"joined-{len(new_labels)}", text))
    remaining = retriever.without(chosen)
    return with_labels(remaining, label_sides, new_labels), chosen


def calibration_error(top: TopLabels, truth: Ragged, num_labels: int) -> float:
    """ECE@5; answers of id -1 do not count."""
    reliability = Reliability(num_labels)
    reliability.update(top, truth)
    result = reliability.result()
    assert result is not None
    return float(result["ECE@5"])


def error_from_half(retriever: Retriever, corpus: Corpus, truth: Ragged) -> float:
    """ECE@5 on every other test query, with probabilities fitted to the rest of them."""
    counted_rows = np.flatnonzero(truth.lengths > 0)
    fitted_rows = counted_rows[::2]
    measured_rows = counted_rows[1::2]
    sample = answers_to(retriever, corpus, fitted_rows, "test")
    calibration = calibration_of(sample, corpus, len(fitted_rows))
    refitted = dataclasses.replace(retriever, calibration=calibration)
    top = searcher(refitted, corpus, "test")(measured_rows).first(WIDTH)
    return calibration_error(top, truth.take(measured_rows), corpus.card.num_labels)


def error_by_chance(top: TopLabels, truth: Ragged) -> float:
    """The mean ECE@5 if each answer were relevant exactly with its probability."""
    counted = np.flatnonzero(truth.lengths > 0)
    assert top.probabilities is not None
    probability_QK = top.probabilities[counted, :5]
    rng = np.random.default_rng(0)
    errors = []
    # Labels 0 .. 4 by place, so that any set of places can be right; label 5 keeps queries counted.
    ids = np.broadcast_to(np.arange(5), probability_QK.shape)
    answers = TopLabels(ids, probability_QK, probability_QK)
    always_Q1 = np.ones((len(counted), 1), bool)
    for _ in range(20):
        is_right_QK = rng.random(probability_QK.shape) < probability_QK
        is_positive_QL = np.hstack([is_right_QK, always_Q1])
        _, labels = np.nonzero(is_positive_QL)
        positives = Ragged(labels, offsets_of(is_positive_QL.sum(axis=1)))
        errors.append(calibration_error(answers, positives, 6))
    return float(np.mean(errors))


def at_level(top: TopLabels, truth: Ragged, num_labels: int) -> list[object]:
    """Precision with its interval, and coverage, of answers that are probable enough."""
    counted = np.flatnonzero(truth.lengths > 0)
    assert top.probabilities is not None
    passes_QK = (top.probabilities[counted] >= LEVEL) & (top.ids[counted] >= 0)
    is_hit_QK = relevant(top.ids[counted], truth.take(counted), num_labels)
    passing_Q = passes_QK.sum(axis=1)
    hits_Q = (passes_QK & is_hit_QK).sum(axis=1)
    if not passing_Q.any():
        return ["-", "0.0"]
    rng = np.random.default_rng(0)
    precisions = []
    for _ in range(RESAMPLES):
        # A bootstrap over queries: as many of them, with replacement.
        drawn = rng.integers(len(counted), size=len(counted))
        num_hits = hits_Q[drawn].sum()
        num_passing = passing_Q[drawn].sum()
        precisions.append(num_hits / max(num_passing, 1))
    precision = 100 * hits_Q.sum() / max(passing_Q.sum(), 1)
    low, high = 100 * np.quantile(precisions, [0.025, 0.975])
    coverage = 100 * float((passing_Q > 0).mean())
    return [f"{precision:.1f} [{low:.1f}, {high:.1f}]", f"{coverage:.1f}"]


if __name__ == "__main__":
    main()
