"""Bundles and corpora on the Hugging Face Hub: push."""

from __future__ import annotations

import argparse
from pathlib import Path

from xmcray.cli.output import show, show_next
from xmcray.errors import ConfigError
from xmcray.paths import bundle_at


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
    from xmcray import hub

    target = hub.HubPath.parse(options.url)
    is_corpus = (Path(options.path) / "card.yaml").is_file()
    expected = "dataset" if is_corpus else "model"
    if target.repo_type != expected:
        raise ConfigError(
            f"{options.url} is of a {target.repo_type}, expected that of a {expected}:"
            f" hf://{'datasets/' if is_corpus else ''}OWNER/NAME"
        )
    if is_corpus:
        from xmcray.training.hub_push import push_corpus

        push_corpus(options.path, options.url)
    else:
        from xmcray.training.hub_push import push_bundle

        push_bundle(bundle_at(options.path, options.data), options.url, options.data)
        show_next(["xmcray", "search", options.url, "TEXT"])
    show(f"pushed to {options.url}")
