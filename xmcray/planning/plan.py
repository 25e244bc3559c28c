"""A plan of a training before it starts, and a refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from xmcray.errors import ResourceError
from xmcray.planning.data_size import DataSize
from xmcray.planning.estimate import BETWEEN_STEPS, INDEX, SPARE, Plan, estimate
from xmcray.planning.rates import Rates
from xmcray.training.run_config import RunConfig

_MOST_WORKERS = 4096
_LEAST_VALUE = 8  # of a setting that is halved
_GB = 1e9


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
        config: Settings of the training.
        data: Its size.
        rates: Rates of the device.
        workers: Number of workers, in place of `cluster.workers`.
        memory_bytes: Memory of each worker; of the device or a share of the machine if not given.
        price_per_hour: Price of one worker with its share of a machine.

    Raises:
        ConfigError: settings or an encoder that do not go together.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    num_shards = max(1, config.cluster.workers if workers is None else workers)
    config.negatives.check_index(data.num_labels, num_shards)
    planned = estimate(
        config,
        data,
        rates,
        workers,
        memory_bytes,
        price_per_hour,
    )
    if not planned.fits:
        changes = _changes(planned, config, data, rates, memory_bytes)
        # Each change of a setting costs a trace: the first three are enough.
        advice = ", or ".join(islice(changes, 3))
        needed = _needed("a worker needs", planned.worker_parts, planned.limit_bytes)
        raise ResourceError(
            f"{needed}: {advice or 'lower encoder.dim and raise --workers together'}"
        )
    host_limit = int(SPARE * rates.host_bytes)
    host_parts = dict(planned.host_bytes)
    if INDEX in planned.device_bytes:
        # An index actor that searches on the worker's device is on its host, too.
        host_parts["index actor"] = planned.index_bytes
    if rates.on_gpu and sum(host_parts.values()) > host_limit:
        needed = _needed("besides its device a worker's host needs", host_parts, host_limit)
        raise ResourceError(
            f"{needed}: raise --workers, set data.augment_with_labels=false, or lower negatives.hard or"
            " encoder.dim"
        )
    return planned


def _needed(needs: str, parts: dict[str, int], limit_bytes: int) -> str:
    """The sum and its largest part, in words."""
    changeable = [part for part in parts if part not in ("process", "CUDA")]
    largest = max(changeable, key=parts.__getitem__)
    total_gb = sum(parts.values()) / _GB
    largest_gb = parts[largest] / _GB
    limit_gb = max(limit_bytes, 0) / _GB
    return (
        f"{needs} {total_gb:.1f} GB,"
        f" of which {largest} {largest_gb:.1f} GB,"
        f" and has {limit_gb:.1f} GB"
    )


def _changes(
    planned: Plan,
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    memory_bytes: int | None,
) -> Iterator[str]:
    """Changes with each of which a worker fits."""
    parts = planned.worker_parts
    missing_bytes = planned.worker_bytes - planned.limit_bytes
    if parts.get(BETWEEN_STEPS, 0) >= missing_bytes:
        without = RunConfig.resolve(config.method_name, config.to_dict(), ["data.validation=0"])
        if estimate(without, data, rates, planned.workers, memory_bytes).fits:
            yield "lower data.validation"
    # Workers share the labels. More workers on the same machine would have less memory each.
    shared_bytes = parts["label rows"] + parts.get(BETWEEN_STEPS, 0)
    workers = planned.workers
    while workers < _MOST_WORKERS and (memory_bytes is not None or rates.on_gpu):
        workers *= 2
        if shared_bytes * (1 - planned.workers / workers) < missing_bytes:
            continue  # the part is too large, which needs no trace
        if estimate(config, data, rates, workers, memory_bytes).fits:
            yield f"raise --workers to {workers}"
            break
    texts = config.optim.micro_batch or config.optim.batch_size
    for part, setting, start in (
        ("label rows", "encoder.dim", planned.dim),
        ("activations and scores", "optim.micro_batch", texts),
        ("activations and scores", "optim.batch_size", config.optim.batch_size),
    ):
        value = start
        while value >= 2 * _LEAST_VALUE:
            value //= 2
            if parts[part] * (1 - value / start) < missing_bytes:
                continue  # the part is too large, which needs no trace
            change = f"{setting}={value}"
            changed = RunConfig.resolve(config.method_name, config.to_dict(), [change])
            if estimate(changed, data, rates, planned.workers, memory_bytes).fits:
                yield f"set {change}"
                break
