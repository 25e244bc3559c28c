"""Sweeps: `xmcray tune METHOD` trains, `xmcray tune --bundle BUNDLE` only searches."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xmcray import api
from xmcray.api.sweeps import DEFAULT_DRAWS, DEFAULT_KEEP, DEFAULT_TRIALS, METRIC
from xmcray.cli.arguments import add_config, add_corpus, add_json, given
from xmcray.cli.output import show_json, show_line, show_next, show_table
from xmcray.config import merge
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name, method_names
from xmcray.paths import kind_of

if TYPE_CHECKING:
    from xmcray.tuning.inference import MeasuredSetting
    from xmcray.tuning.space import Space
    from xmcray.tuning.sweep import Trial

MAX_ROWS = 20  # of the table of settings

_FOR_BOTH = ("space", "trials")
_ONLY_FOR_TRAINING = ("search", "scheduler", "workers", "keep", "trial_cpu_s")
# These are read by functions of their own.
_FILES = ("config", "set", "first")


def tune_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "method",
        metavar="METHOD",
        nargs="?",
        help=f"{', '.join(method_names())}; none with --bundle",
    )
    add_corpus(verb)
    verb.add_argument(
        "--space",
        metavar="FILE",
        help="YAML: dotted name and distribution; or space:NAME (default: space:METHOD)",
    )
    verb.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder of the sweep; the same command continues it, or with --bundle repeats it",
    )
    verb.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="sweep how a bundle or finished run answers; trains nothing",
    )
    add_config(verb, set_help="one setting of all trials, over --config")
    _add_search_options(verb)
    add_json(verb, "the results")


def _add_search_options(verb: argparse.ArgumentParser) -> None:
    """Adds what decides which trials run, and how they are compared."""
    verb.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help=f"(default: {DEFAULT_TRIALS}; with --bundle {DEFAULT_DRAWS})",
    )
    verb.add_argument(
        "--search", choices=("random", "optuna"), help="where values come from (default: random)"
    )
    verb.add_argument(
        "--scheduler", choices=("asha", "none"), help="asha ends trials that are behind (default)"
    )
    verb.add_argument(
        "--metric",
        default=METRIC,
        metavar="M",
        help="on the validation split, or the mean of several joined by + (default: %(default)s)",
    )
    verb.add_argument(
        "--first",
        action="append",
        metavar="FILE",
        help="a configuration whose values one of the first trials has, as near as the space allows",
    )
    verb.add_argument(
        "--trial-cpu-s",
        type=float,
        metavar="S",
        help="stop trials that need more seconds of CPU time (default: no limit); not with --workers",
    )
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of each trial, in place of cluster.workers; 0, the default, is its own",
    )
    verb.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the sampled values (default: %(default)s)",
    )
    verb.add_argument(
        "--keep",
        type=int,
        metavar="K",
        help=f"best trials whose checkpoints stay (default: {DEFAULT_KEEP})",
    )


def tune(options: argparse.Namespace) -> None:
    """Trains or searches with many settings and prints the best ones."""
    # Exactly one of them: equal answers mean both or neither.
    if (options.method is None) == (options.bundle is None):
        raise ConfigError(
            "expected a METHOD to train, or --bundle BUNDLE to search; give one of them"
        )
    if options.bundle is not None:
        _tune_bundle(options)
    else:
        _tune_training(options)


def _tune_training(options: argparse.Namespace) -> None:
    """A sweep of trainings."""
    check_method_name(options.method)
    # Sources one by one, because a preset's number of workers is not one that the user gave.
    sources = [*(options.config or ()), merge({}, options.set or ())]
    sweep = api.tune(
        options.method,
        options.data,
        options.out,
        sources,
        first=options.first or (),
        metric=options.metric,
        seed=options.seed,
        **given(options, (*_FOR_BOTH, *_ONLY_FOR_TRAINING)),
    )
    ranked = sweep.ranked()
    if options.json:
        show_json(
            {
                "metric": options.metric,
                "best": sweep.best_settings(),
                "trials": [trial.plain() for trial in ranked],
            }
        )
        return
    _show_trials(ranked, sweep.space, options.metric)
    best = f"{options.out}/best.yaml"
    show_line(f"report {options.out}/report.html, best settings {best}")
    train = ["xmcray", "train", options.method, "--data", options.data, "--config", best]
    show_next([*train, "--out", "RUN", "--refit"])


def _tune_bundle(options: argparse.Namespace) -> None:
    """A sweep of how a bundle answers."""
    for name in (*_FILES, *_ONLY_FOR_TRAINING):
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} is for trainings, but --bundle only searches; leave one of them out"
            )
    if options.space is None:
        raise ConfigError(
            "--bundle needs a space: give --space space:index, space:memory or space:fusion"
        )
    sweep = api.tune_bundle(
        options.bundle,
        options.data,
        options.out,
        metric=options.metric,
        seed=options.seed,
        **given(options, _FOR_BOTH),
    )
    if options.json:
        show_json(sweep.plain())
        return
    _show_settings(sweep.settings, sweep.space, options.metric)
    show_line(sweep.summary)
    # The names of a space are of one family.
    family = next(iter(sweep.space)).partition(".")[0]
    if family == "memory":
        search = ["xmcray", "search", options.bundle, "TEXT"]
        for name, value in sweep.settings[0].values.items():
            # YAML, which reads --set, writes booleans in lower case.
            text = str(value).lower() if isinstance(value, bool) else value
            search += ["--set", f"{name}={text}"]
        show_next(search)
    if family == "index":
        run = "RUN"
        if kind_of(options.bundle) == "run":
            run = options.bundle.removesuffix("/").removesuffix("/selection")
        best = f"{options.out}/best.yaml"
        show_next(["xmcray", "export", run, "--out", "BUNDLE", "--config", best])


def _show_trials(trials: Sequence[Trial], space: Space, metric: str) -> None:
    rows = []
    for trial in trials:
        row = [
            trial.name,
            trial.state,
            trial.score_text,
            trial.epoch_text,
            f"{trial.steps:,}",
            *_cells(trial.values, space),
        ]
        rows.append(row)
    columns = ["trial", "state", metric, "epoch", "steps", *space]
    show_table("Trials, the best first", columns, rows)


def _show_settings(measured: Sequence[MeasuredSetting], space: Space, metric: str) -> None:
    metrics = list(dict.fromkeys([metric, "P@1", "PSP@1"]))  # each once
    has_speeds = any(setting.queries_per_s for setting in measured)
    rows = []
    for setting in measured[:MAX_ROWS]:
        row = [f"{100 * setting.score(name):.2f}" for name in metrics]
        if has_speeds:
            row.append(f"{setting.queries_per_s:,.0f}")
        rows.append(row + _cells(setting.values, space))
    speed_column = ["queries/s"] if has_speeds else []
    title = f"Settings, the best {len(rows)} of {len(measured)}"
    show_table(title, [*metrics, *speed_column, *space], rows)


def _cells(values: Mapping[str, Any], space: Space) -> list[str]:
    from xmcray.tuning.report import shown

    return [shown(values[name]) for name in space]
