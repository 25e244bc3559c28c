"""Fifty steps on planted data give the curve they always gave.

`curves.yaml` holds the settings, one JSON file each curve. `make golden` renews the files after a
change on purpose.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from corpora import planted_corpus
from loops import trained

from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.training.records import read_records
from xmcray.training.run_config import RunConfig

FOLDER = Path(__file__).parent
CURVES: dict[str, Any] = yaml.safe_load((FOLDER / "curves.yaml").read_text(encoding="utf-8"))
COMMON = CURVES.pop("common")
STEPS = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("golden"), num_queries=400, num_labels=60)


def curve(name: str, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Losses of all steps and the validation at the end."""
    method = CURVES[name]["method"]
    config = RunConfig.resolve(method, {}, [*COMMON, *CURVES[name]["settings"]])
    trained(folder, corpus, config, STEPS)
    records = read_records(folder / "metrics.jsonl")
    return {
        "loss": [record["loss"] for record in records if "loss" in record],
        "validation": {key: records[-1][key] for key in ("P@1", "P@5", "R@10")},
    }


def test_every_method_has_a_curve() -> None:
    assert {settings["method"] for settings in CURVES.values()} == set(method_names())


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_the_recorded_one(name: str, corpus: Corpus, tmp_path: Path) -> None:
    found = curve(name, corpus, tmp_path)
    file = FOLDER / f"{name}.json"
    if os.environ.get("XMCRAY_RENEW_GOLDEN"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(file.read_text())
    assert len(found["loss"]) == STEPS
    np.testing.assert_allclose(found["loss"], golden["loss"], rtol=2e-4)
    for key, value in golden["validation"].items():
        assert found["validation"][key] == pytest.approx(value, abs=0.03), key
    assert found["validation"]["P@1"] > 0.5, "planted data are easy: the method did not learn"
