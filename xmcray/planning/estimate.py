"""Bytes, seconds and money of a training, from a trace of its step and the rates of a machine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from xmcray.planning import sizes
from xmcray.planning.data_size import DataSize
from xmcray.planning.devices import assumptions
from xmcray.planning.rates import Rates
from xmcray.planning.refresh import ANYWHERE, APART, Refresh, Spread, shared_cores_s
from xmcray.planning.stand_in import epoch_queries
from xmcray.planning.trace import Trace, trace
from xmcray.training.run import RunConfig

SPARE = 0.95  # of a memory that can be planned with
_CUDA_BYTES = 1 << 30  # context, kernels, and what the allocator cannot give out
_DRIVER_BYTES = 2 << 30  # the driver, the coordinator and Ray's own processes
REFRESH = "refresh of the negatives, while training goes on"
FIRST_REFRESH = "the first refresh, of rows close to their start"
WHOLE = "the whole training"
# Tensors of a step differ in size from those of the step before, so some do not fit into the gaps that
# those left in the heap. Measured: DEXML's and PRIME's steps leave gaps as large as they are.
_HEAP_GAPS = 1.0
_SNAPSHOT = "copy of a checkpoint that is being written"
_TRACED_LABELS = 2_000_000  # of a rank; of more, two traces give a straight line


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training takes.

    Attributes:
        method: Name of the method.
        device: Name of the device.
        source: Where the device's rates come from.
        workers: Training processes.
        labels: L.
        queries: N.
        dim: D, width of the indexed vectors.
        batch: G.
        memory_bytes: Memory of a worker.
        limit_bytes: What a worker may use: without reserves, and without its index actor where both
            share the machine.
        device_bytes: Bytes of one worker on its device, by part; empty without a GPU.
        host_bytes: Bytes of one worker's process, by part.
        index_bytes: Bytes of an index actor at its largest; there is one per worker.
        index_on_disk: Bytes of all indexes of a bundle, without the vectors.
        object_store: Bytes of Ray's object store.
        ledger: Bytes of the negatives' ledger.
        checkpoint: Bytes of a checkpoint.
        checkpoints: Number of checkpoints that exist at a time.
        step_s: Seconds of one step, by kind of work.
        steps_per_epoch: Steps of an epoch.
        epochs: As configured.
        run_s: Seconds of everything that is larger than a step.
        cost: Cost of all workers; None without a price.
        assumptions: What was not measured, in words.
    """

    method: str
    device: str
    source: str
    workers: int
    labels: int
    queries: int
    dim: int
    batch: int
    memory_bytes: int
    limit_bytes: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    index_bytes: int
    index_on_disk: int
    object_store: int
    ledger: int
    checkpoint: int
    checkpoints: int
    step_s: dict[str, float]
    steps_per_epoch: int
    epochs: int
    run_s: dict[str, float]
    cost: float | None
    assumptions: list[str]

    @property
    def worker_parts(self) -> dict[str, int]:
        """What has to fit a worker's memory: its device, or its process if it has no device."""
        return self.device_bytes or self.host_bytes

    @property
    def worker_bytes(self) -> int:
        """The sum of `worker_parts`."""
        return sum(self.worker_parts.values())

    @property
    def fits(self) -> bool:
        """Whether a worker has the memory that it needs."""
        return self.worker_bytes <= self.limit_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.step_s.values())

    @property
    def total_s(self) -> float:
        """Seconds of all epochs."""
        return self.run_s[WHOLE]


