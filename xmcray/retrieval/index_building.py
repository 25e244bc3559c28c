"""Builds indexes: exact for few rows, else a graph or inverted lists, tuned for a stated recall."""

from __future__ import annotations

import numpy as np
import torch

from xmcray.errors import ResourceError
from xmcray.retrieval import ann, ann_create
from xmcray.retrieval.exact import as_tensor
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_spec import IndexSpec, num_lists, resolve_factory
from xmcray.retrieval.index_tuning import TUNE_QUERIES, tune
from xmcray.retrieval.inverted_lists import long_rows
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.list_index import ListIndex
from xmcray.types import Float32Array

# At most this share of the rows is in no list, namely those longer than so many medians.
LONG_SHARE = 0.05
LONG_RATIO = 1.5
CODES_BREADTH = 128  # of a graph over codes
NOISE = 0.5  # length of the noise of a row in place of a query, in terms of the row's


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
    factory = resolve_factory(spec.factory, *vectors.shape)
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
        faiss_index = ann_create.create(rows[listed_ids], listed_ids, factory, spec.seed, threads)
    else:
        faiss_index = ann_create.create(rows, None, factory, spec.seed, threads)
    ann.set_search(faiss_index, spec.nprobe, spec.ef_search or CODES_BREADTH)
    index = Index(as_tensor(rows), faiss_index, long_ids=long_ids, threads=threads)
    index.recall = tune(index, _tuning_queries(queries, rows, spec.seed), spec)
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
    index = ListIndex(lists)
    recall = tune(index, _tuning_queries(queries, vectors, spec.seed), spec)
    # Half of the lists take as long as all rows (benchmarks/device_lists.py).
    is_slow = index.nprobe >= len(lists.centroid_CD) // 2
    if not spec.nprobe and (is_slow or recall < spec.recall):
        return Index(vector_ND, None)
    return index


def _tuning_queries(queries: Float32Array | None, rows: Float32Array, seed: int) -> Float32Array:
    """The given queries; without any, noisy rows: a query lies near the rows of its labels."""
    if queries is not None and len(queries):
        return queries
    generator = np.random.default_rng([seed, 1])
    num_chosen = min(len(rows), TUNE_QUERIES)
    chosen = generator.choice(len(rows), num_chosen, replace=False)
    sample = rows[np.sort(chosen)]
    noise = generator.standard_normal(sample.shape, dtype=np.float32)
    lengths = np.linalg.norm(sample, axis=1, keepdims=True)
    scale = NOISE * lengths / np.sqrt(rows.shape[1])
    return np.asarray(sample + scale * noise, np.float32)


def _device(gpu: int | None) -> torch.device:
    if gpu is None:
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise ResourceError(
            f"the index should run on GPU {gpu}, {torch.cuda.device_count()} found; use the CPU"
        )
    return torch.device("cuda", gpu)
