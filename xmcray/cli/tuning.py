"""Sweeps: `xmcray tune METHOD` trains, `xmcray tune --bundle BUNDLE` only searches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmcray import config
from xmcray.cli.arguments import add_config, add_corpus, add_json, merged_settings
from xmcray.cli.output import show, show_json, show_next, show_table
from xmcray.errors import ConfigError, RunError
from xmcray.methods.registry import check_method_name, method_names
from xmcray.paths import bundle_at

if TYPE_CHECKING:
    from xmcray.training.run import RunConfig
    from xmcray.tuning.inference import MeasuredSetting
    from xmcray.tuning.space import Space, Values
    from xmcray.tuning.sweep import Sweep, SweepConfig, Trial

DEFAULT_TRIALS = 16  # trainings
DEFAULT_DRAWS = 200  # settings of a bundle
DEFAULT_KEEP = 3
MAX_ROWS = 20  # of the table of settings

_ONLY_FOR_TRAINING = (
    "search",
    "scheduler",
    "config",
    "set",
    "workers",
    "keep",
    "first",
    "trial_cpu_s",
)
# Why settings are not searched, by the beginning of their names.
_NOT_SEARCHED = {
    "cluster.": "it belongs to the machine and changes no result",
    "log.": "it changes no result",
    "data.validation": "trials are compared on one validation split",
    "data.seed": "trials are compared on one validation split",
    "memory.": "validation in training searches labels alone; sweep memory.* with --bundle"
    " on the finished run",
}


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
        help="folder of the sweep; the same command continues it",
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
        default="nDCG@5",
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
        help="stop trials that need more seconds of CPU time (default: no limit)",
    )
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of each trial; 0, the default, is its own",
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
    if options.trials is not None:
        config.check_range("--trials", options.trials, low=1)
    config.check_range("--seed", options.seed, low=0)
    if options.space is None:
        if options.bundle:
            raise ConfigError(
                "--bundle needs a space: give --space space:index, space:memory or space:fusion"
            )
        options.space = f"space:{options.method}"
    if options.bundle:
        _tune_bundle(options)
    else:
        _tune_training(options)


def _tune_training(options: argparse.Namespace) -> None:
    """A sweep of trainings."""
    check_method_name(options.method)
    from xmcray.tuning.space import parse_space

    space_file = config.load_yaml(options.space)
    space = parse_space(space_file, options.space)
    _check_searchable(space, options.space)
    from xmcray.training.run import RunConfig

    # Each trial is one process by default, because trials already run at the same time.
    workers = f"cluster.workers={options.workers or 0}"
    settings = RunConfig.resolve(options.method, merged_settings(options, [workers]))
    num_trials = options.trials or DEFAULT_TRIALS
    keep = DEFAULT_KEEP if options.keep is None else options.keep
    config.check_range("--keep", keep, low=1)
    definition = _definition(options, space_file, settings)
    sweep = _run(options, definition, num_trials, keep, settings)
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
    _show_trials(ranked, space, options.metric)
    best = f"{options.out}/best.yaml"
    show(f"report {options.out}/report.html, best settings {best}")
    train = ["xmcray", "train", options.method, "--data", options.data, "--config", best]
    show_next([*train, "--out", "RUN", "--refit"])


def _definition(
    options: argparse.Namespace,
    space_file: Mapping[str, Any],
    settings: RunConfig,
) -> SweepConfig:
    """The definition of a sweep, compared with what the settings accept."""
    import dataclasses

    from xmcray.data.corpus import Corpus
    from xmcray.tuning.space import check_space, parse_space
    from xmcray.tuning.sweep import SweepConfig

    space = parse_space(space_file, options.space)
    # The checks need a definition, and the corpus is opened only when they have passed.
    definition = SweepConfig(
        method=options.method,
        corpus="",
        corpus_sha256="",
        settings=settings.to_dict(),
        space=space_file,
        search=options.search or "random",
        scheduler=options.scheduler or "asha",
        metric=options.metric,
        seed=options.seed,
        trial_cpu_s=options.trial_cpu_s or 0.0,
    )
    check_space(space, definition.resolve, options.space)
    first = _first_values(options, space, settings)
    for values in first:
        definition.resolve(values)
    definition = dataclasses.replace(definition, first=first)
    if not settings.data.validation:
        raise ConfigError(
            "data.validation is 0, so no query is left to compare trials by;"
            " set data.validation=0.05"
        )
    if definition.scheduler == "asha" and not settings.log.validate_every:
        raise ConfigError(
            "log.validate_every is 0, but asha compares trials while they train; set it to 1"
        )
    # The corpus comes last: opening it takes longer than all other checks.
    corpus = Corpus.open(options.data)
    return dataclasses.replace(definition, corpus=corpus.origin, corpus_sha256=corpus.sha256)


def _first_values(
    options: argparse.Namespace,
    space: Space,
    settings: RunConfig,
) -> tuple[Values, ...]:
    """The values of the first trials, from the files of --first; equal ones once."""
    from xmcray.training.run import RunConfig
    from xmcray.tuning.space import nearest_values

    first: list[Values] = []
    for source in options.first or ():
        merged = config.overlay(settings.to_dict(), config.load_yaml(source))
        whole = RunConfig.resolve(options.method, merged)
        values = nearest_values(space, whole.to_dict(), source)
        if values not in first:
            first.append(values)
    return tuple(first)


def _run(
    options: argparse.Namespace,
    definition: SweepConfig,
    num_trials: int,
    keep: int,
    settings: RunConfig,
) -> Sweep:
    """Runs the trials that have not ended and writes the results."""
    from xmcray.data.corpus import Corpus
    from xmcray.training.run import locked
    from xmcray.tuning.report import write_report
    from xmcray.tuning.sweep import Sweep

    out = Path(options.out).absolute()
    with locked(out):
        sweep = Sweep.open_or_create(out, definition)
        # Ray Tune takes seconds to import, and another sweep in the folder is refused before that.
        from xmcray.tuning.search import run_sweep

        def on_end(trial: Trial) -> None:
            line = _progress(trial, options.metric, sweep.trials(), num_trials)
            print(line, file=sys.stderr, flush=True)

        run_sweep(sweep, num_trials, keep, settings.cluster, on_end)
        sweep.write_results()
        # `_definition` has compared every byte.
        corpus = Corpus.open(options.data, verify=False)
        title = f"Sweep of {options.method} on {corpus.card.name}"
        write_report(out / "report.html", title, options.metric, sweep.space, sweep.ranked())
    return sweep


def _tune_bundle(options: argparse.Namespace) -> None:
    """A sweep of how a bundle answers."""
    for name in _ONLY_FOR_TRAINING:
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} is for trainings, but --bundle only searches; leave one of them out"
            )
    from xmcray.tuning.inference import family_of
    from xmcray.tuning.space import parse_space

    space = parse_space(config.load_yaml(options.space), options.space)
    family = family_of(space, options.space)
    from xmcray.data.corpus import Corpus
    from xmcray.training.run import locked
    from xmcray.tuning.inference import sweep_bundle

    corpus = Corpus.open(options.data)
    out = Path(options.out).absolute()
    bundle = bundle_at(options.bundle, options.data)
    num_draws = options.trials or DEFAULT_DRAWS
    with locked(out):
        # A sweep of a bundle starts anew each time, so it may replace only its own files.
        names = {path.name for path in out.iterdir()}
        foreign = sorted(names - {"lock", "results.json", "report.html", "best.yaml"})
        if foreign:
            raise RunError(
                f"{out} holds {foreign[0]}, not a sweep of a bundle; choose another --out"
            )
        sweep = sweep_bundle(
            bundle,
            corpus,
            space,
            num_draws,
            options.seed,
            options.metric,
            options.space,
        )
        sweep.write(out, f"Settings of {Path(options.bundle).name} on {corpus.card.name}")
    if options.json:
        show_json(sweep.plain())
        return
    _show_settings(sweep.settings, space, options.metric)
    show(sweep.summary)
    if family == "memory":
        search = ["xmcray", "search", options.bundle, "TEXT"]
        for name, value in sweep.settings[0].values.items():
            # YAML, which reads --set, writes booleans in lower case.
            text = str(value).lower() if isinstance(value, bool) else value
            search += ["--set", f"{name}={text}"]
        show_next(search)
    if family == "index":
        run = "RUN"
        if bundle != options.bundle:  # a run was named, not its bundle
            run = options.bundle.removesuffix("/").removesuffix("/selection")
        best = f"{options.out}/best.yaml"
        show_next(["xmcray", "export", run, "--out", "BUNDLE", "--config", best])


def _check_searchable(space: Space, where: str) -> None:
    """Raises ConfigError for settings that a sweep of trainings cannot compare."""
    for name in space:
        for beginning, reason in _NOT_SEARCHED.items():
            if name.startswith(beginning):
                raise ConfigError(f"{where}: {name} cannot be searched: {reason}")


def _progress(trial: Trial, metric: str, trials: Sequence[Trial], num_trials: int) -> str:
    """The line that is printed when a trial ends."""
    num_ended = sum(other.state != "unfinished" for other in trials)
    result = trial.message
    if trial.score is not None:
        best = max(other.score for other in trials if other.score is not None)
        result = f"{metric} {trial.score_text} (best {100 * best:.2f})"
    return (
        f"trial {trial.name} {trial.state} at step {trial.steps:,}: {result};"
        f" {num_ended} of {num_trials} have ended"
    )


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
        row = [f"{100 * setting.metrics[name]:.2f}" for name in metrics]
        if has_speeds:
            row.append(f"{setting.queries_per_s:,.0f}")
        rows.append(row + _cells(setting.values, space))
    speed_column = ["queries/s"] if has_speeds else []
    title = f"Settings, the best {len(rows)} of {len(measured)}"
    show_table(title, [*metrics, *speed_column, *space], rows)


def _cells(values: Mapping[str, Any], space: Space) -> list[str]:
    from xmcray.tuning.report import shown

    return [shown(values[name]) for name in space]
