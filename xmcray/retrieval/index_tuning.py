"""Chooses the settings of a search in an index: the cheapest that reach a recall."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import exact_search, from_keys
from xmcray.retrieval.index import FEW_ANSWERS, Index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.types import Float32Array

TUNE_K = 50  # answers whose recall `IndexSpec.recall` states
TUNE_QUERIES = 256
CANDIDATE_STEPS = (2, 4, 8, 16)
MOST_CANDIDATES = 64  # per answer; they stand for all rows of the visited lists
BREADTH_STEPS = (TUNE_K, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CODE_LOSS = 0.005  # recall that short codes may cost in addition to the lists


def tune(index: Index, queries: Float32Array, spec: IndexSpec) -> float:
    """Chooses the settings of an index that are 0 in `spec`: the cheapest that reach its recall.

    Args:
        index: its settings change.
        queries: float32 [Q, D]; the first TUNE_QUERIES are used.
        spec: settings that are not 0 are kept.
    Returns:
        The recall that was reached.
    """
    if index.is_exact:
        return 1.0
    tuning = _Tuning(index, queries, spec)
    if index.is_graph:
        return tuning.choose_breadth()
    if not index.num_lists:
        # Only short codes lose answers.
        return tuning.choose_candidates(spec.recall, spec.recall)
    recall_of_lists = tuning.choose_nprobe()
    if not index.proposes_candidates:
        # All rows of the visited lists are compared.
        return recall_of_lists
    # Short codes may lose a little more than the lists do.
    wanted = recall_of_lists - CODE_LOSS
    wanted_of_few = tuning.recall_of_few() - CODE_LOSS
    return tuning.choose_candidates(wanted, wanted_of_few)


class _Tuning:
    """Measures searches of some queries against their exact answers."""

    def __init__(self, index: Index, queries: Float32Array, spec: IndexSpec) -> None:
        self.index = index
        self.spec = spec
        self.queries = np.ascontiguousarray(queries[:TUNE_QUERIES], np.float32)
        self.k = min(TUNE_K, len(index))
        self.few = min(FEW_ANSWERS, len(index))
        self.exact_ids = exact_search(index.vectors, self.queries, self.k).ids
        self.all_rows = AnswerableRows.of(len(index), len(self.queries), None, None)

    def choose_breadth(self) -> float:
        """Sets the breadth of a search in a graph; returns the recall that it reaches."""
        # A graph compares the vectors themselves, so more candidates than answers are no use.
        self.index.candidates = self.spec.candidates or 1
        steps = [self.spec.ef_search] if self.spec.ef_search else BREADTH_STEPS

        def recall_at(breadth: int) -> float:
            self.index.set_breadth(breadth)
            return self._recall_of_candidates(self.k)

        return self._first_step(steps, recall_at)

    def choose_nprobe(self) -> float:
        """Sets the number of visited lists; returns the recall that it reaches."""
        num_lists = self.index.num_lists
        # To scan the 4-bit codes of all rows takes less time than an exact search, most of all for one
        # query. Without codes, half of the lists take as long.
        most = num_lists if self.index.has_quick_codes else num_lists // 2
        steps = _nprobe_steps(num_lists, most)
        if self.spec.nprobe:
            steps = [min(self.spec.nprobe, num_lists)]

        def recall_at(nprobe: int) -> float:
            self.index.set_nprobe(nprobe)
            return self._recall(self._best_of_lists(self.k))

        return self._first_step(steps, recall_at)

    def recall_of_few(self) -> float:
        """Recall of FEW_ANSWERS in the visited lists."""
        return self._recall(self._best_of_lists(self.few))

    def choose_candidates(self, wanted: float, wanted_of_few: float) -> float:
        """Sets the number of candidates per answer, which makes up for short codes.

        If no number is enough, the largest stays.

        Args:
            wanted: recall of TUNE_K answers.
            wanted_of_few: recall of FEW_ANSWERS, which need more candidates each.
        Returns:
            The recall of TUNE_K answers.
        """
        steps = [self.spec.candidates] if self.spec.candidates else CANDIDATE_STEPS
        recall = 0.0
        for candidates in steps:
            self.index.candidates = candidates
            recall = self._recall_of_candidates(self.k)
            if recall >= wanted and self._recall_of_candidates(self.few) >= wanted_of_few:
                break
        return recall

    def _first_step(self, steps: Sequence[int], recall_at: Callable[[int], float]) -> float:
        """Leaves the index at the first step that reaches the recall, or at the last one.

        Recall grows with the steps, so the step is found by bisection. The last one needs no test,
        as there is no better one.
        """
        chosen = bisect.bisect_left(steps[:-1], self.spec.recall, key=recall_at)
        # The bisection may have ended at another step.
        return recall_at(steps[chosen])

    def _best_of_lists(self, k: int) -> Tensor:
        """Keys [Q, k] of the best rows of the visited lists."""
        if self.index.scans_lists:
            return self.index.search_lists(self.queries, k, self.all_rows)
        # FAISS does not give all rows of the lists, but hardly a good one is missing among so many.
        width = k * MOST_CANDIDATES
        return self.index.search_candidates(self.queries, width, k, self.all_rows)

    def _recall_of_candidates(self, k: int) -> float:
        """Recall of k answers."""
        width = k * self.index.candidates
        return self._recall(self.index.search_candidates(self.queries, width, k, self.all_rows))

    def _recall(self, keys: Tensor) -> float:
        """The share of the k best rows of all that are among the k answers in `keys` [Q, k]."""
        answer_ids = from_keys(keys).ids
        exact_ids = self.exact_ids[:, : answer_ids.shape[1]]
        hits = 0
        for found_ids, wanted_ids in zip(answer_ids, exact_ids, strict=True):
            hits += len(np.intersect1d(found_ids, wanted_ids))
        return hits / max(1, exact_ids.size)


def _nprobe_steps(num_lists: int, most: int) -> list[int]:
    """4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ... up to `most`; all lists if there are fewer than 4."""
    limit = min(max(4, most), num_lists)
    steps = []
    step = 4
    distance = 1
    while step <= limit:
        steps.append(step)
        step += distance
        # Each power of two doubles the distance to the next step.
        if step == 8 * distance:
            distance *= 2
    if steps and steps[-1] < limit:
        steps.append(limit)
    return steps or [num_lists]
