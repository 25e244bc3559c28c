"""Arguments that several verbs have, and the settings that they give."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from xmcray import config
from xmcray.api.settings_sources import merged
from xmcray.errors import ConfigError


def add_corpus(verb: argparse.ArgumentParser) -> None:
    """Adds --data, the corpus of the verb."""
    verb.add_argument(
        "--data",
        required=True,
        metavar="CORPUS",
        help="folder or URL that `xmcray prepare` wrote",
    )


def add_config(
    verb: argparse.ArgumentParser,
    config_help: str = "YAML, or preset:METHOD/DATASET",
    set_help: str = "one setting, over --config",
) -> None:
    """Adds --config and --set; `merged_settings` reads them."""
    verb.add_argument("--config", action="append", metavar="FILE", help=config_help)
    verb.add_argument("--set", action="append", metavar="A.B=C", help=set_help)


def add_json(verb: argparse.ArgumentParser, what: str) -> None:
    """Adds --json, which prints for programs."""
    verb.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The named options that were given, by name."""
    return {
        name: value for name, value in vars(options).items() if name in names and value is not None
    }


def assignments(options: argparse.Namespace, name: str) -> dict[str, str]:
    """An option such as --columns text=title,labels=tags by its names.

    Raises:
        ConfigError: a part of it is no assignment.
    """
    values = {}
    for part in getattr(options, name).split(","):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"--{name} has {part!r}, expected NAME=VALUE, separated by commas")
        values[key.strip()] = value.strip()
    return values


def merged_settings(options: argparse.Namespace, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of all --config files, the later over the earlier, and of --set over them.

    Args:
        options: arguments of a verb with `add_config`.
        overrides: more assignments such as "optim.epochs=3", over all of them.
    """
    return config.merge(merged(options.config or ()), [*(options.set or ()), *overrides])
