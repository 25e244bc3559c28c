"""The classifier's part of a training step must cost the same for 10^4 and for 10^7 labels; one thread, one run.

    python benchmarks/classifier_step.py            # about 10 GB of memory, a quarter of an hour
    python benchmarks/classifier_step.py --quick    # does it work?

A step is what ASTRA does between encoder and encoder: draw the pool, gather the candidates, read their rows, score,
loss, gradients of rows and of query vectors, SGD with momentum. 256 queries with 2 positives and 50 hard negatives
each, 2,048 uniform labels; ids are uniform over all labels, the worst case for the memory. The sizes take turns in
blocks of steps, so that a disturbance meets all of them; the first steps of a block, which bring its rows back into
the caches, do not count.

The limit of the machine, for 10^5 labels and D = 256: a copy of as many bytes as a step touches, and matrix products of
as many operations, timed in each round.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray import draws
from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import Pairs, pair_scores
from xmcray.negatives.sampler import gather_candidates
from xmcray.nn.classifier import classifier_rows
from xmcray.nn.row_table import RowOptimConfig
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

QUERIES = 256
POOL = 2048
HARD = 50
POSITIVES = 2
LR = 0.05
MOMENTUM = 0.9
OFFSET = -6.0
WARM_UP = 2  # steps of a block that do not count
# The case that is compared with the limit of the machine.
LIMIT_LABELS = 10**5
LIMIT_DIM = 256
LIMIT_GOAL = 1.8
# Numbers of labels by width.
SIZES = {256: [10**4, 10**5, 10**6], 64: [10**4, 10**5, 10**6, 10**7]}
QUICK_SIZES = {256: [10**4, 10**5], 64: [10**4, 10**5]}
# (labels, width, limit): how many times the step of 10^5 labels a step may take.
GROWTH_LIMITS = ((10**6, 256, 1.6), (10**7, 64, 2.5))
# As workers are started; malloc and OpenMP read them once, when the process begins.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
}
PHASES = ("candidates", "read rows", "scores and loss", "gradients", "update")
HEADER = [
    "labels",
    "D",
    "distinct rows",
    "step, ms",
    *[f"{name}, ms" for name in PHASES],
    "touched, MB",
]


@dataclass
class Case:
    """One number of labels at one width, with its measured steps.

    Attributes:
        num_labels: rows of the classifier.
        dim: their width.
        clock: of wall time, or time.process_time, which other processes do not disturb.
        seconds: time of each measured step.
        phases: the same by part, in the order of PHASES.
        distinct: number of rows that each step met.
    """

    num_labels: int
    dim: int
    clock: Callable[[], float] = time.perf_counter
    seconds: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)
    distinct: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.part = LabelPartition(self.num_labels, 1, 0)
        optimiser = RowOptimConfig(kind="sgd", lr=LR, momentum=MOMENTUM)
        self.table = classifier_rows(self.part, self.dim, optimiser, seed=0)
        self.table.state["momentum"].fill_(1e-9)  # every page is there, as after the first epochs
        self.step = 0

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def phase_medians(self) -> list[float]:
        """Seconds of each of PHASES."""
        return [float(seconds) for seconds in np.median(self.phases, axis=0)]

    @property
    def bytes_touched(self) -> float:
        """Of the model: the distinct rows' weight and state, each read and written once, and the pool's scores."""
        num_rows = float(np.median(self.distinct))
        bytes_of_float = 4
        # Weight and state, each read and written.
        row_bytes = num_rows * self.dim * bytes_of_float * 4
        # Scores and their gradients, each written and read.
        score_bytes = QUERIES * POOL * bytes_of_float * 4
        return row_bytes + score_bytes

    def inputs(self) -> tuple[Batch, Ragged]:
        """A batch and its hard negatives."""
        generator = draws.generator(0, "benchmark", self.step)
        labels = generator.integers(self.num_labels, size=(QUERIES, POSITIVES + HARD))
        positives = [np.unique(row[:POSITIVES]) for row in labels]
        hard = [np.setdiff1d(row[POSITIVES:], row[:POSITIVES]) for row in labels]
        query_ids = np.arange(QUERIES, dtype=np.int64)
        no_tokens = Ragged.empty(QUERIES)
        positive_ids = Ragged.from_rows(positives)
        batch = Batch(0, self.step, query_ids, 0, QUERIES, no_tokens, positive_ids, no_tokens)
        return batch, Ragged.from_rows(hard)

    def query(self) -> torch.Tensor:
        """Random query vectors of about unit length, which collect a gradient."""
        generator = torch.Generator().manual_seed(self.step)
        query_GD = torch.randn(QUERIES, self.dim, generator=generator)
        query_GD /= math.sqrt(self.dim)
        return query_GD.requires_grad_()

    def sampled(self, keep: bool) -> None:
        """One step on sampled labels."""
        batch, hard = self.inputs()
        query_GD = self.query()
        times = [self.clock()]
        pool = draws.uniform_labels(0, self.step, self.num_labels, POOL)
        candidates = gather_candidates(batch, hard, pool, batch.positives, None, self.part)
        times.append(self.clock())
        row_UD = self.read(candidates.row_ids)
        times.append(self.clock())
        pair_score_P = pair_scores(query_GD, row_UD, candidates.pair_query, candidates.pair_row)
        pair_score_P = pair_score_P + OFFSET
        pool_score_GC = query_GD @ row_UD.index_select(0, candidates.pool_rows).T + OFFSET
        total = sampled_bce(
            pair_score_P,
            candidates.pair_is_positive,
            None,
            pool_score_GC,
            candidates.skip_query,
            candidates.skip_column,
            self.num_labels / POOL,
        )
        times.append(self.clock())
        (total / len(query_GD)).backward()
        times.append(self.clock())
        self.update(candidates.row_ids, row_UD)
        times.append(self.clock())
        self._finish(query_GD, times, keep)
        self.distinct.append(len(candidates.row_ids))

    def read(self, row_ids: torch.Tensor) -> torch.Tensor:
        """The rows of a step, [U, D], which collect a gradient."""
        return self.table.rows(row_ids)

    def update(self, row_ids: torch.Tensor, row_UD: torch.Tensor) -> None:
        """Updates the rows that `read` returned."""
        self.table.update(LR)

    def exact(self, keep: bool) -> None:
        """One step on all labels."""
        batch, _ = self.inputs()
        query_GD = self.query()
        start = self.clock()
        row_SD = self.table.rows(None)
        positives = batch.positives
        pairs = Pairs(torch.from_numpy(positives.row_ids), torch.from_numpy(positives.values))
        none = torch.empty(0, dtype=torch.int64)
        total = full_bce(query_GD, row_SD, pairs, Pairs(none, none), logit_prior=OFFSET)
        (total / len(query_GD)).backward()
        self.table.update(LR)
        self._finish(query_GD, [start, self.clock()], keep)

    def _finish(self, query_GD: torch.Tensor, times: list[float], keep: bool) -> None:
        assert query_GD.grad is not None
        self.step += 1
        if keep:
            self.seconds.append(times[-1] - times[0])
            self.phases.append(list(np.diff(times)))


@dataclass
class MachineLimit:
    """What a step of a case cannot do without, done at once.

    Attributes:
        case: the case that is compared with it.
        copy_s: time of each copy.
        product_s: time of each round of products.
    """

    case: Case
    copy_s: list[float] = field(default_factory=list)
    product_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        columns = POOL + POSITIVES + HARD
        self.query_GD = torch.randn(QUERIES, self.case.dim)
        self.row_CD = torch.randn(columns, self.case.dim)
        self.score_GC = torch.empty(QUERIES, columns)
        self.query_gradient_GD = torch.empty_like(self.query_GD)
        self.row_gradient_CD = torch.empty_like(self.row_CD)
        self.source = torch.empty(0)

    @property
    def seconds(self) -> float:
        return float(np.median(self.copy_s) + np.median(self.product_s))

    def measure(self) -> None:
        """One copy, and one product for the scores and each of the two gradients."""
        if not len(self.source):
            # A copy touches each byte twice: it is read here and written there.
            self.source = torch.ones(int(self.case.bytes_touched) // 2 // 4)
            self.target = torch.ones_like(self.source)
        clock = self.case.clock
        start = clock()
        self.target.copy_(self.source)
        copied = clock()
        torch.mm(self.query_GD, self.row_CD.T, out=self.score_GC)
        torch.mm(self.score_GC, self.row_CD, out=self.query_gradient_GD)
        torch.mm(self.score_GC.T, self.query_GD, out=self.row_gradient_CD)
        self.product_s.append(clock() - copied)
        self.copy_s.append(copied - start)

    def sentence(self) -> str:
        """How far the step is from the limit."""
        ratio = self.case.median / self.seconds
        copy_ms = 1e3 * float(np.median(self.copy_s))
        product_ms = 1e3 * float(np.median(self.product_s))
        return (
            f"{self.case.num_labels:,} labels, D = {self.case.dim}: {ratio:.2f} x the limit of the machine"
            f" (goal {LIMIT_GOAL}), which is {copy_ms:.2f} ms for a copy of the touched bytes and {product_ms:.2f} ms"
            " for matrix products of as many operations as the scores and both gradients take"
        )


def main() -> None:
    parser = new_parser(__doc__, out="classifier_step.md", anyway=True)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each size")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a block")
    parser.add_argument("--exact-steps", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="three small sizes, a few steps, printed only"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 2
        arguments.steps = 3
        arguments.exact_steps = 1
        arguments.out = Path(os.devnull)
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    if not ENVIRONMENT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)
    cases: dict[tuple[int, int], Case] = {}
    for dim, sizes in (QUICK_SIZES if arguments.quick else SIZES).items():
        for num_labels in sizes:
            cases[num_labels, dim] = Case(num_labels, dim)
    limit = MachineLimit(cases[LIMIT_LABELS, LIMIT_DIM])
    for number in range(arguments.rounds):
        for case in cases.values():
            for step in range(WARM_UP + arguments.steps):
                case.sampled(keep=step >= WARM_UP)
        for _ in range(arguments.steps):
            limit.measure()
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    table = [row(case) for case in cases.values()]
    notes = [*growth_notes(cases), *settings_notes(cases), limit.sentence()]

    largest = max((case for case in cases.values() if case.dim == 256), key=lambda c: c.num_labels)
    sampled_s = largest.median
    largest.seconds = []
    for step in range(1 + arguments.exact_steps):
        largest.exact(keep=step > 0)
    exact_s = largest.median
    labels = f"{largest.num_labels:,}"
    no_phases = ["-"] * len(PHASES)
    table.append([labels, largest.dim, f"{labels} (all)", exact_s * 1e3, *no_phases, "-"])
    notes.append(
        f"all labels instead of a sample: {exact_s / sampled_s:.0f} x slower at {labels} (at least 50 at 1,000,000)"
    )
    write_table(arguments.out, "The classifier's part of a step", HEADER, table, [*notes, load])


def row(case: Case) -> list[object]:
    phases_ms = [1e3 * seconds for seconds in case.phase_medians]
    return [
        f"{case.num_labels:,}",
        case.dim,
        f"{np.median(case.distinct):,.0f}",
        case.median * 1e3,
        *phases_ms,
        case.bytes_touched / 1e6,
    ]


def growth_notes(cases: dict[tuple[int, int], Case]) -> list[str]:
    """Sentences about how the time grows with the number of labels, each with its limit."""
    lines: list[str] = []
    for dim in sorted({case.dim for case in cases.values()}, reverse=True):
        sizes = [case.num_labels for case in cases.values() if case.dim == dim]
        seconds = [case.median for case in cases.values() if case.dim == dim]
        line = (
            f"D = {dim}: time grows as L^{exponent(sizes, seconds):.3f} from {sizes[0]:,} to {sizes[-1]:,} labels"
            " (limit 0.2)"
        )
        if len(sizes) > 2:
            line += (
                f"; as L^{exponent(sizes[1:], seconds[1:]):.3f} from {sizes[1]:,} on, where every size has the same"
                " number of rows"
            )
        lines.append(line)
    for num_labels, dim, limit in GROWTH_LIMITS:
        if (num_labels, dim) in cases:
            ratio = cases[num_labels, dim].median / cases[10**5, dim].median
            lines.append(
                f"D = {dim}: {num_labels:,} labels take {ratio:.2f} x the time of 100,000 (limit {limit})"
            )
    return lines


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The power of the number of labels that fits the times best."""
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


def settings_notes(cases: dict[tuple[int, int], Case]) -> list[str]:
    first_case = next(iter(cases.values()))
    return [
        f"medians of {len(first_case.seconds)} steps; {QUERIES} queries, {POSITIVES} positives and"
        f" {HARD} hard negatives each, {POOL:,} uniform labels; SGD with momentum; 1 thread",
        "touched: distinct rows x D x 4 bytes x (weight, state) x (read, write), and the pool's scores",
        "10,000 labels hold fewer distinct rows than a step asks for, which flatters that size, not the others",
    ]


if __name__ == "__main__":
    main()
