"""A plan: bytes, seconds and money of a training before it starts, and a refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xmcray.errors import ConfigError, ResourceError
from xmcray.planning import model, refresh, sizes
from xmcray.planning.costs import costs_of
from xmcray.planning.data_size import DataSize
from xmcray.planning.devices import assumptions
from xmcray.planning.encoders import encoder_shape
from xmcray.planning.rates import Rates
from xmcray.planning.workload import workload
from xmcray.training.run import RunConfig

CUDA_BYTES = 1 << 30  # context, kernels, and what the allocator cannot give out
SPARE = 0.95  # of a device's memory that can be planned with
DRIVER_BYTES = 2 << 30  # the driver, the coordinator and Ray's own processes
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training takes.

    Attributes:
        method, device, source: what is trained on what, and where its rates come from. workers: of the training.
        labels, queries, dim, batch: L, N, D and G.
        device_bytes, host_bytes: of one worker, by part; all is on the host without a GPU.
        index_bytes: of an index actor at its largest, of which there is one per worker. index_on_disk: of all indexes
            of a bundle. object_store, ledger, checkpoint: bytes; `checkpoints` of them exist at a time.
        step_s: of one step, by part. steps_per_epoch, epochs: as configured.
        refresh_s, build_s, search_s: of one version of the negatives, beside the training, once label rows are apart;
            first_refresh_s: of the first one. validation_s, checkpoint_s: each time. epoch_s, total_s, cost: of
            everything, with the waits for late negatives.
        fits: memory that a worker has. assumptions: what was not measured, in words.
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
        workers: in place of `cluster.workers`. memory_bytes: of each worker; of the device or machine if not given.
        price_per_hour: of one worker with its share of a machine.
    Raises:
        ConfigError: settings or an encoder that do not go together.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    workers = max(1, config.cluster.workers if workers is None else workers)
    shape = encoder_shape(config.encoder, data.vocab_size)
    if config.encoder.frozen and not shape.dense and costs_of(config).encoder_alone:
        raise ConfigError(
            "encoder.frozen leaves this method nothing to train without a projection; set encoder.dim"
        )
    load = workload(config, data, workers)
    shard = sizes.shard_of(config, data, load, workers)
    check_fit(config, data, rates, workers, memory_bytes)
    on_device, on_host = worker_parts(config, data, rates, workers)
    step = model.StepTime(
        config=config, shape=shape, data=data, load=load, shard=shard, rates=rates
    )
    parts, dim = step.parts(), shape.dim
    checkpoint_s, validation_s = model.checkpoint(step), model.validation(step)
    first = refresh.ANYWHERE if costs_of(config).starts_anywhere else refresh.APART
    refresh_s, first_s = (refresh.refresh(step, spread) for spread in (refresh.APART, first))
    queries = load.steps_per_epoch * load.queries if config.negatives.hard else 0
    training_s = load.steps_per_epoch * step.seconds
    saves = (
        max(1.0, load.steps_per_epoch / config.log.checkpoint_every)
        if config.log.checkpoint_every
        else 1.0
    )
    checks = 1.0 / config.log.validate_every if config.log.validate_every else 0.0
    late = max(0.0, refresh_s - training_s) / config.negatives.refresh_every
    epoch_s = training_s + saves * checkpoint_s + checks * validation_s + late
    total_s = load.epochs * epoch_s + max(0.0, first_s - max(refresh_s, training_s))
    rows = sizes.index(config.negatives.index, shard.labels, dim) if config.negatives.hard else 0
    searched = (
        config.negatives.index,
        shard.labels,
        dim,
        queries,
        config.negatives.hard + refresh.FOUND_MORE,
    )
    notes = [*data.assumptions, *(assumptions() if rates.source == "published specs" else [])]
    if config.negatives.hard:
        notes.append(
            f"a search of an index with lists visits {refresh.APART.visited:.0%} of them; that of the first version"
            f" {first.visited:.0%}, for its rows are near their start"
        )
        notes.append(
            "index actors have the cores that workers leave, and those of workers that wait for them"
            if rates.cores
            else "index actors have cores of their own"
        )
    if not rates.encoders.get(shape.key):
        notes.append(
            "the encoder's speed is computed from its floating-point operations, not measured"
        )
    return Plan(
        method=config.method_name,
        device=rates.device,
        source=rates.source,
        workers=workers,
        labels=data.num_labels,
        queries=data.num_train,
        dim=dim,
        batch=load.queries,
        device_bytes=on_device,
        host_bytes=on_host,
        index_bytes=_actor(config, data, rates, dim, workers),
        index_on_disk=rows * workers,
        object_store=sizes.object_store(rates.threads, data),
        ledger=sizes.ledger(config, data, load, dim, workers),
        checkpoint=sizes.checkpoint(config, data, shape, shard.value),
        checkpoints=config.log.keep + 1,
        step_s=parts,
        steps_per_epoch=load.steps_per_epoch,
        epochs=load.epochs,
        build_s=refresh.build(rates, config.negatives.index, shard.labels, dim) if queries else 0.0,
        search_s=refresh.search(rates, *searched, refresh.APART) if queries else 0.0,
        refresh_s=refresh_s,
        first_refresh_s=first_s,
        validation_s=validation_s if checks else 0.0,
        checkpoint_s=checkpoint_s,
        epoch_s=epoch_s,
        total_s=total_s,
        cost=None if price_per_hour is None else price_per_hour * workers * total_s / 3600,
        memory_bytes=memory_bytes or rates.memory_bytes,
        assumptions=notes,
    )


def worker_parts(
    config: RunConfig, data: DataSize, rates: Rates, workers: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one worker by part, on its device and in its process; without a GPU everything is in its process."""
    shape = encoder_shape(config.encoder, data.vocab_size)
    load = workload(config, data, workers)
    shard = sizes.shard_of(config, data, load, workers)
    half = not shape.is_static and (
        config.encoder.autocast == "bf16" or (config.encoder.autocast == "auto" and rates.on_gpu)
    )
    dim, value = shape.dim, shard.value
    computing = {
        "encoder": sizes.encoder(shape, value),
        "modules of the method": sizes.method_modules(config, shape, data.num_labels, value),
        "encoder's optimiser": sizes.optimiser(config, shape, data.num_labels, value),
        "classifier shard": sizes.label_rows(config, dim, shard),
        "activations": sizes.activations(config, shape, load, shard, half),
        "logits": sizes.scores(config, shape, load, shard),
    }
    process = rates.process_bytes[0 if shape.is_static else 1]
    # label vectors are made or copied at the start, for a version, for validation and for checkpoints, one at a time,
    # and never during a step: on one device they have the place of what a step makes
    beside = max(
        sizes.started(config, data, dim, shard),
        sizes.published(config, dim, shard),
        sizes.validated(config, dim, shard),
        sizes.writing(config, shape, shard, rates.on_gpu),
    )
    among_steps = 0 if rates.on_gpu else computing["activations"] + computing["logits"]
    host = {
        "process": process,
        "tokens": sizes.tokens(data, load),
        "negatives": sizes.negatives(config.negatives, load),
        "copies for start, versions and checkpoints": max(0, beside - among_steps),
    }
    if not rates.on_gpu:
        computing["heap between them"] = sizes.holes(
            shape, config.encoder.frozen, computing["activations"], value
        )
        return {}, {**host, **computing}
    return {"CUDA": CUDA_BYTES, **computing}, host


