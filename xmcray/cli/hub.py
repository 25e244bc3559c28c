"""Bundles and corpora on the Hugging Face Hub: push."""

from __future__ import annotations

import argparse

from xmcray import api
from xmcray.cli.output import show_line, show_next


def push_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="PATH", help="a bundle, a run or a corpus")
    verb.add_argument(
        "url",
        metavar="URL",
        help="hf://OWNER/NAME for a bundle, hf://datasets/OWNER/NAME for a corpus; a repository that"
        " is not there yet is made private",
    )
    verb.add_argument(
        "--data",
        metavar="CORPUS",
        help="measure the bundle on its test split for the card",
    )


def push(options: argparse.Namespace) -> None:
    """Writes a bundle or a corpus to the Hub as one commit, with its card."""
    api.push(options.path, options.url, options.data)
    if not options.url.startswith("hf://datasets/"):
        show_next(["xmcray", "search", options.url, "TEXT"])
    show_line(f"pushed to {options.url}")
