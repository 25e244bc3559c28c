"""One training step of one rank, run without values: its operations, its memory, its host time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from xmcray.methods.base import Method
from xmcray.methods.registry import method_entry
from xmcray.nn import row_table
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.counter import Counter, Operation
from xmcray.planning.data_size import DataSize
from xmcray.planning.encoders import planned_encoder
from xmcray.planning.pretended_ranks import pretended_ranks
from xmcray.planning.rates import Rates
from xmcray.planning.stand_in import StandInData
from xmcray.training.loop import Setup, assemble
from xmcray.training.run import RunConfig
from xmcray.types import Ragged

META = torch.device("meta")
_FORWARD_TEXTS = 1024
_COUNTED_STEPS = (2, 3, 4)
_OVERHEAD_CALLS = 300
_START_LABELS = 4096


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What rank 0 needs; all bytes and seconds.

    Attributes:
        step_s: seconds of a step, by kind of work.
        forward_s: seconds of encoding one text without a graph.
        tensors: bytes by part that live as long as the run.
        step_bytes: what a step adds at its largest moment.
        copy_bytes: the most that start, versions of negatives and validation need for a moment.
        index_dim: width of the vectors that are indexed.
        encodes_labels: whether the vectors that answer are made of label texts.
        label_state: bytes of a checkpoint for the labels of this rank.
        shared_state: bytes of a checkpoint that all ranks have alike.
    """

    step_s: dict[str, float]
    forward_s: float
    tensors: dict[str, int]
    step_bytes: int
    copy_bytes: int
    index_dim: int
    encodes_labels: bool
    label_state: int
    shared_state: int


def trace(config: RunConfig, size: DataSize, rates: Rates, workers: int) -> Needs:
    """Builds a run as rank 0 would, without values, and runs some of its steps.

    Args:
        config: of the run.
        size: of its data.
        rates: of the device.
        workers: ranks.
    """
    copies = [_start_bytes(config, size, workers)]
    with _rank(config, size, workers, rates.on_gpu) as rank:
        rank.step(1)  # Adam's state is made here
        overhead_s = rank.overhead_s()
        # The host's time is measured for this machine only; the smallest has the least noise.
        steps = _COUNTED_STEPS if rates.host_entry_s is None else _COUNTED_STEPS[:1]
        host_s = min(rank.timed_step(step, overhead_s) for step in steps)
        if rates.host_entry_s is not None:
            host_s = rank.data.entries * rates.host_entry_s
        step_s = rates.step_seconds(rank.counter.operations, workers)
        tensors = rank.tensor_bytes()
        step_bytes = max(0, rank.counter.peak_bytes - sum(tensors.values()))
        index_dim, index_bytes = rank.peak_of(rank.setup.method.index_rows)
        rank.encoded_texts = 0
        _, answer_bytes = rank.peak_of(rank.setup.method.answer_rows)
        if config.negatives.hard:
            # The copy that is written while training goes on is float32.
            copies.append(index_bytes + 4 * index_dim * rank.setup.partition.size)
        if config.data.validation:
            copies.append(answer_bytes)
        return Needs(
            step_s={**step_s, "batch, draws and Python": host_s},
            forward_s=sum(rates.step_seconds(rank.forward()).values()) / _FORWARD_TEXTS,
            tensors=tensors,
            step_bytes=step_bytes,
            copy_bytes=max(copies),
            index_dim=index_dim,
            encodes_labels=rank.encoded_texts > 0,
            label_state=rank.label_state_bytes(),
            shared_state=rank.shared_state_bytes(),
        )


