"""The classifier's part of a step on a GPU against the roofline: LF-AmazonTitles-1.3M's shape, at least 0.6 of it.

    python benchmarks/roofline.py                     # on a machine with a CUDA device
    python benchmarks/roofline.py --quick --anyway    # does it work? also on a CPU

Needs torch, numpy and PyYAML, neither Ray nor FAISS: it can be carried to any machine. A step reads the distinct rows
of positives, hard and uniform negatives, scores them, and updates them by SGD with momentum; which rows those are is
drawn on the host beforehand. The roofline is the larger of two times: what has to be read and written at least (rows
and momentum once each way, scores of the pool twice each way) at the bandwidth of a copy, and the products at the rate
of a large one; both rates are measured on the device.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import cuda_device, new_parser

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package is not installed
from xmcray.losses.bce import sampled_bce
from xmcray.losses.pairs import pair_scores
from xmcray.negatives.sampler import Candidates, gather_candidates
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

LIMIT = 0.6
WARM = 10
STEPS = 50
DRAWS = 8


@dataclass(frozen=True)
class Size:
    """L, D, G, and labels of a query: `preset:astra/lf-amazontitles-1.3m` on eight workers, of which this is one."""

    labels: int = 1_305_265
    dim: int = 768
    queries: int = 1024
    positives: int = 22
    hard: int = 240
    uniform: int = 1600
    ranks: int = 8


QUICK = Size(labels=13_053, dim=64, queries=64, positives=4, hard=20, uniform=200)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step takes.

    Attributes:
        seconds: median.
        distinct_rows: rows of the classifier that it reads and updates.
        num_bytes: that it has to move.
        flop: floating-point operations.
    """

    seconds: float
    distinct_rows: float
    num_bytes: float
    flop: float


def main() -> None:
    parser = new_parser(__doc__)
    ranks_help = "workers that share the labels"
    anyway_help = "without a CUDA device, where it says little"
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help=ranks_help)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the labels, few steps")
    parser.add_argument("--out", type=Path, help="also write the table there")
    parser.add_argument("--anyway", action="store_true", help=anyway_help)
    arguments = parser.parse_args()
    device = cuda_device(arguments.anyway)
    copy_bytes_s, product_flop_s = ceilings(device, arguments.quick)
    lines = [
        "| workers | rows of this one | distinct rows | step, ms | roofline, ms | share | held |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in arguments.ranks:
        size = dataclasses.replace(QUICK if arguments.quick else Size(), ranks=ranks)
        step = measure(size, device, 3 if arguments.quick else STEPS)
        roof_s = max(step.num_bytes / copy_bytes_s, step.flop / product_flop_s)
        share = roof_s / step.seconds
        cells = [
            f"{ranks}",
            f"{math.ceil(size.labels / ranks):,}",
            f"{step.distinct_rows:,.0f}",
            f"{1e3 * step.seconds:.3f}",
            f"{1e3 * roof_s:.3f}",
            f"{share:.2f}",
            "yes" if share >= LIMIT else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    lines += [
        "",
        f"- copy {copy_bytes_s / 1e9:,.0f} GB/s, product {product_flop_s / 1e12:.1f} Tflop/s in float32, both measured;"
        f" at least {LIMIT} of the roofline is wanted",
        f"- {name}; torch {torch.__version__}; {datetime.date.today()}; medians of {STEPS} steps",
    ]
    table = "\n".join(lines)
    print(table)
    if arguments.out:
        page = f"# The classifier's step on a GPU\n\n{table}\n"
        arguments.out.write_text(page, encoding="utf-8")


def ceilings(device: torch.device, quick: bool) -> tuple[float, float]:
    """Bytes per second of a large copy, reads and writes counted, and flop/s of a large product."""
    num_bytes = 1 << (22 if quick else 30)
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    side = 256 if quick else 8192
    matrix = torch.randn(side, side, device=device)
    out = torch.empty(side, side, device=device)
    copy_s = median_s(lambda: target.copy_(source), device, 10)
    product_s = median_s(lambda: torch.mm(matrix, matrix, out=out), device, 10)
    return 2 * num_bytes / copy_s, 2 * side**3 / product_s


def measure(size: Size, device: torch.device, steps: int) -> Step:
    """Trains the rows that one rank owns for some steps."""
    part = LabelPartition(size.labels, size.ranks, 0)
    weight_SD = torch.randn(part.size, size.dim, device=device) * 0.02
    table = RowTable(weight_SD, RowOptimConfig(kind="sgd", momentum=0.9))
    batches = [draw(size, part, number).to(device) for number in range(DRAWS)]
    query_GD = torch.randn(size.queries, size.dim, device=device)
    query_GD.div_(size.dim**0.5).requires_grad_()
    next_batch = itertools.cycle(batches)

    def step() -> None:
        batch = next(next_batch)
        query_GD.grad = None
        row_UD = table.rows(batch.row_ids)
        pair_score_P = pair_scores(query_GD, row_UD, batch.pair_query, batch.pair_row)
        pool_score_GC = query_GD @ row_UD.index_select(0, batch.pool_rows).T
        total = sampled_bce(
            pair_score_P,
            batch.pair_is_positive,
            None,
            pool_score_GC,
            batch.skip_query,
            batch.skip_column,
            size.labels / size.uniform,
        )
        (total / len(query_GD)).backward()
        table.update(0.01)

    seconds = median_s(step, device, steps)
    num_rows = float(np.mean([len(batch.row_ids) for batch in batches]))
    num_pooled = float(np.mean([len(batch.pool_rows) for batch in batches]))
    num_pairs = float(np.mean([len(batch.pair_row) for batch in batches]))
    num_pool_scores = num_pooled * size.queries
    return Step(
        seconds=seconds,
        distinct_rows=num_rows,
        # float32: rows and their momentum once each way, scores of the pool twice each way.
        num_bytes=num_rows * size.dim * 4 * 4 + num_pool_scores * 4 * 4,
        # A score takes 2 D operations, and as many for the gradient by each of its two vectors.
        flop=3 * 2 * size.dim * (num_pool_scores + num_pairs),
    )


def draw(size: Size, part: LabelPartition, number: int) -> Candidates:
    """The candidates of one step of one rank; all labels are equally likely."""
    generator = np.random.default_rng(number)
    labels = generator.integers(size.labels, size=(size.queries, size.positives + size.hard))
    positives = []
    hard = []
    for row in labels:
        positives.append(np.unique(row[: size.positives]))
        hard.append(np.setdiff1d(row[size.positives :], row[: size.positives]))
    pool = np.sort(generator.choice(size.labels, size.uniform, replace=False))
    empty = Ragged.empty(size.queries)
    ids = np.arange(size.queries, dtype=np.int64)
    batch = Batch(0, 0, ids, 0, size.queries, empty, Ragged.from_rows(positives), empty)
    return gather_candidates(batch, Ragged.from_rows(hard), pool, batch.positives, None, part)


def median_s(function: Callable[[], object], device: torch.device, number: int) -> float:
    """Median seconds of a call, waiting for the device."""
    seconds = []
    for _ in range(WARM + number):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[WARM:]))


if __name__ == "__main__":
    main()
