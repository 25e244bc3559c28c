"""Settings by validation: tune, tune_bundle, auto."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xmcray import config as configs
from xmcray import settings_files
from xmcray.api.settings_sources import (
    Location,
    Settings,
    merged,
    merged_mappings,
    merged_without_presets,
)
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name
from xmcray.paths import bundle_at
from xmcray.terminal import printable

if TYPE_CHECKING:
    from xmcray.training.run_config import RunConfig
    from xmcray.tuning.inference import BundleSweep
    from xmcray.tuning.space import Space, Values
    from xmcray.tuning.sweep import Sweep, SweepConfig, Trial

logger = logging.getLogger(__name__)

DEFAULT_TRIALS = 16  # trainings
DEFAULT_DRAWS = 200  # settings of a bundle
DEFAULT_KEEP = 3
METRIC = "nDCG@5"
_UNITS = {"s": 1, "m": 60, "h": 3600}
# Settings that name a transformer.
_MODELS = frozenset(("encoder.name", "encoder.init_from"))
# Why settings are not searched, by the beginning of their names.
_NOT_SEARCHED = {
    "cluster.": "it belongs to the machine and changes no result",
    "log.": "it changes no result",
    "data.validation": "trials are compared on one validation split",
    "data.seed": "trials are compared on one validation split",
    "memory.": "validation in training searches labels alone; sweep memory.* with --bundle"
    " on the finished run",
}


def tune(
    method: str,
    data: Location,
    out: Location,
    config: Settings = (),
    *,
    space: Location | None = None,
    trials: int = DEFAULT_TRIALS,
    search: Literal["random", "optuna"] = "random",
    scheduler: Literal["asha", "none"] = "asha",
    metric: str = METRIC,
    first: Sequence[Location] = (),
    trial_cpu_s: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    keep: int = DEFAULT_KEEP,
    progress: bool = True,
) -> Sweep:
    """Trains a method with many settings, on Ray Tune; the same call continues.

    Args:
        method: name of the method.
        data: corpus.
        out: folder of the sweep.
        config: settings of all trials. The space replaces those that it searches; a warning names
            those of them that are set by name.
        space: YAML of dotted names and distributions, or "space:NAME"; "space:METHOD" if not given.
        trials: number of trainings.
        search: where values come from.
        scheduler: "asha" ends trials that are behind.
        metric: on the validation split, or the mean of several joined by "+".
        first: configurations whose values the first trials have, as near as the space allows.
        trial_cpu_s: seconds of CPU time after which a trial is stopped; no limit if not given. Only
            for trials without workers.
        workers: processes of each trial; 0 is its own. That of `cluster.workers` if not given, and 0
            if only a preset has it.
        seed: of the sampled values.
        keep: best trials whose checkpoints stay.
        progress: print a line on stderr when a trial ends.
    Returns:
        The sweep, with its trials and the best settings; its report is in `out`.
    Raises:
        ConfigError: the method, a setting or the space is not valid.
        RunError: `out` is in use, or holds another sweep, or no trial has a score.
    """
    check_method_name(method)
    configs.check_range("trials", trials, low=1)
    configs.check_range("keep", keep, low=1)
    configs.check_range("seed", seed, low=0)
    space_name = f"space:{method}" if space is None else os.fspath(space)
    from xmcray.tuning.space import parse_space

    space_file = settings_files.load_yaml(space_name)
    space_as_given = parse_space(space_file, space_name)
    _check_searchable(space_as_given, space_name)
    from xmcray.training.run_config import RunConfig
    from xmcray.tuning.sweep import SweepConfig

    values = merged(config)
    values = configs.overlay(values, {"cluster": _processes_of_a_trial(config, workers)})
    settings = RunConfig.resolve(method, values)
    _warn_of_set(space_as_given, space_name, merged_mappings(config))
    left_out = _left_out(out, space_as_given, space_name)
    # The checks need a definition, and the corpus is opened only when they have passed.
    definition = SweepConfig(
        method=method,
        corpus="",
        corpus_sha256="",
        settings=RunConfig.unresolved(method, values).to_dict(),
        space=space_file,
        search=search,
        scheduler=scheduler,
        metric=metric,
        seed=seed,
        trial_cpu_s=trial_cpu_s or 0.0,
        left_out=left_out,
    )
    definition = _checked(definition, settings, space_name, first, data)
    return _run(definition, settings, data, out, trials, keep, progress)


def _processes_of_a_trial(config: Settings, workers: int | None) -> dict[str, int]:
    """Settings of a trial's processes and threads that replace those of presets.

    The numbers of a preset are for one training, and trials share the machine.
    """
    own_cluster = merged_without_presets(config).get("cluster")
    own_names = own_cluster.keys() if isinstance(own_cluster, Mapping) else ()
    replaced = {name: 0 for name in ("workers", "threads_per_process") if name not in own_names}
    return replaced if workers is None else {**replaced, "workers": workers}


def _checked(
    definition: SweepConfig,
    settings: RunConfig,
    space_name: str,
    first: Sequence[Location],
    data: Location,
) -> SweepConfig:
    """A definition with its corpus and its first values, compared with what the settings accept."""
    from xmcray.data.batches import TrainingData
    from xmcray.data.corpus import Corpus
    from xmcray.tuning.space import check_space, parse_space

    space = parse_space(definition.searched, space_name)
    check_space(space, definition.resolve, space_name)
    first_values = _first_values(definition, first, space)
    for values in first_values:
        definition.resolve(values)
    definition = dataclasses.replace(definition, first=first_values)
    if not settings.data.validation:
        raise ConfigError(
            "data.validation is 0, so no query is left to compare trials by;"
            " set data.validation=0.05"
        )
    if definition.scheduler == "asha" and settings.log.validate_every != 1:
        raise ConfigError(
            f"log.validate_every is {settings.log.validate_every}, but asha compares trials after"
            " epochs that all of them have validated; set it to 1, or use --scheduler none"
        )
    if definition.trial_cpu_s and settings.cluster.workers:
        raise ConfigError(
            f"--trial-cpu-s limits trials that train in one process each, but they have"
            f" {settings.cluster.workers} workers; leave out one of the two"
        )
    # The corpus comes last: opening it takes longer than all other checks.
    corpus = Corpus.open(os.fspath(data))
    TrainingData(corpus, settings.data).check_held_out()
    return dataclasses.replace(definition, corpus=corpus.origin, corpus_sha256=corpus.sha256)


def _check_searchable(space: Space, where: str) -> None:
    """Raises ConfigError for settings that a sweep of trainings cannot compare."""
    for name in space:
        for beginning, reason in _NOT_SEARCHED.items():
            if name.startswith(beginning):
                raise ConfigError(f"{where}: {name} cannot be searched: {reason}")


def _warn_of_set(space: Space, where: str, values: Mapping[str, Any]) -> None:
    """Says which settings have a value and are searched, so that the value has no effect."""
    for name in space:
        if _has(values, name):
            logger.warning("%s is searched by %s, so its value has no effect", name, where)


def _has(settings: Mapping[str, Any], name: str) -> bool:
    """Whether settings in sections have a value for a dotted name."""
    value: Any = settings
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _missing_models(space: Space, where: str) -> dict[str, list[str]]:
    """The transformers of the space that cannot be opened, by the setting that names them.

    So a machine without a network searches the rest. Each is logged.

    Raises:
        ConfigError: no choice would be left.
    """
    from xmcray.nn import pretrained

    missing = {}
    # Sorted, so that messages come in the same order each time.
    for name in sorted(_MODELS.intersection(space)):
        models = []
        choices = space[name].values_to_check()
        for model in choices:
            try:
                if model not in ("", "static"):
                    pretrained.find(str(model))
            except ConfigError as error:
                problem = f"{where}: {name}: {error}"
                logger.warning("%s; it is left out", problem)
                models.append(model)
        if len(models) == len(choices):
            raise ConfigError(problem)
        if models:
            missing[name] = models
    return missing


def _left_out(out: Location, space: Space, space_name: str) -> Mapping[str, Any]:
    """What the sweep in a folder has left out since its start; for a new one, the missing models."""
    from xmcray.tuning.sweep import Sweep

    folder = Path(out)
    if not (folder / "sweep.json").is_file():
        return _missing_models(space, space_name)
    left_out = Sweep.open(folder).config.left_out
    # Another space is refused later. It may lack a setting, or have fewer choices of it.
    return {
        name: models
        for name, models in left_out.items()
        if name in space and set(map(str, space[name].values_to_check())) > set(models)
    }


def _first_values(
    definition: SweepConfig, sources: Sequence[Location], space: Space
) -> tuple[Values, ...]:
    """The values of the first trials, from configurations over the sweep's settings; equal ones once."""
    from xmcray.training.run_config import RunConfig
    from xmcray.tuning.space import nearest_values

    first: list[Values] = []
    for source in sources:
        name = os.fspath(source)
        values = configs.overlay(definition.settings, merged(name))
        whole = RunConfig.resolve(definition.method, values)
        nearest = nearest_values(space, whole.to_dict(), name, definition.left_out)
        if nearest not in first:
            first.append(nearest)
    return tuple(first)


