"""What a claim is measured by: trainings, choices by validation, and functions of a seed."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other benchmarks' parts

import data_sets

from xmcray import settings_files
from xmcray.data.corpus import Corpus
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

Result = Mapping[str, Any]
"""Measures by name: numbers, or lists of numbers for a curve.

Numbers with an @ are shares and shown in percent. The key "hits" holds, by the name of a precision,
the number of hits of each test query as a string of digits. The key "chosen" names what validation
chose.
"""

HIT_CUTOFFS = (1, 5)  # one digit per query is enough
_MADE_HERE = ("sample", "planted")  # corpora that need no files
HELD_OUT = 0.1  # share of the training queries that a choice is made by
# Settings of presets that have changed since claims were measured with them. Without its file, a claim is measured anew.
SETTINGS = Path(__file__).parent / "settings"
# The kind of optimiser that ASTRA's paper has, where a preset has another one.
SGD = (
    "method.classifier.kind=sgd",
    "method.classifier.lr=300",
    "method.classifier.momentum=0",
)
# At a rate of 300 a few trainings of tate-subjects go wrong: a frequent label becomes the first answer of too many queries.
STEADY_SGD = (*SGD, "method.classifier.lr=150")


def claims_folder() -> Path:
    folder = data_sets.CACHE / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Variant(Protocol):
    """Something measured once for each seed."""

    def key(self, seed: int) -> str:
        """Names the measurement: equal for equal settings and data."""

    def measure(self, seed: int) -> Result:
        """Measures it; may take minutes."""


def present(*names: str) -> list[str]:
    """Those corpora that this machine has or can make; says which are missing.

    Prepares none of them: that is left to the measurements, so that all claims are listed quickly.
    """
    available = []
    for name in names:
        if is_present(name):
            available.append(name)
        else:
            print(f"{name} left out: no folder of that name in {data_sets.DATA}")
    return available


@functools.cache
def open_corpus(name: str) -> Corpus:
    """A corpus by name, opened once, because every measurement's key needs it.

    Raises:
        SystemExit: this machine lacks the data; the message is printed.
    """
    corpus = data_sets.corpus(name)
    if corpus is None:
        raise SystemExit(2)
    return corpus


@functools.cache
def preset_values(name: str) -> Mapping[str, Any]:
    """The settings of a preset, read once; former ones if the folder SETTINGS keeps them."""
    former = SETTINGS / f"{name.replace('/', '-')}.yaml"
    return settings_files.load_yaml(str(former) if former.is_file() else f"preset:{name}")


def is_present(name: str) -> bool:
    """Whether this machine has a corpus or can make it."""
    return name in _MADE_HERE or (data_sets.DATA / name).is_dir()


def answers(
    run: Run, corpus: Corpus, split: str = "test", bundle: str = "bundle"
) -> dict[str, Any]:
    """The metrics of a finished run by exact search; `bundle` is its folder in the run's."""
    folder = run.path / bundle
    if not folder.exists():
        export_run(run, folder, corpus)
    evaluation = measure_bundle(Retriever.load(folder), corpus, split, exact=True)
    metrics = {name: value for name, value in evaluation.metrics.items() if value is not None}
    return {**metrics, "hits": hits_by_query(evaluation.per_query)}


