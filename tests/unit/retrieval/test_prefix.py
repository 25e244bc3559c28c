"""Bundles cut to the first columns: scores are those of the columns, and labels still join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import DIM, TEXTS, write_bundle_of
from shell import Shell

from xmcray.api import export
from xmcray.errors import ConfigError
from xmcray.nn.label_side import load_label_side
from xmcray.retrieval import shards
from xmcray.retrieval.bundle import read_settings
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.new_vectors import new_vectors
from xmcray.retrieval.prefix import cut_bundle
from xmcray.retrieval.retriever import Retriever
from xmcray.types import Float32Array

QUERIES = ["matrix norm", "solve inverse trace", "sort join"]


@pytest.mark.parametrize("kind", ["texts", "rows"])
def test_answers_are_those_of_the_first_columns(tmp_path: Path, kind: str) -> None:
    whole = Retriever.load(write_bundle_of(tmp_path / "whole", kind))
    cut_bundle(tmp_path / "whole", tmp_path / "cut", 6)
    cut = Retriever.load(tmp_path / "cut")
    query_BD = whole.encode(QUERIES)[:, :6]
    label_LD = whole.labels.vectors_of(np.arange(len(TEXTS)))[:, :6]
    if kind == "texts":
        query_BD = query_BD / np.linalg.norm(query_BD, axis=1, keepdims=True)
        label_LD = label_LD / np.linalg.norm(label_LD, axis=1, keepdims=True)
    np.testing.assert_allclose(cut.encode(QUERIES), query_BD, rtol=0, atol=1e-6)
    scores = query_BD @ label_LD.T
    found = cut.search(QUERIES, 5)
    for row, answer in enumerate(found):
        ids = [hit.label_id for hit in answer]
        np.testing.assert_allclose(
            [hit.score for hit in answer], np.sort(scores[row])[::-1][:5], rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(scores[row, ids], [hit.score for hit in answer], atol=1e-5)
    assert read_settings(tmp_path / "cut").dim == 6
    assert new_vectors(
        cut, load_label_side(tmp_path / "cut" / "label_side"), ["norm matrix"]
    ).shape == (1, 6)


def test_the_command_says_that_there_are_no_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle_of(tmp_path / "whole", "texts")
    output = Shell(capsys).run(f"export {bundle} --out {tmp_path}/cut --dim 6")
    assert "cut has no probabilities, because its scores are new; `xmcray calibrate`" in output


@pytest.mark.parametrize(
    ("config", "recall", "factory"),
    [
        ({}, 0.99, "IVF8,Flat"),
        ({"index": {"recall": 0.9}}, 0.9, "IVF8,Flat"),
        ({"index": {"factory": "IVF4,Flat"}}, 0.99, "IVF4,Flat"),
    ],
)
def test_the_index_is_that_of_an_export(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    recall: float,
    factory: str,
) -> None:
    bundle = write_bundle_of(tmp_path / "whole", "textsIVF")
    built: list[IndexSpec] = []

    def noting(rows: Float32Array, spec: IndexSpec, **options: Any) -> Index:
        built.append(spec)
        return build_index(rows, spec, **options)

    monkeypatch.setattr(shards, "build_index", noting)
    export(bundle, tmp_path / "cut", config, dim=6)

    assert {(spec.recall, spec.factory) for spec in built} == {(recall, factory)}
    assert read_settings(tmp_path / "cut").factory == factory


def test_other_settings_are_refused_with_fewer_columns(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "whole", "texts")
    with pytest.raises(ConfigError, match="settings of the index alone, found 'optim'"):
        export(bundle, tmp_path / "cut", {"optim.lr": 1}, dim=6)
    assert not (tmp_path / "cut").exists()


def test_a_bundle_is_cut_once(tmp_path: Path) -> None:
    cut_bundle(write_bundle_of(tmp_path / "whole", "texts"), tmp_path / "cut", 6)
    with pytest.raises(ConfigError, match="was cut before"):
        cut_bundle(tmp_path / "cut", tmp_path / "again", 3)


@pytest.mark.parametrize(
    ("kind", "dim", "message"),
    [
        ("texts", DIM, f"--dim is {DIM}, expected 1 to {DIM - 1}"),
        ("both", 3, "answers by more than one vector of the encoder"),
        ("prototypes", 3, "answers by more than one vector of the encoder"),
    ],
)
def test_what_has_no_prefix_is_refused(tmp_path: Path, kind: str, dim: int, message: str) -> None:
    bundle = write_bundle_of(tmp_path / "whole", kind)
    with pytest.raises(ConfigError, match=message):
        cut_bundle(bundle, tmp_path / "cut", dim)
    assert not (tmp_path / "cut").exists()
