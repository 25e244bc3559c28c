"""A sweep and its folder: what is searched, the values of every trial, and how each trial ended.

DIR/sweep.json        definition of the sweep (`SweepConfig`); written at every start
DIR/ledger/0007.json  one trial: its values and, once it has ended, its state
DIR/trials/0007/      its run, an ordinary one (training/run.py)
DIR/trials/0007.txt   the traceback, if a bug ended the trial
DIR/results.json      all trials, the best first
DIR/report.html       the same as a page
DIR/best.yaml         the best settings, for `xmcray train METHOD --config DIR/best.yaml`
DIR/lock              held by the process that sweeps

A restart needs nothing but the ledger. A trial that has ended never runs again, one that has not
continues its run from its newest checkpoint, and values are never drawn a second time. Nothing of
Ray Tune's own state is read back.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from xmcray import config as configs
from xmcray.config import check_choice, check_choices, check_range
from xmcray.errors import ConfigError, ResourceError, RunError, StorageError, readable
from xmcray.storage.whole_files import read_json, write_json, write_text
from xmcray.storage.work_folder import FolderKind
from xmcray.training.records import read_records
from xmcray.training.run_config import RunConfig
from xmcray.training.validation import VALIDATION_METRICS
from xmcray.tuning.space import Space, Values, nested, parse_space

# A process that is killed early may leave these two folders without a sweep.json.
SWEEP_FOLDER = FolderKind("sweep", "sweep.json", ("ledger", "trials"))
# Errors that every other trial would meet too.
FATAL = (ResourceError, StorageError)
State = Literal["finished", "stopped", "unfinished", "failed"]  # in the order of the ranking
# The large files of a run; the rest is small.
_LARGE = ("checkpoints", "negatives", "ray", "vectors", "bundle")
# The only setting of section `log` that changes results: a trial's score is its best validation.
_COMPARED_LOG = ("validate_every",)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The definition of a sweep; two sweeps with equal definitions are the same.

    Attributes:
        method: name of the method.
        corpus: absolute path or URL.
        corpus_sha256: hash of its content.
        settings: a whole run configuration as plain values, which all trials share.
        space: content of the space's file.
        left_out: choices of the space that cannot be had on the machine that began the sweep, such
            as transformers, by dotted name. Later starts leave out the same.
        search: "random", or "optuna" (a Parzen estimator).
        scheduler: "asha" ends trials that are behind others at the same epoch; "none" trains all of
            them to the end.
        metric: the metric on the validation split by which trials are compared; of several names
            joined by "+", their mean.
        seed: seed of the sampled values.
        first: values of the first trials, which are not sampled.
        trial_cpu_s: CPU seconds that a training may take. A trial is stopped as soon as its steps
            show that it needs more. 0 is no limit.
    """

    method: str
    corpus: str
    corpus_sha256: str
    settings: Mapping[str, Any]
    space: Mapping[str, Any]
    search: Literal["random", "optuna"] = "random"
    scheduler: Literal["asha", "none"] = "asha"
    metric: str
    seed: int = 0
    first: tuple[Mapping[str, Any], ...] = ()
    trial_cpu_s: float = 0.0
    left_out: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("--seed", self.seed, low=0)
        check_range("--trial-cpu-s", self.trial_cpu_s, low=0)
        for name in self.metric.split("+"):
            if name not in VALIDATION_METRICS:
                raise ConfigError(configs.unknown("metric", name, VALIDATION_METRICS))

    @property
    def searched(self) -> dict[str, Any]:
        """The space without the choices that are left out."""
        searched = dict(self.space)
        for name, models in self.left_out.items():
            choices = [value for value in searched[name]["choice"] if value not in models]
            searched[name] = {"choice": choices}
        return searched

    def resolve(self, values: Values, cluster: Mapping[str, Any] | None = None) -> RunConfig:
        """The configuration of a trial.

        Args:
            values: values of the searched settings, by dotted name.
            cluster: settings of section `cluster` in place of the sweep's.

        Raises:
            ConfigError: the settings do not accept these values.
        """
        merged = configs.overlay(self.settings, nested(values))
        merged = configs.overlay(merged, {"cluster": cluster or {}})
        return RunConfig.resolve(self.method, merged)