class _Rank:
    """Rank 0 of a run, built on the device "meta"."""

    def __init__(self, config: RunConfig, size: DataSize, workers: int, on_gpu: bool) -> None:
        self.config = config
        self.workers = workers
        self.counter = Counter()
        self.data = StandInData(size, config.data.augment_with_labels)
        self.encoded_texts = 0
        dtype = config.optim.dtype
        with self.counter:
            self.encoder = planned_encoder(config.encoder, size.vocab_size, on_gpu).to(dtype)
            partition = LabelPartition(size.num_labels, workers, 0)
            data: Any = self.data
            self.setup: Setup = assemble(
                config, data, self.encoder, META, partition, self._encode_without_graph
            )
        self.optimizer = self.setup.stepper.optimizer
        if on_gpu:
            for group in self.optimizer._adam.param_groups:
                group["foreach"] = True

    def _encode_without_graph(self, tokens: Ragged) -> Tensor:
        """Vectors of texts that no step trains on, without the encoder's work."""
        self.encoded_texts += len(tokens)
        return torch.empty(
            len(tokens), self.encoder.dim, dtype=self.config.optim.dtype, device=META
        )

    def step(self, number: int) -> float:
        """Runs one step and counts it; returns its seconds outside the counter and the stand-ins."""
        self.data.entries = 0
        batch = self.data.batch(self.config, number, self.workers)
        self.counter.restart()
        self.data.seconds = 0.0
        shortlist: Any = self.data
        with self.counter:
            start = time.thread_time()
            self.setup.stepper.step(batch, shortlist)
            elapsed_s = time.thread_time() - start
        return elapsed_s - self.data.seconds - self.counter.inside_s

    def timed_step(self, number: int, overhead_s: float) -> float:
        """The host's seconds of a step, without those that the counter adds to an operation."""
        return max(0.0, self.step(number) - self.counter.calls * overhead_s)

    def overhead_s(self) -> float:
        """Seconds that entering the counter adds to an operation."""
        tensor = torch.empty(4, device=META)
        self.counter.restart()
        with self.counter:
            start = time.thread_time()
            for _ in range(_OVERHEAD_CALLS):
                tensor.mul_(1.0)
            elapsed_s = time.thread_time() - start
        return (elapsed_s - self.counter.inside_s) / _OVERHEAD_CALLS

    def forward(self) -> list[Operation]:
        """Operations of encoding texts for a search."""
        self.counter.restart()
        self.encoder.eval()
        with self.counter, torch.no_grad():
            self.encoder(self.data.tokens(self.data.query_ids[:_FORWARD_TEXTS]))
        return self.counter.operations

    def peak_of(self, make_rows: Callable[[], Tensor]) -> tuple[int, int]:
        """Width of the rows that a method makes, and the bytes that exist while it does."""
        self.counter.restart()
        before = self.counter.live_bytes
        with self.counter:
            rows_SD = make_rows()
        return rows_SD.shape[1], self.counter.peak_bytes - before

    def started(self) -> Tensor:
        """Label vectors after the initial values were computed."""
        self.setup.method.start()
        return torch.empty(0, 0, device=META)

    def tensor_bytes(self) -> dict[str, int]:
        """Bytes by part of everything that lives as long as the run."""
        modules = {
            name: _bytes(module.state_dict()) for name, module in self.setup.stepper.modules.items()
        }
        encoder_bytes = modules.pop("encoder")
        # Gradients of dense parameters live from one step to the next.
        optimizer_bytes = _bytes(self.optimizer.tensors()) + _bytes(self.optimizer.dense)
        for table in self.optimizer.tables.values():
            optimizer_bytes += table.last_step_S.nbytes
        tables = self.setup.method.tables.values()
        last_steps = sum(table.last_step_S.nbytes for table in tables)
        return {
            "encoder": encoder_bytes,
            "modules of the method": sum(modules.values()),
            "encoder's optimiser": optimizer_bytes,
            "label rows": self.label_state_bytes() + last_steps,
        }

    def label_state_bytes(self) -> int:
        """Everything that a checkpoint keeps for the labels of this rank."""
        tables = self.setup.method.tables.values()
        table_bytes = sum(_bytes(table.tensors()) for table in tables)
        return table_bytes + _bytes(self.setup.method.state_tensors())

    def shared_state_bytes(self) -> int:
        """Everything that a checkpoint keeps once for all ranks."""
        modules = self.setup.stepper.modules.values()
        weights = sum(_bytes(module.state_dict()) for module in modules)
        return weights + _bytes(self.optimizer.tensors())


def _start_bytes(config: RunConfig, size: DataSize, workers: int) -> int:
    """What initial values take for a moment, from those of few labels: linear in the labels."""
    if getattr(method_entry(config.method_name).factory, "start", None) is Method.start:
        return 0
    ranks = min(workers, 4)
    labels = (
        _START_LABELS  # whole blocks for each rank: the pretended ones send as much as this one
    )
    few = dataclasses.replace(size, num_labels=labels, num_train=labels, label_share_L=None)
    data = dataclasses.replace(config.data, augment_with_labels=False)
    with _rank(dataclasses.replace(config, data=data), few, ranks, on_gpu=False) as rank:
        logging.disable(logging.WARNING)  # about few labels, which the user does not have
        tracemalloc.start()
        _, tensor_bytes = rank.peak_of(rank.started)
        _, array_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    return int((tensor_bytes + array_bytes) * (size.num_labels / workers) / (labels / ranks))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@contextlib.contextmanager
def _rank(config: RunConfig, size: DataSize, workers: int, on_gpu: bool) -> Iterator[_Rank]:
    """A rank among others that exist only for its collectives."""
    counted: list[Counter] = []
    with _as_device(on_gpu), pretended_ranks(workers, lambda *sizes: counted[0].add(*sizes)):
        rank = _Rank(config, size, workers, on_gpu)
        counted.append(rank.counter)
        yield rank


@contextlib.contextmanager
def _as_device(on_gpu: bool) -> Iterator[None]:
    """Tensors without values are cut into the blocks of the planned device."""
    block = row_table.BLOCK["cuda" if on_gpu else "cpu"]
    make_tensor = torch.tensor

    def tensor(values: Any, device: Any = None, **options: Any) -> Tensor:
        """`torch.tensor`, which no dispatch mode sees: integers keep their values."""
        result = make_tensor(values, **options)
        return result.to(device) if device is not None else result

    with (
        mock.patch.dict(row_table.BLOCK, {"meta": block}),
        mock.patch.object(torch, "tensor", tensor),
    ):
        yield
