"""Measures this machine in some 20 seconds: the rates that a step's time is computed from.

    python -m xmcray.planning.probe OUT.json

The measuring process is started as workers are (threads, allocator), and so are two ranks for the
collectives.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
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
from torch import multiprocessing, nn

from xmcray.errors import ResourceError
from xmcray.host_memory import host_memory
from xmcray.negatives.refresh import best_allowed
from xmcray.parallel import collectives
from xmcray.planning.rates import Rates, load_rates
from xmcray.storage.manifest import hash_file
from xmcray.storage.whole_files import whole_file
from xmcray.types import Ragged

_INNER = 1 << 22  # bytes: more than the inner caches hold
_OUTER = 1 << 26  # bytes: more than is left of the outer cache
_QUERIES = 512  # of a batch
_LABELS = 2048  # of a shortlist
_DIM = 128
_ARRAY = 1 << 22  # elements
_TABLE = 1 << 18  # rows
_ROWS = 8192  # read by one call
_SORTED = 30_000  # elements
_SHARDS = 8  # of an index
_FOUND = 28  # labels that a shard finds for a query
_SENT = 1 << 23  # bytes of a large collective
_EXCHANGES = 40
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
        threads: Threads of each process.

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
    host_bytes = host_memory().total
    exchange_s, exchange_bytes_s = _collectives()
    product_flop_s = _product(torch.float32)
    return Rates(
        device=f"{_processor()}, {os.cpu_count()} cores",
        source="measured",
        memory_bytes=host_bytes,
        host_bytes=host_bytes,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        process_bytes=(_process_bytes(""), _process_bytes("import xmcray.nn.transformer")),
        product_flop_s=product_flop_s,
        half_flop_s=_product(torch.bfloat16),
        pass_bytes_s=_pass(),
        row_bytes_s=_row_read(),
        slow_s=_slow_pass(),
        sort_s=_sort(),
        call_s=_call(),
        merge_s=_merge(),
        exchange_s=exchange_s,
        exchange_bytes_s=exchange_bytes_s,
        disk_bytes_s=_disk(),
        build_flop_s=product_flop_s,  # assigning rows to lists is a product
        search_flop_s=_search(),
    )


def _seconds(function: Callable[[], object], touched_bytes: int = _OUTER) -> float:
    """Median seconds of a call; as in a step, other bytes are touched between two calls.

    Args:
        function: What is measured.
        touched_bytes: Bytes that take its data's place in the caches.
    """
    function()
    others = torch.zeros(touched_bytes // 4)
    measured = []
    for _ in range(_REPEATS):
        others.add_(1.0)
        start = time.perf_counter()
        function()
        measured.append(time.perf_counter() - start)
    # The median leaves out calls that another process has held up.
    return float(np.median(measured))


def _product(dtype: torch.dtype) -> float:
    """Floating-point operations per second of query vectors times label rows."""
    query_BD = torch.randn(_QUERIES, _DIM, dtype=dtype)
    label_CD = torch.randn(_LABELS, _DIM, dtype=dtype)
    product_s = _seconds(lambda: query_BD @ label_CD.T)
    # A multiplication and an addition for each pair of factors.
    return 2.0 * _QUERIES * label_CD.numel() / product_s


def _pass() -> float:
    """Bytes per second of adding an array to another: two reads and a write."""
    array = torch.zeros(_ARRAY)
    others = torch.ones(_ARRAY)
    pass_s = _seconds(lambda: array.add_(others))
    return 3 * array.nbytes / pass_s


def _row_read() -> float:
    """Bytes per second of reading rows at ascending, otherwise random places."""
    table = torch.randn(_TABLE, _DIM)
    places = torch.randint(_TABLE, (32, _ROWS)).sort(dim=1).values
    # No row is read again before the caches have lost it.
    next_places = itertools.cycle(places)
    read_s = _seconds(lambda: table.index_select(0, next(next_places)))
    return _ROWS * table[0].nbytes / read_s


def _slow_pass() -> float:
    """Seconds for an element of a softplus."""
    scores = torch.randn(_QUERIES, _LABELS)
    pass_s = _seconds(lambda: nn.functional.softplus(scores))
    return pass_s / scores.numel()


def _merge() -> float:
    """Seconds of merging a label that an index shard has found."""
    random = np.random.default_rng(0)
    shape = (_QUERIES, _SHARDS * _FOUND)
    labels = random.integers(_TABLE, size=shape)
    scores = random.standard_normal(shape, np.float32)
    positives = Ragged(
        random.integers(_TABLE, size=5 * _QUERIES), np.arange(0, 5 * _QUERIES + 1, 5)
    )
    merge_s = _seconds(lambda: best_allowed(labels, scores, [positives], _TABLE, 20))
    return merge_s / labels.size


def _sort() -> float:
    """Seconds for an element of a stable sort."""
    numbers = np.random.default_rng(0).integers(1 << 20, size=_SORTED)
    sort_s = _seconds(lambda: np.argsort(numbers, kind="stable"))
    return sort_s / _SORTED


def _call() -> float:
    """Seconds of one operation in a chain of different operations on few numbers."""
    values = torch.ones(8, 8)
    ids = torch.arange(8)

    def chain() -> None:
        rows = values.index_select(0, ids) * values
        scores = (rows @ values.T + 0.5).index_select(1, ids)
        nn.functional.softplus(scores).sum()
        rows.mul_(0.5).addcmul_(values, values).sqrt().add_(1.0)

    chain_s = _seconds(chain, touched_bytes=_INNER)
    # The chain has eleven operations.
    return chain_s / 11


def _disk() -> float:
    """Bytes per second of writing a file, syncing and hashing it."""
    content = os.urandom(1 << 20) * 32
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "file"
        start = time.perf_counter()
        with whole_file(path) as part:
            part.write_bytes(content)
        hash_file(path)
        return len(content) / (time.perf_counter() - start)


def _search() -> float:
    """Floating-point operations per second of scanning rows for the best of many queries."""
    from xmcray.retrieval.exact import exact_search

    rows = np.random.default_rng(0).standard_normal((32_768, _DIM), dtype=np.float32)
    search_s = _seconds(lambda: exact_search(rows, rows[:_QUERIES], 50))
    return 2.0 * _QUERIES * rows.size / search_s


def _process_bytes(more_imports: str) -> int:
    """Largest resident memory of a worker that has imported its libraries and made a small step.

    Not by getrusage: its value starts with the memory of the process that started this one.
    """
    print_status = "print(open('/proc/self/status').read())"
    code = "\n".join([_FIRST_STEP, more_imports, print_status])
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    # A line such as "VmHWM:   123456 kB".
    _, _, rest = finished.stdout.partition("VmHWM:")
    return 1024 * int(rest.split()[0])


def _collectives() -> tuple[float, float]:
    """Seconds of a small all-gather after work, and bytes per second of a large one."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_exchange, (folder,), nprocs=2)  # type: ignore[attr-defined]
        content = (Path(folder) / "times").read_text(encoding="utf-8")
    work_s, small_s, large_s = json.loads(content)
    exchange_s = max(0.0, small_s - work_s)
    sent_s = max(large_s - small_s, 1e-9)
    return exchange_s, _SENT / sent_s


def _exchange(rank: int, folder: str) -> None:
    """Times work, and work with a small and with a large all-gather after it, on one of two ranks."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    query_BD = torch.randn(_QUERIES, _DIM)
    label_DC = torch.randn(_DIM, _LABELS)
    work = partial(torch.mm, query_BD, label_DC)
    small = partial(collectives.gather_equal, torch.zeros(4))
    large = partial(collectives.gather_equal, torch.zeros(_SENT // 4))
    times = []
    for calls in ([work], [work, small], [work, large]):
        small()  # both ranks start together
        start = time.perf_counter()
        for call in calls * _EXCHANGES:
            call()
        elapsed_s = time.perf_counter() - start
        times.append(elapsed_s / _EXCHANGES)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times))
    dist.destroy_process_group()


def _processor() -> str:
    """The model of the processor, or its architecture if the kernel does not list it."""
    description = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*: (.*)", description)
    return model[1] if model else platform.machine()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _measure_machine().save(Path(sys.argv[1]))