def check_fit(
    config: RunConfig, data: DataSize, rates: Rates, workers: int, memory_bytes: int | None = None
) -> None:
    """Raises ResourceError, naming the largest part and what would fit, if a worker needs more memory than it has.

    Without `memory_bytes` the workers of a CPU share the machine at hand, with their index actors; those of a device
    have one each.
    """
    limit = _limit(config, data, rates, workers, memory_bytes)
    on_device, on_host = worker_parts(config, data, rates, workers)
    parts = on_device or on_host
    if sum(parts.values()) <= limit:
        _check_host(on_host, rates)
        return
    largest = max(
        (part for part in parts if part not in ("process", "CUDA")), key=lambda part: parts[part]
    )
    fitting = list(_fitting(config, data, rates, workers, memory_bytes))
    advice = ", or ".join(fitting[:3]) or "lower encoder.dim and raise --workers together"
    raise ResourceError(
        f"a worker needs {sum(parts.values()) / GB:.1f} GB, of which {largest} {parts[largest] / GB:.1f} GB, and has"
        f" {max(limit, 0) / GB:.1f} GB: {advice}"
    )


def _check_host(on_host: dict[str, int], rates: Rates) -> None:
    """The process beside a device has its share of the server."""
    has = int(SPARE * rates.host_bytes)
    if rates.on_gpu and sum(on_host.values()) > has:
        largest = max(on_host, key=lambda part: on_host[part])
        raise ResourceError(
            f"a worker's process needs {sum(on_host.values()) / GB:.1f} GB beside its device, of which {largest}"
            f" {on_host[largest] / GB:.1f} GB, and has {has / GB:.1f} GB: set data.augment_with_labels=false, or lower"
            " negatives.hard or encoder.dim"
        )


