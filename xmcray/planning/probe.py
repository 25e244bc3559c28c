"""Measures this machine in about half a minute: the rates that a step's time is computed from.

    python -m xmcray.planning.probe OUT.json

The measuring process is started as workers are (threads, allocator), and so are two ranks for the
collectives.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from xmcray.errors import ResourceError
from xmcray.planning.rates import NARROW_ROW, SORTED, WIDE_ROW, Points, Rates, load_rates

_ARRAYS = (1 << 14, 1 << 18, 1 << 22, 1 << 25, 1 << 28)  # bytes
_TABLES = (1 << 19, 1 << 23, 1 << 27, 1 << 30)  # bytes
_INNER = 1 << 22  # bytes: more than the inner caches hold
_OUTER = 1 << 26  # bytes: more than is left of the outer cache
_QUERIES = 512  # of a batch
_LABELS = 2048  # of a shortlist
_ROWS = 8192  # read or written by one call
_REPEATS = 9
_FIRST_STEP = """
import faiss, numpy, ray.train.torch, torch, xmcray.training.worker, xmcray.training.loop
from xmcray.nn.static import StaticEncoder
from xmcray.training.optim import EncoderOptimizer, OptimConfig
from xmcray.types import Ragged
encoder = StaticEncoder(torch.ones(256), 256)
optimiser = EncoderOptimizer({"encoder": encoder}, OptimConfig(), ["encoder.embedding.weight"])
vectors = encoder(Ragged(numpy.arange(256), numpy.arange(0, 257, 4)))
(vectors @ vectors.T).topk(4).values.softmax(1).sum().backward()
optimiser.step(1.0)
"""


def probe(threads: int = 1) -> Rates:
    """Measures this machine in separate processes.

    Args:
        threads: of each process.

    Raises:
        ResourceError: the measuring process failed.
    """
    from xmcray.training.process import worker_environment  # imports torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rates.json"
        result = subprocess.run(
            [sys.executable, "-m", "xmcray.planning.probe", str(out)],
            env={**os.environ, **worker_environment(threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise ResourceError(
                f"the probe of this machine failed ({lines[-1][:200]}); free some memory and try again"
            )
        return load_rates(out)


def _measure_machine() -> Rates:
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    scores = torch.randn(_QUERIES, _LABELS)
    exponential_s = _seconds(lambda: torch.sigmoid(scores), _OUTER)
    softplus_s = _seconds(lambda: nn.functional.softplus(scores), _OUTER)
    numbers = np.random.default_rng(0).integers(1 << 20, size=SORTED)
    narrow_rows = [_row_times(size, NARROW_ROW) for size in _TABLES]
    wide_rows = [_row_times(size, WIDE_ROW) for size in _TABLES]
    write_factors = [write_s / read_s for read_s, write_s in narrow_rows + wide_rows]
    exchange_s, meet_s, exchange_bytes_s = _collectives()
    build_flop_s, search_flop_s = _index()
    return Rates(
        device=f"{_processor()}, {os.cpu_count()} cores",
        source="measured",
        memory_bytes=host_bytes,
        host_bytes=host_bytes,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        process_bytes=(_process_bytes(""), _process_bytes("import xmcray.nn.transformer")),
        products=tuple((float(dim), _product(dim, torch.float32)) for dim in (16, 64, 256, 1024)),
        half_flop_s=_product(256, torch.bfloat16),
        passes=tuple((float(size), _pass(size)) for size in _ARRAYS),
        narrow_row_s=_points(narrow_rows),
        wide_row_s=_points(wide_rows),
        row_write_factor=float(np.median(write_factors)),
        slow_s=(exponential_s + softplus_s) / 2 / scores.numel(),
        sort_s=_seconds(lambda: np.argsort(numbers, kind="stable")) / SORTED,
        call_s=_call(),
        exchange_s=exchange_s,
        meet_s=meet_s,
        exchange_bytes_s=exchange_bytes_s,
        disk_bytes_s=_disk(),
        build_flop_s=build_flop_s,
        search_flop_s=search_flop_s,
    )


def _seconds(function: Callable[[], object], touched_bytes: int = _INNER) -> float:
    """Median seconds of a call; as in a step, other bytes are touched between two calls."""
    function()
    others = torch.zeros(touched_bytes // 4)
    measured = []
    for _ in range(_REPEATS):
        others.add_(1.0)
        start = time.perf_counter()
        function()
        measured.append(time.perf_counter() - start)
    return float(np.median(measured))


def _product(dim: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of query vectors times label rows."""
    query_BD = torch.randn(_QUERIES, dim, dtype=dtype)
    label_CD = torch.randn(_LABELS, dim, dtype=dtype)
    score_BC = torch.empty(_QUERIES, _LABELS, dtype=dtype)
    product_s = _seconds(lambda: torch.mm(query_BD, label_CD.T, out=score_BC), _OUTER)
    return 2.0 * _QUERIES * _LABELS * dim / product_s


