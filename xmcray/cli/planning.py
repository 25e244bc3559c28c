"""The verb `plan`: memory, time and cost of a training before anything runs."""

from __future__ import annotations

import argparse
import dataclasses

from xmcray import api
from xmcray.cli.arguments import add_config, add_json, merged_settings
from xmcray.cli.output import show, show_json, show_line
from xmcray.methods.registry import method_names

# Options that go to the function of the same name as they are.
ARGUMENTS = (
    "data",
    "labels",
    "queries",
    "tokens_per_text",
    "positives",
    "workers",
    "device",
    "memory_gb",
    "price_per_hour",
    "probe",
)
# Properties of a plan that its JSON has too.
_SUMS = ("worker_bytes", "step_seconds", "total_s")


def plan_options(verb: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(method_names()))
    verb.add_argument(
        "--data", metavar="CORPUS", help="count a prepared corpus; or give the next options"
    )
    verb.add_argument(
        "--labels", type=_integer, metavar="L", help="number of labels, such as 1.3e6"
    )
    verb.add_argument("--queries", type=_integer, metavar="N", help="number of training queries")
    verb.add_argument(
        "--tokens-per-text",
        type=_number,
        metavar="T",
        help="average of queries and label texts (default: 16)",
    )
    verb.add_argument(
        "--positives",
        type=_number,
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
    arguments = {name: getattr(options, name) for name in ARGUMENTS}
    training_plan = api.plan(options.method, merged_settings(options), **arguments)
    if options.json:
        sums = {name: getattr(training_plan, name) for name in _SUMS}
        show_json({**dataclasses.asdict(training_plan), **sums})
        return
    from xmcray.planning.tables import tables

    for part in tables(training_plan):
        if isinstance(part, str):
            show_line(part)
        else:
            show(part)


def _number(text: str) -> float:
    """12.5 or 1.3e6."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _integer(text: str) -> int:
    """1300000, 1.3e6 or 1_300_000."""
    number = _number(text)
    # Infinity and NaN are no integers either.
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
    return int(number)
