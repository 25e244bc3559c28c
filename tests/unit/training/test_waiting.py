"""A run without workers: for how long, and what ends it sooner."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmcray.errors import ResourceError
from xmcray.training import waiting
from xmcray.training.preemption import StopFlag
from xmcray.training.waiting import Patience, WorkersMark


def test_only_time_without_workers_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock["now"])
    patience = Patience(tmp_path, "2 workers", 240)
    for now, without_workers in ((0, True), (200, False), (900, True), (1100, True)):
        clock["now"] = now
        patience.after_turn(without_workers, same_state=False)
    clock["now"] = 1141
    with pytest.raises(
        ResourceError,
        match=r"no room for 2 workers for 240 s: .* raise cluster\.wait_s, and the same",
    ):
        patience.after_turn(without_workers=True, same_state=False)


def test_a_run_that_is_to_stop_does_not_wait(tmp_path: Path) -> None:
    patience = Patience(tmp_path, "2 workers", 240)
    patience.after_turn(without_workers=True, same_state=False)
    StopFlag(tmp_path).hoist()
    patience.after_turn(without_workers=False, same_state=False)  # its workers react to the flag
    with pytest.raises(ResourceError, match="asked to stop"):
        patience.after_turn(without_workers=True, same_state=False)


def test_a_mark_says_whether_workers_train(tmp_path: Path) -> None:
    patience = Patience(tmp_path, "2 workers", 240)
    for without_workers in (True, False, True):
        patience.after_turn(without_workers, same_state=False)
        assert WorkersMark(tmp_path).is_set != without_workers
