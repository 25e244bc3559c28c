"""Whether a new bundle may take the place of the one in use: a paired test on the newest queries.

The two bundles may have other labels: answers are matched with the corpus by uid. An answer that
the corpus does not have is a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xmcray.config import unknown
from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError
from xmcray.evaluation.evaluate import SEARCH_K, ComparisonRow, Evaluation, compare, evaluate
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.retrieval.bundle import LABEL_BLOCK
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.uid_index import UidIndex
from xmcray.training.probability_curves import FEW_QUERIES
from xmcray.types import Int64Array, Ragged, TopLabels

SPLIT = "test"  # no run is trained on it
LAST = 5_000  # queries
METRIC = "P@5"
MARGIN = 0.009  # of the metric; 0.9 points
MISTAKES = 0.025  # share of bundles that are worse by the margin and pass

Progress = Callable[[int], None]


class NotPromotedError(BundleError):
    """A new bundle is worse than the one in use, or there are too few queries to tell.

    Attributes:
        verdict: of the test.
    """

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Verdict:
    """A new bundle against the one in use.

    Attributes:
        comparison: the new bundle less the one in use, one row per metric.
        metric: by which it is judged.
        margin: how much worse the new bundle may be, as a fraction.
        num_queries: queries that counted.
    """

    comparison: list[ComparisonRow]
    metric: str
    margin: float
    num_queries: int

    @property
    def row(self) -> ComparisonRow:
        """The comparison by the metric that decides."""
        [row] = [row for row in self.comparison if row.metric == self.metric]
        return row

    @property
    def accepted(self) -> bool:
        """Whether the new bundle is better, or not worse by the margin, on enough queries."""
        is_better = self.row.low > 0 and self.num_queries >= FEW_QUERIES
        is_not_worse = self.row.low > -self.margin
        return is_better or (is_not_worse and self.num_queries >= min_queries(self.margin))

    def check(self) -> None:
        """Raises NotPromotedError unless the new bundle is accepted."""
        if self.accepted:
            return
        raise NotPromotedError(
            f"the new bundle is not promoted: {self}, expected the interval above"
            f" {-100 * self.margin:+.2f} of at least {min_queries(self.margin):,} queries;"
            f" {self._advice()}",
            self,
        )

    def __str__(self) -> str:
        row = self.row
        return (
            f"{row.metric} {100 * row.difference:+.2f} points (95 % interval {100 * row.low:+.2f} to"
            f" {100 * row.high:+.2f}, {self.num_queries:,} queries)"
        )

    def _advice(self) -> str:
        if self.row.high < 0:
            return "keep the old one"
        # There are too few queries to tell.
        return "test with more queries (--last) or a wider --margin, or keep the old one"


def min_queries(margin: float) -> int:
    """Queries by which a new bundle can be judged.

    The bootstrap knows of no loss that none of its queries shows. Suppose that a bundle loses all
    answers to a share `margin` of all queries. Among this many test queries, at least one shows the
    loss in 97.5 of 100 cases. A margin below MARGIN asks for no more: there the interval is wide
    enough to refuse the bundle.
    """
    share = max(margin, MARGIN)
    if share >= 1:
        return 1
    return math.ceil(math.log(MISTAKES) / math.log(1 - share))


def check_metric(metric: str) -> None:
    """Raises ConfigError for a metric that is not measured."""
    if metric not in MAIN_METRICS:
        raise ConfigError(unknown("metric", metric, list(MAIN_METRICS)))


def judge(
    old: Evaluation, new: Evaluation, metric: str = METRIC, margin: float = MARGIN
) -> Verdict:
    """Compares two evaluations of the same queries.

    A one-sided test of non-inferiority: the lower end of the difference's 95 % interval, by paired
    bootstrap over queries, has to be above -margin. A bundle that is worse by the margin passes in
    2.5 of 100 cases.

    Raises:
        ConfigError: no such metric.
        DataError: the evaluations are of other queries.
    """
    check_metric(metric)
    return Verdict(compare(new, old), metric, margin, new.queries)


def lost_changes(old: str, new: str) -> list[str]:
    """Changes made to the bundle in use that the new one lacks, one sentence each.

    Args:
        old: folder or URL of the bundle in use.
        new: folder or URL of the other one.
    """
    before = Retriever.load(old)
    after = Retriever.load(new)
    lines = []
    first_added = before.settings.first_added
    if first_added is not None:
        added = np.arange(first_added, before.settings.num_labels)
        joined, _ = before.labels.uids_and_texts(np.setdiff1d(added, before.labels.removed))
        missing = set(joined) - after.labels.ids_of(joined).keys()
        if missing:
            lines.append(
                f"{new} lacks labels that joined {old} ({len(missing):,}, such as {min(missing)!r}); add"
                " them with `xmcray labels add`, but for those that joined on the server, which adds"
                " them itself"
            )
    removed, _ = before.labels.uids_and_texts(before.labels.removed)
    # A label that came back under another id is no loss.
    gone = set(removed) - before.labels.ids_of(removed).keys()
    back = after.labels.ids_of(gone).keys()
    if back:
        lines.append(
            f"{new} answers labels that were removed from {old} ({len(back):,}, such as"
            f" {min(back)!r}); remove them with `xmcray labels remove`"
        )
    if before.calibration is not None and after.calibration is None:
        lines.append(
            f"{new} gives no probabilities, and {old} does; add them with `xmcray calibrate`"
        )
    return lines


def measure_newest(
    bundle: str, corpus: Corpus, last: int = LAST, progress: Progress | None = None
) -> Evaluation:
    """Evaluates a bundle on the newest test queries, the last ones of the corpus.

    Args:
        bundle: folder or URL.
        corpus: may have labels that the bundle lacks, and the other way round.
        last: queries; all of them if there are fewer.
        progress: called with the number of queries answered so far.
    """
    retriever = _without_removed(Retriever.load(bundle), corpus)
    queries = corpus.split(SPLIT)
    num_queries = min(last, len(queries))
    first = len(queries) - num_queries
    source_ids = _source_ids(retriever, corpus)
    shared_ids = np.flatnonzero(source_ids >= 0)
    bundle_ids = np.full(corpus.card.num_labels, -1, np.int64)
    bundle_ids[source_ids[shared_ids]] = shared_ids
    width = min(SEARCH_K, corpus.card.num_labels)
    num_answers = min(width, retriever.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        rows = first + rows
        # Texts, as a server gets them: the bundle may have another tokenizer than the corpus.
        exclude = _renamed(queries.filters(rows), bundle_ids)
        vectors = queries.side_vectors(rows)
        top = retriever.top_labels(
            queries.texts(rows), num_answers, exclude=exclude, vectors=vectors
        )
        answers = TopLabels.empty(len(rows), width)
        # Id -1 of a missing answer stays what it is.
        is_answer = top.ids >= 0
        answers.ids[:, :num_answers] = np.where(is_answer, source_ids[top.ids], -1)
        answers.scores[:, :num_answers] = top.scores
        return answers

    card = corpus.card
    return evaluate(
        search,
        lambda rows: corpus.answerable(queries.positives(first + rows)),
        num_queries=num_queries,
        train_counts=corpus.train_counts,
        num_train=card.num_train,
        a=card.propensity_a,
        b=card.propensity_b,
        removed=corpus.removed_labels,
        resamples=0,
        progress=progress,
    )


def _without_removed(retriever: Retriever, corpus: Corpus) -> Retriever:
    """The retriever without the labels that the corpus removed, which a server does not answer either."""
    bundle_ids = retriever.labels.ids_of(corpus.label_uids(corpus.removed_labels))
    if not bundle_ids:
        return retriever
    return retriever.without(np.array([*bundle_ids.values()], np.int64))


def _source_ids(retriever: Retriever, corpus: Corpus) -> Int64Array:
    """int64, the id that each label of a bundle has in the corpus; -1 if it is not there."""
    in_bundle = UidIndex(retriever.labels)  # to look up all labels of the corpus, in blocks
    source_ids = np.full(retriever.settings.num_labels, -1, np.int64)
    num_labels = corpus.card.num_labels
    for first in range(0, num_labels, LABEL_BLOCK):
        uids = corpus.label_uids(np.arange(first, min(first + LABEL_BLOCK, num_labels)))
        bundle_ids = in_bundle.ids_of(uids, retriever.labels)
        for source_id, uid in enumerate(uids, first):
            if uid in bundle_ids:
                source_ids[bundle_ids[uid]] = source_id
    return source_ids


def _renamed(labels: Ragged, new_ids: Int64Array) -> Ragged:
    """Lists of labels with other ids, ascending; labels without one are left out."""
    values = new_ids[labels.values]
    renamed = Ragged(values, labels.offsets).where(values >= 0)
    # The last key of lexsort counts most: by row, then by id.
    order = np.lexsort((renamed.values, renamed.row_ids))
    return Ragged(renamed.values[order], renamed.offsets)
