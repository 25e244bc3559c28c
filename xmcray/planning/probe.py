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
from xmcray.planning.rates import SORTED, Points, Rates, load_rates

ENVIRONMENT = {  # as training/launch.py starts its workers
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "THP_MEM_ALLOC_ENABLE": "1",
}
_TABLES = (1 << 19, 1 << 23, 1 << 27, 1 << 30)  # bytes
_ROW_WIDTHS = (64, 256)  # floats
_INNER = 1 << 22  # bytes: more than the inner caches hold
_OUTER = 1 << 26  # bytes: more than is left of the outer cache
_ROWS = 8192
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
    """Measures this machine, in processes of their own.

    Args:
        threads: of each process.
    Raises:
        ResourceError: the measuring process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rates.json"
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "xmcray.planning.probe", str(out)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ResourceError(
                f"the probe of this machine failed ({last[:200]}); free some memory and try again"
            )
        return load_rates(out)


def _measure_machine() -> Rates:
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    row_reads, row_writes = _rows()
    exchange_s, meet_s, exchange_bytes_s = _collectives()
    build_flop_s, search_flop_s = _index()
    scores = torch.randn(512, 2048)
    return Rates(
        device=f"{_processor()}, {os.cpu_count()} cores",
        source="measured",
        memory_bytes=host_bytes,
        host_bytes=host_bytes,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        process_bytes=(_process_bytes(""), _process_bytes("import xmcray.nn.transformer")),
        products=tuple((float(k), _product(k, torch.float32)) for k in (16, 64, 256, 1024)),
        half_flop_s=_product(256, torch.bfloat16),
        passes=_passes(),
        row_reads=row_reads,
        row_writes=row_writes,
        exp_s=_seconds(lambda: torch.sigmoid(scores), _OUTER) / scores.numel(),
        softplus_s=_seconds(lambda: nn.functional.softplus(scores), _OUTER) / scores.numel(),
        top_s=_seconds(lambda: scores.topk(100, dim=1)) / scores.numel(),
        sort_s=_sort(),
        call_s=_call(),
        exchange_s=exchange_s,
        meet_s=meet_s,
        exchange_bytes_s=exchange_bytes_s,
        disk_bytes_s=_disk(),
        build_flop_s=build_flop_s,
        search_flop_s=search_flop_s,
    )


def _seconds(function: Callable[[], object], touched_bytes: int = _INNER) -> float:
    """Median seconds of a call when other bytes were touched since the one before, as in a step."""
    function()
    others = torch.zeros(touched_bytes // 4)
    measured = []
    for _ in range(_REPEATS):
        others.add_(1.0)
        start = time.perf_counter()
        function()
        measured.append(time.perf_counter() - start)
    return float(np.median(measured))


def _product(width: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of query vectors with rows."""
    queries = torch.randn(512, width, dtype=dtype)
    rows = torch.randn(2048, width, dtype=dtype)
    product = partial(torch.mm, queries, rows.T, out=torch.empty(512, 2048, dtype=dtype))
    return 2.0 * 512 * 2048 * width / _seconds(product, _OUTER)


def _passes() -> Points:
    points = []
    for size in (1 << 14, 1 << 18, 1 << 22, 1 << 25, 1 << 28):
        add = partial(torch.zeros(size // 4).add_, torch.ones(size // 4))
        seconds = _seconds(add, _OUTER if size > _INNER else 0)
        points.append((float(size), 3 * size / seconds))
    return tuple(points)


def _rows() -> tuple[dict[str, Points], dict[str, Points]]:
    """Seconds of reading and of writing a row, by width and by bytes of the table."""
    reads: dict[str, Points] = {}
    writes: dict[str, Points] = {}
    for width in _ROW_WIDTHS:
        for size in _TABLES:
            read_s, write_s = _rows_of(size, width)
            key = str(4 * width)
            reads[key] = (*reads.get(key, ()), (float(size), read_s))
            writes[key] = (*writes.get(key, ()), (float(size), write_s))
    return reads, writes


def _rows_of(table_bytes: int, width: int) -> tuple[float, float]:
    """Seconds of reading and of writing a row, at ascending, otherwise random places."""
    table = torch.zeros(table_bytes // 4 // width, width).fill_(1.0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(table), (32, _ROWS), generator=generator)
    places = itertools.cycle(drawn.sort(dim=1).values)
    rows = table.index_select(0, next(places))
    read_s = _seconds(lambda: table.index_select(0, next(places)), _OUTER)
    write_s = _seconds(lambda: table.index_copy_(0, next(places), rows), _OUTER)
    return read_s / _ROWS, write_s / _ROWS


def _sort() -> float:
    values = np.random.default_rng(0).integers(1 << 20, size=SORTED)
    return _seconds(lambda: np.argsort(values, kind="stable")) / len(values)


def _call() -> float:
    """A chain of different operations on a few numbers, by their number."""
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
    """Of assigning rows to lists, and of scanning rows for the best of many queries."""
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


def _process_bytes(also: str) -> int:
    """Largest resident memory of a worker that has imported its libraries and made a small step.

    Not by getrusage: what that reports begins with the memory of the process that started this one.
    """
    code = "\n".join([_FIRST_STEP, also, "print(open('/proc/self/status').read())"])
    status = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _collectives() -> tuple[float, float, float]:
    """Seconds of a small all-gather, what it takes longer after work, and bytes per second."""
    code = "import sys; from xmcray.planning import probe; probe.rank_times(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, rank, folder], stdout=subprocess.PIPE, text=True
            )
            for rank in ("0", "1")
        ]
        outputs = [process.communicate()[0] for process in ranks]
    small, large, work, small_after_work = map(float, outputs[0].split())
    meet_s = max(0.0, small_after_work - work - small)
    return small, meet_s, (1 << 23) / max(large - small, 1e-9)


def rank_times(rank: str, folder: str) -> None:
    """One of two ranks: prints the seconds of a small and a large all-gather, of work, and of both.

    Args:
        rank: 0 or 1.
        folder: where the ranks meet.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2
    )
    queries = torch.randn(512, 256)
    work = partial(torch.mm, queries, torch.randn(256, 2048), out=torch.empty(512, 2048))
    small = partial(dist.all_gather_into_tensor, torch.zeros(2 << 4), torch.zeros(1 << 4))
    large = partial(dist.all_gather_into_tensor, torch.zeros(2 << 21), torch.zeros(1 << 21))
    for calls, count in (([small], 20), ([large], 10), ([work], 60), ([work, small], 60)):
        for call in [*calls, small]:
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
