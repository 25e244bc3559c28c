"""The loop of one rank: batch, step, negatives, records, checkpoints. Knows neither Ray nor which method it trains."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmcray import storage
from xmcray.data.batches import BatchSampler, TrainingData
from xmcray.methods.base import Method, MethodContext
from xmcray.methods.registry import method_entry
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.refresh import Refresher
from xmcray.negatives.shortlists import ShortlistFeed
from xmcray.nn.encoder import build_encoder
from xmcray.nn.heads import FusionConfig
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.training import checkpoint as checkpoints
from xmcray.training.optim import lr_factor
from xmcray.training.preemption import StopFlag
from xmcray.training.records import Record, Records
from xmcray.training.run import Run, RunConfig
from xmcray.training.step import Embedder, Stepper, encode_plain
from xmcray.training.validation import validate
from xmcray.training.watch import Watch
from xmcray.types import Batch, StepOutput


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything one rank trains with, built from a configuration alone."""

    data: TrainingData
    sampler: BatchSampler
    partition: LabelPartition
    method: Method
    stepper: Stepper


def build(
    config: RunConfig,
    data: TrainingData,
    device: torch.device,
    partition: LabelPartition | None = None,
    vectors: Path | None = None,
) -> Setup:
    """Encoder, method and optimisers of this rank; the same start values whatever the number of ranks.

    Args:
        partition: the labels it holds; those of this rank if not given.
        vectors: folder for what a frozen encoder computes once; without it computes as often as it is asked.
    """
    optim = config.optim
    partition = partition or LabelPartition(
        data.num_labels, collectives.num_ranks(), collectives.rank()
    )
    tokenizer = data.corpus.tokenizer()
    encoder = build_encoder(
        config.encoder, tokenizer, data.token_counts(tokenizer.vocab_size), optim.seed
    ).to(device, optim.dtype)
    if vectors is not None:
        encoder.remember(vectors, data.num_train + data.num_labels, data.tokens)
    embedder = Embedder(encoder, optim.micro_batch)
    context = MethodContext(
        encode=embedder,
        encode_plain=lambda tokens: encode_plain(encoder, tokens),
        dim=encoder.dim,
        data=data,
        partition=partition,
        negatives=config.negatives,
        seed=optim.seed,
        dtype=optim.dtype,
        device=device,
        fusion=config.fusion or FusionConfig(),
    )
    method = method_entry(config.method_name).factory(config.method, context)
    sampler = BatchSampler(data, optim.batch_size, optim.seed)
    stepper = Stepper(encoder, embedder, method, optim, optim.epochs * sampler.steps_per_epoch)
    return Setup(data, sampler, partition, method, stepper)


