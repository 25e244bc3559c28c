"""How much memory a stretch of code needs at its peak, in a process of its own."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

# Freed blocks go back to the system at once: what counts is what is held.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}


class Peak:
    """Context that measures what its body needs beyond what was there: `mb`, of 10^6 bytes.

    On a GPU the allocator's peak; else the peak of the resident memory, which the system resets on request (Linux).
    """

    mb: float

    def __init__(self, device: str = "cpu") -> None:
        self.cuda = device == "cuda"

    def __enter__(self) -> Peak:
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = torch.cuda.max_memory_allocated() if self.cuda else _status("VmHWM")
        self.mb = (peak - self._before) / 1e6


def in_child(module: str, function: str, **settings: Any) -> dict[str, float]:
    """What a function of a script of this folder returns, run in a process of its own, and its `cpu_s`.

    The process is a fork of a server that has imported the script and done nothing else, so that
    no child pays for the imports again.
    """
    # The server reads them when it starts, which is before the first child.
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    measure: Callable[..., dict[str, float]] = getattr(importlib.import_module(module), function)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_with_cpu_s, measure, settings).result()


def _with_cpu_s(
    measure: Callable[..., dict[str, float]], settings: dict[str, Any]
) -> dict[str, float]:
    """In the child: the server, whose child it is, does not count its time for the parent."""
    result = measure(**settings)
    return {**result, "cpu_s": time.process_time()}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
