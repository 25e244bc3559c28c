"""A plan of a training before it starts, and a refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from xmcray.errors import ResourceError
from xmcray.planning.data_size import DataSize
from xmcray.planning.estimate import SPARE, Plan, estimate
from xmcray.planning.rates import Rates
from xmcray.training.run import RunConfig

_MOST_WORKERS = 4096
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
        config: of the training.
        data: its size.
        rates: of the device.
        workers: in place of `cluster.workers`.
        memory_bytes: of each worker; of the device or a share of the machine if not given.
        price_per_hour: of one worker with its share of a machine.

    Raises:
        ConfigError: settings or an encoder that do not go together.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    planned = estimate(config, data, rates, workers, memory_bytes, price_per_hour)
    if not planned.fits:
        changes = _worker_changes(planned, rates, memory_bytes)
        # Each further change costs a trace: the first three are enough.
        setting_changes = _setting_changes(planned, config, data, rates, memory_bytes)
        changes += islice(setting_changes, 3 - len(changes))
        advice = ", or ".join(changes) or "lower encoder.dim and raise --workers together"
        needed = _needed(planned.worker_parts, "a worker needs", "")
        limit = max(planned.limit_bytes, 0) / _GB
        raise ResourceError(f"{needed}, and has {limit:.1f} GB: {advice}")
    host_limit = SPARE * rates.host_bytes
    if rates.on_gpu and sum(planned.host_bytes.values()) > host_limit:
        needed = _needed(planned.host_bytes, "a worker's process needs", " besides its device")
        raise ResourceError(
            f"{needed}, and has {host_limit / _GB:.1f} GB: set data.augment_with_labels=false,"
            " or lower negatives.hard or encoder.dim"
        )
    return planned


def _needed(parts: dict[str, int], needs: str, where: str) -> str:
    """The sum and the largest part, in words."""
    changeable = [part for part in parts if part not in ("process", "CUDA")]
    largest = max(changeable, key=lambda part: parts[part])
    total = sum(parts.values()) / _GB
    return f"{needs} {total:.1f} GB{where}, of which {largest} {parts[largest] / _GB:.1f} GB"


def _worker_changes(planned: Plan, rates: Rates, memory_bytes: int | None) -> list[str]:
    """The number of workers with which each fits, because they share the label rows."""
    if memory_bytes is None and not rates.on_gpu:
        return []  # more workers on the same machine have less memory each
    missing = planned.worker_bytes - planned.limit_bytes
    workers = 2 * planned.workers
    while workers <= _MOST_WORKERS:
        if planned.worker_parts["label rows"] * (1 - planned.workers / workers) >= missing:
            return [f"raise --workers to {workers}"]
        workers *= 2
    return []


def _setting_changes(
    planned: Plan, config: RunConfig, data: DataSize, rates: Rates, memory_bytes: int | None
) -> Iterator[str]:
    """Changes of one setting with each of which a worker fits."""
    missing = planned.worker_bytes - planned.limit_bytes
    for part, setting, values in _smaller_settings(planned, config):
        if planned.worker_parts[part] < missing and setting != "encoder.dim":
            continue  # without the whole part it would not fit either
        for value in values:
            change = f"{setting}={value}"
            changed = RunConfig.resolve(config.method_name, config.to_dict(), [change])
            if estimate(changed, data, rates, planned.workers, memory_bytes).fits:
                yield f"set {change}"
                break


def _smaller_settings(planned: Plan, config: RunConfig) -> list[tuple[str, str, list[Any]]]:
    """(part that shrinks, setting, values to try in this order)."""
    row_bytes = planned.worker_parts["label rows"]
    # The other parts need a trace to know: it would be in vain if the rows alone do not fit.
    max_dim = planned.dim * planned.limit_bytes / row_bytes if row_bytes else planned.dim
    dims = [dim for dim in _halved(planned.dim, 16) if dim < max_dim]
    optim = config.optim
    texts = optim.micro_batch or optim.batch_size
    settings: list[tuple[str, str, list[Any]]] = [
        ("label rows", "encoder.dim", dims),
        ("activations and scores", "optim.micro_batch", _halved(texts, 8)),
        ("activations and scores", "optim.batch_size", _halved(optim.batch_size, 8)),
        ("activations and scores", "negatives.uniform", _halved(config.negatives.uniform, 100)),
    ]
    classifier = getattr(config.method, "classifier", None)
    if classifier is not None:
        settings.append(("label rows", "method.classifier.storage", ["bfloat16"]))
        if classifier.kind == "sgd":
            settings.append(("label rows", "method.classifier.momentum", [0]))
        if classifier.kind == "adam":
            settings.append(("label rows", "method.classifier.kind", ["adagrad"]))
    return settings


def _halved(start: int, least: int) -> list[int]:
    """start / 2, start / 4 and so on, down to `least`."""
    values = []
    while start // 2 >= least:
        start //= 2
        values.append(start)
    return values
