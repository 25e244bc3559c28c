"""The verb `plan`: memory, time and cost of a training before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from xmcray.cli.arguments import add_config, add_json, merged_settings
from xmcray.cli.output import show, show_json
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name, method_names

if TYPE_CHECKING:
    from xmcray.planning.data_size import DataSize
    from xmcray.planning.rates import Rates
    from xmcray.training.run import RunConfig


def plan_options(verb: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(method_names()))
    verb.add_argument(
        "--data", metavar="CORPUS", help="count a prepared corpus; or give the next options"
    )
    verb.add_argument("--labels", type=_number, metavar="L", help="number of labels, such as 1.3e6")
    verb.add_argument("--queries", type=_number, metavar="N", help="number of training queries")
    verb.add_argument(
        "--tokens-per-text",
        type=_number,
        metavar="T",
        help="average of queries and label texts (default: 16)",
    )
    verb.add_argument(
        "--positives",
        type=float,
        default=5.0,
        metavar="P",
        help="labels of a query (default: 5)",
    )
    add_config(verb)
    verb.add_argument("--workers", type=int, metavar="W", help="training processes")
    verb.add_argument(
        "--device",
        default="cpu",
        metavar="D",
        help="cpu (measured here), or one such as a100-80gb",
    )
    verb.add_argument("--memory-gb", type=float, metavar="M", help="memory of each worker")
    verb.add_argument(
        "--price-per-hour",
        type=float,
        metavar="P",
        help="of one worker with its share of a machine",
    )
    verb.add_argument(
        "--probe",
        metavar="FILE",
        help="file of measured rates of this machine; read if it exists, otherwise written",
    )
    add_json(verb, "the plan")


def plan(options: argparse.Namespace) -> None:
    """Prints what a training takes, or refuses one that does not fit."""
    check_method_name(options.method)
    for name in ("memory_gb", "price_per_hour", "workers"):
        value = getattr(options, name)
        if value is not None and not value > 0:  # NaN is not above 0 either
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}, expected more than 0")
    values = merged_settings(options)
    from xmcray.training.run import RunConfig

    config = RunConfig.resolve(options.method, values)
    data = _data(options)
    from xmcray.planning.plan import plan
    from xmcray.planning.tables import tables

    rates = _rates(options, config)
    memory = None if options.memory_gb is None else int(options.memory_gb * 1e9)
    made = plan(config, data, rates, options.workers, memory, options.price_per_hour)
    if options.json:
        sums = {name: getattr(made, name) for name in ("worker_bytes", "step_seconds", "total_s")}
        show_json({**dataclasses.asdict(made), **sums})
        return

    for part in tables(made):
        show(part)


def _data(options: argparse.Namespace) -> DataSize:
    from xmcray.planning import data_size

    if options.data:
        from xmcray.data.corpus import Corpus

        return data_size.from_corpus(Corpus.open(options.data, verify=False))
    if options.labels is None or options.queries is None:
        raise ConfigError(
            "the size of the data is not known; give --data CORPUS, or --labels and --queries"
        )
    return data_size.from_numbers(
        options.labels,
        options.queries,
        options.tokens_per_text,
        options.positives,
    )


def _rates(options: argparse.Namespace, config: RunConfig) -> Rates:
    """Of the device: published, read from the file of --probe, or measured."""
    from xmcray.planning.devices import device_rates

    if options.device != "cpu":
        return device_rates(options.device, config.optim.matmul)
    from xmcray import storage
    from xmcray.planning.probe import probe
    from xmcray.planning.rates import load_rates

    # Measuring takes time, so its result can be kept in a file.
    path = Path(options.probe) if options.probe else None
    if path is not None and path.is_file():
        return load_rates(path)
    if path is not None:
        storage.check_file(path)
    measured = probe(config.cluster.threads_per_process or 1)
    if path is not None:
        measured.save(path)
    return measured


def _number(text: str) -> int:
    """1300000, 1.3e6 or 1_300_000."""
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
