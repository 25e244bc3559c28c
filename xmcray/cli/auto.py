"""A good bundle within a time: auto."""

from __future__ import annotations

import argparse

from xmcray import api, config
from xmcray.cli.arguments import add_corpus, add_json
from xmcray.cli.output import show_json, show_line, show_next, show_table


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
        action="extend",
        metavar="METHOD",
        help="try these (default: rae astra dexml unidec renee)",
    )
    verb.add_argument("--set", action="append", metavar="A.B=C", help="one setting of all trials")
    add_json(verb, "the results")


def auto(options: argparse.Namespace) -> None:
    """Chooses methods, encoders and a fusion by validation, and writes one bundle and one page."""
    result = api.auto(
        options.data,
        options.out,
        budget=options.budget,
        methods=options.methods,
        config=config.merge({}, options.set or ()),
    )
    if options.json:
        show_json(result)
        return
    if result["test"] is not None:
        from xmcray.training.part_weights import METRICS

        rows = []
        for row in result["test"]["results"]:
            cells = [f"{100 * row[metric]:.2f}" for metric in METRICS]
            rows.append([row["name"], *cells])
        show_table("Test split, in percent", ["", *METRICS], rows)
    show_line(f"bundle {options.out}/bundle, report {options.out}/report.html")
    show_next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])
