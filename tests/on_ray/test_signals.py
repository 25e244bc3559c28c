"""Ctrl-C and SIGTERM end a command also while it waits for Ray, or for nodes that do not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from corpora import planted_corpus
from processes import When, descendants, longest_end_s

from xmcray import cli
from xmcray.errors import ResourceError
from xmcray.training.launch import train
from xmcray.training.placement import Nodes
from xmcray.training.preemption import Terminated, handling
from xmcray.training.run_config import RunConfig

SIGNALS = {
    signal.SIGTERM: (143, "terminated; "),
    signal.SIGINT: (130, "interrupted; "),
}


WAIT_S = 600


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
    tasks = []

    def wait(_: object) -> object:
        # Not earlier: before a verb runs, Ray's own handler would get the signal.
        tasks.append(never_ends.remote(started))
        return ray.get(tasks)

    verb = cli.Verb(wait, lambda _: None, "waits", "xmcray labels")
    monkeypatch.setitem(cli.VERBS, "labels", verb)
    watcher = When(started.exists, lambda: os.kill(os.getpid(), number))
    code, line = SIGNALS[number]
    # In a shell's background SIGINT is ignored from the start.
    with handling(signal.SIGINT, signal.default_int_handler):
        assert cli.main(["labels"]) == code
    watcher.close()
    assert capsys.readouterr().err.startswith(line)
    ray.cancel(tasks[0], force=True)


@pytest.fixture
def waiting_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Trains with more workers than the cluster can have: it waits for nodes."""
    # They were there when the run was placed, and are gone when its workers want them.
    nodes = Nodes({"gone": {"CPU": 64}}, [], autoscaled=False)
    monkeypatch.setattr(Nodes, "of_cluster", lambda: nodes)
    corpus = planted_corpus(tmp_path / "data", num_queries=100, num_labels=20).path

    def start(*settings: str) -> object:
        config = ["cluster.workers=9", "negatives.hard=0", *settings]
        return train(corpus, tmp_path / "run", RunConfig.resolve("astra", {}, config))

    return start


def controllers() -> list[int]:
    """Processes of the controllers of trainings in the shared cluster."""
    return [pid for pid, text in descendants(os.getpid()).items() if "TrainController" in text]


@pytest.mark.usefixtures("cluster")
def test_a_wait_for_nodes_ends_after_its_limit(waiting_run: Callable[..., object]) -> None:
    expected = "the cluster has had no room for 9 workers that ask for 1 CPU each for 1 s"
    with pytest.raises(ResourceError, match=expected):
        waiting_run("cluster.min_workers=9", "cluster.wait_s=1")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("number", "interrupts", "settings", "ended"),
    [
        pytest.param(
            signal.SIGINT,
            signal.default_int_handler,
            ["cluster.min_workers=9"],
            KeyboardInterrupt,
            marks=pytest.mark.soak,
        ),
        # A shell that starts a process in the background has it ignore SIGINT.
        (signal.SIGTERM, lambda *_: None, [], Terminated),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_wait_for_nodes_ends_at_a_signal(
    number: signal.Signals,
    interrupts: Callable[..., object],
    settings: list[str],
    ended: type[BaseException],
    waiting_run: Callable[..., object],
) -> None:
    moments: list[float] = []

    def send() -> None:
        moments.append(time.monotonic())
        os.kill(os.getpid(), number)

    watcher = When(lambda: bool(controllers()), send)
    with handling(signal.SIGINT, interrupts), pytest.raises(ended):
        waiting_run(f"cluster.wait_s={WAIT_S}", *settings)
    watcher.close()
    seconds = time.monotonic() - moments[0]
    assert seconds < longest_end_s()
