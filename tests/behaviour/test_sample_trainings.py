"""Trainings on the embedded sample: what the quickstart promises, and the recorded bits."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from types import ModuleType

import pytest
from corpora import corpus_of

from xmcray import cli
from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample
from xmcray.settings_files import load_yaml
from xmcray.training.launch import train
from xmcray.training.outcome import finish
from xmcray.training.run_config import RunConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.timeout(600)  # half a minute on an idle machine


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("sample")
    (folder / "raw").mkdir()
    write_sample(folder / "raw")
    return corpus_of(folder / "raw", folder / "corpus")


def check_floors(corpus: Corpus, folder: Path, *settings: str, refit: bool = False) -> None:
    """Trains with the committed preset."""
    values = load_yaml("preset:astra/sample")
    config = RunConfig.resolve("astra", values, ["cluster.workers=0", *settings])
    run = train(corpus.path, folder, config, refit=refit)
    evaluation = finish(run, corpus)
    assert evaluation is not None
    metrics = evaluation.to_json()
    assert metrics["P@1"] >= 0.62
    assert metrics["P@5"] >= 0.34


def test_sample_reaches_its_floors(corpus: Corpus, tmp_path: Path) -> None:
    """Like a refit, which holds nothing out, but of 8 epochs instead of 14."""
    check_floors(corpus, tmp_path / "run", "data.validation=0", "optim.stop_epoch=8")


@pytest.mark.soak
def test_sample_reaches_its_floors_with_a_refit(corpus: Corpus, tmp_path: Path) -> None:
    check_floors(corpus, tmp_path / "run", refit=True)


@pytest.fixture
def sameness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with the verbs in this process, because each start imports torch anew."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("sameness")
    monkeypatch.setattr(module, "run", run_here)
    return module


def run_here(*arguments: str) -> bytes:
    """Standard output of a verb."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(arguments) == 0
    return output.getvalue().encode()


@pytest.mark.parametrize("method", ["astra", "dexml"])
def test_training_export_and_search_give_the_recorded_bits(
    method: str, sameness: ModuleType, corpus: Corpus, tmp_path: Path
) -> None:
    """Two methods without Ray; benchmarks/sameness.py has all methods."""
    recorded = json.loads((BENCHMARKS / "results" / "sameness.json").read_text(encoding="utf-8"))
    if recorded[sameness.MACHINE] != sameness.kernels():
        pytest.skip(f"recorded on {recorded[sameness.MACHINE]}; this is {sameness.kernels()}")
    fingerprint = sameness.fingerprint(sameness.CASES[method], 0, corpus.path, tmp_path / "run")
    assert fingerprint == recorded[f"{method}, 0 workers"]