def _run(
    definition: SweepConfig,
    settings: RunConfig,
    data: Location,
    out: Location,
    num_trials: int,
    keep: int,
    progress: bool,
) -> Sweep:
    """Runs the trials that have not ended and writes the results."""
    from xmcray.data.corpus import Corpus
    from xmcray.storage.work_folder import locked
    from xmcray.tuning.report import write_report
    from xmcray.tuning.sweep import SWEEP_FOLDER, Sweep

    folder = Path(out).absolute()
    with locked(folder, SWEEP_FOLDER):
        sweep = Sweep.open_or_create(folder, definition)
        # Ray Tune takes seconds to import, and another sweep in the folder is refused before that.
        from xmcray.tuning.search import run_sweep

        def on_end(trial: Trial) -> None:
            if progress:
                line = _progress_line(trial, definition.metric, sweep.ranked(), num_trials)
                _say(line)

        run_sweep(sweep, num_trials, keep, settings.cluster, on_end)
        sweep.write_results()
        # `_checked` has compared every byte.
        corpus = Corpus.open(os.fspath(data), verify=False)
        title = f"Sweep of {definition.method} on {corpus.card.name}"
        report = folder / "report.html"
        write_report(report, title, definition.metric, sweep.space, sweep.ranked())
        sweep.check_scores()
    return sweep


