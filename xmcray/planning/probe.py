"""Measures this machine in about half a minute: the rates that a step's time is computed from.

    python -m xmcray.planning.probe OUT.json ASKED.json

The measuring process is started as workers are (threads, allocator), and so are two ranks for the collectives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from xmcray import draws
from xmcray.errors import ResourceError
from xmcray.nn.encoder import Encoder, EncoderConfig
from xmcray.nn.static import StaticEncoder
from xmcray.planning.encoders import EncoderShape, transformer_settings
from xmcray.planning.rates import (
    SORTED,
    TOP_COLUMNS,
    TOP_KEPT,
    EncoderRate,
    Points,
    Rates,
    between,
    load_rates,
)
from xmcray.types import Ragged

TABLES = (1 << 19, 1 << 23, 1 << 27, 1 << 30)
ROW_WIDTHS = (64, 256)  # floats
INNER, OUTER = (
    1 << 22,
    1 << 26,
)  # bytes: more than the inner caches hold, and than is left of the outer one
ENVIRONMENT = {  # as training/launch.py starts its workers
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "THP_MEM_ALLOC_ENABLE": "1",
}
_PAIRS = 8192
_FIRST_STEP = """
import faiss, numpy, ray.train.torch, torch, xmcray.training.worker
from xmcray.methods.registry import method_entry, method_names
from xmcray.nn.static import StaticEncoder
from xmcray.training.optim import EncoderOptimizer, OptimConfig
from xmcray.types import Ragged
for name in method_names():
    method_entry(name)
encoder = StaticEncoder(torch.ones(256), 256)
optimiser = EncoderOptimizer({"encoder": encoder}, OptimConfig(), ["encoder.embedding.weight"])
vectors = encoder(Ragged(numpy.arange(256), numpy.arange(0, 257, 4)))
(vectors @ vectors.T).topk(4).values.softmax(1).sum().backward()
optimiser.step(1.0)
"""
_REPEATS = 9


def probe(
    shape: EncoderShape, config: EncoderConfig, threads: int = 1, known: Rates | None = None
) -> Rates:
    """Measures, in processes of their own.

    Args:
        shape, config: of the encoder that is asked about. threads: of each process.
        known: rates of this machine, to which only the encoder's are added.
    Raises:
        ResourceError: the measuring process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, asked = Path(folder) / "rates.json", Path(folder) / "asked.json"
        if known is not None:
            known.save(out)
        body = {"shape": asdict(shape), "pairs": config.bigram_buckets, "residual": config.residual}
        asked.write_text(json.dumps(body), encoding="utf-8")
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "xmcray.planning.probe", str(out), str(asked)]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ResourceError(
                f"the probe of this machine failed ({last[:200]}); free some memory and try again"
            )
        return load_rates(out)


