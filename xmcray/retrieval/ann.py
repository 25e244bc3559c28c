"""Every call of FAISS but those that create an index: searching, tuning, writing and reading.

Files are not trusted.
"""

from __future__ import annotations

import re
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.errors import BundleError, ConfigError, ResourceError, one_line
from xmcray.types import Float32Array, Int64Array, are_ids

GPU_CANDIDATES = 2048  # of a query that an index on a GPU can select
MAX_LISTS = 1 << 22
TABLE_BYTES = 1 << 28  # for tables that FAISS computes while reading, which count as well
# How the file of a plain graph begins: kind, dim, rows, two unused numbers, is trained, metric.
GRAPH_HEADER = struct.Struct("<4siqqq?i")
# The bytes of a number in the arrays that follow: probabilities of the levels, links per level,
# levels of the rows, offsets of the rows, links.
GRAPH_WIDTHS = (8, 4, 4, 8, 4)
# How it ends: entry point, levels, breadths of building and searching, an unused number, no rows.
GRAPH_END = struct.Struct("<5i4s")

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
    """Sets the threads of FAISS for calls from the calling thread; others are not affected."""
    import_faiss().omp_set_num_threads(threads)


def is_installed() -> bool:
    """Whether FAISS can be used."""
    try:
        import_faiss()
    except ResourceError:
        return False
    return True


def inner_products(rows: Float32Array, query: Float32Array) -> Float32Array:
    """Inner products of one query with all rows; each row's bits depend on that row alone.

    Args:
        rows: contiguous float32 [n, D], possibly memory-mapped.
        query: contiguous float32 [D].
    Returns:
        float32 [n].
    """
    faiss = import_faiss()
    num_rows, dim = rows.shape
    scores = np.empty(num_rows, np.float32)
    # FAISS's own search of a flat index computes the same products with the same function.
    faiss.fvec_inner_products_ny(
        faiss.swig_ptr(scores), faiss.swig_ptr(query), faiss.swig_ptr(rows), dim, num_rows
    )
    return scores


def best_inner_products(
    rows: Float32Array, query: Float32Array, k: int
) -> tuple[Float32Array, Int64Array]:
    """The k rows with the largest inner products with one query, best first.

    Args:
        rows: contiguous float32 [n, D], possibly memory-mapped.
        query: contiguous float32 [D].
        k: wanted rows, at least 1.
    Returns:
        Scores float32 [k] with the bits of `inner_products`, and positions int64 [k], -1 where there is
        no further row. Of rows with equal scores, any may come first or be left out. NaN is left out.
    """
    faiss = import_faiss()
    num_rows, dim = rows.shape
    scores = np.empty(k, np.float32)
    positions = np.empty(k, np.int64)
    faiss.knn_inner_product(
        faiss.swig_ptr(query),
        faiss.swig_ptr(rows),
        dim,
        1,
        num_rows,
        k,
        faiss.swig_ptr(scores),
        faiss.swig_ptr(positions),
    )
    return scores, positions


def candidate_scores(
    rows: Float32Array, queries: Float32Array, candidates: Int64Array
) -> Float32Array:
    """Inner products of each query with its candidates.

    Args:
        rows: contiguous float32 [n, D], possibly memory-mapped.
        queries: contiguous float32 [Q, D].
        candidates: contiguous int64 [Q, C], positions of rows; -1 for none.
    Returns:
        float32 [Q, C], with the bits of `inner_products`; -inf for no candidate.
    """
    faiss = import_faiss()
    num_queries, num_candidates = candidates.shape
    scores = np.empty(candidates.shape, np.float32)
    faiss.fvec_inner_products_by_idx(
        faiss.swig_ptr(scores),
        faiss.swig_ptr(queries),
        faiss.swig_ptr(rows),
        faiss.swig_ptr(candidates),
        rows.shape[1],
        num_queries,
        num_candidates,
    )
    return scores


def is_plain_graph(faiss_index: Any) -> bool:
    """Whether it is an HNSW graph over the vectors as they are, not over codes."""
    return isinstance(faiss_index, import_faiss().IndexHNSWFlat)


def refer_to(graph: Any, rows: Float32Array) -> None:
    """Makes a graph compute its inner products from rows that stay where they are.

    Args:
        graph: an IndexHNSWFlat of as many rows.
        rows: contiguous float32 [n, D], possibly memory-mapped.
    """
    faiss = import_faiss()
    flat = faiss.IndexFlatIP(rows.shape[1])
    memory = faiss.swig_ptr(rows.view(np.uint8).reshape(-1))
    # FAISS wants to know the owner of the memory. An empty vector has an empty owner.
    flat.codes = faiss.MaybeOwnedVectorUInt8.create_view(memory, rows.nbytes, flat.codes.owner)
    flat.ntotal = len(rows)
    graph.storage = flat
    graph.own_fields = False
    # FAISS holds bare pointers; Python has to keep what they point to.
    graph.referenced_objects = [flat, rows]


