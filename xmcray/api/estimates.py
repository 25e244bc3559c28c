"""What a training takes, before it runs: plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from xmcray.api.settings_sources import Location, Settings, merged
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name

if TYPE_CHECKING:
    from xmcray.planning.data_size import DataSize
    from xmcray.planning.estimate import Plan
    from xmcray.planning.rates import Rates
    from xmcray.training.run_config import RunConfig

_MOST = 1e9  # GB of memory or a price; more is a mistake and would overflow


def plan(
    method: str,
    config: Settings = (),
    *,
    data: Location | None = None,
    labels: int | None = None,
    queries: int | None = None,
    tokens_per_text: float | None = None,
    positives: float | None = None,
    workers: int | None = None,
    device: str = "cpu",
    memory_gb: float | None = None,
    price_per_hour: float | None = None,
    probe: Location | None = None,
) -> Plan:
    """Computes memory, time and cost of a training before it runs.

    Args:
        method: name of the method.
        config: settings.
        data: corpus to count; or give `labels` and `queries`.
        labels: number of labels.
        queries: number of training queries.
        tokens_per_text: average of queries and label texts; 16 if not given.
        positives: labels of a query; 5 if not given.
        workers: training processes, in place of `cluster.workers`; 0 is one process without Ray.
        device: "cpu", which is measured here, or a device such as "a100-80gb".
        memory_gb: memory of each worker, in units of 10^9 bytes.
        price_per_hour: price of one worker with its share of a machine.
        probe: file of measured rates of this machine; read if it exists, otherwise written.
    Raises:
        ConfigError: an argument or a setting is out of range, or the size is not known.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    check_method_name(method)
    numbers = {"memory_gb": memory_gb, "price_per_hour": price_per_hour}
    for name, value in numbers.items():
        if value is not None and not value > 0:  # NaN is not above 0 either
            raise ConfigError(f"{name} is {value:g}, expected more than 0")
        if value is not None and value > _MOST:
            raise ConfigError(f"{name} is {value:g}, expected at most {_MOST:g}")
    values = merged(config)
    from xmcray.config import check_range
    from xmcray.training.run_config import MOST_WORKERS, RunConfig

    if workers is not None:
        check_range("workers", workers, 0, MOST_WORKERS)
    settings = RunConfig.resolve(method, values)
    size = _data_size(data, labels, queries, tokens_per_text, positives)
    from xmcray.planning import plan as planning

    rates = _rates(device, settings, workers, probe)
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    return planning.plan(settings, size, rates, workers, memory_bytes, price_per_hour)


def _data_size(
    data: Location | None,
    labels: int | None,
    queries: int | None,
    tokens_per_text: float | None,
    positives: float | None,
) -> DataSize:
    """Of a corpus, or from numbers.

    Raises:
        ConfigError: both or neither are given, or a number is out of range.
    """
    from xmcray.planning import data_size

    if data is not None:
        numbers = {
            "labels": labels,
            "queries": queries,
            "tokens_per_text": tokens_per_text,
            "positives": positives,
        }
        for name, value in numbers.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value:g}, but data is counted; leave out {name}, or data"
                )
        from xmcray.data.corpus import Corpus

        return data_size.from_corpus(Corpus.open(os.fspath(data), verify=False))
    if labels is None or queries is None:
        raise ConfigError("the size of the data is not known; give data, or labels and queries")
    return data_size.from_numbers(labels, queries, tokens_per_text, positives)


def _rates(device: str, settings: RunConfig, workers: int | None, probe: Location | None) -> Rates:
    """Of the device: published, read from the file of `probe`, or measured.

    Raises:
        ConfigError: the rates in the file are of another number of threads, or the device is no CPU.
    """
    from xmcray.planning.devices import device_rates

    if device != "cpu":
        if probe is not None:
            raise ConfigError(f"probe is {probe}, expected none: rates of {device} are published")
        return device_rates(device, settings.optim.matmul)
    from xmcray.planning import probe as measurement
    from xmcray.planning.rates import load_rates
    from xmcray.storage.path_errors import check_file

    threads = _threads(settings, workers)
    # Measuring takes time, so its result can be kept in a file.
    path = None if probe is None else Path(probe)
    if path is not None and path.is_file():
        rates = load_rates(path)
        if rates.threads != threads:
            raise ConfigError(
                f"probe {path} was measured with {rates.threads} threads, but processes of this"
                f" training have {threads}; measure into another file, or set"
                f" cluster.threads_per_process={rates.threads}"
            )
        return rates
    if path is not None:
        check_file(path)
    measured = measurement.probe(threads)
    if path is not None:
        measured.save(path)
    return measured


def _threads(settings: RunConfig, workers: int | None) -> int:
    """Threads of each process of a training on this machine."""
    cluster = settings.cluster
    if workers is None:
        workers = cluster.workers
    # Each worker has an index actor.
    num_shards = workers if settings.negatives.refreshed else 0
    return cluster.threads_on_one_machine(workers, num_shards)
