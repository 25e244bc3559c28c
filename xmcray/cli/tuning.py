"""Sweeps: `xmcray tune METHOD` trains, `xmcray tune --bundle BUNDLE` only searches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmcray import config
from xmcray.cli.output import show, show_json, show_next
from xmcray.cli.paths import bundle_at
from xmcray.cli.training import METHODS
from xmcray.errors import ConfigError

if TYPE_CHECKING:
    from xmcray.tuning.space import Space
    from xmcray.tuning.sweep import Trial

TRIALS, DRAWS = 16, 200  # of trainings, of settings of a bundle
_OF_TRAINING = ("search", "scheduler", "config", "set", "workers", "keep")
_FIXED = {  # by the beginning of a name: why it is not searched
    "cluster.": "it belongs to the machine and changes no result",
    "log.": "it changes no result",
    "data.validation": "trials are compared on one validation split",
    "data.seed": "trials are compared on one validation split",
    "method.memory.": "validation in training asks labels alone; sweep memory.* with --bundle on the finished run",
}


def tune_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "method", metavar="METHOD", nargs="?", help=f"{', '.join(METHODS)}; none with --bundle"
    )
    verb.add_argument(
        "--data", required=True, metavar="CORPUS", help="folder or URL that `xmcray prepare` wrote"
    )
    verb.add_argument(
        "--space", required=True, metavar="FILE", help="YAML: dotted name and distribution"
    )
    verb.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder of the sweep; the same command continues it",
    )
    verb.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="sweep how a bundle or finished run answers; trains nothing",
    )
    verb.add_argument(
        "--trials", type=int, metavar="N", help=f"(default: {TRIALS}; with --bundle {DRAWS})"
    )
    verb.add_argument(
        "--search", choices=("random", "optuna"), help="where values come from (default: random)"
    )
    verb.add_argument(
        "--scheduler", choices=("asha", "none"), help="asha ends trials that are behind (default)"
    )
    verb.add_argument(
        "--metric",
        default="nDCG@5",
        metavar="M",
        help="on the validation split (default: %(default)s)",
    )
    verb.add_argument(
        "--config", action="append", metavar="FILE", help="YAML, or preset:METHOD/DATASET"
    )
    verb.add_argument(
        "--set", action="append", metavar="A.B=C", help="one setting of all trials, over --config"
    )
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of each trial; 0, the default, is its own",
    )
    verb.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)"
    )
    verb.add_argument(
        "--keep", type=int, metavar="K", help="best trials whose checkpoints stay (default: 3)"
    )
    verb.add_argument("--json", action="store_true", help="print the results as JSON")


def tune(options: argparse.Namespace) -> None:
    """Trains or searches with many settings and says which are best."""
    if (options.method is None) == (options.bundle is None):
        raise ConfigError(
            "expected a METHOD to train, or --bundle BUNDLE to search; give one of them"
        )
    if options.trials is not None:
        config.check_range("--trials", options.trials, low=1)
    config.check_range("--seed", options.seed, low=0)
    _tune_bundle(options) if options.bundle else _tune_training(options)


def _tune_training(options: argparse.Namespace) -> None:
    if options.method not in METHODS:
        raise ConfigError(config.unknown("method", options.method, METHODS))
    from xmcray.tuning.space import check_space, load_space

    space = load_space(options.space)
    _check_searchable(space, options.space)
    values: dict[str, Any] = {}
    for source in options.config or ():
        values = config.overlay(values, config.load_yaml(source))
    from xmcray.training.run import RunConfig, locked

    settings = RunConfig.resolve(
        options.method, values, [*(options.set or ()), f"cluster.workers={options.workers or 0}"]
    )
    keep, trials = 3 if options.keep is None else options.keep, options.trials or TRIALS
    config.check_range("--keep", keep, low=1)
    from xmcray.tuning.sweep import Sweep, SweepConfig

    wanted = SweepConfig(
        method=options.method,
        corpus="",
        corpus_sha256="",
        settings=settings.to_dict(),
        space={name: distribution.to_yaml() for name, distribution in space.items()},
        search=options.search or "random",
        scheduler=options.scheduler or "asha",
        metric=options.metric,
        seed=options.seed,
    )
    check_space(space, wanted.resolve, options.space)
    if not settings.data.validation:
        raise ConfigError(
            "data.validation is 0, so no query is left to compare trials by; set data.validation=0.05"
        )
    if wanted.scheduler == "asha" and not settings.log.validate_every:
        raise ConfigError(
            "log.validate_every is 0, but asha compares trials while they train; set it to 1"
        )
    import dataclasses

    from xmcray.data.corpus import Corpus
    from xmcray.storage import is_url

    corpus = Corpus.open(options.data)
    where = options.data if is_url(options.data) else str(Path(options.data).absolute())
    wanted = dataclasses.replace(wanted, corpus=where, corpus_sha256=corpus.sha256)
    from xmcray.tuning.report import write_report

    out = Path(options.out).absolute()
    with locked(out):
        sweep = Sweep.open_or_create(out, wanted)
        from xmcray.tuning.search import run_sweep

        def on_end(trial: Trial) -> None:
            print(_line(trial, options.metric, sweep.trials(), trials), file=sys.stderr, flush=True)

        run_sweep(sweep, trials, keep, settings.cluster, on_end)
        sweep.write_results()
        ranked = sweep.ranked()
        title = f"Sweep of {options.method} on {corpus.card.name}"
        write_report(out / "report.html", title, options.metric, space, ranked)
    if options.json:
        show_json(
            {
                "metric": options.metric,
                "best": sweep.best_settings(),
                "trials": [t.plain() for t in ranked],
            }
        )
        return
    _show_trials(ranked, space, options.metric)
    show(f"report {options.out}/report.html, best settings {options.out}/best.yaml")
    best = f"{options.out}/best.yaml"
    show_next(
        [
            "xmcray",
            "train",
            options.method,
            "--data",
            options.data,
            "--config",
            best,
            "--out",
            "RUN",
            "--refit",
        ]
    )


def _tune_bundle(options: argparse.Namespace) -> None:
    given = [name for name in _OF_TRAINING if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"--{given[0]} is for trainings, but --bundle only searches; leave one of them out"
        )
    from xmcray.tuning.inference import as_trials, kind_of, sweep_bundle
    from xmcray.tuning.space import load_space

    space = load_space(options.space)
    kind = kind_of(space, options.space)
    import yaml

    from xmcray import storage
    from xmcray.data.corpus import Corpus
    from xmcray.errors import RunError
    from xmcray.training.run import locked
    from xmcray.tuning.report import write_report
    from xmcray.tuning.space import nested

    corpus, metric, out = Corpus.open(options.data), options.metric, Path(options.out).absolute()
    bundle = bundle_at(options.bundle, options.data)
    with locked(out):
        if found := {p.name for p in out.iterdir()} - {
            "lock",
            "results.json",
            "report.html",
            "best.yaml",
        }:
            raise RunError(
                f"{out} holds {sorted(found)[0]}, not a sweep of a bundle; choose another --out"
            )
        trials = options.trials or DRAWS
        measured, before = sweep_bundle(
            bundle, corpus, space, trials, options.seed, metric, options.space
        )
        results = [
            {"values": one.values, "queries_per_s": one.queries_per_s, **one.metrics}
            for one in measured
        ]
        best = measured[0]
        body = {"metric": metric, "bundle_as_it_is": before, "settings": results}
        storage.write_json(out / "results.json", body)
        # a memory's settings have a place in the configuration of a run
        settings = nested(
            {f"method.{n}" if kind == "memory" else n: value for n, value in best.values.items()}
        )
        score = f"{metric} {best.metrics[metric]:.4f} on validation, {before[metric]:.4f} of the bundle as it is"
        storage.write_text(
            out / "best.yaml", f"# {score}.\n" + yaml.safe_dump(settings, sort_keys=False)
        )
        title = f"Settings of {Path(options.bundle).name} on {corpus.card.name}"
        write_report(
            out / "report.html",
            title,
            metric,
            space,
            as_trials(measured, metric),
            f"Best: {score}.",
        )
    if options.json:
        show_json(body)
        return
    _show_settings(measured, space, metric)
    show(score)
    if kind == "memory":
        asked = [
            part
            for name, value in best.values.items()
            for part in ("--memory", _assigned(name, value))
        ]
        show_next(["xmcray", "search", options.bundle, "TEXT", *asked])
    if kind == "index":
        run = (
            "RUN"
            if bundle == options.bundle
            else options.bundle.removesuffix("/").removesuffix("/selection")
        )
        show_next(
            ["xmcray", "export", run, "--out", "BUNDLE", "--config", f"{options.out}/best.yaml"]
        )


def _check_searchable(space: Space, where: str) -> None:
    """Raises ConfigError for settings that a sweep of trainings cannot compare."""
    for name in space:
        for beginning, reason in _FIXED.items():
            if name.startswith(beginning):
                raise ConfigError(f"{where}: {name} cannot be searched: {reason}")


def _assigned(name: str, value: Any) -> str:
    return f"{name.rpartition('.')[2]}={str(value).lower() if isinstance(value, bool) else value}"


def _line(trial: Trial, metric: str, trials: list[Trial], of: int) -> str:
    """What is printed when a trial ends."""
    ended = sum(t.state != "unfinished" for t in trials)
    best = max((t.score for t in trials if t.score is not None), default=0.0)
    told = (
        trial.message
        if trial.best is None
        else f"{metric} {100 * trial.best[0]:.2f} (best {100 * best:.2f})"
    )
    return f"trial {trial.name} {trial.state} at step {trial.steps:,}: {told}; {ended} of {of} have ended"


def _show_trials(trials: list[Trial], space: Space, metric: str) -> None:
    rows = [
        [t.name, t.state, t.score_text, t.epoch_text, f"{t.steps:,}", *_cells(t.values, space)]
        for t in trials
    ]
    _show_table(
        "Trials, the best first", ["trial", "state", metric, "epoch", "steps", *space], rows
    )


def _show_settings(measured: list[Any], space: Space, metric: str, rows: int = 20) -> None:
    timed = any(one.queries_per_s for one in measured)
    names = [metric, "P@1", "PSP@1", *(["queries/s"] if timed else [])]
    names = list(dict.fromkeys(names))
    table = []
    for one in measured[:rows]:
        figures = [
            f"{one.queries_per_s:,.0f}" if n == "queries/s" else f"{100 * one.metrics[n]:.2f}"
            for n in names
        ]
        table.append([*figures, *_cells(one.values, space)])
    _show_table(f"Settings, the best {len(table)} of {len(measured)}", [*names, *space], table)


def _cells(values: Mapping[str, Any], space: Space) -> list[str]:
    from xmcray.tuning.report import shown

    return [shown(values[name]) for name in space]


def _show_table(title: str, names: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(Text(name), justify="right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    show(table)
