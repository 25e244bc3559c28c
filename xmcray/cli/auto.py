"""A good bundle within a time: auto."""

from __future__ import annotations

import argparse
import re
import sys

from xmcray import config
from xmcray.cli.arguments import add_corpus, add_json
from xmcray.cli.output import show, show_json, show_next, show_table
from xmcray.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3600}


def auto_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add_corpus(verb)
    verb.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder of the study; the same command continues it",
    )
    verb.add_argument(
        "--budget",
        default="20m",
        metavar="TIME",
        help="wall time of all calls together, such as 90s, 20m or 2h (default: %(default)s)",
    )
    verb.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="try these (default: rae astra dexml unidec renee)",
    )
    verb.add_argument("--set", action="append", metavar="A.B=C", help="one setting of all trials")
    add_json(verb, "the results")


def auto(options: argparse.Namespace) -> None:
    """Chooses methods, encoders and a fusion by validation, and writes one bundle and one page."""
    budget_s = seconds_of(options.budget)
    overrides = config.merge({}, options.set or ())
    from xmcray.tuning.portfolio import DEFAULT_METHODS, METHODS, dotted

    methods = options.methods or DEFAULT_METHODS
    for method in methods:
        if method not in METHODS:
            raise ConfigError(config.unknown("method", method, METHODS))
    from xmcray.data.corpus import Corpus
    from xmcray.tuning.auto import auto

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    corpus = Corpus.open(options.data)
    result = auto(corpus, options.out, budget_s, methods, dotted(overrides), say)
    if options.json:
        show_json(result)
        return
    if result["test"] is not None:
        from xmcray.tuning.study import METRICS

        rows = []
        for row in result["test"]["results"]:
            cells = [f"{100 * row[metric]:.2f}" for metric in METRICS]
            rows.append([row["name"], *cells])
        show_table("Test split, in percent", ["", *METRICS], rows)
    show(f"bundle {options.out}/bundle, report {options.out}/report.html")
    show_next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])


def seconds_of(text: str) -> float:
    """A time such as "90s", "20m" or "1.5h" in seconds.

    Raises:
        ConfigError: it is no time, or 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"--budget is {text!r}, expected a time such as 90s, 20m or 2h")
    return seconds
