"""Nearest rows by inner product: exact for small shards, a graph or inverted lists for others.

Answers and hard negatives are searched with it. FAISS makes the index and answers few queries. It
only proposes candidates: their scores are then computed from the float32 vectors, so the index can
hold short codes, and every score that leaves this file is an inner product. Many queries at once
scan the same lists with matrix products (inverted_lists.py).

Answers come to users one text at a time, which a graph suits. Hard negatives are searched for
all queries of an epoch at once, after an index was built that is used only then: inverted lists.
"""

from __future__ import annotations

import bisect
import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmcray.config import check_range
from xmcray.data.checked_files import read_array
from xmcray.errors import ResourceError
from xmcray.retrieval import ann, few_queries, inverted_lists
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import (
    as_tensor,
    empty_keys,
    exact_device_bytes,
    exact_keys,
    exact_search,
    from_keys,
    scores_of,
    to_keys,
)
from xmcray.retrieval.inverted_lists import InvertedLists, long_rows
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.readable import readable
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

logger = logging.getLogger(__name__)

# Up to so many rows an exhaustive search costs no more than building, tuning and searching lists.
FLAT_ROWS = 50_000
# At most this share of the rows is in no list, namely those longer than so many medians.
LONG_SHARE = 0.05
LONG_RATIO = 1.5
BATCH_QUERIES = 256  # from here on lists are scanned with matrix products
TUNE_QUERIES = 256
TUNE_K = 50
TUNE_NOISE = 0.5
CANDIDATE_STEPS = (2, 4, 8, 16)
BREADTH_STEPS = (50, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CODES_BREADTH = 128  # of a graph over codes
CODE_LOSS = 0.005  # recall that short codes may cost in addition to the lists
CANDIDATE_FLOATS = 1 << 22  # vectors gathered at once when scores are made exact


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """How to index vectors.

    Attributes:
        factory: "auto", "Flat", or a FAISS factory string such as "IVF4096,SQfp16" or "HNSW32".
        recall: recall@50 by which `nprobe`, `ef_search` and `candidates` are chosen if they are 0.
        nprobe: lists an IVF index visits; 0 chooses it when the index is built.
        candidates: candidates per answer whose exact score is computed; 0 chooses it when the
            index is built.
        ef_search: breadth of a search in an HNSW index; 0 chooses it when the index is built.
        seed: seed of the training sample and of k-means.
    """

    factory: str = "auto"
    recall: float = 0.95
    nprobe: int = 0
    candidates: int = 0
    ef_search: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("index.recall", self.recall, low=0, high=1)
        for name in ("nprobe", "candidates", "ef_search"):
            check_range(f"index.{name}", getattr(self, name), low=0)


def resolve_factory(factory: str, rows: int) -> str:
    """The factory string that "auto" stands for; any other is returned as it is.

    Many rows get inverted lists of quantised rows. They are built in a fraction of the time of a
    graph, share the work of many queries, and answer a single one at least as fast at the same
    recall (benchmarks/index_recall.py, benchmarks/one_query.py).
    """
    if factory != "auto":
        return factory
    if rows <= FLAT_ROWS:
        return "Flat"
    # The power of two next to 2.5 * sqrt(n).
    num_lists = 1 << round(np.log2(2.5 * rows**0.5))
    return f"IVF{num_lists},SQfp16"


def num_lists(factory: str, rows: int) -> int:
    """Inverted lists of an index, such as 4096 of "IVF4096,SQfp16"; 0 without."""
    match = re.match(r"IVF(\d+)(,|$)", resolve_factory(factory, rows))
    return int(match[1]) if match else 0


def device_bytes(factory: str, rows: int, dim: int) -> int:
    """Bytes of a GPU that an index there takes at its largest, without CUDA's own.

    Args:
        factory: "auto" or "Flat".
        rows: rows of the index.
        dim: width of the vectors.
    """
    exact_bytes = exact_device_bytes(rows, dim)
    if not num_lists(factory, rows):
        return exact_bytes
    # If the lists do not find enough, all rows are compared.
    return max(exact_bytes, inverted_lists.device_bytes(rows, dim))


def build_index(
    vectors: Float32Array,
    spec: IndexSpec,
    *,
    threads: int = 1,
    gpu: int | None = None,
    queries: Float32Array | None = None,
) -> Index:
    """Builds an index over `vectors`.

    It is the same for the same arguments, whatever the timing of threads.

    Args:
        vectors: float32 [n, D]; n = 0 is legal. The index refers to them, it does not copy them.
        spec: how to index them.
        threads: threads that build the index and that search it later.
        gpu: CUDA device number. "auto" and "Flat" need torch alone there; others need a FAISS build
            for GPUs.
        queries: float32 [Q, D], a sample of real queries by which `nprobe` and `candidates` are
            chosen; noisy rows if not given.
    Raises:
        ConfigError: FAISS does not accept the factory string for these vectors.
        ResourceError: no FAISS, or no such GPU.
    """
    num_rows = len(vectors)
    device = _device(gpu)
    factory = resolve_factory(spec.factory, num_rows)
    if factory == "Flat" or num_rows == 0:
        return Index(as_tensor(vectors).to(device), None, threads=threads)
    if gpu is not None and spec.factory == "auto":
        return index_of_lists(vectors, spec, device, queries)
    # FAISS wants contiguous float32, and the index keeps referring to these rows.
    rows = np.ascontiguousarray(vectors, np.float32)
    long_ids = np.empty(0, np.int64)
    if "IVF" in factory:
        long_ids = long_rows(rows, LONG_SHARE, LONG_RATIO)
    if len(long_ids):
        listed_ids = np.setdiff1d(np.arange(num_rows), long_ids, assume_unique=True)
        faiss_index = ann.create(rows[listed_ids], listed_ids, factory, spec.seed, threads)
    else:
        faiss_index = ann.create(rows, None, factory, spec.seed, threads)
    ann.set_search(faiss_index, spec.nprobe, spec.ef_search or CODES_BREADTH)
    index = Index(as_tensor(rows), faiss_index, long_ids=long_ids, threads=threads)
    if queries is None or not len(queries):
        queries = _noisy_rows(rows, spec.seed)
    index.tune(queries, spec)
    if gpu is None:
        return index
    faiss_index = ann.to_gpu(faiss_index, gpu)
    return Index(index.vectors, faiss_index, long_ids=long_ids, candidates=index.candidates)


def index_of_lists(
    vectors: Float32Array, spec: IndexSpec, device: torch.device, queries: Float32Array | None
) -> Index:
    """An index as "auto" is on a CPU, but of torch alone: inverted lists on a device.

    Args:
        vectors: float32 [n, D].
        spec: how to index them.
        device: where the vectors go, and where lists are made and searched.
        queries: as in `build_index`.
    """
    long_ids = long_rows(vectors, LONG_SHARE, LONG_RATIO)
    vector_ND = as_tensor(vectors).to(device)
    lists = build_lists(vector_ND, long_ids, num_lists("auto", len(vectors)), spec.seed)
    index = _ListIndex(lists)
    if queries is None or not len(queries):
        queries = _noisy_rows(vectors, spec.seed)
    recall = index.tune(queries, spec)
    # Half of the lists take as long as all rows (benchmarks/device_lists.py).
    is_slow = index.nprobe >= len(lists.centroid_CD) // 2
    if not spec.nprobe and (is_slow or recall < spec.recall):
        return Index(vector_ND, None)
    return index


class Index:
    """Rows that can be searched by inner product.

    Args:
        vectors: float32 [n, D] tensor; on a GPU for an exhaustive search there.
        faiss_index: a FAISS index over the same rows, or None to search all of them.
        long_ids: int64 [H], positions of rows that `faiss_index` lacks and every query meets.
        candidates: candidates per answer that FAISS proposes.
        threads: threads of a search.
    """

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
        self.long_ids = np.empty(0, np.int64) if long_ids is None else long_ids
        self._faiss = faiss_index
        self._warned = False

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def is_exact(self) -> bool:
        """Whether every row is compared with every query."""
        return self._faiss is None

    @property
    def nprobe(self) -> int:
        """Lists visited per query; 0 if the index has no lists."""
        return int(getattr(ann.lists_of(self._faiss), "nprobe", 0))

    @property
    def breadth(self) -> int:
        """Rows that a search in a graph keeps while it walks; 0 if the index is no graph."""
        return ann.breadth_of(self._faiss)

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
        compares_all = (exact or self.is_exact) and len(self.vectors) == len(self)
        if compares_all and hidden is None and len(queries) == 1:
            answer = few_queries.answer_at_once(self.vectors, queries, k, ids)
            if answer is not None:
                return answer
        rows = AnswerableRows.of(len(self), len(queries), ids, hidden)
        return from_keys(self.search_keys(queries, k, rows, exact))

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
            return exact_keys(self.vectors, queries, empty_keys(len(queries), k), rows)
        # Hidden rows take places among the candidates, so that many more are proposed.
        most_hidden = int(rows.hidden.lengths.max(initial=0))
        width = (max(k, TUNE_K) + most_hidden) * self.candidates
        limit = ann.most_candidates(self._faiss)
        if limit is not None and width > limit:
            self._warn_of_limit(width, limit)
            # Fewer candidates for each answer are enough, but not fewer than answers.
            width = limit if k + most_hidden <= limit else len(self)
        # Candidates that are half of the rows cost more than comparing all rows.
        if width >= len(self) // 2:
            return exact_keys(self.vectors, queries, empty_keys(len(queries), k), rows)
        if len(queries) >= BATCH_QUERIES and self._lists is not None:
            keys = self._search_lists(queries, k, rows)
        else:
            keys = self._search_candidates(queries, width, k, rows)
        return self._completed(keys, queries, rows)

    def _completed(self, keys: Tensor, queries: Float32Array, rows: AnswerableRows) -> Tensor:
        """The keys of a search, without gaps where the visited lists had too few rows.

        Rather than return less than k answers, these queries are searched exhaustively.
        """
        short = torch.nonzero(scores_of(keys[:, -1]) == -torch.inf)[:, 0]
        if len(short):
            short_rows = AnswerableRows(rows.ids, rows.hidden.take(short.numpy()))
            best = empty_keys(len(short), keys.shape[1])
            keys[short] = exact_keys(self.vectors, queries[short.numpy()], best, short_rows)
        return keys

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

    def only(self, rows: Int64Array) -> Index:
        """An exact index that answers only a few rows, of which it holds a copy.

        Args:
            rows: int64, ascending positions. Answers and `hidden` use the same positions as before.
        """
        return _RowSelection(self, rows)

    def tune(self, queries: Float32Array, spec: IndexSpec) -> float:
        """Chooses the settings that are 0 in `spec`: the cheapest that reach its recall.

        Args:
            queries: float32 [Q, D]; a few hundred are enough, the first 256 are used.
            spec: settings that are not 0 are kept.
        Returns:
            The recall that was reached.
        """
        if self.is_exact:
            return 1.0
        queries = np.ascontiguousarray(queries[:TUNE_QUERIES], np.float32)
        k = min(TUNE_K, len(self))
        # The truth that recall is measured against.
        exact_ids = exact_search(self.vectors, queries, k).ids
        return self._tune(queries, k, exact_ids, spec)

    def _tune(self, queries: Float32Array, k: int, exact_ids: Int64Array, spec: IndexSpec) -> float:
        """Chooses the settings by the exact answers to some queries; returns the recall."""
        if ann.is_plain_graph(self._faiss):
            return self._tune_breadth(queries, k, exact_ids, spec)
        lists = ann.lists_of(self._faiss)
        if lists is None:
            return self._tune_candidates(queries, k, exact_ids, spec, spec.recall)
        list_recall = self._tune_nprobe(lists, queries, k, exact_ids, spec)
        self._tune_candidates(queries, k, exact_ids, spec, list_recall - CODE_LOSS)
        return list_recall

    def _tune_breadth(
        self, queries: Float32Array, k: int, exact_ids: Int64Array, spec: IndexSpec
    ) -> float:
        """Sets the breadth of a search in a graph; returns the recall that it reaches."""
        # A graph compares the vectors themselves, so more candidates than answers are no use.
        self.candidates = spec.candidates or 1
        steps = [spec.ef_search] if spec.ef_search else BREADTH_STEPS
        all_rows = AnswerableRows.of(len(self), len(queries), None, None)

        def recall_at(breadth: int) -> float:
            ann.set_search(self._faiss, 0, breadth)
            keys = self._search_candidates(queries, k, k, all_rows)
            return _recall(from_keys(keys).ids, exact_ids)

        chosen = bisect.bisect_left(steps[:-1], spec.recall, key=recall_at)
        return recall_at(steps[chosen])

    def _tune_nprobe(
        self, lists: Any, queries: Float32Array, k: int, exact_ids: Int64Array, spec: IndexSpec
    ) -> float:
        """Sets the number of visited lists; returns the recall that it reaches."""
        num_lists = int(lists.nlist)
        steps = [min(spec.nprobe, num_lists)] if spec.nprobe else _nprobe_steps(num_lists)

        all_rows = AnswerableRows.of(len(self), len(queries), None, None)

        def recall_at(nprobe: int) -> float:
            lists.nprobe = nprobe
            keys = self._search_lists(queries, k, all_rows)
            return _recall(from_keys(keys).ids, exact_ids)

        # Recall grows with the visited lists, so the first step that reaches it is found by
        # bisection. The last step needs no test: there is no better one.
        chosen = bisect.bisect_left(steps[:-1], spec.recall, key=recall_at)
        return recall_at(steps[chosen])

    def _tune_candidates(
        self,
        queries: Float32Array,
        k: int,
        exact_ids: Int64Array,
        spec: IndexSpec,
        wanted_recall: float,
    ) -> float:
        """Sets the number of candidates, which makes up for short codes; returns the recall."""
        all_rows = AnswerableRows.of(len(self), len(queries), None, None)
        recall = 0.0
        for candidates in [spec.candidates] if spec.candidates else CANDIDATE_STEPS:
            self.candidates = candidates
            keys = self._search_candidates(queries, k * candidates, k, all_rows)
            recall = _recall(from_keys(keys).ids, exact_ids)
            if recall >= wanted_recall:
                break
        return recall

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
        """The lists of the FAISS index as arrays, or None if it has none or lies on a GPU."""
        lists = ann.lists_of(self._faiss)
        if lists is None or not hasattr(lists, "invlists") or self.vectors.is_cuda:
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

    def _search_lists(self, queries: Float32Array, k: int, rows: AnswerableRows) -> Tensor:
        """Keys [Q, k] of the best rows of the visited lists and of the long rows."""
        assert self._lists is not None
        return self._lists.search(queries, k, self.nprobe, rows)

    def _search_candidates(
        self, queries: Float32Array, width: int, k: int, rows: AnswerableRows
    ) -> Tensor:
        """Keys [Q, k] of the best among `width` candidates of FAISS and the long rows."""
        # FAISS keeps the number of threads per calling thread, so it is set before each search.
        ann.use_threads(self.threads)
        assert self._faiss is not None
        _, candidate_QC = self._faiss.search(queries, min(width, len(self)))
        best_QK = self._rescore(queries, np.asarray(candidate_QC, np.int64), k, rows)
        if not len(self.long_ids):
            return best_QK
        # FAISS does not know the long rows: they compete with its candidates here.
        competing_rows = rows.selected(self.long_ids)
        return exact_keys(self._long_vectors, queries, best_QK, competing_rows)

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
        num_queries = len(row_QC)
        hidden = rows.hidden
        if len(hidden.values):
            # One number per pair of query and row, so that one look-up masks all queries.
            pair_QC = row_QC + np.arange(num_queries)[:, None] * len(self)
            hidden_pairs = hidden.values + hidden.row_ids * len(self)
            row_QC = np.where(np.isin(pair_QC, hidden_pairs), -1, row_QC)
        scores = self.candidate_scores(queries, row_QC)
        # A missing candidate (-1) borrows the id of row 0; its score is -inf.
        id_QC = rows.ids[np.maximum(row_QC, 0)]
        return to_keys(as_tensor(scores), torch.from_numpy(id_QC)).topk(k, dim=1).values

    def candidate_scores(self, queries: Float32Array, row_QC: Int64Array) -> Float32Array:
        """Inner products of queries and some rows, whatever the index.

        Args:
            queries: float32 [Q, D].
            row_QC: int64 [Q, width], positions of the candidates; -1 for none.
        Returns:
            float32 [Q, width]; -inf where there is no candidate.
        """
        device = self.vectors.device
        if device.type == "cpu":
            ann.use_threads(self.threads)
            return ann.candidate_scores(self.vectors.numpy(), queries, row_QC)
        # Candidates are computed where the vectors are, in chunks of bounded memory.
        num_queries, width = row_QC.shape
        all_row_QC = torch.from_numpy(row_QC).to(device)
        query_QD = as_tensor(queries).to(device)
        scores = [np.empty((0, width), np.float32)]
        chunk = max(1, CANDIDATE_FLOATS // (width * self.vectors.shape[1]))
        for start in range(0, num_queries, chunk):
            row_BC = all_row_QC[start : start + chunk]
            query_BD = query_QD[start : start + chunk]
            vector_BCD = self.vectors[row_BC.clamp_min(0)]
            score_BC = (vector_BCD @ query_BD[:, :, None])[:, :, 0]
            score_BC[row_BC < 0] = -torch.inf
            scores.append(score_BC.cpu().numpy())
        return np.concatenate(scores)


class _ListIndex(Index):
    """Rows in inverted lists, searched by torch alone on the device of the rows.

    Args:
        lists: the rows.

    Attributes:
        nlist: all lists, and `nprobe` those that a query visits; the names are those of FAISS.
    """

    nprobe = 1

    def __init__(self, lists: InvertedLists) -> None:
        super().__init__(lists.vector_ND, None)
        self.nlist = len(lists.centroid_CD)
        self._lists = lists

    @property
    def is_exact(self) -> bool:
        return False

    def search_keys(
        self, queries: Float32Array, k: int, rows: AnswerableRows, exact: bool = False
    ) -> Tensor:
        queries = np.ascontiguousarray(queries, np.float32)
        if exact or not len(queries):
            return exact_keys(self.vectors, queries, empty_keys(len(queries), k), rows)
        return self._completed(self._search_lists(queries, k, rows), queries, rows)

    def _tune(self, queries: Float32Array, k: int, exact_ids: Int64Array, spec: IndexSpec) -> float:
        return self._tune_nprobe(self, queries, k, exact_ids, spec)


class _RowSelection(Index):
    """An exact index over some rows of another one, which keep their positions."""

    def __init__(self, whole: Index, rows: Int64Array) -> None:
        super().__init__(whole.vectors[as_tensor(rows, np.int64)], None, threads=whole.threads)
        self._rows = rows
        self._num_rows = len(whole)

    def __len__(self) -> int:
        return self._num_rows

    def search_keys(
        self, queries: Float32Array, k: int, rows: AnswerableRows, exact: bool = False
    ) -> Tensor:
        best = empty_keys(len(queries), k)
        return exact_keys(self.vectors, queries, best, rows.selected(self._rows))


def _noisy_rows(rows: Float32Array, seed: int) -> Float32Array:
    """Noisy rows in place of queries: a query lies near the rows of its labels, not on them."""
    generator = np.random.default_rng([seed, 1])
    chosen = generator.choice(len(rows), min(len(rows), TUNE_QUERIES), replace=False)
    sample = rows[np.sort(chosen)]
    noise = generator.standard_normal(sample.shape, dtype=np.float32)
    lengths = np.linalg.norm(sample, axis=1, keepdims=True)
    scale = TUNE_NOISE * lengths / np.sqrt(rows.shape[1])
    return np.asarray(sample + scale * noise, np.float32)


def _nprobe_steps(num_lists: int) -> list[int]:
    """4, 5, 6, 7, 8, 10, 12, 14, 16 ... up to half of the lists; all lists if there are few."""
    steps = [(4 + i % 4) << i // 4 for i in range(80)]
    most = min(max(4, num_lists // 2), num_lists)
    return [step for step in steps if step <= most] or [num_lists]


def _recall(found_ids: Int64Array, exact_ids: Int64Array) -> float:
    """Share of the exact answers that were found."""
    hits = 0
    for query, query_ids in enumerate(exact_ids):
        hits += len(np.intersect1d(found_ids[query], query_ids))
    return hits / max(1, exact_ids.size)


def _long_ids_path(path: Path) -> Path:
    return path.with_suffix(".long.npy")


def _device(gpu: int | None) -> torch.device:
    if gpu is None:
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise ResourceError(
            f"the index should run on GPU {gpu}, {torch.cuda.device_count()} found; use the CPU"
        )
    return torch.device("cuda", gpu)
