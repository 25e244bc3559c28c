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
from xmcray.types import Int64Array, Ragged, TopLabels

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
            calibrate(path, corpus, Path(folder) / "alone")
            bundles = {method: Path(folder) / "alone"}
            if arguments.fused:
                fuse([path], corpus, Path(folder) / "fused")
                bundles[f"{method}, fused"] = Path(folder) / "fused"
            for name, bundle in bundles.items():
                row = measured(bundle, corpus)
                rows[f"{corpus.card.name} {name}"] = [corpus.card.name, name, *row]
                print(rows[f"{corpus.card.name} {name}"], flush=True)
    ordered = {key: rows[key] for key in sorted(rows)}
    STORE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    write_table(
        arguments.out, "Probabilities of answers", HEADER, list(ordered.values()), [*NOTES, load]
    )


def measured(bundle: Path, corpus: Corpus) -> list[object]:
    """A row of the table, without set and method."""
    retriever = Retriever.load(bundle)
    assert retriever.calibration is not None
    test = corpus.split("test")
    all_rows = np.arange(len(test))
    truth = test.positives(all_rows)
    top = searcher(retriever, corpus, "test")(all_rows).first(WIDTH)
    num_labels = corpus.card.num_labels
    joined, places = after_joining(bundle, corpus)
    joined_top = searcher(joined, corpus, "test")(all_rows).first(WIDTH)
    renamed = np.concatenate([np.arange(num_labels), places])
    is_joined = joined_top.ids >= num_labels
    ids = np.where(joined_top.ids >= 0, renamed[joined_top.ids], -1)
    joined_top = TopLabels(ids, joined_top.scores, joined_top.probabilities)
    only_joined = np.where(is_joined, ids, -1)
    alone = TopLabels(only_joined, joined_top.scores, joined_top.probabilities)
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
    new = []
    for text in corpus.label_texts(chosen):
        new.append(NewLabel(f"joined-{len(new)}", text))
    return with_labels(retriever.without(chosen), label_sides, new), chosen


def calibration_error(top: TopLabels, truth: Ragged, num_labels: int) -> float:
    """ECE@5; answers of id -1 do not count."""
    reliability = Reliability(num_labels)
    reliability.update(top, truth)
    result = reliability.result()
    assert result is not None
    return float(result["ECE@5"])


def error_from_half(retriever: Retriever, corpus: Corpus, truth: Ragged) -> float:
    """ECE@5 on every other test query, with probabilities fitted to the rest of them."""
    fitted_rows = np.flatnonzero(truth.lengths > 0)[::2]
    measured_rows = np.flatnonzero(truth.lengths > 0)[1::2]
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
    shown = TopLabels(ids, probability_QK, probability_QK)
    for _ in range(20):
        is_right = rng.random(probability_QK.shape) < probability_QK
        positives = np.hstack([is_right, np.ones((len(counted), 1), bool)])
        offsets = np.concatenate([[0], np.cumsum(positives.sum(axis=1))])
        drawn = Ragged(np.nonzero(positives)[1].astype(np.int64), offsets.astype(np.int64))
        errors.append(calibration_error(shown, drawn, 6))
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
        drawn = rng.integers(len(counted), size=len(counted))
        precisions.append(hits_Q[drawn].sum() / max(passing_Q[drawn].sum(), 1))
    precision = 100 * hits_Q.sum() / max(passing_Q.sum(), 1)
    low, high = 100 * np.quantile(precisions, [0.025, 0.975])
    coverage = 100 * float((passing_Q > 0).mean())
    return [f"{precision:.1f} [{low:.1f}, {high:.1f}]", f"{coverage:.1f}"]


if __name__ == "__main__":
    main()
