"""The number of epochs that `train --refit` chooses on held-out queries."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from corpora import planted_corpus

from xmcray.errors import ConfigError
from xmcray.retrieval.retriever import Retriever
from xmcray.training import launch
from xmcray.training.calibrate import calibrate
from xmcray.training.export import export_run
from xmcray.training.fuse import fuse
from xmcray.training.launch import refit_config, train
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

HARD_ALONE = ("negatives.uniform=0", "negatives.hard=20", "negatives.start_epoch=2")


@pytest.mark.parametrize(
    ("method", "settings", "epochs"),
    [
        ("astra", (), 1),
        # The first two epochs have no negatives, and one alone would train on positives.
        ("astra", HARD_ALONE, 4),
        ("dexml", HARD_ALONE, 1),
    ],
)
def test_the_best_validation_chooses_among_trainings_that_are_allowed(
    method: str, settings: tuple[str, ...], epochs: int, tmp_path: Path
) -> None:
    scores = [0.4, 0.3, 0.1, 0.2]
    lines = []
    for epoch, score in enumerate(scores):
        lines.append(json.dumps({"step": epoch, "epoch": epoch, "nDCG@5": score}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = RunConfig.resolve(method, {}, ["optim.epochs=4", *settings])
    chosen = refit_config(Run(tmp_path, "id", config, tmp_path, ""))
    assert chosen.optim.num_epochs == epochs
    assert chosen.data.validation == 0


@pytest.mark.parametrize("every", [0, 4, 9])
def test_a_single_validation_chooses_nothing(every: int, tmp_path: Path) -> None:
    settings = ["optim.epochs=4", f"log.validate_every={every}"]
    config = RunConfig.resolve("dexml", {}, settings)
    with pytest.raises(ConfigError, match=f"validate_every is {every} and validates the last of 4"):
        train(tmp_path / "corpus", tmp_path / "out", config, refit=True)


@pytest.mark.parametrize("best", [1, 2])
def test_a_refit_much_shorter_than_its_selection_has_no_probabilities(
    best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = planted_corpus(tmp_path, num_queries=200)
    choose = launch.refit_config

    def chosen(selection: Run) -> RunConfig:
        config = choose(selection)
        return dataclasses.replace(config, optim=dataclasses.replace(config.optim, stop_epoch=best))

    monkeypatch.setattr(launch, "refit_config", chosen)
    settings = ["optim.epochs=4", "encoder.dim=8", "cluster.workers=0", "data.validation=0.2"]
    config = RunConfig.resolve("dexml", {}, settings)
    run = train(corpus.path, tmp_path / "run", config, refit=True)
    export_run(run, tmp_path / "bundle", corpus)
    fuse([str(run.path)], corpus, tmp_path / "fused")
    for name in ("bundle", "fused"):
        has_probabilities = Retriever.load(tmp_path / name).calibration is not None
        assert has_probabilities == (best == 2)
    assert ("the best epoch was 1" in caplog.text) == (best == 1)
    if best == 1:
        with pytest.raises(ConfigError, match="the best epoch was 1"):
            calibrate(str(run.path), corpus)
