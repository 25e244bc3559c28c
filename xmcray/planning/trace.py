"""One training step of one rank, run without values: its operations, its memory, its host time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from xmcray.methods import prime
from xmcray.negatives import clusters
from xmcray.nn import row_table
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.counter import Counter
from xmcray.planning.data_size import DataSize
from xmcray.planning.encoders import planned_encoder
from xmcray.planning.rates import Rates
from xmcray.planning.stand_in import StandInData
from xmcray.training.loop import assemble
from xmcray.training.run_config import RunConfig
from xmcray.types import Ragged, spans

META = torch.device("meta")
_FORWARD_TEXTS = 1024
_COUNTED_STEPS = (2, 3, 4)
_OVERHEAD_CALLS = 300
# Whole blocks for each rank: the other ranks send as much as this one.
_START_LABELS = 4096
_START_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What rank 0 needs.

    Attributes:
        step_s: Seconds of a step, by kind of work.
        forward_s: Seconds of encoding one text without a graph.
        tensors: Bytes by part that live as long as the run.
        step_bytes: Bytes that a step adds at its largest moment.
        copy_bytes: The most that start, versions of negatives and validation need for a moment.
        index_rows_bytes: Bytes that the vectors take which are indexed, while they are made.
        answer_rows_bytes: The same of the vectors that answer the queries of a validation.
        index_dim: Width of the vectors that are indexed.
        encoded_labels: Label texts that are encoded before the rank answers.
        label_state: Bytes of a checkpoint for the labels of this rank.
        shared_state: Bytes of a checkpoint that all ranks have alike.
    """

    step_s: dict[str, float]
    forward_s: float
    tensors: dict[str, int]
    step_bytes: int
    copy_bytes: int
    index_rows_bytes: int
    answer_rows_bytes: int
    index_dim: int
    encoded_labels: int
    label_state: int
    shared_state: int


def trace(config: RunConfig, size: DataSize, rates: Rates, workers: int) -> Trace:
    """Builds a run as rank 0 would, without values, and runs some of its steps.

    Args:
        config: Settings of the run.
        size: Its data.
        rates: Rates of the device.
        workers: Number of ranks.
    """
    copies = [_start_bytes(config, size, workers)]
    with _rank(config, size, workers, rates.on_gpu) as rank:
        rank.step(1)  # Adam's state is made here
        host_s = rank.host_s(rates.host_entry_s)
        step_s = rates.step_seconds(rank.counter.operations)
        tensors = rank.tensor_bytes()
        step_bytes = max(0, rank.counter.peak_bytes - sum(tensors.values()))
        index_dim, index_bytes = rank.peak_of(rank.method.index_rows)
        if config.negatives.hard:
            # The copy that is written while training goes on is float32.
            copies.append(index_bytes + 4 * index_dim * rank.partition.size)
        rank.encoded_texts = 0
        _, answer_bytes = rank.peak_of(rank.method.answer_rows)
        if config.data.validation:
            copies.append(answer_bytes)
        return Trace(
            step_s={**step_s, "batch, draws and Python": host_s},
            forward_s=rank.forward_s(rates),
            tensors=tensors,
            step_bytes=step_bytes,
            copy_bytes=max(copies),
            index_rows_bytes=index_bytes if config.negatives.hard else 0,
            answer_rows_bytes=answer_bytes if config.data.validation else 0,
            index_dim=index_dim,
            encoded_labels=rank.encoded_texts,
            label_state=rank.label_state_bytes(),
            shared_state=rank.shared_state_bytes(),
        )