def _progress_line(trial: Trial, metric: str, ranked: Sequence[Trial], num_trials: int) -> str:
    """The line that is printed when a trial ends.

    Args:
        trial: the trial.
        metric: by which trials are compared.
        ranked: all trials that have begun, the best first.
        num_trials: trials of the whole sweep.
    """
    num_ended = sum(other.state != "unfinished" for other in ranked)
    result = trial.message
    if trial.score is not None:
        best = next(other for other in ranked if other.score is not None)
        result = f"{metric} {trial.score_text} (best {best.score_text})"
    return (
        f"trial {trial.name} {trial.state} at step {trial.steps:,}: {result};"
        f" {num_ended} of {num_trials} have ended"
    )


def tune_bundle(
    bundle: Location,
    data: Location,
    out: Location,
    space: Location,
    *,
    trials: int = DEFAULT_DRAWS,
    metric: str = METRIC,
    seed: int = 0,
) -> BundleSweep:
    """Searches with many settings of a bundle, and trains nothing; the same call repeats it.

    Args:
        bundle: bundle or finished run, whose run held queries out.
        data: corpus.
        out: folder of the sweep.
        space: YAML of dotted names and distributions, or "space:index", "space:memory",
            "space:fusion".
        trials: number of settings.
        metric: on the validation split, or the mean of several joined by "+".
        seed: of the sampled values.
    Returns:
        The settings with their metrics, the best first; `out` has the report.
    Raises:
        ConfigError: the space is not valid, or is not for this bundle.
        RunError: `out` is in use, or holds something else, such as another sweep.
    """
    configs.check_range("trials", trials, low=1)
    configs.check_range("seed", seed, low=0)
    from xmcray.tuning.inference import family_of
    from xmcray.tuning.space import parse_space

    space_name = os.fspath(space)
    space_file = settings_files.load_yaml(space_name)
    parsed = parse_space(space_file, space_name)
    family_of(parsed, space_name)
    from xmcray.data.corpus import Corpus
    from xmcray.retrieval import bundle as bundles
    from xmcray.storage.artifact import open_artifact
    from xmcray.storage.work_folder import locked
    from xmcray.tuning.inference import BUNDLE_SWEEP_FOLDER, BundleSweepConfig, sweep_bundle

    corpus = Corpus.open(os.fspath(data))
    folder = Path(out).absolute()
    path = bundle_at(os.fspath(bundle), os.fspath(data))
    _, manifest = open_artifact(path, bundles.KIND, contents=False)
    definition = BundleSweepConfig(
        bundle_sha256=manifest.sha256,
        corpus_sha256=corpus.sha256,
        space=space_file,
        trials=trials,
        metric=metric,
        seed=seed,
    )
    with locked(folder, BUNDLE_SWEEP_FOLDER):
        definition.check_folder(folder)
        sweep = sweep_bundle(path, corpus, parsed, trials, seed, metric, space_name)
        # Before the results, so that no folder has results without it.
        definition.write(folder)
        sweep.write(folder, f"Settings of {Path(bundle).name} on {corpus.card.name}")
    return sweep


