"""Followers of a run's records see each one once, and read no more than what is new."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from xmcray.training import records
from xmcray.training.records import Record, Records, following, read_records, tailing

PATIENCE_S = 20


class Seen:
    """Records that a follower has seen, and a way to wait for them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._changed = threading.Condition()

    def add(self, record: Record) -> None:
        with self._changed:
            self.steps.append(record["step"])
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), self.steps


@pytest.fixture
def parsed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of bytes that were parsed."""
    monkeypatch.setattr(records, "_POLL_S", 0.01)
    sizes: list[int] = []
    parse: Any = records._parsed

    def counted(content: bytes) -> list[Record]:
        sizes.append(len(content))
        parsed: list[Record] = parse(content)
        return parsed

    monkeypatch.setattr(records, "_parsed", counted)
    return sizes


def test_a_follower_reads_only_what_is_new(tmp_path: Path, parsed_bytes: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    file = Records(path)
    seen = Seen()
    with tailing(path, seen.add):
        for step in range(1, 31):
            file.add({"step": step})
            seen.wait_for(lambda step=step: len(seen.steps) == step)  # type: ignore[misc]
        # Half a line is read when it is whole.
        with path.open("a", encoding="utf-8") as half:
            half.write('{"step"')
            half.flush()
            half.write(": 31}\n")
    assert seen.steps == list(range(1, 32))
    assert sum(parsed_bytes) == path.stat().st_size


def test_a_run_that_is_cut_back_is_followed_on(tmp_path: Path, parsed_bytes: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    file = Records(path)
    for step in (1, 2, 3):
        file.add({"step": step})
    seen = Seen()
    with tailing(path, seen.add, num_seen=1):
        seen.wait_for(lambda: seen.steps == [2, 3])
        file.truncate(1)
        parsed_before = len(parsed_bytes)
        # The first look from here on may still be at the former file.
        wait_until(
            lambda: len(parsed_bytes) >= parsed_before + 2, PATIENCE_S, lambda: "nobody looks", 0.01
        )
        file.add({"step": 2})
        seen.wait_for(lambda: len(seen.steps) == 3)
    assert seen.steps == [2, 3, 2]


def test_a_validation_that_was_still_owed_is_followed(
    tmp_path: Path, parsed_bytes: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = Records(path)
    # The run was killed between the record of step 2 and its validation.
    for step in (1, 2):
        file.add({"step": step, "loss": 0.5})
    heard: list[Record] = []
    with following(path, heard.append):
        file.truncate(1)
        file.add({"step": 2, "loss": 0.5})
        file.add({"step": 2, "P@1": 0.5})
        file.add({"step": 3, "loss": 0.5})
    assert [(record["step"], "P@1" in record) for record in heard] == [(2, True), (3, False)]


@pytest.mark.parametrize(
    "damaged", ['{"step": 1', "[1]", '{"step": -1}', '{"step": 1e3}', f'{{"step": {10**30}}}']
)
def test_records_end_before_a_damaged_one(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n', encoding="utf-8")
    assert read_records(path) == [{"step": 1}]


def test_a_pipe_that_nobody_reads_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        Records(path).add({"step": 1})
