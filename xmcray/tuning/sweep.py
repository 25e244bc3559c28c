"""A sweep and the folder it lives in: what is searched, every trial's values, and what became of it.

DIR/sweep.json        method, corpus, settings, space, search, scheduler, metric, seed: written at every start
DIR/ledger/0007.json  one trial: its values, and once it has ended how: written when it is drawn and when it ends
DIR/trials/0007/      its run, an ordinary one (training/run.py); DIR/trials/0007.txt: how it failed, if by a bug
DIR/results.json      all trials, the best first; DIR/report.html: the same as a page
DIR/best.yaml         the best settings, for `xmcray train METHOD --config DIR/best.yaml`
DIR/lock              held by the process that sweeps

The ledger is all that a restart needs: a trial with an end is never run again, one without continues its run from its
own newest checkpoint, and what was drawn stays drawn. Nothing of Ray Tune's own state is read back.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from xmcray import config as configs
from xmcray import storage
from xmcray.config import check_choice, check_range
from xmcray.errors import ConfigError, RunError
from xmcray.training.records import read_records
from xmcray.training.run import RunConfig
from xmcray.tuning.space import Space, Values, nested, parse_space

METRICS = (
    "nDCG@5",
    "P@1",
    "P@3",
    "P@5",
    "PSP@1",
    "PSP@5",
    "R@10",
)  # what a validation in training tells
State = Literal["unfinished", "finished", "stopped", "failed"]
_HEAVY = ("checkpoints", "negatives", "ray", "vectors", "bundle")  # of a run; the rest is small
_NOT_COMPARED = ("cluster", "log")  # sections that do not change what a trial comes to


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What a sweep is; two with equal ones are the same sweep.

    Attributes:
        method: its name. corpus: absolute path or URL. corpus_sha256: of its content.
        settings: a whole run configuration as plain values, what the trials have in common.
        space: as in its file.
        search: "random", or "optuna" (a Parzen estimator).
        scheduler: "asha" ends trials that are behind others at the same epoch, "none" trains all to the end.
        metric: on the validation split, by which trials are compared. seed: of the draws.
    """

    method: str
    corpus: str
    corpus_sha256: str
    settings: Mapping[str, Any]
    space: Mapping[str, Any]
    search: Literal["random", "optuna"] = "random"
    scheduler: Literal["asha", "none"] = "asha"
    metric: str = METRICS[0]
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("--search", self.search, ("random", "optuna"))
        check_choice("--scheduler", self.scheduler, ("asha", "none"))
        check_range("--seed", self.seed, low=0)
        if self.metric not in METRICS:
            raise ConfigError(configs.unknown("metric", self.metric, METRICS))

    def resolve(self, values: Values, cluster: Mapping[str, Any] | None = None) -> RunConfig:
        """The configuration of a trial.

        Raises:
            ConfigError: the settings do not take these values.
        """
        merged = configs.overlay(self.settings, nested(values))
        return RunConfig.resolve(self.method, configs.overlay(merged, {"cluster": cluster or {}}))


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial as far as it has come.

    Attributes:
        number: its place in the sweep. values: by dotted name. state: how it ended. message: why it failed.
        curve: (epochs done, metric) of each validation. steps: of training, all restarts together.
    """

    number: int
    values: Values
    state: State
    message: str = ""
    curve: tuple[tuple[int, float], ...] = field(default=())
    steps: int = 0

    @property
    def name(self) -> str:
        """As its files are called."""
        return f"{self.number:04d}"

    @property
    def best(self) -> tuple[float, int] | None:
        """Metric and epoch of its best validation, the earlier of equal ones."""
        if self.state == "failed" or not self.curve:
            return None
        epoch, score = max(self.curve, key=lambda point: (point[1], -point[0]))
        return score, epoch

    @property
    def score(self) -> float | None:
        """Metric of its best validation."""
        return None if self.best is None else self.best[0]

    @property
    def score_text(self) -> str:
        """Its score in percent, as it is printed."""
        return "-" if self.best is None else f"{100 * self.best[0]:.2f}"

    @property
    def epoch_text(self) -> str:
        """The epoch of its best validation, as it is printed."""
        return "-" if self.best is None else str(self.best[1])

    def plain(self) -> dict[str, Any]:
        """For results.json."""
        score, epoch = self.best or (None, None)
        told = {
            "trial": self.name,
            "state": self.state,
            "score": score,
            "epoch": epoch,
            "steps": self.steps,
        }
        return {**told, "values": self.values, "curve": self.curve, "message": self.message}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep's folder.

    Attributes:
        path: absolute. config: what it is.
    """

    path: Path
    config: SweepConfig

    @classmethod
    def open_or_create(cls, path: Path, config: SweepConfig) -> Sweep:
        """The sweep that lies there, or a new one. The caller holds the lock.

        Raises:
            RunError: the folder holds another sweep (with the first difference), or something else.
        """
        if (path / "sweep.json").is_file():
            sweep = cls.open(path)
            different = next(_differences(_identity(sweep.config), _identity(config)), None)
            if different:
                raise RunError(
                    f"{path} holds a sweep with {different}; use the same settings or another --out"
                )
        elif found := sorted({item.name for item in path.iterdir()} - {"lock", "ledger", "trials"}):
            raise RunError(f"{path} holds {found[0]} and no sweep; choose another --out")
        for name in ("ledger", "trials"):
            (path / name).mkdir(exist_ok=True)
        # Last, as with it the folder is a sweep; and anew at every start, as the corpus may lie elsewhere now.
        storage.write_json(path / "sweep.json", dataclasses.asdict(config))
        return cls(path.absolute(), config)

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """Reads sweep.json.

        Raises:
            RunError: the folder is not a sweep.
        """
        try:
            body = json.loads((Path(path) / "sweep.json").read_text(encoding="utf-8"))
            return cls(Path(path).absolute(), configs.build(SweepConfig, body))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{path} is not a sweep: it has no sweep.json") from None
        except (ValueError, ConfigError):
            raise RunError(
                f"{path}/sweep.json is damaged; sweep again with another --out"
            ) from None

    @property
    def space(self) -> Space:
        """What is searched."""
        return parse_space(self.config.space, "sweep.json")

    def run_path(self, number: int) -> Path:
        """Folder of a trial's run."""
        return self.path / "trials" / f"{number:04d}"

    def traceback_path(self, number: int) -> Path:
        """Where the traceback of a trial goes that the program itself failed in."""
        return self.path / "trials" / f"{number:04d}.txt"

    def draw(self, number: int, values: Values) -> None:
        """Notes the values of a new trial."""
        assert not self._entry(number).exists(), "what was drawn stays drawn"
        storage.write_json(self._entry(number), {"values": values})

    def end(self, number: int, state: State, message: str = "") -> None:
        """Notes how a trial ended, once."""
        body = self._read(number)
        assert "state" not in body, "a trial ends once"
        storage.write_json(self._entry(number), {**body, "state": state, "message": message})

    def trials(self) -> list[Trial]:
        """All that were drawn, by number."""
        return [
            self.trial(int(path.stem))
            for path in sorted((self.path / "ledger").glob("[0-9]*.json"))
        ]

    def trial(self, number: int) -> Trial:
        """One that was drawn."""
        body, records = self._read(number), read_records(self.run_path(number) / "metrics.jsonl")
        known = {
            r["epoch"] + 1: float(r[self.config.metric]) for r in records if self.config.metric in r
        }
        steps = max((int(record["step"]) for record in records), default=0)
        state, message = body.get("state", "unfinished"), body.get("message", "")
        return Trial(number, body["values"], state, message, tuple(sorted(known.items())), steps)

    def ranked(self) -> list[Trial]:
        """The best first: those that trained to the end, then those that were stopped, then the others."""
        order = ("finished", "stopped", "unfinished", "failed")
        return sorted(
            self.trials(), key=lambda t: (order.index(t.state), -(t.score or 0.0), t.number)
        )

    def prune(self, keep: int) -> None:
        """Removes checkpoints and other large files of trials that have ended, except of the best."""
        for place, trial in enumerate(self.ranked()):
            if trial.state != "unfinished" and not (place < keep and trial.score is not None):
                for name in _HEAVY:
                    shutil.rmtree(self.run_path(trial.number) / name, ignore_errors=True)

    def best_settings(self) -> dict[str, Any] | None:
        """A configuration for `train`: the best trial's, without what belongs to a machine; None if none ended."""
        best = next(iter(self.ranked()), None)
        if best is None or best.score is None:
            return None
        settings = self.config.resolve(best.values).to_dict()
        return {name: section for name, section in settings.items() if name != "cluster"}

    def write_results(self) -> None:
        """Writes results.json, and best.yaml as soon as some trial has a score."""
        ranked = self.ranked()
        storage.write_json(
            self.path / "results.json",
            {
                "metric": self.config.metric,
                "method": self.config.method,
                "trials": [t.plain() for t in ranked],
            },
        )
        if (settings := self.best_settings()) is not None:
            score, epoch = ranked[0].best or (0.0, 0)
            about = f"# Trial {ranked[0].name}: {self.config.metric} {score:.4f} on validation after epoch {epoch}.\n"
            storage.write_text(
                self.path / "best.yaml", about + yaml.safe_dump(settings, sort_keys=False)
            )

    def _entry(self, number: int) -> Path:
        return self.path / "ledger" / f"{number:04d}.json"

    def _read(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._entry(number).read_text(encoding="utf-8"))
        return body


def _identity(config: SweepConfig) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    del body["corpus"]  # it may lie elsewhere now; its hash tells
    body["settings"] = {
        name: section for name, section in body["settings"].items() if name not in _NOT_COMPARED
    }
    return body


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping) and where != "space.":
            yield from _differences(x, y, f"{where}{key}.")
        elif x != y:
            yield f"{where}{key} = {x}, now {y}"