class Loop:
    """Trains a run to its end, from the newest checkpoint if there is one.

    Args:
        run: its folder and configuration. setup: what is trained. refresher: finishes versions of hard negatives.
        on_step: called after each step with the step's number; tests kill and pause here.
        watch: when to look for a flag to stop; the run's own flag if not given.
        on_record: called on rank 0 with each record of metrics.jsonl.
    """

    def __init__(
        self,
        run: Run,
        setup: Setup,
        refresher: Refresher,
        on_step: Callable[[int], None] | None = None,
        watch: Watch | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        self.run, self.setup, self.config = run, setup, run.config
        self.on_step = on_step
        self.watch = watch or Watch(StopFlag(run.path))
        self.saved_step = 0
        self.steps_per_epoch = setup.sampler.steps_per_epoch
        self.last_step = (
            self.config.optim.stop_epoch or self.config.optim.epochs
        ) * self.steps_per_epoch
        self.feed = ShortlistFeed(
            Ledger(run.negatives),
            self.config.negatives,
            refresher,
            self.steps_per_epoch,
            self.last_step // self.steps_per_epoch,
            setup.method.index_rows,
            setup.partition.start,
        )
        self.records = Records(run.path / "metrics.jsonl", on_record)

    def train(self) -> dict[str, Any]:
        """Runs the remaining steps; returns the run's result, the same on every rank, also in result.json.

        Told to stop, it saves a checkpoint and returns nothing.
        """
        started = time.perf_counter()
        first = self._restore()
        window = _Window(self.feed)
        for step in range(first, self.last_step):
            order = self.watch.look(step)
            if order != "go on" and step > self.saved_step:
                self._save(step)
                window.pause()
            if order == "stop":
                self.feed.close()
                return {}
            batch, output = self._step(step)
            window.add(batch, output)
            if (step + 1) % self.config.log.every == 0 or step + 1 == self.last_step:
                self._record(step + 1, window)
                window = _Window(self.feed)
            if self._epoch_ends(step, self.config.log.validate_every) or step + 1 == self.last_step:
                self._validate(step + 1)
                window.pause()
            if self._checkpoint_due(step + 1):
                self._save(step + 1)
                window.pause()
            if self.on_step:
                self.on_step(step + 1)
        self.feed.close()
        return self._finish(time.perf_counter() - started, self.last_step - first)

    def _step(self, step: int) -> tuple[Batch, StepOutput]:
        shortlist = self.feed.before_step(step)
        ranks = collectives.rank(), collectives.num_ranks()
        batch = self.setup.sampler.batch(step, *ranks, self.feed.clusters)
        output = self.setup.stepper.step(batch, shortlist)
        self.feed.after_step(batch, output.query_vectors)
        return batch, output

    def _restore(self) -> int:
        """Restores the newest checkpoint and returns its step; 0 if there is none."""
        found = checkpoints.newest(self.run.checkpoints) if collectives.rank() == 0 else None
        step = collectives.broadcast_int(-1 if found is None else found.step)
        state: Mapping[str, Any] = {}
        collected: list[dict[str, np.ndarray[Any, Any]]] = []
        if step >= 0:
            path = self.run.checkpoints / f"step-{step:08d}"
            checkpoint = checkpoints.open_checkpoint(path, contents=False)
            checkpoints.load(checkpoint, self.setup.stepper, self.setup.partition)
            state, collected = checkpoint.state["negatives"], checkpoints.collected(checkpoint)
        else:
            self.setup.method.start()
        step = self.saved_step = max(step, 0)
        self.feed.restore(state, step, collected)
        if collectives.rank() == 0:
            self.records.truncate(step)
        return step

    def _save(self, step: int) -> None:
        state = {"epoch": step // self.steps_per_epoch, "negatives": self.feed.state(step)}
        stepper, part, keep = self.setup.stepper, self.setup.partition, self.config.log.keep
        checkpoints.save(
            self.run.checkpoints, step, stepper, part, state, keep, self.feed.pending()
        )
        self.saved_step = step
        if collectives.rank() == 0:
            self._retire_versions()

    def _retire_versions(self) -> None:
        """Removes versions of hard negatives, and inputs of versions, that no kept checkpoint can still need."""
        states = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in self.run.checkpoints.glob("step-*/state.json")
        ]
        kept = [state["negatives"] for state in states if state["negatives"]]
        if kept and all(state["version"] is not None for state in kept):
            used = [state.get(name) for state in kept for name in ("version", "clusters_version")]
            self.feed.ledger.retire(min(version for version in used if version is not None))
        for folder in self.feed.ledger.versions() if kept else []:
            if folder.complete and all(folder.version in state["published"] for state in kept):
                folder.drop_inputs()

    def _record(self, step: int, window: _Window) -> None:
        loss = float(
            collectives.sum_over_ranks(
                torch.tensor([window.loss], dtype=torch.float64, device=_wire())
            )
        )
        if collectives.rank() == 0:
            current = self.feed.current
            self.records.add(
                {
                    "step": step,
                    "last_step": self.last_step,
                    "epoch": (step - 1) // self.steps_per_epoch,
                    "loss": loss / window.steps,
                    "lr": lr_factor(self.config.optim, step - 1, self.setup.stepper.total_steps),
                    "queries_per_s": window.queries / window.seconds,
                    "step_s": window.seconds / window.steps,
                    "negatives_version": None if current is None else current.version,
                    "negatives_age": self.feed.age(step),
                    "index_recall": None if current is None else current.index_recall,
                    "schedule_broken_at_step": self.feed.broken_at_step,
                    "blocked_s": window.blocked_s,
                    "memory_mb": _resident_mb(),
                }
            )

    def _validate(self, step: int) -> None:
        if not len(self.setup.data.validation_rows):
            return
        values = validate(
            self.setup.stepper.encoder, self.setup.method, self.setup.data, self.setup.partition
        )
        if collectives.rank() == 0:
            self.records.add({"step": step, "epoch": (step - 1) // self.steps_per_epoch, **values})

    def _epoch_ends(self, step: int, every: int) -> bool:
        return every > 0 and (step + 1) % (every * self.steps_per_epoch) == 0

    def _checkpoint_due(self, done: int) -> bool:
        every = self.config.log.checkpoint_every or self.steps_per_epoch
        return done % every == 0 or done == self.last_step

    def _finish(self, seconds: float, steps: int) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        result = {
            "steps": self.last_step,
            "seconds": seconds,
            "steps_here": steps,
            "blocked_s": self.feed.blocked_s,
            "peak_memory_mb": max(collectives.gather_objects(peak)),
            "schedule_broken_at_step": self.feed.broken_at_step,
        }
        if collectives.rank() == 0:
            storage.write_json(self.run.path / "result.json", result)
        collectives.broadcast_int(0)
        return result


class _Window:
    """Sums between two records; time spent on validation and checkpoints does not count."""

    def __init__(self, feed: ShortlistFeed) -> None:
        self._feed, self._blocked = feed, feed.blocked_s
        self._last = time.perf_counter()
        self.steps, self.queries, self.loss, self.seconds = 0, 0, 0.0, 0.0

    def add(self, batch: Batch, output: StepOutput) -> None:
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now
        self.steps += 1
        self.queries += len(batch.query_ids)
        self.loss += output.value

    def pause(self) -> None:
        self._last = time.perf_counter()

    @property
    def blocked_s(self) -> float:
        return self._feed.blocked_s - self._blocked


def _wire() -> str:
    return "cuda" if collectives.on_gpu() else "cpu"


def _resident_mb() -> float:
    pages = (
        int(Path("/proc/self/statm").read_text().split()[1])
        if Path("/proc/self/statm").exists()
        else 0
    )
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
