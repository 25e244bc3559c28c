"""Where the time of a training step goes, for each method: encoder, loss, backward, optimiser, and all the rest.

    python benchmarks/step_profile.py                                      # the embedded sample
    python benchmarks/step_profile.py --method prime --data cdnjs-keywords
    python benchmarks/step_profile.py --minilm --out step_profile_minilm.md   # fine-tunes a transformer

Each method trains in this process with its preset (of the sample, where a set has none of the method's own), and the
functions of the library are wrapped from outside: a phase has the time within its functions, without that of phases
called in them. What is averaged is one full cycle of refreshes, from the first epoch with hard negatives to the next
version: hard negatives are in use, query vectors are collected and the index is built while training goes on.
Checkpoints, validation and evaluation are no part of a step.

With --minilm the encoder is MiniLM, with the settings of minilm.py. A few steps of small batches of short texts, without
hard negatives, are averaged, because each takes a second or more.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data_sets
import minilm
import numpy as np
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray import draws, settings_files
from xmcray.data.batches import BatchSampler, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample
from xmcray.methods import rae
from xmcray.methods.base import MethodContext
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.registry import method_entry, method_names
from xmcray.negatives import sampler
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.negatives.shortlists import ShortlistFeed
from xmcray.nn.row_table import RowTable
from xmcray.training import loop as loops
from xmcray.training.optim import EncoderOptimizer
from xmcray.training.prefetch import BatchPrefetcher
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.training.step import Embedder, Stepper

COMPUTING = ("encoder", "scores and loss", "backward", "optimiser")
BESIDE = ("batch", "tokens", "draws", "label pool", "negatives", "log", "rest")
LIMIT = 0.1  # of a step, for each phase that is not computing
BUILDING = ("batch", "tokens", "draws", "label pool")
BUILDING_LIMIT = 0.02  # of a step, for these phases together, where a core is free to build ahead
WARM_STEPS = 20
MODEL = data_sets.packaged_minilm()
FINE_TUNED = ("encoder.dim=0", "optim.batch_size=32", "optim.lr=1e-4", "negatives.hard=0")
FINE_TUNED_STEPS = 20


class EnoughStepsError(Exception):
    """Ends a training whose last measured step is done."""


class Clock:
    """Seconds by phase; time within a phase called from another counts for the inner one only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread = threading.get_ident()
        self.seconds: Counter[str] = Counter()
        self._phase = "rest"
        self._last = time.perf_counter()

    def switch(self, phase: str) -> str:
        """Enters a phase and returns the one before."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._last
        before = self._phase
        self._phase = phase
        self._last = now
        return before

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:  # an index is built in another one
                return function(*args, **kwargs)
            before = self.switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return run

    def watch(self, owner: Any, names: str, phase: str) -> None:
        """Wraps methods of a class, or functions of a module wherever they were imported to."""
        for name in names.split():
            function = getattr(owner, name)
            timed = self.timed(function, phase)
            if isinstance(owner, type):
                setattr(
                    owner, name, staticmethod(timed) if hasattr(function, "__self__") else timed
                )
                continue
            for module in [m for n, m in list(sys.modules.items()) if n.startswith("xmcray.")]:
                if getattr(module, name, None) is function:
                    setattr(module, name, timed)


def watch_all(clock: Clock) -> None:
    # Both run in a thread of their own; what counts is how long training waits for it.
    clock.watch(BatchPrefetcher, "batch", "batch")
    clock.watch(BatchSampler, "batch", "batch")
    clock.watch(TrainingData, "tokens", "tokens")
    clock.watch(draws, "generator torch_seed uniform_labels keep_mask", "draws")
    clock.watch(sampler, "draw_from_rows capped_positives", "draws")
    clock.watch(MethodContext, "draw_positives draw_hard_negatives", "draws")
    clock.watch(LabelPool, "of everything pairs count", "label pool")
    clock.watch(sampler, "gather_candidates", "label pool")
    clock.watch(rae, "sharing_queries", "label pool")
    clock.watch(Embedder, "__call__", "encoder")
    for name in method_names():
        clock.watch(method_entry(name).factory, "loss after_step", "scores and loss")
    clock.watch(torch.Tensor, "backward", "backward")
    clock.watch(Embedder, "finish_backward", "backward")
    clock.watch(EncoderOptimizer, "step zero_grad", "optimiser")
    clock.watch(RowTable, "update", "optimiser")
    clock.watch(ShortlistFeed, "before_step after_step", "negatives")
    clock.watch(loops._Window, "add", "log")
    clock.watch(loops.Loop, "_record", "log")
    clock.watch(Stepper, "step", "rest")


def main() -> None:
    parser = new_parser(__doc__, out="step_profile.md", threads=1, anyway=True)
    parser.add_argument("--data", nargs="+", default=["sample"], metavar="CORPUS")
    parser.add_argument("--method", nargs="+", default=method_names(), choices=method_names())
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the presets"
    )
    parser.add_argument(
        "--minilm", action="store_true", help="a transformer in place of the static encoder"
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    clock = Clock(torch.device("cuda" if arguments.device == "gpu" else "cpu"))
    watch_all(clock)
    rows = []
    notes = []
    for name in arguments.data:
        corpus = data_sets.corpus(name)
        if arguments.minilm and corpus:
            corpus = short_texts(name)
        for method in arguments.method if corpus else []:
            config, preset = settings(method, name, arguments)
            steps, share = profile(corpus, config, clock)
            worst = max(BESIDE, key=lambda phase: share[phase])
            rows.append(
                [
                    name,
                    method,
                    f"{1000 * steps.mean():.1f}",
                    *(f"{100 * share[p]:.1f}" for p in COMPUTING),
                ]
            )
            rows[-1] += [
                *(f"{100 * share[p]:.1f}" for p in BESIDE),
                f"{worst} {100 * share[worst]:.1f}",
            ]
            building = sum(share[phase] for phase in BUILDING)
            rows[-1].append(f"{100 * building:.1f}")
            held = share[worst] <= LIMIT and building <= BUILDING_LIMIT
            label = "held" if held else "broken"
            notes.append(
                f"{name}, {method}: {len(steps)} steps of {config.optim.batch_size} queries, {preset}; {label}"
            )
            print(" ".join(map(str, rows[-1])), flush=True)
    encoder = "static encoder, means over a cycle of refreshes"
    if arguments.minilm:
        encoder = f"MiniLM, means over {FINE_TUNED_STEPS} steps, {' '.join(FINE_TUNED)}"
    header = [
        "set",
        "method",
        "step, ms",
        *(f"{p}, %" for p in (*COMPUTING, *BESIDE)),
        "largest apart from computing",
        "building batches, %",
    ]
    notes += [
        f"limits: no phase but {', '.join(COMPUTING)} above {100 * LIMIT:.0f} %, building batches at most"
        f" {100 * BUILDING_LIMIT:.0f} % ({', '.join(BUILDING)}, as far as training does it or waits for it)",
        "batch: the wait for batches that are built ahead; draws: positives, hard and uniform negatives, dropout masks;"
        " label pool: which labels are columns, and which pairs are positive; log: the loss as a number, records",
        f"{encoder}, {arguments.device}, {arguments.threads} thread(s)",
        load,
    ]
    write_table(arguments.out, "Where the time of a step goes", header, rows, notes)


def short_texts(name: str) -> Corpus:
    """A set in MiniLM's tokens, 32 of each text."""
    raw = write_sample if name == "sample" else data_sets.DATA / name
    return data_sets.prepared(f"{name}-minilm-32", raw, tokenizer=MODEL, max_len=32)


