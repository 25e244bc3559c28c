"""What is asked of FAISS, and what is not trusted to it: creating, tuning, writing and reading its indexes."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.errors import BundleError, ConfigError, ResourceError
from xmcray.types import Float32Array, Int64Array

TRAIN_ROWS_PER_LIST = 64
MAX_LISTS = 1 << 22
TABLE_BYTES = (
    1 << 28
)  # FAISS holds the tables that it computes while reading against the same limit

_limits = threading.Lock()


def import_faiss() -> Any:
    """The faiss module, whichever wheel it came with.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ResourceError(
            "faiss is not installed; run pip install 'xmcray[cpu]' or pip install 'xmcray[gpu]'"
        ) from None
    return faiss


def use_threads(threads: int) -> None:
    """Sets the threads of FAISS for calls from the calling thread, the only ones this setting reaches."""
    import_faiss().omp_set_num_threads(threads)


def create(
    rows: Float32Array, ids: Int64Array | None, factory: str, seed: int, threads: int
) -> Any:
    """A trained FAISS index that holds `rows` float32 [n, D], the same whatever the timing of threads.

    Args:
        ids: int64 [n], what an index with lists calls the rows; their positions if not given.
    Raises:
        ConfigError: FAISS does not accept the factory string for these rows.
    """
    faiss = import_faiss()
    # The graph of HNSW depends on the order of insertion, which several threads would leave to chance.
    faiss.omp_set_num_threads(1 if "HNSW" in factory else threads)
    num_rows, dim = rows.shape
    try:
        found = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        found.train(_training_rows(found, rows, seed))
        found.add(rows) if ids is None else found.add_with_ids(rows, ids)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"index factory {factory!r} does not fit {num_rows} vectors of width {dim} ({_one_line(error)}); use auto"
        ) from None
    return found


def set_search(found: Any, nprobe: int, ef_search: int) -> None:
    """Sets the lists to visit (at least 1) and the breadth of an HNSW search, where the index has such."""
    lists = lists_of(found)
    if lists is not None:
        lists.nprobe = min(max(1, nprobe), int(lists.nlist))
    graph = import_faiss().downcast_index(found)
    if hasattr(graph, "hnsw"):
        graph.hnsw.efSearch = ef_search


def lists_of(found: Any) -> Any | None:
    """The part of a FAISS index that has inverted lists, or None."""
    if found is None:
        return None
    try:
        return import_faiss().extract_index_ivf(found)
    except RuntimeError:
        return None


def read_lists(lists: Any) -> tuple[Float32Array, Int64Array, list[int]]:
    """Centroids float32 [C, D], ids of the rows list after list, and where each list begins, [C + 1]."""
    faiss = import_faiss()
    sizes = [int(lists.invlists.list_size(number)) for number in range(lists.nlist)]
    ids = [
        faiss.rev_swig_ptr(lists.invlists.get_ids(number), size).copy()
        if size
        else np.empty(0, np.int64)
        for number, size in enumerate(sizes)
    ]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return lists.quantizer.reconstruct_n(0, lists.nlist), np.concatenate(ids), offsets


def to_gpu(found: Any, gpu: int) -> Any:
    """The index on CUDA device `gpu`.

    Raises:
        ResourceError: this FAISS was built without GPUs.
        ConfigError: this kind of index has no GPU form.
    """
    faiss = import_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        raise ResourceError(
            "this faiss has no GPU support; run pip install 'xmcray[gpu]', or use index.factory=auto"
        )
    try:
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), gpu, found)
    except RuntimeError as error:
        raise ConfigError(
            f"this index cannot run on a GPU ({_one_line(error)}); use index.factory=auto"
        ) from None


def write(found: Any, path: Path) -> None:
    """Writes a FAISS index, also one that lives on a GPU."""
    faiss = import_faiss()
    on_gpu = hasattr(faiss, "GpuIndex") and isinstance(found, faiss.GpuIndex)
    faiss.write_index(faiss.index_gpu_to_cpu(found) if on_gpu else found, str(path))


def read(path: Path, max_bytes: int, rows: int, dim: int) -> Any:
    """A FAISS index over `rows` vectors of width `dim` from a file of at most `max_bytes`.

    FAISS trusts the sizes in a file. Here none may exceed what the known size of the file can account for, and the
    index must fit the vectors. An alteration that keeps all sizes is only seen by its hash: verify that before.

    Raises:
        BundleError: not a FAISS index, malformed, or of other vectors.
    """
    faiss = import_faiss()
    if path.stat().st_size > max_bytes:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, expected at most {max_bytes}; export it again"
        )
    with _limits:  # the limits are global to the process
        before = (
            faiss.get_deserialization_vector_byte_limit(),
            faiss.get_deserialization_loop_limit(),
        )
        faiss.set_deserialization_vector_byte_limit(max_bytes + TABLE_BYTES)
        faiss.set_deserialization_loop_limit(min(max_bytes, MAX_LISTS))
        try:
            found = faiss.read_index(str(path))
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:
            raise BundleError(
                f"{path} is not a readable FAISS index ({_one_line(error)}); export it again"
            ) from None
        finally:
            faiss.set_deserialization_vector_byte_limit(before[0])
            faiss.set_deserialization_loop_limit(before[1])
    shape = (int(found.ntotal), int(found.d))
    if (
        shape != (rows, dim)
        or found.metric_type != faiss.METRIC_INNER_PRODUCT
        or not found.is_trained
    ):
        raise BundleError(
            f"{path} indexes {shape[0]} vectors of width {shape[1]} with metric {found.metric_type}, expected"
            f" {rows} of width {dim} with inner products; export it again"
        )
    return found


def _training_rows(found: Any, rows: Float32Array, seed: int) -> Float32Array:
    """A seeded sample that is large enough for k-means, which is set up on the way."""
    lists = lists_of(found)
    if lists is None:
        wanted = 1 << 16
    else:
        lists.cp.seed, lists.cp.niter = 1 + seed % 1_000_000, 8
        lists.cp.min_points_per_centroid, lists.cp.max_points_per_centroid = 1, TRAIN_ROWS_PER_LIST
        wanted = TRAIN_ROWS_PER_LIST * int(lists.nlist)
    if wanted >= len(rows):
        return rows
    return rows[np.sort(np.random.default_rng(seed).choice(len(rows), wanted, replace=False))]


def _one_line(error: BaseException) -> str:
    text = " ".join(
        str(error).split()
    )  # FAISS: "Error in FUNCTION at FILE:LINE: Error: 'CONDITION' failed: MESSAGE"
    return (
        re.split(r"failed:|\.(?:cpp|h):\d+:", text)[-1].strip(" :'")[:160] or type(error).__name__
    )