def _limit(
    config: RunConfig, data: DataSize, rates: Rates, workers: int, memory_bytes: int | None
) -> int:
    if memory_bytes is not None:
        return memory_bytes
    if rates.on_gpu:
        return int(SPARE * rates.memory_bytes)
    dim = encoder_shape(config.encoder, data.vocab_size).dim
    return int((SPARE * rates.memory_bytes - DRIVER_BYTES) / workers) - _actor(
        config, data, rates, dim, workers
    )


def _parts(config: RunConfig, data: DataSize, rates: Rates, workers: int) -> dict[str, int]:
    on_device, on_host = worker_parts(config, data, rates, workers)
    return on_device or on_host


def _actor(config: RunConfig, data: DataSize, rates: Rates, dim: int, workers: int) -> int:
    """An index actor's process."""
    found = sizes.index_actor(config, data, dim, workers)
    return found + rates.process_bytes[0] if found else 0


def _fitting(
    config: RunConfig, data: DataSize, rates: Rates, workers: int, memory_bytes: int | None
) -> Iterator[str]:
    """Changes of one setting each with which a worker fits."""

    def fits(changed: RunConfig, number: int = workers) -> bool:
        parts = _parts(changed, data, rates, number)
        return sum(parts.values()) <= _limit(changed, data, rates, number, memory_bytes)

    if memory_bytes is not None or rates.on_gpu:
        number = next((n for n in _doubled(workers, 4096) if fits(config, n)), None)
        if number:
            yield f"raise --workers to {number}"
    shape = encoder_shape(config.encoder, data.vocab_size)
    batch, texts = config.optim.batch_size, config.optim.micro_batch or config.optim.batch_size
    halved: dict[str, Sequence[object]] = {
        "encoder.dim": _halved(shape.dim, 16),
        "optim.micro_batch": _halved(texts, 8),
        "optim.batch_size": _halved(batch, 8),
        "negatives.uniform": _halved(config.negatives.uniform, 100),
    }
    rows = getattr(config.method, "classifier", None)
    if rows is not None:
        halved |= {"method.classifier.storage": ["bfloat16"]}
        if rows.kind == "adam":
            halved |= {"method.classifier.kind": ["adagrad"]}
        if rows.kind == "sgd" and rows.momentum:
            halved |= {"method.classifier.momentum": [0]}
    for name, values in halved.items():
        for value in values:
            if fits(RunConfig.resolve(config.method_name, config.to_dict(), [f"{name}={value}"])):
                yield f"set {name}={value}"
                break


def _doubled(start: int, most: int) -> list[int]:
    return [start << i for i in range(1, 13) if start << i <= most]


def _halved(start: int, least: int) -> list[int]:
    return [start >> i for i in range(1, 20) if start >> i >= least]
