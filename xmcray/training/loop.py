"""The loop of one rank: batch, step, negatives, records, checkpoints.

It knows neither Ray nor which method it trains.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmcray.data.batches import BatchSampler, TrainingData
from xmcray.data.side_signal import side_signal
from xmcray.errors import StorageError
from xmcray.methods.base import Method, MethodContext
from xmcray.methods.matryoshka import Matryoshka, PrefixEncode, check_prefixes
from xmcray.methods.registry import method_entry
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.refresh import Refresher
from xmcray.negatives.shortlists import ShortlistFeed
from xmcray.negatives.version_folder import QueryBlock
from xmcray.nn.encoder import Encoder, build_encoder
from xmcray.nn.heads import FusionConfig
from xmcray.nn.matmul import matmul_precision
from xmcray.nn.side import MixedEncoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage.whole_files import write_json
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Costs
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.optim import lr_factor
from xmcray.training.preemption import StopFlag
from xmcray.training.prefetch import BatchPrefetcher
from xmcray.training.records import Record, Records
from xmcray.training.run import START, Run
from xmcray.training.run_config import RunConfig
from xmcray.training.step import Embedder, Stepper, encode_without_graph
from xmcray.training.validation import validate
from xmcray.training.watch import Watch
from xmcray.types import Ragged, StepOutput

logger = logging.getLogger(__name__)


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
    """Encoder, method and optimisers of this rank, with equal initial values on all ranks.

    Args:
        config: Settings of the run.
        data: Training split.
        device: Where tensors live.
        partition: The labels that the rank holds; those of this rank if not given.
        vectors: Folder for the vectors of a frozen encoder, which are then computed once.
    """
    optim = config.optim
    if partition is None:
        num_ranks = collectives.num_ranks()
        partition = LabelPartition(data.num_labels, num_ranks, collectives.rank())
    tokenizer = data.corpus.tokenizer()
    token_counts = data.token_counts(tokenizer.vocab_size)
    side_width = data.corpus.card.side_width
    encoder = build_encoder(config.encoder, tokenizer, token_counts, optim.seed, side_width)
    if isinstance(encoder, MixedEncoder):
        signal = side_signal(data)
        if signal is not None and signal.is_noise:
            encoder.mixer.close()
    encoder = encoder.to(device, optim.dtype)
    if vectors is not None:
        # Label texts are queries too, with ids after those of the training queries.
        num_texts = data.num_train + data.num_labels
        encoder.remember(vectors, num_texts, data.tokens)
    return assemble(config, data, encoder, device, partition)


def assemble(
    config: RunConfig,
    data: TrainingData,
    encoder: Encoder,
    device: torch.device,
    partition: LabelPartition,
    gradient_free_encode: Callable[[Ragged], Tensor] | None = None,
) -> Setup:
    """Method and optimisers around an encoder.

    Args:
        config: Settings of the run.
        data: Training split.
        encoder: On `device`.
        device: Where label rows live.
        partition: The labels that the rank holds.
        gradient_free_encode: Used in place of the encoder where the method needs no gradient.
    """
    optim = config.optim
    # A curriculum takes shares of the labels that there are.
    num_hard = min(config.negatives.hard, data.num_labels)
    embedder = Embedder(encoder, optim.micro_batch)
    encode = PrefixEncode(embedder)
    context = MethodContext(
        encode=encode,
        encode_without_graph=gradient_free_encode
        or (lambda tokens: encode_without_graph(encoder, tokens)),
        dim=encoder.dim,
        data=data,
        partition=partition,
        negatives=dataclasses.replace(config.negatives, hard=num_hard),
        seed=optim.seed,
        dtype=optim.dtype,
        device=device,
        fusion=config.fusion or FusionConfig(),
        as_labels=encoder.as_labels,
    )
    method = method_entry(config.method_name).factory(config.method, context)
    if config.encoder.matryoshka:
        check_prefixes(config.encoder.matryoshka, encoder.dim)
        widths = [*sorted(config.encoder.matryoshka), encoder.dim]
        method = Matryoshka(method, encode, widths)
    sampler = BatchSampler(data, optim.batch_size, optim.seed)
    # Of the whole schedule, even if the run stops at an earlier epoch.
    total_steps = optim.epochs * sampler.steps_per_epoch
    stepper = Stepper(encoder, embedder, method, optim, total_steps)
    return Setup(data, sampler, partition, method, stepper)


class Loop:
    """Trains a run to its end, from the newest checkpoint if there is one.

    Args:
        run: Its folder and configuration.
        setup: What is trained.
        refresher: Finishes versions of hard negatives.
        on_step: Called after each step with the step's number; tests kill and pause here.
        watch: When to check for a flag to stop; the run's own flag if not given.
        on_record: Called on rank 0 with each record of metrics.jsonl.
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
        self.run = run
        self.setup = setup
        self.config = run.config
        self.on_step = on_step
        self.watch = watch or Watch(StopFlag(run.path))
        self.saved_step = 0
        self._has_warned = False
        self._started = time.perf_counter()
        self._earlier_costs = Costs()
        self.steps_per_epoch = setup.sampler.steps_per_epoch
        num_epochs = self.config.optim.num_epochs
        self.last_step = num_epochs * self.steps_per_epoch
        self.feed = ShortlistFeed(
            Ledger(run.negatives),
            self.config.negatives,
            refresher,
            self.steps_per_epoch,
            num_epochs,
            setup.method.index_rows,
            setup.partition.start,
        )
        self.checkpoints = CheckpointWriter(
            run.checkpoints,
            setup.stepper,
            setup.partition,
            run.config.log.keep,
        )
        self.batches = BatchPrefetcher(
            setup.sampler,
            setup.method.prepare,
            collectives.rank(),
            collectives.num_ranks(),
            self.last_step,
        )
        self.records = Records(run.path / "metrics.jsonl", on_record)

    def train(self) -> dict[str, Any]:
        """Runs the remaining steps.

        Returns:
            The result of the run, the same on every rank, also in result.json. Nothing if the run
            was stopped; then a checkpoint is saved.
        """
        try:
            with matmul_precision(self.config.optim.matmul):
                result = self._train()
        except BaseException:
            # A checkpoint that has all its files is still completed; other ranks are not waited for.
            self.checkpoints.abandon()
            raise
        finally:
            self.batches.close()
        self.feed.close()
        return result

    def _train(self) -> dict[str, Any]:
        if collectives.rank() == 0:
            self._warn_of_settings()
        first_step = self._restore()
        # Set-up and restore have a longer one.
        collectives.set_time_limit(self.config.exchange_limit_s)
        window = _Window(self.feed)
        for step in range(first_step, self.last_step):
            order = self.watch.look(step)
            if order != "go on":
                if step > self.saved_step:
                    self._save(step, scheduled=False)
                self._finish_checkpoint()
                window.pause()
            if order == "stop":
                return {}
            self._step(step, window)
            steps_done = step + 1
            is_last = steps_done == self.last_step
            if steps_done % self.config.log.every == 0 or is_last:
                self._record(steps_done, window)
                window = _Window(self.feed)
            if self._validation_due(steps_done) or is_last:
                self._validate(steps_done)
                window.pause()
            if self._checkpoint_due(steps_done) or is_last:
                self._save(steps_done)
                window.pause()
            if self.on_step:
                self.on_step(steps_done)
        self._finish_checkpoint()
        return self._finish(self.last_step - first_step)

    def _warn_of_settings(self) -> None:
        """Says which settings do not fit the number of queries."""
        held_out = self.setup.data.validation_rows
        if self.config.data.validation and not len(held_out):
            logger.warning(
                "data.validation=%g holds out no query, so nothing is measured during the training",
                self.config.data.validation,
            )
        warmup_steps = self.config.optim.warmup_steps
        if warmup_steps > self.last_step:
            logger.warning(
                "optim.warmup_steps is %d, but the run has %d steps, so the learning rate rises to %.0f %% of its peak;"
                " lower it",
                warmup_steps,
                self.last_step,
                100 * self.last_step / warmup_steps,
            )

    def _step(self, step: int, window: _Window) -> None:
        shortlist = self.feed.before_step(step)
        batch = self.batches.batch(step, self.feed.clusters, shortlist)
        output = self.setup.stepper.step(batch, shortlist)
        self.feed.after_step(batch, output.query_vectors)
        window.add(len(batch.query_ids), output)

    def _restore(self) -> int:
        """Restores the newest checkpoint, or starts the method; returns the steps done."""
        is_first = collectives.rank() == 0
        if is_first:
            checkpoints.remove_unfinished(self.run.checkpoints)
        checkpoint = checkpoints.newest(self.run.checkpoints)
        if checkpoint is None:
            # A run that goes on from another one begins with a checkpoint of step 0.
            checkpoint = checkpoints.newest(self.run.path / START)
        negatives_state: Mapping[str, Any] = {}
        collected: list[QueryBlock] = []
        if checkpoint is None:
            step = 0
            self.setup.method.start()
        else:
            step = checkpoint.step
            if is_first:
                checkpoints.set_aside_newer(self.run.checkpoints, step)
            checkpoints.load(checkpoint, self.setup.stepper, self.setup.partition)
            negatives_state = checkpoint.negatives
            self._earlier_costs = checkpoint.costs
            collected = checkpoints.collected(checkpoint)
        self.saved_step = step
        self.feed.restore(negatives_state, step, collected)
        if is_first:
            self.records.truncate(step)
        return step

    def _save(self, step: int, scheduled: bool = True) -> None:
        self._finish_checkpoint()
        state = {"epoch": step // self.steps_per_epoch, "negatives": self.feed.state(step)}
        costs = self._costs()
        self.checkpoints.save(step, state, self.feed.pending(), costs, scheduled=scheduled)
        self.saved_step = step

    def _finish_checkpoint(self) -> None:
        """Waits until the newest checkpoint is complete; collective."""
        self.checkpoints.finish()
        if collectives.rank() == 0:
            self._retire_versions()

    def _retire_versions(self) -> None:
        """Removes versions of hard negatives, and their inputs, that no kept checkpoint needs."""
        try:
            states = checkpoints.negatives_needed(self.run.checkpoints)
        except StorageError:
            # A copy of the damaged checkpoint may be put back, so what it may need stays until the
            # checkpoint itself is removed.
            return
        states = [state for state in states if state]
        if not states:
            return
        if all(state["version"] is not None for state in states):
            used = [state["version"] for state in states]
            used += [state["clusters_version"] for state in states]
            self.feed.ledger.retire(min(version for version in used if version is not None))
        for version in self.feed.ledger.versions():
            is_published = all(version.version in state["published"] for state in states)
            if version.complete and is_published:
                version.drop_inputs()

    def _record(self, step: int, window: _Window) -> None:
        mean_loss = float(collectives.sum_over_ranks(window.loss)) / window.steps
        if collectives.rank() != 0:
            return
        if not math.isfinite(mean_loss) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loss of the steps up to %d is %s, so weights may be no numbers; stop, and train"
                " anew with smaller learning rates or without extreme settings",
                step,
                mean_loss,
            )
        shortlist = self.feed.current
        self.records.add(
            {
                "step": step,
                "last_step": self.last_step,
                "epoch": (step - 1) // self.steps_per_epoch,
                "loss": mean_loss,
                "lr": lr_factor(self.config.optim, step - 1, self.setup.stepper.total_steps),
                "queries_per_s": window.queries / window.seconds,
                "step_s": window.seconds / window.steps,
                "negatives_version": None if shortlist is None else shortlist.version,
                "negatives_age": self.feed.age(step),
                "index_recall": None if shortlist is None else shortlist.index_recall,
                "negatives_left_out": None if shortlist is None else shortlist.left_out,
                "schedule_broken_at_step": self.feed.broken_at_step,
                "blocked_s": window.blocked_s,
                "memory_mb": _resident_mb(),
            }
        )

    def _validate(self, step: int) -> None:
        if not len(self.setup.data.validation_rows):
            return
        metrics = validate(
            self.setup.stepper.encoder,
            self.setup.method,
            self.setup.data,
            self.setup.partition,
        )
        if collectives.rank() == 0:
            epoch = (step - 1) // self.steps_per_epoch
            self.records.add({"step": step, "epoch": epoch, **metrics})

    def _validation_due(self, done: int) -> bool:
        every = self.config.log.validate_every
        return every > 0 and done % (every * self.steps_per_epoch) == 0

    def _checkpoint_due(self, done: int) -> bool:
        every = self.config.log.checkpoint_every or self.steps_per_epoch
        return done % every == 0

    def _costs(self) -> Costs:
        """What the training has taken up to now; collective."""
        earlier = self._earlier_costs
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Costs(
            seconds=earlier.seconds + time.perf_counter() - self._started,
            blocked_s=earlier.blocked_s + self.feed.blocked_s,
            peak_memory_mb=max(earlier.peak_memory_mb, *collectives.gather_objects(peak_mb)),
        )

    def _finish(self, steps: int) -> dict[str, Any]:
        result = {
            "steps": self.last_step,
            "steps_here": steps,
            **dataclasses.asdict(self._costs()),
            "schedule_broken_at_step": self.feed.broken_at_step,
        }
        if collectives.rank() == 0:
            write_json(self.run.path / "result.json", result)
        # No rank returns before the file is there.
        collectives.broadcast_int(0)
        return result


class _Window:
    """Sums between two records; time spent on validation and checkpoints does not count."""

    def __init__(self, feed: ShortlistFeed) -> None:
        self._feed = feed
        self._blocked_before_s = feed.blocked_s
        self._last_time = time.perf_counter()
        self.steps = 0
        self.queries = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.seconds = 0.0

    def add(self, num_queries: int, output: StepOutput) -> None:
        now = time.perf_counter()
        self.seconds += now - self._last_time
        self._last_time = now
        self.steps += 1
        self.queries += num_queries
        # The sum stays on the device: to read it would wait for the whole step. The first sum adds a
        # number of the host, which needs no copy.
        self.loss = self.loss + output.total.detach().double() / output.divisor

    def pause(self) -> None:
        """Leaves out the time since the last step."""
        self._last_time = time.perf_counter()

    @property
    def blocked_s(self) -> float:
        return self._feed.blocked_s - self._blocked_before_s


def _resident_mb() -> float:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux
        return 0.0
    num_pages = int(statm.read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20