def has_quick_codes(faiss_index: Any) -> bool:
    """Whether it compares codes of 4 bits, many with a few instructions."""
    faiss = import_faiss()
    codes = faiss_index
    if isinstance(faiss_index, faiss.IndexPreTransform):
        codes = faiss.downcast_index(faiss_index.index)
    return isinstance(codes, (faiss.IndexFastScan, faiss.IndexIVFFastScan))


def breadth_of(faiss_index: Any) -> int:
    """Breadth of a search in an HNSW graph; 0 if it is none."""
    hnsw = getattr(faiss_index, "hnsw", None)
    return 0 if hnsw is None else int(hnsw.efSearch)


def set_search(faiss_index: Any, nprobe: int, ef_search: int) -> None:
    """Sets the lists to visit (at least 1) or the breadth of an HNSW search (if above 0)."""
    lists = lists_of(faiss_index)
    if lists is not None:
        lists.nprobe = min(max(1, nprobe), int(lists.nlist))
    graph = import_faiss().downcast_index(faiss_index)
    if hasattr(graph, "hnsw") and ef_search:
        graph.hnsw.efSearch = ef_search


def search(faiss_index: Any, queries: Float32Array, width: int, nprobe: int) -> Int64Array:
    """The candidates that an index proposes, best first.

    Args:
        faiss_index: the index.
        queries: contiguous float32 [Q, D].
        width: candidates per query.
        nprobe: lists to visit in an index that has them; 0 for as many as are set in it.
    Returns:
        int64 [Q, width], positions of rows; -1 where there is no further candidate.
    """
    if nprobe:
        # Other threads may want to visit another number of lists, so it is not set in the index.
        parameters = _nprobe_parameters(faiss_index, nprobe)
        _, candidates = faiss_index.search(queries, width, params=parameters)
    else:
        _, candidates = faiss_index.search(queries, width)
    return np.asarray(candidates, np.int64)


def _nprobe_parameters(faiss_index: Any, nprobe: int) -> Any | None:
    """Parameters of a search that visits so many lists; None where FAISS takes no such number."""
    faiss = import_faiss()
    faiss_index = faiss.downcast_index(faiss_index)
    if isinstance(faiss_index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=nprobe)
    if isinstance(faiss_index, faiss.IndexPreTransform):
        inner = _nprobe_parameters(faiss_index.index, nprobe)
        return faiss.SearchParametersPreTransform(index_params=inner)
    return None


def lists_of(faiss_index: Any) -> Any | None:
    """The part of a FAISS index that has inverted lists, or None."""
    if faiss_index is None:
        return None
    try:
        return import_faiss().extract_index_ivf(faiss_index)
    except RuntimeError:
        return None


def transforms_rows(faiss_index: Any) -> bool:
    """Whether it rotates, projects or scales rows and queries before it compares them."""
    faiss = import_faiss()
    return isinstance(faiss.downcast_index(faiss_index), faiss.IndexPreTransform)


def read_lists(lists: Any) -> tuple[Float32Array, Int64Array, Int64Array]:
    """The inverted lists as arrays.

    Returns:
        Centroids float32 [C, D]; ids of the rows list after list, int64; and the list of each.
    """
    ids, sizes = _list_ids(lists)
    list_ids = np.repeat(np.arange(lists.nlist), sizes)
    return lists.quantizer.reconstruct_n(0, lists.nlist), ids, list_ids


def _list_ids(lists: Any) -> tuple[Int64Array, Int64Array]:
    """Ids of the rows list after list, and the number of rows of each list, int64."""
    faiss = import_faiss()
    inverted = lists.invlists
    parts = [np.empty(0, np.int64)]
    sizes = np.zeros(lists.nlist, np.int64)
    for number in range(lists.nlist):
        size = int(inverted.list_size(number))
        if size:
            parts.append(faiss.rev_swig_ptr(inverted.get_ids(number), size))
            sizes[number] = size
    # The parts are memory of FAISS, which this copies.
    return np.concatenate(parts), sizes


def to_gpu(faiss_index: Any, gpu: int) -> Any:
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
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), gpu, faiss_index)
    except RuntimeError as error:
        raise ConfigError(
            f"this index cannot run on a GPU ({failure_reason(error)}); use index.factory=auto"
        ) from None


def most_candidates(faiss_index: Any) -> int | None:
    """The most candidates of a query that an index can propose; None if there is no limit."""
    return GPU_CANDIDATES if _is_on_gpu(faiss_index) else None


def _is_on_gpu(faiss_index: Any) -> bool:
    faiss = import_faiss()
    # FAISS without GPUs lacks the class.
    return hasattr(faiss, "GpuIndex") and isinstance(faiss_index, faiss.GpuIndex)