class _Rank:
    """Rank 0 of a run, built on the device "meta"."""

    def __init__(self, config: RunConfig, size: DataSize, workers: int, on_gpu: bool) -> None:
        self.config = config
        self.workers = workers
        self.counter = Counter(on_gpu)
        self.data = StandInData(size, config.data.augment_with_labels)
        self.partition = LabelPartition(size.num_labels, workers, 0)
        self.encoded_texts = 0
        data: Any = self.data
        with self.counter:
            encoder = planned_encoder(config.encoder, size.vocab_size, on_gpu, size.side_width)
            self.encoder = encoder.to(config.optim.dtype)
            setup = assemble(
                config,
                data,
                self.encoder,
                META,
                self.partition,
                self._encode_without_graph,
            )
        self.method = setup.method
        self.stepper = setup.stepper
        if on_gpu:
            self.stepper.optimizer.update_together()

    def _encode_without_graph(self, tokens: Ragged) -> Tensor:
        """Vectors of texts that no step trains on, without the encoder's work."""
        self.encoded_texts += len(tokens)
        return torch.empty(
            len(tokens),
            self.encoder.dim,
            dtype=self.config.optim.dtype,
            device=META,
        )

    def step(self, number: int) -> float:
        """Runs one step and counts it.

        Returns:
            Seconds of the step outside the counter.
        """
        self.data.entries = 0
        batch = self.data.batch(self.config, number, self.workers)
        # The stand-in also answers as a shortlist.
        shortlist: Any = self.data
        self.counter.restart()
        with self.counter:
            start = time.thread_time()
            self.stepper.step(batch, shortlist)
            elapsed_s = time.thread_time() - start
        return elapsed_s - self.counter.inside_s

    def host_s(self, entry_s: float | None) -> float:
        """The host's seconds of a step.

        Args:
            entry_s: Seconds for a token or label of the batch. None measures this machine.
        """
        if entry_s is not None:
            self.step(2)
            return self.data.entries * entry_s
        overhead_s = _counter_overhead_s()
        measured = []
        for number in _COUNTED_STEPS:
            step_s = self.step(number)
            measured.append(step_s - self.counter.calls * overhead_s)
        return max(0.0, min(measured))  # the smallest has the least noise

    def forward_s(self, rates: Rates) -> float:
        """Seconds of encoding a text for a search."""
        self.counter.restart()
        self.encoder.eval()
        with self.counter, torch.no_grad():
            query_ids = self.data.query_ids[:_FORWARD_TEXTS]
            tokens = self.data.tokens(query_ids)
            self.encoder(tokens)
        seconds = rates.step_seconds(self.counter.operations)
        return sum(seconds.values()) / _FORWARD_TEXTS

    def peak_of(self, make_rows: Callable[[], Tensor]) -> tuple[int, int]:
        """Runs a part of a method and counts its memory.

        Args:
            make_rows: Returns [S, D], rows of the labels of this rank.

        Returns:
            D, and the most bytes that exist while the rows are made.
        """
        self.counter.restart()
        before = self.counter.live_bytes
        with self.counter, mock.patch.object(prime, "spans", _some_spans):
            rows_SD = make_rows()
        return rows_SD.shape[1], self.counter.peak_bytes - before

    def tensor_bytes(self) -> dict[str, int]:
        """Bytes by part of everything that lives as long as the run."""
        optimizer = self.stepper.optimizer
        encoder_bytes = _bytes(self.encoder.state_dict())
        # Gradients of dense parameters live from one step to the next.
        optimizer_bytes = _bytes(optimizer.tensors()) + _bytes(optimizer.dense)
        return {
            "encoder": encoder_bytes,
            "modules of the method": self._weight_bytes() - encoder_bytes,
            "encoder's optimiser": optimizer_bytes + _last_step_bytes(optimizer.tables),
            "label rows": self.label_state_bytes() + _last_step_bytes(self.method.tables),
        }

    def _weight_bytes(self) -> int:
        """Weights of the encoder and of the method's modules."""
        return sum(_bytes(module.state_dict()) for module in self.stepper.modules.values())

    def label_state_bytes(self) -> int:
        """Everything that a checkpoint keeps for the labels of this rank."""
        table_bytes = sum(_bytes(table.tensors()) for table in self.method.tables.values())
        return table_bytes + _bytes(self.method.state_tensors())

    def shared_state_bytes(self) -> int:
        """Everything that a checkpoint keeps once for all ranks."""
        return self._weight_bytes() + _bytes(self.stepper.optimizer.tensors())


def _some_spans(num_rows: int, size: int) -> Iterator[slice]:
    """The first two spans and the last one. Those between them take as much, and time."""
    num_spans = math.ceil(num_rows / size)
    for number, span in enumerate(spans(num_rows, size)):
        if number in (0, 1, num_spans - 1):
            yield span


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _last_step_bytes(tables: Mapping[str, row_table.RowTable]) -> int:
    """The number of the last update of each row, which no checkpoint has."""
    return sum(table.last_step_S.nbytes for table in tables.values())


