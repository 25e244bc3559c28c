"""Bytes, seconds and money of a training, from a trace of its step and the rates of a machine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from xmcray.planning import refresh, sizes
from xmcray.planning.data_size import DataSize
from xmcray.planning.devices import assumptions
from xmcray.planning.rates import Rates
from xmcray.planning.stand_in import epoch_queries
from xmcray.planning.trace import Needs, trace
from xmcray.training.checkpoint import ROW_BLOCK_BYTES
from xmcray.training.run import RunConfig

SPARE = 0.95  # of a memory that can be planned with
_CUDA_BYTES = 1 << 30  # context, kernels, and what the allocator cannot give out
_DRIVER_BYTES = 2 << 30  # the driver, the coordinator and Ray's own processes
_TRACED_LABELS = 2_000_000  # of a rank; of more, two traces give a straight line


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training takes.

    Attributes:
        method: what is trained.
        device: what it is trained on.
        source: where the device's rates come from.
        workers: training processes.
        labels: L.
        queries: N.
        dim: D, width of the indexed vectors.
        batch: G.
        device_bytes: of one worker, by part; empty without a GPU.
        host_bytes: of one worker's process, by part.
        index_bytes: of an index actor at its largest; there is one per worker.
        index_on_disk: of all indexes of a bundle.
        object_store: bytes of Ray's object store.
        ledger: bytes of the negatives' ledger.
        checkpoint: bytes of one.
        checkpoints: that exist at a time.
        step_s: seconds of one step, by kind of work.
        steps_per_epoch: as configured.
        epochs: as configured.
        build_s: of the index of a version of the negatives.
        search_s: of the search of a version.
        refresh_s: of a version, while training goes on, once label rows are apart.
        first_refresh_s: of the first one.
        validation_s: each time.
        checkpoint_s: each time.
        epoch_s: of everything, with the waits for late negatives.
        total_s: of all epochs.
        cost: of all workers; None without a price.
        memory_bytes: that a worker has.
        limit_bytes: that a worker may use: without reserves, and without its index actor where both
            share the machine.
        assumptions: what was not measured, in words.
    """

    method: str
    device: str
    source: str
    workers: int
    labels: int
    queries: int
    dim: int
    batch: int
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
    build_s: float
    search_s: float
    refresh_s: float
    first_refresh_s: float
    validation_s: float
    checkpoint_s: float
    epoch_s: float
    total_s: float
    cost: float | None
    memory_bytes: int
    limit_bytes: int
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
        """One step."""
        return sum(self.step_s.values())


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Seconds and counts of a run; the names are those of `Plan`."""

    step_s: dict[str, float]
    steps_per_epoch: int
    epochs: int
    build_s: float
    search_s: float
    refresh_s: float
    first_refresh_s: float
    validation_s: float
    checkpoint_s: float
    epoch_s: float
    total_s: float


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
    needs = _needs(config, data, rates, workers)
    negatives = config.negatives
    num_rows = math.ceil(data.num_labels / workers)
    num_queries = epoch_queries(config, data)
    dim = needs.index_dim
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
    device_bytes, host_bytes = _worker_bytes(config, data, rates, needs)
    times = _times(config, data, rates, needs, workers)
    cost = None
    if price_per_hour is not None:
        cost = price_per_hour * workers * times.total_s / 3600
    return Plan(
        method=config.method_name,
        device=rates.device,
        source=rates.source,
        workers=workers,
        labels=data.num_labels,
        queries=data.num_train,
        dim=dim,
        batch=min(config.optim.batch_size, num_queries),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        index_bytes=actor_bytes,
        index_on_disk=index_bytes * workers,
        object_store=sizes.object_store_bytes(rates.threads, data),
        ledger=sizes.ledger_bytes(negatives, data.num_labels, num_queries, dim, workers),
        checkpoint=needs.shared_state + needs.label_state * data.num_labels // num_rows,
        checkpoints=config.log.keep + 1,
        cost=cost,
        memory_bytes=memory_bytes or rates.memory_bytes,
        limit_bytes=limit_bytes,
        assumptions=_assumptions(config, data, rates, num_rows),
        **vars(times),
    )


def _worker_bytes(
    config: RunConfig, data: DataSize, rates: Rates, needs: Needs
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one worker by part, on its device and in its process.

    Without a GPU everything is in its process.
    """
    num_query_ids = data.num_train + (data.num_labels if config.data.augment_with_labels else 0)
    is_static = config.encoder.name == "static"
    copy_bytes = needs.copy_bytes
    if rates.on_gpu:
        # A block of label rows, or Adam's moments, come to the process before they are written.
        block_bytes = min(needs.label_state, ROW_BLOCK_BYTES)
        copy_bytes = max(copy_bytes, block_bytes, needs.tensors["encoder's optimiser"])
    else:
        # Label vectors are never copied during a step: the copies may take the step's place.
        copy_bytes = max(0, copy_bytes - needs.step_bytes)
    host = {
        "process": rates.process_bytes[0 if is_static else 1],
        "tokens": sizes.corpus_bytes(data, num_query_ids),
        "negatives": sizes.shortlist_bytes(config.negatives, num_query_ids),
        "copies for start, versions and checkpoints": copy_bytes,
    }
    trained = {**needs.tensors, "activations and scores": needs.step_bytes}
    if rates.on_gpu:
        return {"CUDA": _CUDA_BYTES, **trained}, host
    return {}, {**host, **trained}


