"""Nearest rows by inner product: exact for small shards, inverted lists for large ones. Also finds the hard negatives.

FAISS makes the index and answers few queries. It only proposes candidates: their scores are then computed from the
float32 vectors themselves, so the index can hold short codes, and every score that leaves this file is an inner
product. Many queries at once scan the same lists with matrix products (lists.py).
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmcray.config import check_range
from xmcray.errors import BundleError, ResourceError
from xmcray.retrieval import ann
from xmcray.retrieval.exact import as_tensor, exact_keys, exact_search, from_keys, to_keys
from xmcray.retrieval.lists import Lists, long_rows
from xmcray.types import Float32Array, Int64Array, Ragged

FLAT_ROWS = 50_000  # up to here a search of all rows costs no more than building, tuning and searching lists
LONG_SHARE, LONG_RATIO = (
    0.05,
    1.5,
)  # at most so many rows are in no list, those longer than so many medians
BATCH_QUERIES = 256  # from here on lists are scanned with matrix products
TUNE_QUERIES, TUNE_K, TUNE_NOISE = 256, 50, 0.5
CODE_LOSS = 0.005  # recall that short codes may cost where lists cost more
CANDIDATE_FLOATS = 1 << 22  # vectors gathered at once when scores are made exact


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """How to index vectors.

    Attributes:
        factory: "auto", "Flat", or a FAISS factory string such as "IVF4096,SQfp16" or "HNSW32".
        recall: recall@50 for which `nprobe` and `candidates` are chosen where they are 0.
        nprobe: lists an IVF index visits; 0 chooses it when the index is built.
        candidates: candidates per answer whose exact score is computed; 0 chooses it when the index is built.
        ef_search: breadth of a search in an HNSW index.
        seed: of the training sample and of k-means.
    """

    factory: str = "auto"
    recall: float = 0.95
    nprobe: int = 0
    candidates: int = 0
    ef_search: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("index.recall", self.recall, low=0, high=1)
        for name in ("nprobe", "candidates"):
            check_range(f"index.{name}", getattr(self, name), low=0)
        check_range("index.ef_search", self.ef_search, low=1)


def resolve_factory(factory: str, rows: int) -> str:
    """The factory string that `auto` stands for; any other is returned as it is.

    Large shards get inverted lists; benchmarks/index_recall.py measures them. HNSW is never chosen: its graph depends
    on the order in which threads insert.
    """
    if factory != "auto":
        return factory
    if rows <= FLAT_ROWS:
        return "Flat"
    return f"IVF{1 << round(np.log2(2.5 * rows**0.5))},SQfp16"


def build_index(
    vectors: Float32Array,
    factory: str = "auto",
    seed: int = 0,
    threads: int = 1,
    gpu: int | None = None,
    spec: IndexSpec | None = None,
    queries: Float32Array | None = None,
) -> Index:
    """An index over `vectors`, the same for the same arguments whatever the timing of threads.

    Args:
        vectors: float32 [n, D]; n = 0 is legal. The index refers to them, it does not copy them.
        factory, seed: as in IndexSpec.
        threads: of building and of every later search.
        gpu: CUDA device number. `auto` and "Flat" then search all rows there; others need a FAISS build for GPUs.
        spec: the remaining settings; its `factory` and `seed` are overruled by the arguments.
        queries: float32 [Q, D], a sample of real queries to choose `nprobe` and `candidates` by; without it noisy
            rows stand in for queries.
    Raises:
        ConfigError: FAISS does not accept the factory string for these vectors.
        ResourceError: no FAISS, or no such GPU.
    """
    spec = spec or IndexSpec()
    num_rows = len(vectors)
    device = _device(gpu)
    if factory == "auto" and device.type == "cuda":
        factory = "Flat"
    factory = resolve_factory(factory, num_rows)
    if factory == "Flat" or num_rows == 0:
        return Index(as_tensor(vectors).to(device), None, threads=threads)
    rows = np.ascontiguousarray(vectors, np.float32)
    long_ids = (
        long_rows(rows, LONG_SHARE, LONG_RATIO) if "IVF" in factory else np.empty(0, np.int64)
    )
    if len(long_ids):
        ids = np.setdiff1d(np.arange(num_rows), long_ids, assume_unique=True)
        found = ann.create(rows[ids], ids, factory, seed, threads)
    else:
        found = ann.create(rows, None, factory, seed, threads)
    ann.set_search(found, spec.nprobe, spec.ef_search)
    index = Index(as_tensor(rows), found, long_ids=long_ids, threads=threads)
    index.tune(_stand_ins(rows, seed) if queries is None or not len(queries) else queries, spec)
    if gpu is None:
        return index
    return Index(
        index.vectors, ann.to_gpu(found, gpu), long_ids=long_ids, candidates=index.candidates
    )


class Index:
    """Rows that can be searched by inner product.

    Args:
        vectors: float32 [n, D] tensor; on a GPU for an exhaustive search there.
        found: a FAISS index over the same rows, or None to search all of them.
        long_ids: int64 [H], positions of rows that `found` lacks and every query meets.
        candidates: candidates per answer that FAISS proposes.
        threads: of a search.
    """

    def __init__(
        self,
        vectors: Tensor,
        found: Any | None,
        *,
        long_ids: Int64Array | None = None,
        candidates: int = 1,
        threads: int = 1,
    ) -> None:
        self.vectors, self.candidates, self.threads = vectors, candidates, threads
        self.long_ids = np.empty(0, np.int64) if long_ids is None else long_ids
        self._faiss = found

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

    def search(
        self,
        queries: Float32Array,
        k: int,
        ids: Int64Array | None = None,
        hidden: Ragged | None = None,
        exact: bool = False,
    ) -> tuple[Float32Array, Int64Array]:
        """The k best rows, best first, equal scores by lower id.

        Args:
            queries: float32 [Q, D].
            k: answers per query, at least 1.
            ids: int64 [n], what the rows are called in the answer, negative for those that are no answers; their
                positions if not given.
            hidden: Q rows of positions that are masked before the k best are taken.
            exact: compare all rows, whatever the index.
        Returns:
            Scores float32 [Q, k] (inner products) and ids int64 [Q, k]; -inf and -1 where no row is left.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        most_hidden = int(hidden.lengths.max(initial=0)) if hidden is not None else 0
        width = (max(k, TUNE_K) + most_hidden) * self.candidates
        if exact or self.is_exact or width >= len(self) // 2 or not len(queries):
            return exact_search(self.vectors, queries, k, ids, hidden)
        if len(queries) >= BATCH_QUERIES and self._lists is not None:
            scores, answers = self._scan(queries, k, ids, hidden)
        else:
            scores, answers = self._ask(queries, width, k, ids, hidden)
        # Too few rows in the visited lists: search these queries exhaustively rather than answer less than k.
        short = np.flatnonzero(answers[:, -1] < 0)
        if len(short):
            part = None if hidden is None else hidden.take(short)
            scores[short], answers[short] = exact_search(self.vectors, queries[short], k, ids, part)
        return scores, answers

    def only(self, rows: Int64Array) -> Index:
        """The same rows, of which only a few (ascending positions) are answered: compared one by one, in a copy."""
        return _Few(self, rows)

    def tune(self, queries: Float32Array, spec: IndexSpec) -> float:
        """Sets the settings that are 0 in `spec` to the cheapest that reach its recall, and returns the recall.

        Args:
            queries: float32 [Q, D]; a few hundred are enough, the first 256 are used.
        """
        if self.is_exact:
            return 1.0
        queries, k = (
            np.ascontiguousarray(queries[:TUNE_QUERIES], np.float32),
            min(TUNE_K, len(self)),
        )
        _, wanted = exact_search(self.vectors, queries, k)
        lists, recall = ann.lists_of(self._faiss), 0.0
        if lists is not None:
            steps = (
                [min(spec.nprobe, int(lists.nlist))] if spec.nprobe else _steps(int(lists.nlist))
            )

            def reached(probe: int) -> float:
                lists.nprobe = probe
                return _recall(self._scan(queries, k, None, None)[1], wanted)

            place = bisect.bisect_left(
                steps[:-1], spec.recall, key=reached
            )  # recall grows with the lists
            recall = reached(steps[place])
        # what the codes lose besides: more candidates, until they cost less recall than the lists
        for candidates in [spec.candidates] if spec.candidates else [2, 4, 8, 16]:
            self.candidates = candidates
            coded = _recall(self._ask(queries, k * candidates, k, None, None)[1], wanted)
            if coded >= (recall - CODE_LOSS if lists is not None else spec.recall):
                break
        return coded if lists is None else recall

    def save(self, path: Path) -> None:
        """Writes the FAISS index and, beside it, which rows it lacks; an exact index has nothing to write.

        The vectors are stored by whoever owns them.
        """
        assert self._faiss is not None, "an exact index is its vectors"
        ann.write(self._faiss, path)
        np.save(_beside(path), self.long_ids)

    @classmethod
    def load(
        cls, path: Path, max_bytes: int, vectors: Tensor, candidates: int = 1, threads: int = 1
    ) -> Index:
        """What `save` wrote, over the same vectors.

        Raises:
            BundleError: not a FAISS index, malformed, or of other vectors.
            ResourceError: no FAISS.
        """
        rows, dim = vectors.shape
        try:
            long_ids = np.load(_beside(path))
            fits = long_ids.dtype == np.int64 and np.array_equal(
                long_ids, np.unique(long_ids.clip(0, rows - 1))
            )
        except (OSError, ValueError):
            fits = False
        if not fits:
            raise BundleError(f"{_beside(path)} is missing or malformed; export it again")
        found = ann.read(path, max_bytes, rows - len(long_ids), dim)
        return cls(vectors, found, long_ids=long_ids, candidates=candidates, threads=threads)

    @functools.cached_property
    def _lists(self) -> Lists | None:
        """The lists of the FAISS index as arrays, or None where it has none or lies on a GPU."""
        lists = ann.lists_of(self._faiss)
        if lists is None or not hasattr(lists, "invlists") or self.vectors.is_cuda:
            return None
        centroids, row_ids, offsets = ann.read_lists(lists)
        long_ids = torch.from_numpy(self.long_ids)
        long_ids = long_ids[
            torch.argsort(self._long_vectors.norm(dim=1), descending=True, stable=True)
        ]
        return Lists(
            self.vectors, torch.from_numpy(centroids), torch.from_numpy(row_ids), offsets, long_ids
        )

    @functools.cached_property
    def _long_vectors(self) -> Tensor:
        return self.vectors[torch.from_numpy(self.long_ids)]

    def _scan(
        self, queries: Float32Array, k: int, ids: Int64Array | None, hidden: Ragged | None
    ) -> tuple[Float32Array, Int64Array]:
        """The k best rows of the visited lists and of the long rows, by matrix products."""
        assert self._lists is not None
        name_N = torch.arange(len(self)) if ids is None else as_tensor(ids, np.int64)
        return from_keys(self._lists.search(as_tensor(queries), k, self.nprobe, name_N, hidden))

    def _ask(
        self,
        queries: Float32Array,
        width: int,
        k: int,
        ids: Int64Array | None,
        hidden: Ragged | None,
    ) -> tuple[Float32Array, Int64Array]:
        """The k best of `width` candidates that FAISS proposes and of the long rows."""
        best_QK = self._rescore(queries, self._propose(queries, width), k, ids, hidden)
        if len(self.long_ids):
            names = self.long_ids if ids is None else ids[self.long_ids]
            hide = None if hidden is None else _renumbered(hidden, self.long_ids)
            best_QK = exact_keys(self._long_vectors, queries, best_QK, names, hide)
        return from_keys(best_QK)

    def _propose(self, queries: Float32Array, width: int) -> Int64Array:
        """int64 [Q, width] row positions in the index's own order, -1 padded."""
        assert self._faiss is not None
        ann.use_threads(self.threads)
        return np.asarray(self._faiss.search(queries, min(width, len(self)))[1], np.int64)

    def _rescore(
        self,
        queries: Float32Array,
        rows: Int64Array,
        k: int,
        ids: Int64Array | None,
        hidden: Ragged | None,
    ) -> Tensor:
        """Keys int64 [Q, k] of the best of the candidates `rows` [Q, width] by exact inner product."""
        if hidden is not None:
            pair = rows + np.arange(len(rows))[:, None] * len(self)
            rows = np.where(np.isin(pair, hidden.values + hidden.row_ids * len(self)), -1, rows)
        device = self.vectors.device
        row_QC, query_QD = torch.from_numpy(rows).to(device), as_tensor(queries).to(device)
        name_N = None if ids is None else as_tensor(ids, np.int64).to(device)
        keys = [torch.empty((0, k), dtype=torch.int64)]
        chunk = max(1, CANDIDATE_FLOATS // (rows.shape[1] * self.vectors.shape[1]))
        for start in range(0, len(rows), chunk):
            row_BC = row_QC[start : start + chunk]
            known_BC = row_BC.clamp_min(0)
            vector_BCD = self.vectors[known_BC]
            score_BC = (vector_BCD @ query_QD[start : start + chunk, :, None])[:, :, 0]
            score_BC[row_BC < 0] = -torch.inf
            key_BC = to_keys(score_BC, known_BC if name_N is None else name_N[known_BC])
            keys.append(key_BC.topk(k, dim=1).values.cpu())
        return torch.cat(keys)


class _Few(Index):
    """An exact index over some rows of another one, which go by their positions there."""

    def __init__(self, whole: Index, rows: Int64Array) -> None:
        super().__init__(whole.vectors[as_tensor(rows, np.int64)], None, threads=whole.threads)
        self._rows, self._num_rows = rows, len(whole)

    def __len__(self) -> int:
        return self._num_rows

    def search(
        self,
        queries: Float32Array,
        k: int,
        ids: Int64Array | None = None,
        hidden: Ragged | None = None,
        exact: bool = False,
    ) -> tuple[Float32Array, Int64Array]:
        names = self._rows if ids is None else ids[self._rows]
        inside = _renumbered(hidden, self._rows) if hidden is not None and len(self._rows) else None
        return exact_search(self.vectors, queries, k, names, inside)


def _stand_ins(rows: Float32Array, seed: int) -> Float32Array:
    """Noisy rows in place of queries: a query lies near the rows of its labels, not on them."""
    generator = np.random.default_rng([seed, 1])
    sample = rows[np.sort(generator.choice(len(rows), min(len(rows), TUNE_QUERIES), replace=False))]
    noise = generator.standard_normal(sample.shape, dtype=np.float32)
    scale = TUNE_NOISE * np.linalg.norm(sample, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
    return np.asarray(sample + scale * noise, np.float32)


def _steps(num_lists: int) -> list[int]:
    """4, 5, 6, 7, 8, 10, 12, 14, 16 ... up to half of the lists."""
    steps = [(4 + i % 4) << i // 4 for i in range(80)]
    return [step for step in steps if step <= max(4, num_lists // 2)]


def _recall(found: Int64Array, wanted: Int64Array) -> float:
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, wanted, strict=True))
    return hits / max(1, wanted.size)


def _beside(path: Path) -> Path:
    return path.with_suffix(".long.npy")


def _renumbered(hidden: Ragged, rows: Int64Array) -> Ragged:
    """The entries that are in `rows` (ascending), as places in it."""
    place = np.minimum(np.searchsorted(rows, hidden.values), len(rows) - 1)
    inside = rows[place] == hidden.values
    return Ragged(place[inside], np.concatenate([[0], np.cumsum(inside)])[hidden.offsets])


def _device(gpu: int | None) -> torch.device:
    if gpu is None:
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise ResourceError(
            f"GPU {gpu} was asked for the index, {torch.cuda.device_count()} found; use the CPU instead"
        )
    return torch.device("cuda", gpu)