def hits_by_query(values: QueryValues, suffix: str = "") -> dict[str, str]:
    """The hits of each query among its first answers, one digit per query.

    Args:
        values: what each query adds to the main metrics.
        suffix: Added to the names.
    """
    digits = {}
    for k in HIT_CUTOFFS:
        precision_Q = values.gain_QM[:, MAIN_METRICS.index(f"P@{k}")]
        hits = np.rint(precision_Q * k).astype(int)
        digits[f"P@{k}{suffix}"] = "".join(map(str, hits))
    return digits


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training in this process, measured with exact search.

    Attributes:
        method: its name. corpus: a name that `data_sets.corpus` knows, or the corpus of a seed.
        preset: "METHOD/NAME" of shipped settings, "" for the defaults. settings: dotted overrides, or those of a seed.
        measure_run: what is kept of the finished run (`run.path / "metrics.jsonl"` has its curves); its name is part
            of the key. full: on a GPU if there is one.
    """

    method: str
    corpus: str | Callable[[int], Corpus] = "sample"
    preset: str = ""
    settings: Sequence[str] | Callable[[int], Sequence[str]] = ()
    measure_run: Callable[[Run, Corpus], Result] = answers
    full: bool = False

    def config(self, seed: int) -> RunConfig:
        common = [
            f"optim.seed={seed}",
            *data_sets.measured_settings(torch.get_num_threads()),
            f"cluster.device={'auto' if self.full else 'cpu'}",
        ]
        values = preset_values(self.preset) if self.preset else {}
        settings = self.settings(seed) if callable(self.settings) else self.settings
        return RunConfig.resolve(self.method, values, [*common, *settings])

    def open(self, seed: int) -> Corpus:
        return self.corpus(seed) if callable(self.corpus) else open_corpus(self.corpus)

    def key(self, seed: int) -> str:
        return f"{data_sets.fingerprint(self.config(seed), self.open(seed))}-{self.measure_run.__name__}"

    def measure(self, seed: int) -> Result:
        corpus = self.open(seed)
        config = self.config(seed)
        folder = Path(tempfile.mkdtemp(dir=claims_folder()))
        try:
            started_cpu = time.process_time()
            run = train(corpus.path, folder / "run", config)
            training_cpu_s = time.process_time() - started_cpu
            result = self.measure_run(run, corpus)
            training_s = run.result()["seconds"]  # type: ignore[index]
            return {**result, "training_s": training_s, "training_cpu_s": training_cpu_s}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def last_validation(run: Run, corpus: Corpus) -> Result:
    """The metrics of the queries that a run held out, at its end."""
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    validations = [record for record in records if "P@1" in record]
    return validations[-1]  # type: ignore[no-any-return]


def choose_once(key: str, names: Sequence[str], validation: Callable[[str], float]) -> str:
    """The name with the largest validation, which is measured once on a machine.

    Args:
        key: names the choice.
        names: of the candidates; of equal ones the first is chosen.
        validation: name -> the number that decides.
    """
    path = claims_folder() / f"{key}-choice.json"
    with path.with_suffix(".lock").open("w") as lock:
        # Of several processes that measure seeds, one chooses and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            values = {name: validation(name) for name in names}
            path.write_text(json.dumps(values), encoding="utf-8")
    stored: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return max(stored, key=stored.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A training with those of a few settings that are best on held-out training queries.

    The choice is made once, with seed 0 and a tenth of the training queries held out. Every seed is
    then trained on all training queries, with the chosen settings.

    Attributes:
        training: the settings that all candidates share.
        candidates: dotted settings of each candidate, by name.
        metric: which decides; of equal candidates the first one wins.
    """

    training: Training
    candidates: Mapping[str, Sequence[str]]
    metric: str = "P@1"

    def with_settings(self, *settings: str) -> Training:
        """The training with more settings."""
        common = self.training.settings
        assert not callable(common), "candidates are chosen for all seeds at once"
        return dataclasses.replace(self.training, settings=[*common, *settings])

    def key(self, seed: int) -> str:
        keys = [self.with_settings(*settings).key(seed) for settings in self.candidates.values()]
        text = json.dumps([keys, self.metric])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-chosen"

    def measure(self, seed: int) -> Result:
        name = self.choose()
        training = self.with_settings(*self.candidates[name])
        return {**training.measure(seed), "chosen": name}

    def choose(self) -> str:
        """The name of the candidate with the best validation; trains each of them if need be."""

        def validation(name: str) -> float:
            settings = [*self.candidates[name], f"data.validation={HELD_OUT}"]
            training = self.with_settings(*settings)
            training = dataclasses.replace(training, measure_run=last_validation)
            return float(training.measure(0)[self.metric])

        return choose_once(self.key(0), list(self.candidates), validation)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A function of a seed and of settings that JSON can hold."""

    function: Callable[..., Result]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def key(self, seed: int) -> str:
        text = json.dumps([self.function.__name__, dict(self.settings), seed], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{self.function.__name__}"

    def measure(self, seed: int) -> Result:
        return self.function(seed, **self.settings)