def settings(method: str, name: str, arguments: argparse.Namespace) -> tuple[RunConfig, str]:
    """The preset of a set, else the method's of the sample, else its defaults with ASTRA's encoder of the sample."""
    overrides = arguments.override
    preset_name = next(
        (p for p in (f"{method}/{name}", f"{method}/sample") if p in settings_files.presets()), ""
    )
    if arguments.minilm:
        described = "settings of minilm.py"
        values: dict[str, Any] = {"encoder": {"name": MODEL}}
        overrides = [*FINE_TUNED, *minilm.FEW_LABELS[method], *overrides]
    elif preset_name:
        described = f"preset {preset_name}"
        values = settings_files.load_yaml(f"preset:{preset_name}")
    else:
        described = "default settings of the method"
        sample = settings_files.load_yaml("preset:astra/sample")
        values = {section: sample[section] for section in ("encoder", "optim")}
    base = RunConfig.resolve(method, values, overrides).negatives
    common = [
        f"optim.epochs={base.start_epoch + base.refresh_every + 1}",
        "data.validation=0",
        "cluster.workers=0",
        "log.validate_every=0",
        f"log.checkpoint_every={10**9}",
        *overrides,
    ]
    return RunConfig.resolve(method, values, common), described


def profile(corpus: Corpus, config: RunConfig, clock: Clock) -> tuple[np.ndarray, dict[str, float]]:
    """Seconds of each measured step, and the share of each phase in their sum."""
    data = TrainingData(corpus, config.data)
    setup = loops.build(config, data, clock.device)
    per_epoch = setup.sampler.steps_per_epoch
    plan = config.negatives
    first = max(WARM_STEPS, plan.start_epoch * per_epoch)
    last = first + plan.refresh_every * per_epoch
    if config.encoder.name:
        first = WARM_STEPS
        last = first + FINE_TUNED_STEPS
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), "profile", config, corpus.origin, corpus.sha256)
        refresher = ThreadRefresher(data, RefreshSpec(1, plan, config.optim.seed))

        def on_step(step: int) -> None:
            clock.switch("rest")
            if step == first:
                clock.seconds.clear()
            if first <= step <= last:
                ends.append(time.perf_counter())
            if step == last:
                kept.update(clock.seconds)
                raise EnoughStepsError

        kept: Counter[str] = Counter()
        try:
            with contextlib.suppress(EnoughStepsError):
                loops.Loop(run, setup, refresher, on_step).train()
        finally:
            refresher.close()
    total = sum(kept.values())
    return np.diff(ends), {phase: kept[phase] / total for phase in (*COMPUTING, *BESIDE)}


if __name__ == "__main__":
    main()
