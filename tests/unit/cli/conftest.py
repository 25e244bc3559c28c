"""A corpus and a finished run, for the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpora import planted_corpus
from shell import SMALL, run_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a run of it and the bundle of that run."""
    folder = tmp_path_factory.mktemp("cli")
    planted_corpus(folder)
    assert run_command(f"train astra --data {folder}/corpus --out {folder}/run {SMALL}") == 0
    return folder