def _times(config: RunConfig, data: DataSize, rates: Rates, needs: Needs, workers: int) -> _Times:
    log = config.log
    num_queries = epoch_queries(config, data)
    steps = math.ceil(num_queries / min(config.optim.batch_size, num_queries))
    training_s = steps * sum(needs.step_s.values())
    validation_s = 0.0
    if log.validate_every:
        validation_s = _validation_s(config, data, rates, needs, workers)
    # A worker writes its share of the label rows; the first one also writes the encoder.
    checkpoint_s = (needs.shared_state + needs.label_state) / rates.disk_bytes_s
    saves = max(1.0, steps / log.checkpoint_every) if log.checkpoint_every else 1.0
    build_s = search_s = refresh_s = first_refresh_s = 0.0
    if config.negatives.refreshed:
        work = refresh.Refresh(
            rates=rates,
            factory=config.negatives.index,
            rows=math.ceil(data.num_labels / workers),
            dim=needs.index_dim,
            queries=num_queries,
            hard=config.negatives.hard,
            shards=workers,
        )
        nice = config.cluster.index_nice
        later_s = work.total_s(refresh.APART)
        first_s = work.total_s(_first_spread(config))
        refresh_s = refresh.shared_cores_s(later_s, training_s, rates, workers, nice)
        first_refresh_s = refresh.shared_cores_s(first_s, training_s, rates, workers, nice)
        if config.negatives.hard:
            build_s = work.build_s()
            search_s = work.search_s(refresh.APART)
    # Training waits only for what a version takes longer than an epoch.
    late_s = max(0.0, refresh_s - training_s) / config.negatives.refresh_every
    epoch_s = training_s + saves * checkpoint_s + validation_s / max(1, log.validate_every) + late_s
    epochs = config.optim.stop_epoch or config.optim.epochs
    return _Times(
        step_s=needs.step_s,
        steps_per_epoch=steps,
        epochs=epochs,
        build_s=build_s,
        search_s=search_s,
        refresh_s=refresh_s,
        first_refresh_s=first_refresh_s,
        validation_s=validation_s,
        checkpoint_s=checkpoint_s,
        epoch_s=epoch_s,
        total_s=epochs * epoch_s + max(0.0, first_refresh_s - max(refresh_s, training_s)),
    )


def _validation_s(
    config: RunConfig, data: DataSize, rates: Rates, needs: Needs, workers: int
) -> float:
    """Held-out queries against all labels; a method may answer with encoded label texts."""
    num_rows = math.ceil(data.num_labels / workers)
    num_queries = data.num_train * config.data.validation
    num_texts = num_queries / workers
    if needs.encodes_labels and num_queries:
        num_texts += num_rows
    flop = 2.0 * needs.index_dim * num_queries * num_rows
    return num_texts * needs.forward_s + flop / rates.search_flop_s


def _first_spread(config: RunConfig) -> refresh.Spread:
    """How the rows lie that the first version of the negatives indexes."""
    starts_anywhere = getattr(config.method, "init", "") in ("random", "zeros")
    return refresh.ANYWHERE if starts_anywhere else refresh.APART


def _assumptions(config: RunConfig, data: DataSize, rates: Rates, num_rows: int) -> list[str]:
    notes = list(data.assumptions)
    if rates.source == "published specs":
        notes += assumptions()
    if config.negatives.hard:
        notes.append(
            f"a search of an index with lists visits {refresh.APART.visited:.0%} of them; that"
            f" of the first version {_first_spread(config).visited:.0%}, because rows are close to"
            " their start"
        )
        shared = "the cores that workers leave, and those of workers that wait for them"
        notes.append(f"index actors have {shared if rates.cores else 'their own cores'}")
    if num_rows > _TRACED_LABELS:
        notes.append("what a step takes grows along a straight line with the number of labels")
    return notes


def _needs(config: RunConfig, data: DataSize, rates: Rates, workers: int) -> Needs:
    """From one trace, or from a straight line through two if a rank has very many labels."""
    num_labels = _TRACED_LABELS * workers
    if data.num_labels <= num_labels:
        return trace(config, data, rates, workers)
    few = trace(config, _with_labels(data, num_labels), rates, workers)
    more = trace(config, _with_labels(data, 2 * num_labels), rates, workers)
    distance = data.num_labels / num_labels - 1
    return Needs(**_on_line(vars(few), vars(more), distance))


def _with_labels(data: DataSize, num_labels: int) -> DataSize:
    return dataclasses.replace(data, num_labels=num_labels, label_share_L=None)


def _on_line(few: Any, more: Any, distance: float) -> Any:
    """The value at `distance` on the straight line through one value at 0 and another at 1."""
    if isinstance(few, dict):
        return {key: _on_line(few.get(key, 0), more[key], distance) for key in more}
    value = few + (more - few) * distance
    return type(few)(max(value, 0))
