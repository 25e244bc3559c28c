"""Fifty steps on planted data give the curve they always gave; `make golden` renews it after a change on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.training.loop import Loop, build
from xmcray.training.records import read_records
from xmcray.training.run import Run, RunConfig

STEPS = 50
SETTINGS = {
    "astra": [
        "method.classifier.kind=adagrad",
        "method.classifier.lr=0.2",
        "negatives.uniform=30",
        "negatives.hard=5",
        "negatives.start_epoch=2",
        "negatives.refresh_every=2",
    ],
    "astra-exact": [
        "method.exact=true",
        "method.classifier.kind=sgd",
        "method.classifier.lr=10",
        "negatives.hard=0",
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_curve(name: str, tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, num_queries=400, num_labels=60)
    common = [
        "encoder.dim=32",
        "optim.batch_size=64",
        "optim.epochs=9",
        "optim.lr=0.01",
        "optim.warmup_steps=5",
    ]
    config = RunConfig.resolve(
        "astra", {}, [*common, *SETTINGS[name], "data.validation=0.2", "log.every=1"]
    )
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    run = Run(tmp_path / "run", "golden", config, corpus.origin, corpus.sha256)
    run.path.mkdir()
    loop = Loop(run, setup, ThreadRefresher(data, RefreshSpec(1, config.negatives, 0)))
    loop.last_step = STEPS
    loop.train()
    records = read_records(run.path / "metrics.jsonl")
    found = {
        "loss": [record["loss"] for record in records if "loss" in record],
        "validation": {key: records[-1][key] for key in ("P@1", "P@5", "R@10")},
    }
    file = Path(__file__).with_name(f"{name}.json")
    if os.environ.get("XMCRAY_RENEW_GOLDEN"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(file.read_text())
    assert len(found["loss"]) == STEPS
    np.testing.assert_allclose(found["loss"], golden["loss"], rtol=2e-4)
    for key, value in golden["validation"].items():
        assert found["validation"][key] == pytest.approx(value, abs=0.03), key
    assert found["validation"]["P@1"] > 0.5, "planted data are easy: the method did not learn"