def write(faiss_index: Any, path: Path) -> None:
    """Writes a FAISS index, also one that lives on a GPU; of a plain graph only the links."""
    faiss = import_faiss()
    if is_plain_graph(faiss_index):
        faiss.write_index(faiss_index, str(path), faiss.IO_FLAG_SKIP_STORAGE)
        return
    if _is_on_gpu(faiss_index):
        faiss_index = faiss.index_gpu_to_cpu(faiss_index)
    faiss.write_index(faiss_index, str(path))


def read(path: Path, rows: int, dim: int) -> Any:
    """Reads a FAISS index. A plain graph is mapped, and has no vectors yet.

    FAISS trusts the sizes in a file. Here none may exceed what the size of the file can account
    for, and the index must fit the vectors. A change that keeps all sizes is only seen by its hash:
    verify that before.

    Args:
        path: the file.
        rows: number of vectors.
        dim: D.
    Raises:
        BundleError: not a FAISS index, malformed, or of other vectors.
    """
    faiss = import_faiss()
    if not path.is_file():
        raise BundleError(f"{path} is missing, expected by settings.json; export it again")
    num_bytes = path.stat().st_size
    with _limits:  # the limits are global to the process
        before = (
            faiss.get_deserialization_vector_byte_limit(),
            faiss.get_deserialization_loop_limit(),
        )
        faiss.set_deserialization_vector_byte_limit(num_bytes + TABLE_BYTES)
        faiss.set_deserialization_loop_limit(min(num_bytes, MAX_LISTS))
        flags = faiss.IO_FLAG_MMAP_IFC if _is_whole_graph(path) else 0
        try:
            faiss_index = faiss.read_index(str(path), flags)
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:
            raise BundleError(
                f"{path} is not a readable FAISS index ({failure_reason(error)}); export it again"
            ) from None
        finally:
            faiss.set_deserialization_vector_byte_limit(before[0])
            faiss.set_deserialization_loop_limit(before[1])
    shape = (int(faiss_index.ntotal), int(faiss_index.d))
    # Only a plain graph may lack its vectors, because `refer_to` gives it those of the shard.
    is_complete = is_plain_graph(faiss_index) or getattr(faiss_index, "storage", None) is not None
    if (
        shape != (rows, dim)
        or faiss_index.metric_type != faiss.METRIC_INNER_PRODUCT
        or not faiss_index.is_trained
        or (hasattr(faiss_index, "hnsw") and not is_complete)
    ):
        raise BundleError(
            f"{path} indexes {shape[0]} vectors of width {shape[1]} with metric {faiss_index.metric_type}, expected"
            f" {rows} of width {dim} with inner products; export it again"
        )
    lists = lists_of(faiss_index)
    # FAISS takes memory for as many lists as it should visit.
    if lists is not None and not 1 <= lists.nprobe <= lists.nlist:
        raise BundleError(
            f"{path} searches {lists.nprobe} lists, expected 1 to {lists.nlist}; export it again"
        )
    return faiss_index


def _is_whole_graph(path: Path) -> bool:
    """Whether a file holds a plain graph without vectors, and all of it.

    Only such a file may be mapped: FAISS 1.15 reads past the end of a mapped file that ends within
    a number, and crashes.
    """
    num_bytes = path.stat().st_size
    position = GRAPH_HEADER.size
    with path.open("rb") as file:
        header = file.read(GRAPH_HEADER.size)
        if len(header) < GRAPH_HEADER.size:
            return False
        kind, *_, metric = GRAPH_HEADER.unpack(header)
        # The header of another metric is longer.
        if kind != b"IHNf" or metric != import_faiss().METRIC_INNER_PRODUCT:
            return False
        for width in GRAPH_WIDTHS:
            file.seek(position)
            length = int.from_bytes(file.read(8), "little")
            position += 8 + width * length
            if position + GRAPH_END.size > num_bytes:
                return False
        file.seek(position)
        end = file.read(GRAPH_END.size)
    *_, storage = GRAPH_END.unpack(end)
    return storage == b"null" and position + GRAPH_END.size == num_bytes


def check_ids(faiss_index: Any, rows: int, path: Path) -> None:
    """Raises BundleError if an inverted list names a row outside 0 .. rows - 1."""
    lists = lists_of(faiss_index)
    if lists is None or not hasattr(lists, "invlists"):
        return
    # All at once: a check of each list would take longer than reading the index.
    ids, _ = _list_ids(lists)
    if not are_ids(ids, rows):
        raise BundleError(f"{path} names rows outside 0 to {rows - 1}; export it again")


def failure_reason(error: BaseException) -> str:
    """What an exception of FAISS says, without where in its sources it was raised."""
    # FAISS: "Error in FUNCTION at FILE:LINE: Error: 'CONDITION' failed: MESSAGE"
    message = re.split(r"failed:|\.(?:cpp|h):\d+:", one_line(error, 10_000))[-1].strip(" :'")
    return message[:160] or type(error).__name__
