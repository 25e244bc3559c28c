"""Sizes beyond the machine's memory: one line, and nothing half-written."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import planted_corpus
from shell import SMALL_SETTINGS, Shell

from xmcray import cli
from xmcray.errors import OutOfMemoryError, memory_errors

# Bytes: more than the addresses of a process, so that it fails wherever the tests run.
TOO_MANY = 1 << 60


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("encoder.dim=1000000000000000", r"\d+ bytes"),
        ("encoder.dim=9000000000000000000", "Storage size calculation overflowed"),
        ("encoder.bigram_buckets=1000000000000000", r"\d+ bytes"),
    ],
)
def test_a_training_that_is_too_large_leaves_nothing(
    setting: str, needed: str, tmp_path: Path, shell: Shell
) -> None:
    corpus = planted_corpus(tmp_path)
    train = f"train astra --data {corpus.path} --out {tmp_path}/r --workers 0 {SMALL_SETTINGS}"
    error = shell.error(f"{train} --set {setting}")
    assert re.match(f"there is no memory for {needed}", error)
    assert not (tmp_path / "r").exists()


def cuda_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")


def python_error() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("allocate", "needed"),
    [
        (lambda: torch.empty(TOO_MANY, dtype=torch.uint8), f"{TOO_MANY} bytes"),
        (lambda: torch.empty(TOO_MANY, TOO_MANY), "Storage size calculation overflowed"),
        (lambda: np.empty(TOO_MANY, np.uint8), "1.00 EiB"),
        (lambda: np.empty((TOO_MANY, TOO_MANY)), "array is too big"),
        (cuda_error, "20.00 GiB"),
        (python_error, "what was asked"),
    ],
)
def test_any_verb_without_memory_says_so_in_one_line(
    allocate: Callable[[], object], needed: str, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    def run(_: argparse.Namespace) -> None:
        allocate()

    monkeypatch.setitem(cli.VERBS, "search", dataclasses.replace(cli.VERBS["search"], run=run))
    error = shell.error("search B x")
    assert f"there is no memory for {needed}" in error
    assert "lower them" in error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as found, memory_errors():
        torch.empty(2, 3) @ torch.empty(2, 3)
    assert not isinstance(found.value, OutOfMemoryError)