def auto(
    data: Location,
    out: Location,
    *,
    budget: str = "20m",
    methods: Sequence[str] | None = None,
    config: Settings = (),
    progress: bool = True,
) -> Mapping[str, Any]:
    """Chooses methods, encoders and a fusion by validation; the same call continues.

    Args:
        data: corpus.
        out: folder of the study; the bundle is in its folder `bundle`.
        budget: wall time of all calls together, such as "90s", "20m" or "2h".
        methods: to try; those of `tuning.portfolio.DEFAULT_METHODS` if not given.
        config: settings of all trials.
        progress: print a line on stderr when something has ended.
    Returns:
        The content of results.json, with the metrics of the test split.
    Raises:
        ConfigError: a method is unknown or does not accept the settings, `config` has settings of a
            memory, or the budget is no time.
        RunError: the folder holds something else, or no training fits into the time.
    """
    budget_s = _seconds_of(budget)
    overrides = merged(config)
    from xmcray.tuning.portfolio import DEFAULT_METHODS, METHODS, dotted

    for method in methods or ():
        if method not in METHODS:
            raise ConfigError(configs.unknown("method", method, METHODS))
    settings = dotted(overrides)
    for name in settings:
        if name.startswith("memory."):
            raise ConfigError(
                f"{name} is chosen by validation for the whole bundle; leave it out, or give it to"
                " `xmcray train` or `xmcray memory`"
            )
    from xmcray.data.corpus import Corpus
    from xmcray.tuning.auto import auto as run_study

    say: Callable[[str], None] = _say if progress else _say_nothing
    corpus = Corpus.open(os.fspath(data))
    chosen = methods or DEFAULT_METHODS
    return run_study(corpus, Path(out), budget_s, chosen, settings, say)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """In place of `_say`."""


def _seconds_of(text: str) -> float:
    """A time such as "90s", "20m" or "1.5h" in seconds.

    Raises:
        ConfigError: it is no time, or 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(text))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"budget is {text!r}, expected a time such as 90s, 20m or 2h")
    return seconds