def measure_machine() -> Rates:
    """All rates of this machine but those of encoders, in this process."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    products = _products()
    reads, writes = _rows()
    exp_s, softplus_s, top_s = _elements()
    exchange_s, meet_s, exchange_bytes_s = _collectives()
    build_flop_s, search_flop_s = _index()
    return Rates(
        device=f"{_processor()}, {os.cpu_count()} cores",
        source="measured",
        memory_bytes=host,
        host_bytes=host,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        process_bytes=(_process_bytes(""), _process_bytes("import xmcray.nn.transformer")),
        products=products,
        passes=_passes(),
        row_reads=reads,
        row_writes=writes,
        exp_s=exp_s,
        softplus_s=softplus_s,
        top_s=top_s,
        sort_s=_sort(),
        random_s=_random(),
        call_s=_calls(),
        exchange_s=exchange_s,
        meet_s=meet_s,
        exchange_bytes_s=exchange_bytes_s,
        disk_bytes_s=_disk(),
        build_flop_s=build_flop_s,
        search_flop_s=search_flop_s,
        transformer_flop_s=0.6
        * between(products, 256),  # attention, normalisation and activations beside products
    )


def seconds(function: Callable[[], object], others: int = INNER) -> float:
    """Median seconds of a call when so many other bytes were touched since the one before, as in a step."""
    function()
    between_calls, found = torch.zeros(others // 4), []
    for _ in range(_REPEATS):
        between_calls.add_(1.0)
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return float(np.median(found))


def _products() -> Points:
    """Of query vectors with rows, at the widths that vectors have."""
    found = []
    for k in (16, 64, 256, 1024):
        product = partial(
            torch.mm, torch.randn(512, k), torch.randn(2048, k).T, out=torch.empty(512, 2048)
        )
        found.append((float(k), 2.0 * 512 * 2048 * k / seconds(product, OUTER)))
    return tuple(found)


def _passes() -> Points:
    found = []
    for size in (1 << 14, 1 << 18, 1 << 22, 1 << 25, 1 << 28):
        add = partial(torch.zeros(size // 4).add_, torch.ones(size // 4))
        found.append((float(size), 3 * size / seconds(add, OUTER if size > INNER else 0)))
    return tuple(found)


def _rows() -> tuple[dict[str, Points], dict[str, Points]]:
    reads: dict[str, Points] = {}
    writes: dict[str, Points] = {}
    for width in ROW_WIDTHS:
        found = [_rows_of(size, width) for size in TABLES]
        reads[str(4 * width)] = tuple(
            (float(size), read_s) for size, (read_s, _) in zip(TABLES, found, strict=True)
        )
        writes[str(4 * width)] = tuple(
            (float(size), write_s) for size, (_, write_s) in zip(TABLES, found, strict=True)
        )
    return reads, writes


def _rows_of(table_bytes: int, width: int) -> tuple[float, float]:
    """Seconds of reading and of writing a row of a table, at ascending, otherwise random places."""
    table = torch.zeros(table_bytes // 4 // width, width).fill_(1.0)
    generator = torch.Generator().manual_seed(0)
    places = itertools.cycle(
        torch.randint(len(table), (32, _PAIRS), generator=generator).sort(dim=1).values
    )
    rows = table.index_select(0, next(places))
    read_s = seconds(lambda: table.index_select(0, next(places)), OUTER)
    write_s = seconds(lambda: table.index_copy_(0, next(places), rows), OUTER)
    return read_s / _PAIRS, write_s / _PAIRS


def _elements() -> tuple[float, float, float]:
    scores = torch.randn(512, TOP_COLUMNS)
    exp_s = seconds(lambda: torch.sigmoid(scores), OUTER) / scores.numel()
    softplus_s = seconds(lambda: nn.functional.softplus(scores), OUTER) / scores.numel()
    return exp_s, softplus_s, seconds(lambda: scores.topk(TOP_KEPT, dim=1)) / scores.numel()


def _sort() -> float:
    values = np.random.default_rng(0).integers(1 << 20, size=SORTED)
    return seconds(lambda: np.argsort(values, kind="stable")) / len(values)


def _random() -> float:
    return seconds(lambda: draws.keep_mask(0, "probe", 0, 0, 512, 256, 0.5)) / (512 * 256)


def _calls() -> float:
    """A chain of different operations on a few numbers, forward and backward, by their number."""
    values, table = torch.ones(8, 8, requires_grad=True), torch.ones(64, 8)
    ids, ends = torch.arange(8), torch.arange(8)

    def chain() -> None:
        rows = table.index_select(0, ids) * values
        scores = (rows @ values.T + 0.5).index_select(1, ids)
        picked = nn.functional.embedding_bag(ids, rows, ends, mode="sum")
        order = torch.argsort(ids, stable=True)
        loss = (
            nn.functional.softplus(scores).sum() + torch.cat([picked, rows[order]]).square().sum()
        )
        loss.backward()
        table.index_copy_(0, ids, rows.detach())
        torch.bincount(ids, minlength=8).cumsum(0)

    return seconds(chain) / 40  # 17 forward, some more backward


def _disk() -> float:
    content = os.urandom(1 << 20) * 32
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "file"

        def write() -> None:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            hashlib.sha256(content).digest()

        start = time.perf_counter()
        write()
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
    build = 2.0 * 4096 * 8192 * 64 / seconds(lambda: flat.search(rows[:8192], 1))
    return build, 2.0 * 512 * len(rows) * 64 / seconds(lambda: exact_search(rows, rows[:512], 50))


def measure_encoder(shape: EncoderShape, pairs: int, residual: bool) -> EncoderRate:
    """Forward and backward passes of few texts, of many, and of fewer that are longer: three numbers are found."""
    encoder: Encoder
    if shape.is_static:
        vocab = shape.table_rows - pairs
        encoder = StaticEncoder(torch.ones(vocab), shape.dim, residual, 0.0, pairs).float()
        few_tokens, many_tokens = 2048, 32_768
    else:
        encoder, vocab = _random_transformer(shape)
        few_tokens, many_tokens = 256, 1024
    share_V = 1 / (np.arange(vocab) + 2.7)
    generator = np.random.default_rng(0)

    def texts(number: int, width: int) -> Ragged:
        values = generator.choice(vocab, number, p=share_V / share_V.sum())
        return Ragged(values.astype(np.int64), np.arange(0, number + 1, width))

    def train(batch: Ragged) -> None:
        for parameter in encoder.parameters():
            parameter.grad = None
        encoder(batch).sum().backward()

    def plain(batch: Ragged) -> None:
        with torch.no_grad():
            encoder(batch)

    short, long = 8, 32
    batches = texts(few_tokens, short), texts(many_tokens, short), texts(many_tokens, long)
    few_s, short_s, long_s = (seconds(partial(train, batch), OUTER) for batch in batches)
    plain_short_s, plain_long_s = (seconds(partial(plain, batch), OUTER) for batch in batches[1:])
    fewer = many_tokens / short - many_tokens / long
    text_s, plain_text_s = (
        max(0.0, short_s - long_s) / fewer,
        max(0.0, plain_short_s - plain_long_s) / fewer,
    )
    each_s = max(short_s - few_s, 0.5 * short_s) / (
        many_tokens - few_tokens
    )  # of a token, with its share of a text
    token_s = max(each_s - text_s / short, 0.1 * each_s)
    return EncoderRate(
        call_s=max(0.0, few_s - few_tokens * each_s),
        text_s=text_s,
        token_s=token_s,
        plain_text_s=plain_text_s,
        plain_token_s=max(plain_short_s - many_tokens / short * plain_text_s, 0.0) / many_tokens,
    )


def _random_transformer(shape: EncoderShape) -> tuple[Encoder, int]:
    """A transformer of this shape with random weights."""
    import transformers

    from xmcray.nn.transformer import TransformerEncoder

    settings = transformer_settings(shape.name)
    config = transformers.AutoConfig.for_model(
        settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"}
    )
    config._attn_implementation = "sdpa"
    model = transformers.AutoModel.from_config(config)
    projection = (
        None if shape.dim == shape.hidden else nn.Linear(shape.hidden, shape.dim, bias=False)
    )
    encoder = TransformerEncoder(model, None, projection=projection)
    if shape.frozen:
        encoder.freeze()
    return encoder, int(model.get_input_embeddings().num_embeddings)


def _process_bytes(also: str) -> int:
    """Resident memory of a worker that has imported what it needs and made a first small step, at its largest.

    Not by getrusage: what that reports begins with the memory of the process that started this one.
    """
    code = "\n".join([_FIRST_STEP, also, "print(open('/proc/self/status').read())"])
    status = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _collectives() -> tuple[float, float, float]:
    """Seconds of a small all-gather, what it takes longer after work, and bytes per second that a rank sends."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from xmcray.planning import probe; probe.rank_times(int(sys.argv[1]), sys.argv[2])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), folder], stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    small, large, work, small_after_work = map(float, outputs[0].split())
    return small, max(0.0, small_after_work - work - small), (1 << 23) / max(large - small, 1e-9)


def rank_times(rank: int, folder: str) -> None:
    """One of two ranks: prints the seconds of a small and a large all-gather, of work, and of work and a small one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    scores = partial(
        torch.mm, torch.randn(512, 256), torch.randn(256, 2048), out=torch.empty(512, 2048)
    )
    small, large = (
        partial(dist.all_gather_into_tensor, torch.zeros(2 * size), torch.zeros(size))
        for size in (1 << 4, 1 << 21)
    )
    found = []
    for calls, count in (([small], 20), ([large], 10), ([scores], 60), ([scores, small], 60)):
        for call in [*calls, small]:
            call()
        start = time.perf_counter()
        for call in calls * count:
            call()
        found.append((time.perf_counter() - start) / count)
    print(*found)
    dist.destroy_process_group()


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def main(out: Path, asked: Path) -> None:
    """The measuring process: adds what is asked for to the rates in `out`, or begins with those of the machine."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rates = load_rates(out) if out.exists() else measure_machine()
    body = json.loads(asked.read_text(encoding="utf-8"))
    shape = EncoderShape(**body["shape"])
    measured = measure_encoder(shape, body["pairs"], body["residual"])
    replace(rates, encoders={**rates.encoders, shape.key: measured}).save(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