def _pass(size: int) -> float:
    """Bytes per second of adding an array of `size` bytes to another: two reads and a write."""
    add = partial(torch.zeros(size // 4).add_, torch.ones(size // 4))
    # Arrays that fit into the inner caches are still there when a step uses them again.
    return 3 * size / _seconds(add, _OUTER if size > _INNER else 0)


def _points(row_times: list[tuple[float, float]]) -> Points:
    """(bytes of the table, seconds of a read)."""
    return tuple(
        (float(size), read_s) for size, (read_s, _) in zip(_TABLES, row_times, strict=True)
    )


def _row_times(table_bytes: int, row_bytes: int) -> tuple[float, float]:
    """Seconds of reading and of writing a row, at ascending, otherwise random places."""
    dim = row_bytes // 4
    # fill_ writes every page: pages of zeros would all be the same one.
    table = torch.zeros(table_bytes // row_bytes, dim).fill_(1.0)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(table), (32, _ROWS), generator=generator).sort(dim=1).values
    next_places = itertools.cycle(places)
    rows = table.index_select(0, next(next_places))
    read_s = _seconds(lambda: table.index_select(0, next(next_places)), _OUTER)
    write_s = _seconds(lambda: table.index_copy_(0, next(next_places), rows), _OUTER)
    return read_s / _ROWS, write_s / _ROWS


def _call() -> float:
    """Seconds of one operation in a chain of different operations on few numbers."""
    values = torch.ones(8, 8)
    table = torch.ones(64, 8)
    ids = torch.arange(8)

    def chain() -> None:
        rows = table.index_select(0, ids) * values
        scores = (rows @ values.T + 0.5).index_select(1, ids)
        nn.functional.embedding_bag(ids, rows, ids, mode="sum")
        nn.functional.softplus(scores).sum()
        rows.mul_(0.5).addcmul_(values, values).sqrt().add_(1.0)
        table.index_copy_(0, ids, rows)

    return _seconds(chain) / 13


def _disk() -> float:
    """Bytes per second of writing a file, syncing and hashing it."""
    content = os.urandom(1 << 20) * 32
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        start = time.perf_counter()
        with (Path(folder) / "file").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hashlib.sha256(content).digest()
        return len(content) / (time.perf_counter() - start)


def _index() -> tuple[float, float]:
    """Flop/s of assigning rows to lists, and of scanning rows for the best of many queries."""
    from xmcray.retrieval import ann
    from xmcray.retrieval.exact import exact_search

    faiss = ann.import_faiss()
    ann.use_threads(torch.get_num_threads())
    rows = np.random.default_rng(0).standard_normal((32_768, 64), dtype=np.float32)
    flat = faiss.IndexFlatIP(64)
    flat.add(rows[:4096])
    build_s = _seconds(lambda: flat.search(rows[:8192], 1))
    search_s = _seconds(lambda: exact_search(rows, rows[:512], 50))
    return 2.0 * 4096 * 8192 * 64 / build_s, 2.0 * 512 * len(rows) * 64 / search_s


def _process_bytes(more_imports: str) -> int:
    """Largest resident memory of a worker that has imported its libraries and made a small step.

    Not by getrusage: its value starts with the memory of the process that started this one.
    """
    code = "\n".join([_FIRST_STEP, more_imports, "print(open('/proc/self/status').read())"])
    command = [sys.executable, "-c", code]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _collectives() -> tuple[float, float, float]:
    """Seconds of a small all-gather, how much longer it takes after work, and bytes per second."""
    code = "import sys; from xmcray.planning import probe; probe.rank_times(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in ("0", "1"):
            command = [sys.executable, "-c", code, rank, folder]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    small_s, large_s, work_s, small_after_work_s = map(float, outputs[0].split())
    meet_s = max(0.0, small_after_work_s - work_s - small_s)
    return small_s, meet_s, (1 << 23) / max(large_s - small_s, 1e-9)


def rank_times(rank: str, folder: str) -> None:
    """Prints the seconds of a small and a large all-gather, of work, and of both, on one of 2 ranks.

    Args:
        rank: 0 or 1.
        folder: where the ranks meet.
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    queries = torch.randn(_QUERIES, 256)
    work = partial(torch.mm, queries, torch.randn(256, _LABELS), out=torch.empty(_QUERIES, _LABELS))
    small = partial(dist.all_gather_into_tensor, torch.zeros(2 << 4), torch.zeros(1 << 4))
    large = partial(dist.all_gather_into_tensor, torch.zeros(2 << 21), torch.zeros(1 << 21))
    for calls, count in (([small], 20), ([large], 10), ([work], 60), ([work, small], 60)):
        for call in [*calls, small]:  # the last one makes both ranks start together
            call()
        start = time.perf_counter()
        for call in calls * count:
            call()
        print((time.perf_counter() - start) / count)
    dist.destroy_process_group()


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _measure_machine().save(Path(sys.argv[1]))
