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

import datetime
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import new_parser

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


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 8], help="workers that share the labels"
    )
    parser.add_argument("--quick", action="store_true", help="a hundredth of the labels, few steps")
    parser.add_argument("--out", type=Path, help="also write the table there")
    parser.add_argument(
        "--anyway", action="store_true", help="without a CUDA device, where it says little"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.anyway:
        print(
            "error: no CUDA device found, expected one; run it on a GPU machine or pass --anyway",
            file=sys.stderr,
        )
        raise SystemExit(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copy_bytes_s, product_flop_s = ceilings(device, arguments.quick)
    lines = [
        "| workers | rows of this one | distinct rows | step, ms | roofline, ms | share | held |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in arguments.ranks:
        size = Size(ranks=ranks)
        if arguments.quick:
            size = Size(
                labels=13_053, dim=64, queries=64, positives=4, hard=20, uniform=200, ranks=ranks
            )
        step_s, met, bytes_, flop = measure(size, device, 3 if arguments.quick else STEPS)
        roof_s = max(bytes_ / copy_bytes_s, flop / product_flop_s)
        share = roof_s / step_s
        held = "yes" if share >= LIMIT else "no"
        rows = (
            f"{-(-size.labels // ranks):,} | {met:,.0f} | {1e3 * step_s:.3f} | {1e3 * roof_s:.3f}"
        )
        lines.append(f"| {ranks} | {rows} | {share:.2f} | {held} |")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    lines += [
        "",
        f"- copy {copy_bytes_s / 1e9:,.0f} GB/s, product {product_flop_s / 1e12:.1f} Tflop/s in float32, both measured;"
        f" at least {LIMIT} of the roofline is wanted",
        f"- {name}; torch {torch.__version__}; {datetime.date.today()}; medians of {STEPS} steps",
    ]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text(
            "# The classifier's step on a GPU\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


def ceilings(device: torch.device, quick: bool) -> tuple[float, float]:
    """Bytes per second of a large copy, reads and writes counted, and flop/s of a large product."""
    size = 1 << (22 if quick else 30)
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    side = 256 if quick else 8192
    a = torch.randn(side, side, device=device)
    out = torch.empty(side, side, device=device)
    copy_s = median_s(lambda: target.copy_(source), device, 10)
    return 2 * size / copy_s, 2 * side**3 / median_s(lambda: torch.mm(a, a, out=out), device, 10)


def measure(size: Size, device: torch.device, steps: int) -> tuple[float, float, float, float]:
    """Seconds of a step, distinct rows of it, bytes that it has to move, and floating-point operations."""
    part = LabelPartition(size.labels, size.ranks, 0)
    table = RowTable(
        torch.randn(part.size, size.dim, device=device) * 0.02,
        RowOptimConfig(kind="sgd", momentum=0.9),
    )
    drawn = [draw(size, part, number).to(device) for number in range(DRAWS)]
    query_GD = (
        torch.randn(size.queries, size.dim, device=device).div_(size.dim**0.5).requires_grad_()
    )
    turn = iter(range(10**9))

    def step() -> None:
        found = drawn[next(turn) % DRAWS]
        query_GD.grad = None
        row_UD = table.rows(found.row_ids)
        pair_score_P = pair_scores(query_GD, row_UD, found.pair_query, found.pair_row)
        pool_score_GC = query_GD @ row_UD.index_select(0, found.pool_rows).T
        skip = found.skip_query, found.skip_column
        weight = size.labels / size.uniform
        total = sampled_bce(
            pair_score_P, found.pair_is_positive, None, pool_score_GC, *skip, weight
        )
        (total / len(query_GD)).backward()
        table.update(0.01)

    seconds = median_s(step, device, steps)
    met = float(np.mean([len(found.row_ids) for found in drawn]))
    pool = float(np.mean([len(found.pool_rows) for found in drawn])) * size.queries
    pairs = float(np.mean([len(found.pair_row) for found in drawn]))
    return seconds, met, met * size.dim * 4 * 4 + pool * 4 * 4, 3 * 2 * size.dim * (pool + pairs)


def draw(size: Size, part: LabelPartition, number: int) -> Candidates:
    """What a step of one rank meets; labels are drawn alike."""
    generator = np.random.default_rng(number)
    labels = generator.integers(size.labels, size=(size.queries, size.positives + size.hard))
    positives = [np.unique(row[: size.positives]) for row in labels]
    hard = [np.setdiff1d(row[size.positives :], row[: size.positives]) for row in labels]
    pool = np.sort(generator.choice(size.labels, size.uniform, replace=False))
    empty = Ragged.empty(size.queries)
    ids = np.arange(size.queries, dtype=np.int64)
    batch = Batch(0, 0, ids, 0, size.queries, empty, Ragged.from_rows(positives), empty)
    return gather_candidates(batch, Ragged.from_rows(hard), pool, batch.positives, None, part)


def median_s(function: Callable[[], object], device: torch.device, number: int) -> float:
    """Median seconds of a call, waiting for the device."""
    found = []
    for i in range(WARM + number):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARM:
            found.append(time.perf_counter() - start)
    return float(np.median(found))


if __name__ == "__main__":
    main()