def estimate(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int | None = None,
    memory_bytes: int | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Plans a training whether it fits or not; arguments as for `plan.plan`."""
    workers = max(1, config.cluster.workers if workers is None else workers)
    traced = _traced(config, data, rates, workers)
    dim = traced.index_dim
    negatives = config.negatives
    num_rows = math.ceil(data.num_labels / workers)
    num_queries = epoch_queries(config, data)
    actor_bytes = 0
    index_bytes = 0
    if negatives.hard:
        actor_bytes = sizes.index_actor_bytes(negatives.index, num_rows, dim)
        actor_bytes += rates.process_bytes[0]
        index_bytes = sizes.index_bytes(negatives.index, num_rows, dim)
    limit_bytes = memory_bytes
    if limit_bytes is None:
        limit_bytes = int(SPARE * rates.memory_bytes)
        if not rates.on_gpu:  # workers and index actors share the machine
            limit_bytes = (limit_bytes - _DRIVER_BYTES) // workers - actor_bytes
    device_bytes, host_bytes = _worker_bytes(config, data, rates, traced)
    run_s = _run_seconds(config, data, rates, workers, traced)
    worker_hours = workers * run_s[WHOLE] / 3600
    return Plan(
        method=config.method_name,
        device=rates.device,
        source=rates.source,
        workers=workers,
        labels=data.num_labels,
        queries=data.num_train,
        dim=dim,
        batch=min(config.optim.batch_size, num_queries),
        memory_bytes=memory_bytes or rates.memory_bytes,
        limit_bytes=limit_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        index_bytes=actor_bytes,
        index_on_disk=index_bytes * workers,
        object_store=sizes.object_store_bytes(rates.threads, data),
        ledger=sizes.ledger_bytes(negatives, data.num_labels, num_queries, dim, workers),
        checkpoint=traced.shared_state + traced.label_state * data.num_labels // num_rows,
        checkpoints=config.log.keep + 1,
        step_s=traced.step_s,
        steps_per_epoch=_steps(config, data),
        epochs=_epochs(config),
        run_s=run_s,
        cost=None if price_per_hour is None else price_per_hour * worker_hours,
        assumptions=_assumptions(config, data, rates, num_rows),
    )


def _traced(config: RunConfig, data: DataSize, rates: Rates, workers: int) -> Trace:
    """One trace, or a straight line through two if a rank has very many labels."""
    num_labels = _TRACED_LABELS * workers
    if data.num_labels <= num_labels:
        return trace(config, data, rates, workers)
    traces = []
    for factor in (1, 2):
        part = dataclasses.replace(data, num_labels=factor * num_labels, label_share_L=None)
        traces.append(vars(trace(config, part, rates, workers)))
    few, more = traces
    return Trace(**_on_line(few, more, data.num_labels / num_labels - 1))


def _on_line(few: Any, more: Any, distance: float) -> Any:
    """The value at `distance` on the straight line through one value at 0 and another at 1."""
    if isinstance(few, dict):
        return {key: _on_line(few.get(key, 0), more[key], distance) for key in more}
    value = few + (more - few) * distance
    return type(few)(max(value, 0))


def _worker_bytes(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    traced: Trace,
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one worker by part, on its device and in its process."""
    num_query_ids = data.num_train + (data.num_labels if config.data.augment_with_labels else 0)
    is_static = config.encoder.name == "static"
    trained = {**traced.tensors, "activations and scores": traced.step_bytes}
    host = {
        "process": rates.process_bytes[0 if is_static else 1],
        "tokens": sizes.corpus_bytes(data, num_query_ids),
        "negatives": sizes.shortlist_bytes(config.negatives, num_query_ids),
    }
    snapshot_bytes = traced.shared_state + traced.label_state
    if not rates.on_gpu:
        # Label vectors are never copied during a step: the copies may take the step's place.
        host["copies for start and versions"] = max(0, traced.copy_bytes - traced.step_bytes)
        host["gaps between activations"] = int(_HEAP_GAPS * traced.step_bytes)
        if not _steps_follow_checkpoints(config, data):
            snapshot_bytes = max(0, snapshot_bytes - traced.step_bytes)
        host[_SNAPSHOT] = snapshot_bytes
        return {}, {**host, **trained}
    host["copies for start and versions"] = traced.copy_bytes
    host[_SNAPSHOT] = snapshot_bytes
    return {"CUDA": _CUDA_BYTES, **trained}, host


def _steps_follow_checkpoints(config: RunConfig, data: DataSize) -> bool:
    """Whether training goes on after a checkpoint, while its copy is still in memory."""
    steps_per_epoch = _steps(config, data)
    steps_between = config.log.checkpoint_every or steps_per_epoch
    return steps_between < _epochs(config) * steps_per_epoch


def _steps(config: RunConfig, data: DataSize) -> int:
    """Steps of an epoch."""
    num_queries = epoch_queries(config, data)
    return math.ceil(num_queries / min(config.optim.batch_size, num_queries))


def _epochs(config: RunConfig) -> int:
    return config.optim.stop_epoch or config.optim.epochs


def _run_seconds(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int,
    traced: Trace,
) -> dict[str, float]:
    """Seconds of everything that is larger than a step."""
    log = config.log
    steps = _steps(config, data)
    training_s = steps * sum(traced.step_s.values())
    seconds = _refresh_seconds(config, data, rates, workers, traced.index_dim, training_s)
    refresh_s = seconds.get(REFRESH, 0.0)
    # Training waits only for what a version takes longer than an epoch.
    epoch_s = training_s + max(0.0, refresh_s - training_s) / config.negatives.refresh_every
    if log.validate_every:
        seconds["one validation"] = _validation_s(config, data, rates, workers, traced)
        epoch_s += seconds["one validation"] / log.validate_every
    # A worker writes its share of the label rows; the first one also writes the encoder.
    checkpoint_s = (traced.shared_state + traced.label_state) / rates.disk_bytes_s
    seconds["one checkpoint"] = checkpoint_s
    saves = max(1.0, steps / log.checkpoint_every) if log.checkpoint_every else 1.0
    # It is written in the background; training waits only for one that the next one overtakes.
    epoch_s = max(epoch_s, saves * checkpoint_s)
    seconds["one epoch"] = epoch_s
    late_s = max(0.0, seconds.get(FIRST_REFRESH, 0.0) - max(refresh_s, training_s))
    seconds[WHOLE] = _epochs(config) * epoch_s + late_s
    return seconds


def _refresh_seconds(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int,
    dim: int,
    training_s: float,
) -> dict[str, float]:
    """Seconds of a version of the negatives, while an epoch trains; nothing without versions."""
    if not config.negatives.refreshed:
        return {}
    work = Refresh(
        rates=rates,
        config=config.negatives,
        rows=math.ceil(data.num_labels / workers),
        dim=dim,
        queries=epoch_queries(config, data),
        shards=workers,
    )
    nice = config.cluster.index_nice
    later_s = shared_cores_s(work.total_s(APART), training_s, rates, workers, nice)
    first_s = shared_cores_s(work.total_s(_first_spread(config)), training_s, rates, workers, nice)
    seconds = {REFRESH: later_s}
    if config.negatives.hard:
        seconds["of which: building an index"] = work.build_s()
        seconds["of which: searching it"] = work.search_s(APART)
    seconds[FIRST_REFRESH] = first_s
    return seconds


def _validation_s(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int,
    traced: Trace,
) -> float:
    """Held-out queries against all labels; a method may answer with encoded label texts."""
    num_queries = data.num_train * config.data.validation
    if not num_queries:
        return 0.0
    num_texts = num_queries / workers + traced.encoded_labels
    flop = 2.0 * traced.index_dim * num_queries * math.ceil(data.num_labels / workers)
    return num_texts * traced.forward_s + flop / rates.search_flop_s


def _first_spread(config: RunConfig) -> Spread:
    """How the rows lie that the first version of the negatives indexes."""
    starts_anywhere = getattr(config.method, "init", "") in ("random", "zeros")
    return ANYWHERE if starts_anywhere else APART


def _assumptions(config: RunConfig, data: DataSize, rates: Rates, num_rows: int) -> list[str]:
    notes = list(data.assumptions)
    if rates.source == "published specs":
        notes += assumptions()
    if config.negatives.hard:
        notes.append(
            f"a search of an index with lists visits {APART.visited:.0%} of them; that of the first"
            f" version {_first_spread(config).visited:.0%}, because rows are close to their start"
        )
        shared = "the cores that workers leave, and those of workers that wait for them"
        notes.append(f"index actors have {shared if rates.cores else 'their own cores'}")
    if num_rows > _TRACED_LABELS:
        notes.append("what a step takes grows along a straight line with the number of labels")
    return notes
