"""Nearest rows by inner product: exact for small shards, a graph or inverted lists for others.

Answers and hard negatives are searched with it. FAISS makes the index and scans it. It only
proposes candidates: their scores are then computed from the float32 vectors, so the index can
hold short codes, and every score that leaves this file is an inner product. Where many queries
visit the same few lists, as for hard negatives, the lists are scanned with matrix products instead
(list_scan.py).
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmcray.data.checked_files import read_array
from xmcray.retrieval import ann, few_queries
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import (
    answer_keys,
    as_tensor,
    empty_keys,
    exact_keys,
    from_keys,
    scores_on_device,
    to_key_array,
)
from xmcray.retrieval.few_queries import BestRows
from xmcray.retrieval.inverted_lists import InvertedLists
from xmcray.retrieval.list_scan import scan_lists
from xmcray.retrieval.readable import readable
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, pairs_of, spans

logger = logging.getLogger(__name__)

BATCH_QUERIES = 256  # so many queries or more scan lists of vectors with matrix products
# So many queries or more scan lists of short codes with matrix products, if each query visits at most
# one list in FEW_LISTS.
MANY_QUERIES = 10_000
FEW_LISTS = 16
# A search for fewer answers proposes as many candidates as one for FEW_ANSWERS: the fewer the answers,
# the more candidates each of them needs.
FEW_ANSWERS = 10
LEAST_CANDIDATES = 50  # of a query; some of them may be labels that cannot be answered
NO_ROWS = np.empty(0, np.int64)
CANDIDATES_AT_ONCE = 1 << 24  # of all queries together, each with its score and key


class Index:
    """Rows that can be searched by inner product.

    Args:
        vectors: float32 [n, D] tensor; on a GPU for an exhaustive search there.
        faiss_index: a FAISS index over the same rows, or None to search all of them.
        long_ids: int64 [H], positions of rows that `faiss_index` lacks and every query meets.
        candidates: candidates per answer that FAISS proposes.
        threads: threads of a search.
    """

    answered_share = 1.0  # of the rows, see `filtered`
    recall = 1.0  # of a sample of queries, when the index was built

    def __init__(
        self,
        vectors: Tensor,
        faiss_index: Any | None,
        *,
        long_ids: Int64Array | None = None,
        candidates: int = 1,
        threads: int = 1,
    ) -> None:
        self.vectors = vectors
        self.candidates = candidates
        self.threads = threads
        self.long_ids = NO_ROWS if long_ids is None else long_ids
        self._faiss = faiss_index
        self._warned = False

    def __len__(self) -> int:
        return len(self.vectors)

    def move_to(self, device: torch.device) -> None:
        """Moves the vectors to the device on which exhaustive searches run."""
        self.vectors = self.vectors.to(device)
        self.__dict__.pop("_faiss_rows", None)

    @property
    def is_exact(self) -> bool:
        """Whether every row is compared with every query."""
        return self._faiss is None

    @property
    def proposes_candidates(self) -> bool:
        """Whether FAISS proposes candidates, of which `candidates` per answer are compared."""
        return self._faiss is not None

    @property
    def is_graph(self) -> bool:
        """Whether it is a graph over the vectors as they are, not over codes."""
        return self._faiss is not None and ann.is_plain_graph(self._faiss)

    @property
    def has_quick_codes(self) -> bool:
        """Whether FAISS scans codes of 4 bits, many with a few instructions."""
        return self._faiss is not None and ann.has_quick_codes(self._faiss)

    @property
    def breadth(self) -> int:
        """Rows that a search in a graph keeps while it walks; 0 if the index is no graph."""
        return ann.breadth_of(self._faiss)

    def set_breadth(self, breadth: int) -> None:
        """Sets `breadth` of a graph."""
        ann.set_search(self._faiss, 0, breadth)

    @property
    def num_lists(self) -> int:
        """Inverted lists; 0 if the index has none."""
        return int(getattr(ann.lists_of(self._faiss), "nlist", 0))

    @property
    def nprobe(self) -> int:
        """Lists visited per query; 0 if the index has no lists."""
        return int(getattr(ann.lists_of(self._faiss), "nprobe", 0))

    def set_nprobe(self, nprobe: int) -> None:
        """Sets `nprobe` of an index with lists."""
        ann.set_search(self._faiss, nprobe, 0)

    def search(
        self,
        queries: Float32Array,
        k: int,
        ids: Int64Array | None = None,
        hidden: Ragged | None = None,
        exact: bool = False,
    ) -> TopLabels:
        """The k best rows, best first, equal scores by lower id.

        Args:
            queries: float32 [Q, D].
            k: answers per query, at least 1.
            ids: int64 [n], ids of the rows in the answer, negative for those that are no answers;
                positions if not given.
            hidden: Q rows of positions that are masked before the k best are taken.
            exact: compare all rows, whatever the index.
        Returns:
            Ids int64 [Q, k] and inner products float32 [Q, k]; -1 and -inf where no row is left.
        """
        if ids is None:
            ids = self._positions
        if len(queries) == 1 and hidden is None:
            answer = self._answer_at_once(queries, k, ids, exact)
            if answer is not None:
                return answer
        rows = AnswerableRows.of(len(self), len(queries), ids, hidden)
        return from_keys(self.search_keys(queries, k, rows, exact))

    def _answer_at_once(
        self, queries: Float32Array, k: int, ids: Int64Array, exact: bool
    ) -> TopLabels | None:
        """The answer of `search` to one query, by few calls; None if it needs the usual way."""
        if self._faiss_rows is None:
            return None
        if exact or self.is_exact:
            return few_queries.answer_at_once(self._faiss_rows, queries, k, ids)
        if not self.proposes_candidates:
            return None
        width = self.num_candidates(k)
        if width == len(self):
            return None
        query = np.ascontiguousarray(queries, np.float32)
        return few_queries.best_first(self._best_of_one(query, width, k, ids, NO_ROWS), k)

    @functools.cached_property
    def _faiss_rows(self) -> Float32Array | None:
        """The vectors as FAISS searches them; kept, because asking torch takes microseconds."""
        return few_queries.faiss_rows(self.vectors)

    @functools.cached_property
    def _positions(self) -> Int64Array:
        """int64 [n], the ids of rows that have no others; kept, because a search may take less time."""
        return np.arange(len(self))

    def search_keys(
        self, queries: Float32Array, k: int, rows: AnswerableRows, exact: bool = False
    ) -> Tensor:
        """As `search`, but sort keys int64 [Q, k] (see exact.py), which merge with other shards."""
        queries = np.ascontiguousarray(queries, np.float32)
        if exact or self.is_exact or not len(queries):
            return self._exact_keys(queries, k, rows)
        width = self.num_candidates(k, rows.most_hidden)
        if width == len(self):
            return self._exact_keys(queries, k, rows)
        if len(queries) <= few_queries.MOST_QUERIES and self._faiss_rows is not None:
            return self._few_query_keys(queries, width, k, rows)
        if self._shares_lists(len(queries)):
            keys = self.search_lists(queries, k, rows)
        else:
            keys = self.search_candidates(queries, width, k, rows)
        return self._completed(keys, queries, rows)

    def num_candidates(self, k: int, most_hidden: int = 0) -> int:
        """Candidates per query that FAISS should propose; the number of all rows if it should not.

        Args:
            k: answers per query.
            most_hidden: hidden rows of the query that has the most.
        """
        # Hidden rows take places among the candidates, so that many more are proposed.
        num_needed = int(max(k, FEW_ANSWERS) / self.answered_share)
        width = max(LEAST_CANDIDATES, (num_needed + most_hidden) * self.candidates)
        limit = self._most_candidates
        if limit is not None and width > limit:
            self._warn_of_limit(width, limit)
            # Fewer candidates for each answer are enough, but not fewer than answers.
            width = limit if k + most_hidden <= limit else len(self)
        # Candidates that are half of the rows cost more than comparing all rows.
        return width if width < len(self) // 2 else len(self)

    def _shares_lists(self, num_queries: int) -> bool:
        """Whether so many queries share the work of their lists, with matrix products of the rows."""
        if self.has_quick_codes:
            # Codes are scanned faster than rows, unless many queries visit few lists each.
            visits_few = self._visited_lists <= self.num_lists // FEW_LISTS
            shares = num_queries >= MANY_QUERIES and visits_few
        else:
            shares = num_queries >= BATCH_QUERIES
        return shares and self._lists is not None

    def _completed(self, keys: Tensor, queries: Float32Array, rows: AnswerableRows) -> Tensor:
        """The keys of a search, without gaps where the visited lists had too few rows.

        Rather than return less than k answers, these queries are searched exhaustively.
        """
        last_scores = from_keys(keys[:, -1]).scores
        incomplete = np.flatnonzero(last_scores == -np.inf)
        if len(incomplete):
            own_rows = AnswerableRows(rows.ids, rows.hidden.take(incomplete))
            completed = self._exact_keys(queries[incomplete], keys.shape[1], own_rows)
            keys[torch.from_numpy(incomplete)] = completed
        return keys

    def _exact_keys(self, queries: Float32Array, k: int, rows: AnswerableRows) -> Tensor:
        """Keys [Q, k] of the best of all rows."""
        return exact_keys(self.vectors, queries, empty_keys(len(queries), k), rows)

    @functools.cached_property
    def _most_candidates(self) -> int | None:
        """Candidates of a query that FAISS can propose; None if there is no limit."""
        return ann.most_candidates(self._faiss)

    def _warn_of_limit(self, width: int, limit: int) -> None:
        """Says once that a search asked for more candidates than the index can propose."""
        if not self._warned:
            logger.warning(
                "an index on a GPU proposes at most %d candidates of a query, a search needs %d;"
                " it takes fewer candidates, or compares all rows",
                limit,
                width,
            )
        self._warned = True

    @property
    def _visited_lists(self) -> int:
        """Lists that a query visits: `nprobe`, and more if few of their rows are answers."""
        return min(self.num_lists, int(self.nprobe / self.answered_share))

    def filtered(self, share: float) -> Index:
        """A view for searches in which only a share of the rows are answers.

        It visits more lists and compares more candidates in inverse proportion, so that as many
        answers are among them as without a filter.

        Args:
            share: above 0, at most 1.
        """
        return _FilteredIndex(self, share)

    def only(self, rows: Int64Array) -> Index:
        """An exact index that answers only a few rows, of which it holds a copy.

        Args:
            rows: int64, ascending positions. Answers and `hidden` use the same positions as before.
        """
        return _RowSelection(self, rows)

    def save(self, path: Path) -> None:
        """Writes the FAISS index and the rows that it lacks; the vectors lie elsewhere."""
        assert self._faiss is not None, "an exact index is its vectors"
        ann.write(self._faiss, path)
        np.save(_long_ids_path(path), self.long_ids)

    @classmethod
    def load(cls, path: Path, vectors: Tensor, candidates: int = 1, threads: int = 1) -> Index:
        """Reads what `save` wrote, over the same vectors.

        Raises:
            BundleError: not a FAISS index, malformed, or of other vectors.
            ResourceError: no FAISS.
        """
        rows, dim = vectors.shape
        with readable(f"{_long_ids_path(path)} is missing or malformed"):
            long_ids = read_array(_long_ids_path(path), np.int64)
            ascending = np.unique(long_ids.clip(0, rows - 1))
            if not np.array_equal(long_ids, ascending):
                raise ValueError(f"expected ascending rows below {rows}")
        faiss_index = ann.read(path, rows - len(long_ids), dim)
        if ann.is_plain_graph(faiss_index) and faiss_index.storage is None:
            ann.refer_to(faiss_index, vectors.numpy())
        # Ids are positions among all rows, also among those that the index lacks.
        ann.check_ids(faiss_index, rows, path)
        return cls(vectors, faiss_index, long_ids=long_ids, candidates=candidates, threads=threads)

    @functools.cached_property
    def _lists(self) -> InvertedLists | None:
        """The lists of the FAISS index as arrays, or None if they are not scanned here.

        They are not if there are none, if they lie on a GPU, and if they are of rows that FAISS has
        rotated or projected, as OPQ does: their centroids cannot be compared with queries.
        """
        lists = ann.lists_of(self._faiss)
        if lists is None or not hasattr(lists, "invlists") or self.vectors.is_cuda:
            return None
        if ann.transforms_rows(self._faiss):
            return None
        centroids, row_ids, list_ids = ann.read_lists(lists)
        return InvertedLists.of(
            self.vectors,
            torch.from_numpy(centroids),
            torch.from_numpy(row_ids),
            torch.from_numpy(list_ids),
            self.long_ids,
        )

    @functools.cached_property
    def _long_vectors(self) -> Tensor:
        return self.vectors[torch.from_numpy(self.long_ids)]

    @property
    def scans_lists(self) -> bool:
        """Whether `search_lists` can be used."""
        return self._lists is not None

    def search_lists(self, queries: Float32Array, k: int, rows: AnswerableRows) -> Tensor:
        """Keys [Q, k] of the best rows of the visited lists and of the long rows."""
        assert self._lists is not None
        return scan_lists(self._lists, queries, k, self._visited_lists, rows)

    def search_candidates(
        self, queries: Float32Array, width: int, k: int, rows: AnswerableRows
    ) -> Tensor:
        """Keys [Q, k] of the best among `width` candidates of FAISS and the long rows."""
        num_queries = max(1, CANDIDATES_AT_ONCE // max(1, width))
        keys = [empty_keys(0, k)]
        for span in spans(len(queries), num_queries):
            candidates = self._candidates(queries[span], width)
            chunk_rows = rows.for_queries(span.start, span.stop)
            keys.append(self._rescore(queries[span], candidates, k, chunk_rows))
        best_QK = torch.cat(keys)
        if not len(self.long_ids):
            return best_QK
        # FAISS does not know the long rows: they compete with its candidates here.
        competing_rows = rows.selected(self.long_ids)
        return exact_keys(self._long_vectors, queries, best_QK, competing_rows)

    def _few_query_keys(
        self, queries: Float32Array, width: int, k: int, rows: AnswerableRows
    ) -> Tensor:
        """As `search_candidates`, one query after another, and complete."""
        keys = np.empty((len(queries), k), np.int64)
        for number in range(len(queries)):
            query = queries[number : number + 1]
            best = self._best_of_one(query, width, k, rows.ids, rows.hidden[number])
            if len(best.ids) < k:
                own_rows = rows.for_queries(number, number + 1)
                keys[number] = self._exact_keys(query, k, own_rows)[0]
            else:
                best_keys = answer_keys(best.scores, best.ids)
                best_keys.sort()
                # The sort ascends, so the best keys are the last ones.
                keys[number] = best_keys[::-1][:k]
        return torch.from_numpy(keys)

    def _best_of_one(
        self, query: Float32Array, width: int, k: int, ids: Int64Array, hidden: Int64Array
    ) -> BestRows:
        """The best among `width` candidates of FAISS for one query and the long rows, in any order.

        All of it is NumPy: for one query a call costs more than its work (benchmarks/one_query.py).

        Args:
            query: contiguous float32 [1, D].
            width: candidates.
            k: wanted rows; there are less if fewer can be answers.
            ids: int64 [n], id of each row; a row with a negative id is no answer.
            hidden: int64, positions of rows that are no answers.
        """
        row_1C = self._candidates(query, width)
        score_1C = self.candidate_scores(query, row_1C)
        # FAISS does not know the long rows.
        long_scores = ann.inner_products(self._long_vectors.numpy(), query[0])
        rows = np.concatenate([row_1C[0], self.long_ids])
        scores = np.concatenate([score_1C[0], long_scores])
        if len(hidden):
            scores[np.isin(rows, hidden)] = -np.inf
        return few_queries.best_scored(scores, k, ids[rows])

    def _candidates(self, queries: Float32Array, width: int) -> Int64Array:
        """int64 [Q, width], positions that FAISS proposes; -1 where it finds no more."""
        assert self._faiss is not None
        # FAISS keeps the number of threads per calling thread, so it is set before each search.
        ann.use_threads(self.threads)
        # Without a filter the index visits as many lists as are set in it.
        nprobe = self._visited_lists if self.answered_share < 1 else 0
        return ann.search(self._faiss, queries, min(width, len(self)), nprobe)

    def _rescore(
        self, queries: Float32Array, row_QC: Int64Array, k: int, rows: AnswerableRows
    ) -> Tensor:
        """Keys [Q, k] of the best candidates by exact inner product.

        Args:
            queries: float32 [Q, D].
            row_QC: int64 [Q, width], positions of the candidates; -1 for none.
            k: answers per query.
            rows: ids and hidden positions of all rows.
        """
        hidden = rows.hidden
        if len(hidden.values):
            # One look-up masks the rows of all queries.
            pair_QC = pairs_of(row_QC, len(self))
            is_hidden_QC = np.isin(pair_QC, hidden.pairs(len(self)))
            row_QC = np.where(is_hidden_QC, -1, row_QC)
        scores = self.candidate_scores(queries, row_QC)
        # A missing candidate (-1) borrows the id of row 0; its score is -inf.
        id_QC = rows.ids[np.maximum(row_QC, 0)]
        key_QC = to_key_array(scores, id_QC)
        # The sort ascends, so the best keys are the last ones.
        key_QC.sort(axis=1)
        best_QK = key_QC[:, ::-1][:, :k]
        return torch.from_numpy(best_QK.copy())

    def candidate_scores(self, queries: Float32Array, row_QC: Int64Array) -> Float32Array:
        """Inner products of queries and some rows, whatever the index.

        Args:
            queries: float32 [Q, D].
            row_QC: int64 [Q, width], positions of the candidates; -1 for none.
        Returns:
            float32 [Q, width]; -inf where there is no candidate.
        """
        if self.vectors.device.type == "cpu":
            ann.use_threads(self.threads)
            return ann.candidate_scores(self.vectors.numpy(), queries, row_QC)
        return scores_on_device(self.vectors, queries, row_QC)


class _FilteredIndex(Index):
    """Another index, of whose rows a share can be answered."""

    def __init__(self, whole: Index, share: float) -> None:
        super().__init__(
            whole.vectors,
            whole._faiss,
            long_ids=whole.long_ids,
            candidates=whole.candidates,
            threads=whole.threads,
        )
        self.answered_share = share
        self._whole = whole

    @functools.cached_property
    def _lists(self) -> InvertedLists | None:
        # They take memory of all rows, so they are made once for all views.
        return self._whole._lists

    @functools.cached_property
    def _long_vectors(self) -> Tensor:
        return self._whole._long_vectors


class _RowSelection(Index):
    """An exact index over some rows of another one, which keep their positions."""

    def __init__(self, whole: Index, rows: Int64Array) -> None:
        vectors = whole.vectors[as_tensor(rows, np.int64)]
        super().__init__(vectors, None, threads=whole.threads)
        self._rows = rows
        self._num_rows = len(whole)

    @property
    def _faiss_rows(self) -> None:
        """None: ids and hidden rows are positions among the rows of the whole index."""
        return None

    def __len__(self) -> int:
        return self._num_rows

    def search_keys(
        self, queries: Float32Array, k: int, rows: AnswerableRows, exact: bool = False
    ) -> Tensor:
        best = empty_keys(len(queries), k)
        return exact_keys(self.vectors, queries, best, rows.selected(self._rows))


def _long_ids_path(path: Path) -> Path:
    return path.with_suffix(".long.npy")
