"""Settings of a process that trains: its threads and its memory allocator.

A worker of Ray gets them as environment variables before it starts. A process that already runs,
because it trains without Ray, sets them through the C library.
"""

from __future__ import annotations

import ctypes
import os

import torch

# By default glibc returns large blocks to the system after each step and faults them in again in
# the next one. With these limits the blocks stay with the process.
_MMAP_THRESHOLD_BYTES = 1 << 30
_TRIM_THRESHOLD_BYTES = 1 << 30
# One heap for all threads. With a heap each, Gloo's threads and those of prefetching and checkpoints
# keep free blocks that the others cannot use.
_ARENAS = 1
# Huge pages, because rows are read at random addresses. A new process can have them for its whole
# heap. One that already runs can only ask torch, before its first tensor, to align each large
# tensor to such a page. That leaves gaps between tensors which nothing fits into.
_HUGE_PAGES_OF_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_HUGE_PAGES_OF_TENSORS = {"THP_MEM_ALLOC_ENABLE": "1"}
# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def worker_environment(threads: int) -> dict[str, str]:
    """Returns the environment variables of a worker process that has not started yet."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD_BYTES),
        "MALLOC_ARENA_MAX": str(_ARENAS),
        **_HUGE_PAGES_OF_HEAP,
    }


def configure_this_process(threads: int) -> None:
    """Sets threads and allocator of the process that calls, as a worker would have them."""
    torch.set_num_threads(threads)
    os.environ.update(_HUGE_PAGES_OF_TENSORS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        # Only glibc has these limits; other allocators keep large blocks or cannot be asked to.
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    mallopt(_M_ARENA_MAX, _ARENAS)
