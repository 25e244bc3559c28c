"""Nearest rows by inner product: exact for small shards, FAISS for large ones. Also finds the hard negatives.

An approximate index only proposes candidates. Their scores are then computed from the float32 vectors themselves, so
the index can hold short codes, and every score that leaves this file is an inner product.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmcray.config import check_range
from xmcray.errors import ResourceError
from xmcray.retrieval import ann
from xmcray.retrieval.exact import as_tensor, exact_search, from_keys, to_keys
from xmcray.types import Float32Array, Int64Array, Ragged

FLAT_ROWS = 100_000  # up to here a search of all rows costs no more than building, tuning and searching lists
TUNE_QUERIES, TUNE_K, TUNE_NOISE = 256, 50, 0.5
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


def resolve_factory(factory: str, rows: int, dim: int) -> str:
    """The factory string that `auto` stands for; any other is returned as it is.

    Large shards get inverted lists with 4-bit codes, whose candidates are scored exactly: per visited row about a tenth
    of the time of float lists. benchmarks/index_recall.py measures it. HNSW is never chosen: its graph depends on the
    order in which threads insert.
    """
    if factory != "auto":
        return factory
    if rows <= FLAT_ROWS:
        return "Flat"
    lists = 1 << round(np.log2(2.5 * rows**0.5))
    # Two bits per component, one where there are many components.
    codes = dim // 2 if dim <= 128 else dim // 4
    return f"IVF{lists},PQ{codes}x4fs" if codes and dim % codes == 0 else f"IVF{lists},SQfp16"


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
    num_rows, dim = vectors.shape
    device = _device(gpu)
    if factory == "auto" and device.type == "cuda":
        factory = "Flat"
    factory = resolve_factory(factory, num_rows, dim)
    if factory == "Flat" or num_rows == 0:
        return Index(as_tensor(vectors).to(device), None, threads=threads)
    rows = np.ascontiguousarray(vectors, np.float32)
    found = ann.create(rows, factory, seed, threads)
    ann.set_search(found, spec.nprobe, spec.ef_search)
    index = Index(as_tensor(rows), found, threads=threads)
    index.tune(_stand_ins(rows, seed) if queries is None or not len(queries) else queries, spec)
    return index if gpu is None else Index(index.vectors, ann.to_gpu(found, gpu), candidates=index.candidates)


class Index:
    """Rows that can be searched by inner product.

    Args:
        vectors: float32 [n, D] tensor; on a GPU for an exhaustive search there.
        found: a FAISS index over the same rows, or None to search all of them.
        candidates: candidates per answer that FAISS proposes.
        threads: of a search.
    """

    def __init__(self, vectors: Tensor, found: Any | None, *, candidates: int = 1, threads: int = 1) -> None:
        self.vectors, self.candidates, self.threads = vectors, candidates, threads
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
            ids: int64 [n], what the rows are called in the answer; their positions if not given.
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
        scores, answers = self._rescore(queries, self._propose(queries, width), k, ids, hidden)
        # Too few rows in the visited lists: search these queries exhaustively rather than answer less than k.
        short = np.flatnonzero(answers[:, -1] < 0)
        if len(short):
            part = None if hidden is None else hidden.take(short)
            scores[short], answers[short] = exact_search(self.vectors, queries[short], k, ids, part)
        return scores, answers

    def tune(self, queries: Float32Array, spec: IndexSpec) -> float:
        """Sets the settings that are 0 in `spec` to the cheapest that reach its recall, and returns the recall.

        Args:
            queries: float32 [Q, D]; a few hundred are enough, the first 256 are used.
        """
        if self.is_exact:
            return 1.0
        queries, k = np.ascontiguousarray(queries[:TUNE_QUERIES], np.float32), min(TUNE_K, len(self))
        _, wanted = exact_search(self.vectors, queries, k)
        lists = ann.lists_of(self._faiss)
        num_lists = int(lists.nlist) if lists is not None else 1
        probes = [spec.nprobe] if spec.nprobe or lists is None else _steps(num_lists)
        recall = 0.0
        for candidates in [spec.candidates] if spec.candidates else [2, 4, 8, 16]:
            self.candidates = candidates
            for probe in probes:
                if lists is not None:
                    lists.nprobe = min(probe, num_lists)
                _, answer = self._rescore(queries, self._propose(queries, k * candidates), k, None, None)
                before, recall = recall, _recall(answer, wanted)
                if recall >= spec.recall:
                    return recall
                if probe > 16 and recall - before < 0.002:
                    break  # what is missing is lost in the codes: more candidates are needed, not more lists
        return recall

    def save(self, path: Path) -> None:
        """Writes the FAISS index; the vectors are stored by whoever owns them. An exact index has nothing to write."""
        assert self._faiss is not None, "an exact index is its vectors"
        ann.write(self._faiss, path)

    @classmethod
    def load(cls, path: Path, max_bytes: int, vectors: Tensor, candidates: int = 1, threads: int = 1) -> Index:
        """What `save` wrote, over the same vectors.

        Raises:
            BundleError: not a FAISS index, malformed, or of other vectors.
            ResourceError: no FAISS.
        """
        rows, dim = vectors.shape
        return cls(vectors, ann.read(path, max_bytes, rows, dim), candidates=candidates, threads=threads)

    def _propose(self, queries: Float32Array, width: int) -> Int64Array:
        """int64 [Q, width] row positions in the index's own order, -1 padded."""
        assert self._faiss is not None
        ann.use_threads(self.threads)
        return np.asarray(self._faiss.search(queries, min(width, len(self)))[1], np.int64)

    def _rescore(
        self, queries: Float32Array, rows: Int64Array, k: int, ids: Int64Array | None, hidden: Ragged | None
    ) -> tuple[Float32Array, Int64Array]:
        """The k best of the candidates `rows` [Q, width] by exact inner product."""
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
        return from_keys(torch.cat(keys))


def _stand_ins(rows: Float32Array, seed: int) -> Float32Array:
    """Noisy rows in place of queries: a query lies near the rows of its labels, not on them."""
    generator = np.random.default_rng([seed, 1])
    sample = rows[np.sort(generator.choice(len(rows), min(len(rows), TUNE_QUERIES), replace=False))]
    noise = generator.standard_normal(sample.shape, dtype=np.float32)
    scale = TUNE_NOISE * np.linalg.norm(sample, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
    return np.asarray(sample + scale * noise, np.float32)


def _steps(num_lists: int) -> list[int]:
    """4, 6, 8, 12, 16 ... up to a quarter of the lists."""
    steps = [4 << i // 2 if i % 2 == 0 else 6 << i // 2 for i in range(40)]
    return [step for step in steps if step <= max(4, num_lists // 4)]


def _recall(found: Int64Array, wanted: Int64Array) -> float:
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, wanted, strict=True))
    return hits / max(1, wanted.size)


def _device(gpu: int | None) -> torch.device:
    if gpu is None:
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise ResourceError(
            f"GPU {gpu} was asked for the index, {torch.cuda.device_count()} found; use the CPU instead"
        )
    return torch.device("cuda", gpu)