class Validation(NamedTuple):
    """One validation of a trial; results.json holds it as a list.

    Attributes:
        epochs: epochs trained before it.
        score: the metric by which trials are compared.
    """

    epochs: int
    score: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial as far as it has come.

    Attributes:
        number: its place in the sweep.
        values: values of the searched settings, by dotted name.
        state: how it ended.
        message: why it failed or was stopped.
        curve: its validations, by epoch.
        steps: training steps so far; a step that a restart repeats counts once.
    """

    number: int
    values: Values
    state: State
    message: str = ""
    curve: tuple[Validation, ...] = ()
    steps: int = 0

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.number:04d}"

    @property
    def best(self) -> Validation | None:
        """Its best validation; None if there is none, or the trial failed."""
        if self.state == "failed" or not self.curve:
            return None
        # Of equal scores, `max` returns the first, which is that of the earliest epoch.
        return max(self.curve, key=lambda validation: validation.score)

    @property
    def score(self) -> float | None:
        """Metric of its best validation."""
        return None if self.best is None else self.best.score

    @property
    def score_text(self) -> str:
        """Its score in percent, as it is printed."""
        return "-" if self.best is None else f"{100 * self.best.score:.2f}"

    @property
    def epoch_text(self) -> str:
        """The epoch of its best validation, as it is printed."""
        return "-" if self.best is None else str(self.best.epochs)

    def plain(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {
            "trial": self.name,
            "state": self.state,
            "score": self.score,
            "epoch": None if self.best is None else self.best.epochs,
            "steps": self.steps,
            "values": self.values,
            "curve": self.curve,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """The folder of a sweep.

    Attributes:
        path: absolute.
        config: definition of the sweep.
    """

    path: Path
    config: SweepConfig

    @classmethod
    def open_or_create(cls, path: Path, config: SweepConfig) -> Sweep:
        """Opens the sweep in a folder, or starts one there. The caller holds the lock.

        Raises:
            RunError: the folder holds another sweep; the message names the first difference.
        """
        if (path / "sweep.json").is_file():
            stored = cls.open(path).config
            config = dataclasses.replace(config, left_out=stored.left_out)
            difference = next(configs.differences(_identity(stored), _identity(config)), None)
            if difference:
                raise RunError(
                    f"{path} holds a sweep with {difference};"
                    " use the same settings or another --out"
                )
        (path / "ledger").mkdir(exist_ok=True)
        (path / "trials").mkdir(exist_ok=True)
        # Written last, because this file makes the folder a sweep. Written at every start, because
        # the corpus may have moved.
        write_json(path / "sweep.json", dataclasses.asdict(config))
        return cls(path.absolute(), config)

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """Reads sweep.json.

        Raises:
            RunError: the folder is not a sweep.
        """
        folder = Path(path).absolute()
        try:
            text = (folder / "sweep.json").read_text(encoding="utf-8")
            return cls(folder, configs.build(SweepConfig, json.loads(text)))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{path} is not a sweep: it has no sweep.json") from None
        except (ValueError, TypeError, AttributeError, RecursionError, ConfigError):
            raise RunError(
                f"{path}/sweep.json is damaged; sweep again with another --out"
            ) from None

    @property
    def space(self) -> Space:
        """The search space."""
        return parse_space(self.config.searched, "sweep.json")

    def run_path(self, number: int) -> Path:
        """Folder of a trial's run."""
        return self.path / "trials" / f"{number:04d}"

    def traceback_path(self, number: int) -> Path:
        """File for the traceback of a trial that a bug ended."""
        return self.path / "trials" / f"{number:04d}.txt"

    def draw(self, number: int, values: Values) -> None:
        """Records the values of a new trial."""
        assert not self._entry_path(number).exists(), "what was drawn stays drawn"
        write_json(self._entry_path(number), {"values": values})

    def end(self, number: int, state: State, message: str = "") -> None:
        """Records how a trial ended, once."""
        entry = self._entry(number)
        assert "state" not in entry, "a trial ends once"
        entry.update(state=state, message=message)
        write_json(self._entry_path(number), entry)

    def trials(self) -> list[Trial]:
        """All trials that have values, by number."""
        entries = (self.path / "ledger").glob("[0-9]*.json")
        # A copy that someone made, such as "0007-copy.json", is no trial.
        numbers = [int(path.stem) for path in entries if path.stem.isdecimal()]
        return [self.trial(number) for number in sorted(numbers)]

    def trial(self, number: int) -> Trial:
        """A trial that has values.

        Raises:
            RunError: its file in the ledger or its records are damaged.
        """
        entry = self._entry(number)
        score_by_epoch: dict[int, float] = {}
        steps = 0
        path = self.run_path(number) / "metrics.jsonl"
        remedy = f"remove {path.parent} and {self._entry_path(number)} to train the trial anew"
        with readable(f"{path} is damaged", remedy, RunError):
            for record in read_records(path):
                steps = max(steps, record["step"])
                score = score_of(record, self.config.metric)
                if score is not None:
                    # A resumed run repeats epochs; the newest value counts.
                    epochs_done = int(record["epoch"]) + 1
                    score_by_epoch[epochs_done] = score
        curve = [Validation(epochs, score_by_epoch[epochs]) for epochs in sorted(score_by_epoch)]
        return Trial(
            number,
            values=entry["values"],
            state=entry.get("state", "unfinished"),
            message=entry.get("message", ""),
            curve=tuple(curve),
            steps=steps,
        )

    def ranked(self) -> list[Trial]:
        """The best first: trials that trained to the end, then stopped ones, then the others."""
        states = get_args(State)

        def rank(trial: Trial) -> tuple[int, float]:
            # Negative, so that the largest score comes first.
            return states.index(trial.state), -(trial.score or 0.0)

        # Equal trials stay in the order of their numbers, because sorting is stable.
        return sorted(self.trials(), key=rank)

    def prune(self, keep: int) -> None:
        """Removes checkpoints and other large files of trials that have ended, except of the best.

        Args:
            keep: number of best trials that keep their files.
        """
        for place, trial in enumerate(self.ranked()):
            is_kept = place < keep and trial.score is not None
            if is_kept or trial.state == "unfinished":
                continue
            for name in _LARGE:
                shutil.rmtree(self.run_path(trial.number) / name, ignore_errors=True)

    def best_settings(self) -> dict[str, Any] | None:
        """Configuration of the best trial, for `train`; None if no trial has a score.

        Section `cluster` is left out because it belongs to a machine.
        """
        ranked = self.ranked()
        if not ranked or ranked[0].score is None:
            return None
        return self._settings_of(ranked[0])

    def check_scores(self) -> None:
        """Refuses a sweep without a result.

        Raises:
            RunError: no trial has a score; the message says why the first has none.
        """
        trials = self.trials()
        if any(trial.score is not None for trial in trials):
            return
        first = trials[0]
        verb = "was stopped" if first.state == "stopped" else first.state
        raise RunError(
            f"none of {len(trials)} trials has a score; the first {verb} because {first.message}"
        )

    def write_results(self) -> None:
        """Writes results.json, and best.yaml if some trial has a score."""
        ranked = self.ranked()
        results = {
            "metric": self.config.metric,
            "method": self.config.method,
            "trials": [trial.plain() for trial in ranked],
        }
        write_json(self.path / "results.json", results)
        validation = ranked[0].best if ranked else None
        if validation is None:
            return
        comment = (
            f"# Trial {ranked[0].name}: {self.config.metric} {validation.score:.4f} on validation"
            f" after epoch {validation.epochs}.\n"
        )
        settings = yaml.safe_dump(self._settings_of(ranked[0]), sort_keys=False)
        write_text(self.path / "best.yaml", comment + settings)

    def _settings_of(self, trial: Trial) -> dict[str, Any]:
        settings = self.config.resolve(trial.values).to_dict()
        del settings["cluster"]
        return settings

    def _entry_path(self, number: int) -> Path:
        return self.path / "ledger" / f"{number:04d}.json"

    def _entry(self, number: int) -> dict[str, Any]:
        """The content of a trial's file in the ledger, which has at least its values."""
        path = self._entry_path(number)
        with readable(f"{path} is damaged", "remove it to draw the trial anew", RunError):
            entry = read_json(path)
            # Anything but a mapping is damage, and so is an unknown state.
            entry["values"] = dict(entry["values"])
            check_choice("state", entry.get("state", "unfinished"), get_args(State))
        return entry


def score_of(record: Mapping[str, Any], metric: str) -> float | None:
    """The metric of a record, or the mean of metrics joined by "+"; None if it is no validation."""
    if metric.split("+")[0] not in record:
        return None
    return mean_metric(record, metric)


def mean_metric(values: Mapping[str, Any], metric: str) -> float:
    """The metric of these values, or the mean of metrics joined by "+"."""
    names = metric.split("+")
    return sum(float(values[name]) for name in names) / len(names)


def _identity(config: SweepConfig) -> dict[str, Any]:
    """The part of a definition that must stay equal for a sweep to continue, as JSON reads it."""
    content = json.dumps(dataclasses.asdict(config))
    body: dict[str, Any] = json.loads(content)
    del body["corpus"]  # it may have moved; its hash stays
    del body["left_out"]  # a sweep keeps those of its first start
    # The section `cluster` changes no result, and of `log` only these settings do.
    body["settings"].pop("cluster", None)
    log = body["settings"].pop("log", {})
    body["settings"]["log"] = {name: log.get(name) for name in _COMPARED_LOG}
    return body