def on_line(few: Any, more: Any, distance: float) -> Any:
    """The value on the straight line through one value and another, not below 0.

    Args:
        few: Value at 0: a number, or numbers by name, of which a missing one is 0.
        more: Value at 1.
        distance: Where the line is read.
    """
    if isinstance(few, dict):
        return {key: on_line(few.get(key, 0), more[key], distance) for key in more}
    value = few + (more - few) * distance
    # Not the type of `few`: seconds that it lacks would be cut to whole ones.
    return type(more)(max(value, 0))


def _counter_overhead_s() -> float:
    """Seconds that entering the counter adds to an operation."""
    tensor = torch.empty(4, device=META)
    counter = Counter()
    with counter:
        start = time.thread_time()
        for _ in range(_OVERHEAD_CALLS):
            tensor.mul_(1.0)
        elapsed_s = time.thread_time() - start
    return (elapsed_s - counter.inside_s) / _OVERHEAD_CALLS


def _start_bytes(config: RunConfig, size: DataSize, workers: int) -> int:
    """Bytes that making the initial values needs for a moment, as bytes per label of small starts."""
    ranks = min(workers, _START_RANKS)
    if ranks == 3:
        ranks = 2  # which have whole blocks of labels each, as one and four have
    # The first one fills caches of torch and Python, which are no part of a start.
    _few_start_bytes(config, size, ranks, 2 * _START_LABELS)
    few = _few_start_bytes(config, size, ranks, _START_LABELS)
    more = _few_start_bytes(config, size, ranks, 2 * _START_LABELS)
    # Rounded, because what torch and Python allocate for themselves varies by a few bytes.
    label_bytes = max(0, round((more - few) / _START_LABELS))
    num_labels = size.num_labels * ranks // workers  # with as many labels for each rank
    return label_bytes * num_labels


def _few_start_bytes(config: RunConfig, size: DataSize, ranks: int, num_labels: int) -> int:
    """What initial values take for a moment, arrays of the host included.

    Args:
        config: Settings of the training.
        size: Its data.
        ranks: Number of ranks.
        num_labels: Number of labels and of queries, in place of those of `size`.
    """
    few = dataclasses.replace(
        size,
        num_labels=num_labels,
        num_train=num_labels,
        label_share_L=None,
    )
    data = dataclasses.replace(config.data, augment_with_labels=False)
    config = dataclasses.replace(config, data=data)
    # Clusters are split in chunks of a fixed size, here in chunks of the same share of all rows.
    chunk = clusters.ELEMENTS_AT_ONCE * num_labels // size.num_labels
    with (
        mock.patch.object(clusters, "ELEMENTS_AT_ONCE", chunk),
        _rank(config, few, ranks, on_gpu=False) as rank,
    ):

        def start() -> Tensor:
            rank.method.start()
            return torch.empty(0, 0, device=META)  # `peak_of` expects rows

        logging.disable(logging.WARNING)  # about few labels, which the user does not have
        tracemalloc.start()
        try:
            _, peak_bytes = rank.peak_of(start)
        finally:
            # A caller that catches an error still gets its warnings, at its usual speed.
            tracemalloc.stop()
            logging.disable(logging.NOTSET)
    return peak_bytes


@contextlib.contextmanager
def _rank(config: RunConfig, size: DataSize, workers: int, on_gpu: bool) -> Iterator[_Rank]:
    """Rank 0 among ranks that do not exist: torch's fake group sends what this rank sends."""
    block = row_table.BLOCK["cuda" if on_gpu else "cpu"]
    make_tensor = torch.tensor

    def tensor(values: Any, device: Any = None, **options: Any) -> Tensor:
        """`torch.tensor`, which no dispatch mode sees: integers keep their values."""
        result = make_tensor(values, **options)
        return result.to(device) if device is not None else result

    # A device context lists torch's constructors at its first use, and keeps the list. Were the
    # stand-in below in it, no context of this process would ever work on `torch.tensor` again.
    with META:
        torch.empty(0)
    if workers > 1:
        dist.init_process_group("fake", rank=0, world_size=workers, store=FakeStore())
    try:
        with (
            mock.patch.dict(row_table.BLOCK, {"meta": block}),
            mock.patch.object(torch, "tensor", tensor),
        ):
            yield _Rank(config, size, workers, on_gpu)
    finally:
        if workers > 1:
            dist.destroy_process_group()
