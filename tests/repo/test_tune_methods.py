"""The runner of all sweeps: the pairs that it takes, and the presets that it writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from xmcray.methods.registry import method_names
from xmcray.training.run_config import RunConfig


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import tune_methods

    return tune_methods


def test_patterns_choose_pairs_and_the_sample_only_by_name(runner: Any) -> None:
    assert len(runner.wanted_pairs("*:*")) == 5 * len(method_names())
    assert runner.wanted_pairs("rae:msdocs-*,dexml:sample") == [
        ("rae", "msdocs-seealso"),
        ("rae", "msdocs-links"),
        ("dexml", "sample"),
    ]
    with pytest.raises(SystemExit):
        runner.wanted_pairs("rea:*")


def test_a_preset_keeps_the_best_settings_and_says_what_they_cost(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "preset_path", lambda method, name: tmp_path / "preset.yaml")
    (tmp_path / "preset.yaml").write_text("cluster: {workers: 1}\n")
    values = {"optim.lr": 0.00123456, "negatives.hard": 0}
    best = RunConfig.resolve("unidec", {"optim": {"lr": 0.00123456}, "negatives": {"hard": 0}})
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "best.yaml").write_text(yaml.safe_dump(best.to_dict()))
    (sweep / "sweep.json").write_text(json.dumps({"first": [values]}))
    card = SimpleNamespace(name="s", num_labels=20, num_train=3000)
    trial = {"score": 0.5, "values": values}
    budget = argparse.Namespace(trials=8, trial_cpu_s=60.0)
    text = runner.preset_text("unidec", SimpleNamespace(card=card), tmp_path, trial, budget)
    assert "best of 8 trials of at most 60 seconds" in text
    assert "50.0; its settings were given at its start" in text
    settings = yaml.safe_load(text)
    assert settings == {
        "cluster": {"workers": 1},
        "negatives": {"hard": 0},
        "optim": {"lr": 0.00123},
    }


def test_a_first_trial_borrows_only_what_both_methods_have(runner: Any) -> None:
    theirs = {
        "encoder": {"dim": 512},
        "method": {"temperature": 0.07, "columns": "hard"},
    }
    defaults = RunConfig.resolve("rae", {}).to_dict()
    assert runner.shared(theirs, defaults) == {
        "encoder": {"dim": 512},
        "method": {"temperature": 0.07},
    }
