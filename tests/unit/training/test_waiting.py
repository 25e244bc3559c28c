"""A run without workers: for how long, and what ends it sooner."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.train.v2._internal.execution.controller import state as states

from xmcray.errors import ResourceError
from xmcray.training import waiting
from xmcray.training.preemption import StopFlag
from xmcray.training.waiting import Patience


def test_only_time_without_workers_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock["now"])
    patience, first = Patience(tmp_path, "2 workers", 240), states.InitializingState()
    begun, lost = states.RunningState(), states.RestartingState(RuntimeError())
    for now, state in (
        (0, states.SchedulingState(None)),
        (200, begun),
        (900, lost),
        (1100, states.SchedulingState(None)),
    ):
        clock["now"] = now
        patience.after_controller_state_update(first, state)
    clock["now"] = 1141
    with pytest.raises(
        ResourceError,
        match=r"no room for 2 workers for 240 s: .* raise cluster\.wait_s, and the same",
    ):
        patience.after_controller_state_update(first, lost)


def test_a_run_that_is_to_stop_does_not_wait(tmp_path: Path) -> None:
    patience, since = Patience(tmp_path, "2 workers", 240), states.InitializingState()
    patience.after_controller_state_update(since, states.SchedulingState(None))
    StopFlag(tmp_path).hoist()
    patience.after_controller_state_update(since, states.RunningState())  # its workers see to that
    with pytest.raises(ResourceError, match="asked to stop"):
        patience.after_controller_state_update(since, states.ReschedulingState(RuntimeError()))
