"""A plan: bytes, seconds and money of a training before it starts, and a refusal of what cannot fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from xmcray.errors import ResourceError
from xmcray.planning import refresh, sizes
from xmcray.planning.data_size import DataSize
from xmcray.planning.devices import assumptions
from xmcray.planning.rates import Rates
from xmcray.planning.stand_in import epoch_queries
from xmcray.planning.trace import Needs, trace
from xmcray.training.checkpoint import ROW_BLOCK_BYTES
from xmcray.training.run import RunConfig

_CUDA_BYTES = 1 << 30  # context, kernels, and what the allocator cannot give out
_SPARE = 0.95  # of a device's memory that can be planned with
_DRIVER_BYTES = 2 << 30  # the driver, the coordinator and Ray's own processes
_TRACED_LABELS = 2_000_000  # of a rank; of more, two traces give a straight line
_GB = 1e9


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
    assumptions: list[str]

    @property
    def worker_bytes(self) -> int:
        """What has to fit a worker's memory: its device, or its process where it has none."""
        return sum((self.device_bytes or self.host_bytes).values())

    @property
    def step_seconds(self) -> float:
        """One step."""
        return sum(self.step_s.values())


class Planner:
    """Plans one configuration.

    Args:
        config: of the training.
        data: its size.
        rates: of the device.
        workers: training processes; those of `cluster.workers` if not given.
        memory_bytes: of each worker; if not given, of the device, or a share of the machine.
    """

    def __init__(
        self,
        config: RunConfig,
        data: DataSize,
        rates: Rates,
        workers: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.rates = rates
        self.workers = max(1, config.cluster.workers if workers is None else workers)
        self.memory_bytes = memory_bytes
        self.needs = _needs(config, data, rates, self.workers)
        self.rows = math.ceil(data.num_labels / self.workers)
        self.epoch_queries = epoch_queries(config, data)
        self.batch = min(config.optim.batch_size, self.epoch_queries)
        self.steps = math.ceil(self.epoch_queries / self.batch)

    # -- memory ------------------------------------------------------------------------------------

    def worker_parts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of one worker by part, on its device and in its process.

        Without a GPU everything is in its process.
        """
        needs = self.needs
        augmented = self.data.num_labels if self.config.data.augment_with_labels else 0
        query_ids = self.data.num_train + augmented
        is_static = self.config.encoder.name == "static"
        # Copies of label vectors are never made during a step: they may take the step's place.
        step_bytes = 0 if self.rates.on_gpu else needs.step_bytes
        copies = max(needs.copy_bytes, self._checkpoint_copies()) - step_bytes
        host = {
            "process": self.rates.process_bytes[0 if is_static else 1],
            "tokens": sizes.corpus_bytes(self.data, query_ids),
            "negatives": sizes.shortlist_bytes(self.config.negatives, query_ids),
            "copies for start, versions and checkpoints": max(0, copies),
        }
        trained = {**needs.tensors, "activations and scores": needs.step_bytes}
        if self.rates.on_gpu:
            return {"CUDA": _CUDA_BYTES, **trained}, host
        return {}, {**host, **trained}

    def _checkpoint_copies(self) -> int:
        """From a GPU a block of label rows, or Adam's moments, come to the process first."""
        if not self.rates.on_gpu:
            return 0
        moments = self.needs.tensors["encoder's optimiser"]
        return max(min(self.needs.label_state, ROW_BLOCK_BYTES), moments)

    def actor_bytes(self) -> int:
        """An index actor's process."""
        if not self.config.negatives.hard:
            return 0
        factory = self.config.negatives.index
        index = sizes.index_actor_bytes(factory, self.rows, self.needs.index_dim)
        return index + self.rates.process_bytes[0]

    def limit(self) -> int:
        """Memory that a worker has; on a CPU, workers and index actors share the machine."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        memory = _SPARE * self.rates.memory_bytes
        if self.rates.on_gpu:
            return int(memory)
        return int((memory - _DRIVER_BYTES) / self.workers) - self.actor_bytes()

    def fits(self) -> bool:
        """Whether a worker has the memory that it needs."""
        on_device, on_host = self.worker_parts()
        return sum((on_device or on_host).values()) <= self.limit()

    def check_fit(self) -> None:
        """Raises ResourceError, naming the largest part and changes with which it would fit."""
        on_device, on_host = self.worker_parts()
        if not self.fits():
            parts = on_device or on_host
            changes = list(islice(self._fitting_changes(), 3))
            advice = ", or ".join(changes) or "lower encoder.dim and raise --workers together"
            needed = _needed(parts, "a worker needs", "")
            raise ResourceError(f"{needed}, and has {max(self.limit(), 0) / _GB:.1f} GB: {advice}")
        host_limit = int(_SPARE * self.rates.host_bytes)
        if self.rates.on_gpu and sum(on_host.values()) > host_limit:
            needed = _needed(on_host, "a worker's process needs", " besides its device")
            raise ResourceError(
                f"{needed}, and has {host_limit / _GB:.1f} GB: set data.augment_with_labels=false,"
                " or lower negatives.hard or encoder.dim"
            )

    def _fitting_changes(self) -> Iterator[str]:
        """Changes of one setting each with which a worker fits."""
        config = self.config
        on_device, on_host = self.worker_parts()
        total = sum((on_device or on_host).values())
        row_bytes = self.needs.tensors["label rows"]
        missing = total - self.limit()
        if self.memory_bytes is not None or self.rates.on_gpu:
            for workers in _doubled(self.workers, 4096):
                if row_bytes * (1 - self.workers / workers) >= missing:
                    yield f"raise --workers to {workers}"
                    break
        dims = _halved(self.needs.index_dim, 16)
        # Only label rows surely shrink with the dimension: a trace of the others would be in vain.
        shares = {dim: dim / self.needs.index_dim for dim in dims}
        smaller: dict[str, list[Any]] = {
            "encoder.dim": [dim for dim in dims if row_bytes * shares[dim] < self.limit()]
        }
        if self.needs.step_bytes >= missing:
            texts = config.optim.micro_batch or config.optim.batch_size
            smaller["optim.micro_batch"] = _halved(texts, 8)
            smaller["optim.batch_size"] = _halved(config.optim.batch_size, 8)
            smaller["negatives.uniform"] = _halved(config.negatives.uniform, 100)
        rows = getattr(config.method, "classifier", None)
        if rows is not None and row_bytes >= missing:
            smaller["method.classifier.storage"] = ["bfloat16"]
            smaller["method.classifier.momentum"] = [0] if rows.kind == "sgd" else []
            smaller["method.classifier.kind"] = ["adagrad"] if rows.kind == "adam" else []
        for name, values in smaller.items():
            for value in values:
                changed = RunConfig.resolve(
                    config.method_name, config.to_dict(), [f"{name}={value}"]
                )
                planner = Planner(changed, self.data, self.rates, self.workers, self.memory_bytes)
                if planner.fits():
                    yield f"set {name}={value}"
                    break

    # -- time --------------------------------------------------------------------------------------

    def validation_s(self) -> float:
        """Held-out queries against all labels; label texts are encoded where they answer."""
        rows = self.data.num_train * self.config.data.validation
        texts = rows / self.workers + (self.rows if self.needs.encodes_labels and rows else 0)
        flop = 2.0 * self.needs.index_dim * rows * self.rows
        return texts * self.needs.forward_s + flop / self.rates.search_flop_s

    def checkpoint_s(self) -> float:
        """A worker's share of the label rows; the first worker also writes the encoder."""
        written = self.needs.shared_state + self.needs.label_state
        return written / self.rates.disk_bytes_s

    def refresh(self) -> refresh.Refresh | None:
        """The work of an index actor, if there is any."""
        if not self.config.negatives.refreshed:
            return None
        return refresh.Refresh(
            rates=self.rates,
            factory=self.config.negatives.index,
            rows=self.rows,
            dim=self.needs.index_dim,
            queries=self.epoch_queries,
            hard=self.config.negatives.hard,
            shards=self.workers,
        )

    def plan(self, price_per_hour: float | None) -> Plan:
        """The plan of a configuration that fits."""
        config, needs = self.config, self.needs
        on_device, on_host = self.worker_parts()
        training_s = self.steps * sum(needs.step_s.values())
        starts_anywhere = getattr(config.method, "init", "") in ("random", "zeros")
        first = refresh.ANYWHERE if starts_anywhere else refresh.APART
        work = self.refresh()
        refresh_s = first_s = build_s = search_s = 0.0
        if work is not None:
            refresh_s = self._among_trainers(work.total_s(refresh.APART), training_s)
            first_s = self._among_trainers(work.total_s(first), training_s)
        if work is not None and config.negatives.hard:
            build_s = work.build_s()
            search_s = work.search_s(refresh.APART)
        saves = 1.0
        if config.log.checkpoint_every:
            saves = max(1.0, self.steps / config.log.checkpoint_every)
        checks = 1.0 / config.log.validate_every if config.log.validate_every else 0.0
        late_s = max(0.0, refresh_s - training_s) / config.negatives.refresh_every
        epoch_s = training_s + saves * self.checkpoint_s() + checks * self.validation_s() + late_s
        epochs = config.optim.stop_epoch or config.optim.epochs
        total_s = epochs * epoch_s + max(0.0, first_s - max(refresh_s, training_s))
        label_state = needs.label_state * self.data.num_labels // self.rows
        negatives, dim = config.negatives, needs.index_dim
        index = sizes.index_bytes(negatives.index, self.rows, dim) if negatives.hard else 0
        return Plan(
            method=config.method_name,
            device=self.rates.device,
            source=self.rates.source,
            workers=self.workers,
            labels=self.data.num_labels,
            queries=self.data.num_train,
            dim=dim,
            batch=self.batch,
            device_bytes=on_device,
            host_bytes=on_host,
            index_bytes=self.actor_bytes(),
            index_on_disk=index * self.workers,
            object_store=sizes.object_store_bytes(self.rates.threads, self.data),
            ledger=sizes.ledger_bytes(
                negatives, self.data.num_labels, self.epoch_queries, dim, self.workers
            ),
            checkpoint=needs.shared_state + label_state,
            checkpoints=config.log.keep + 1,
            step_s=needs.step_s,
            steps_per_epoch=self.steps,
            epochs=epochs,
            build_s=build_s,
            search_s=search_s,
            refresh_s=refresh_s,
            first_refresh_s=first_s,
            validation_s=self.validation_s() if checks else 0.0,
            checkpoint_s=self.checkpoint_s(),
            epoch_s=epoch_s,
            total_s=total_s,
            cost=None if price_per_hour is None else price_per_hour * self.workers * total_s / 3600,
            memory_bytes=self.memory_bytes or self.rates.memory_bytes,
            assumptions=self._assumptions(first),
        )

    def _among_trainers(self, work_s: float, training_s: float) -> float:
        niceness = self.config.cluster.index_nice
        return refresh.shared_cores_s(work_s, training_s, self.rates, self.workers, niceness)

    def _assumptions(self, first: refresh.Spread) -> list[str]:
        notes = list(self.data.assumptions)
        if self.rates.source == "published specs":
            notes += assumptions()
        if self.config.negatives.hard:
            notes.append(
                f"a search of an index with lists visits {refresh.APART.visited:.0%} of them; that"
                f" of the first version {first.visited:.0%}, because rows are close to their start"
            )
            shared = "the cores that workers leave, and those of workers that wait for them"
            notes.append(f"index actors have {shared if self.rates.cores else 'their own cores'}")
        if self.rows > _TRACED_LABELS:
            notes.append("what a step takes grows along a straight line with the number of labels")
        return notes


def plan(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int | None = None,
    memory_bytes: int | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Plans a training.

    Args:
        config: of the training.
        data: its size.
        rates: of the device.
        workers: in place of `cluster.workers`.
        memory_bytes: of each worker; of the device or machine if not given.
        price_per_hour: of one worker with its share of a machine.
    Raises:
        ConfigError: settings or an encoder that do not go together.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    planner = Planner(config, data, rates, workers, memory_bytes)
    planner.check_fit()
    return planner.plan(price_per_hour)


def _needs(config: RunConfig, data: DataSize, rates: Rates, workers: int) -> Needs:
    """From one trace, or on a straight line through two where a rank has very many labels."""
    if data.num_labels <= _TRACED_LABELS * workers:
        return trace(config, data, rates, workers)
    labels = _TRACED_LABELS * workers
    few = trace(config, _with_labels(data, labels), rates, workers)
    more = trace(config, _with_labels(data, 2 * labels), rates, workers)
    return _on_line(few, more, data.num_labels / labels - 1)


def _with_labels(data: DataSize, labels: int) -> DataSize:
    return dataclasses.replace(data, num_labels=labels, label_share_L=None)


def _on_line(few: Any, more: Any, distance: float) -> Any:
    """The value at `distance` on the straight line through one value at 0 and another at 1."""
    if isinstance(few, dict):
        return {key: _on_line(few.get(key, 0), more[key], distance) for key in more}
    if isinstance(few, Needs):
        return Needs(**_on_line(vars(few), vars(more), distance))
    value = few + (more - few) * distance
    return type(few)(max(value, 0))


def _needed(parts: dict[str, int], needs: str, where: str) -> str:
    """The sum and the largest part, in words."""
    candidates = [part for part in parts if part not in ("process", "CUDA")]
    largest = max(candidates, key=lambda part: parts[part])
    total = sum(parts.values()) / _GB
    return f"{needs} {total:.1f} GB{where}, of which {largest} {parts[largest] / _GB:.1f} GB"


def _doubled(start: int, most: int) -> list[int]:
    return [start << i for i in range(1, 13) if start << i <= most]


def _halved(start: int, least: int) -> list[int]:
    return [start >> i for i in range(1, 20) if start >> i >= least]
