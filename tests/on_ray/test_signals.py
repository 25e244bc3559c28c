"""Ctrl-C and SIGTERM end a command also while it waits for Ray."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import ray
from processes import When

from xmcray import cli
from xmcray.training.preemption import handling

SIGNALS = {
    signal.SIGTERM: (143, "terminated; "),
    signal.SIGINT: (130, "interrupted; "),
}


@ray.remote(num_cpus=0)
def never_ends(started: Path) -> None:
    started.touch()
    threading.Event().wait()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_waits_for_ray_ends(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray's calls let no exception of a signal's handler through except a few."""
    started = tmp_path / "started"
    task = never_ends.remote(started)
    verb = cli.Verb(lambda _: ray.get(task), lambda _: None, "waits", "xmcray labels")
    monkeypatch.setitem(cli.VERBS, "labels", verb)
    watcher = When(started.exists, lambda: os.kill(os.getpid(), number))
    code, line = SIGNALS[number]
    # In a shell's background SIGINT is ignored from the start.
    with handling(signal.SIGINT, signal.default_int_handler):
        assert cli.main(["labels"]) == code
    watcher.close()
    assert capsys.readouterr().err.startswith(line)
    ray.cancel(task, force=True)
