"""SIGTERM: the last line, the exit code, and a run that goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from corpora import planted_corpus
from shell import run_command, set_options

from xmcray import cli
from xmcray.parallel import collectives
from xmcray.ray_adapter.session import _keep_sigterm_handler, start_ray
from xmcray.storage.manifest import read_manifest
from xmcray.training import watch
from xmcray.training.preemption import StopFlag, handling
from xmcray.training.records import Records
from xmcray.training.watch import Watch

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "optim.epochs=6",
    "negatives.hard=3",
    "negatives.uniform=10",
]
SETTINGS += [
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "method.dropout=0.2",
    "log.every=1",
]
SETTINGS += [
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.05",
    "cluster.threads_per_process=1",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_corpus(
        tmp_path_factory.mktemp("preemption"), num_queries=220, num_labels=40
    ).path


def train(corpus: Path, out: Path) -> int:
    options = set_options(SETTINGS)
    return run_command(
        f"train astra --data {corpus} --out {out} --workers 0 --no-evaluate {options}"
    )


def weights(run: Path) -> dict[str, str]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {
        name: entry.sha256 for name, entry in read_manifest(newest, "checkpoint").files.items()
    } | {"": newest.name}


def sigterm_at(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process signals itself as soon as one of the steps is done."""
    add = Records.add

    def add_and_kill(self: Records, record: Mapping[str, Any]) -> None:
        add(self, record)
        if record["step"] in steps:
            steps.remove(record["step"])
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Records, "add", add_and_kill)
    monkeypatch.setattr(Watch, "every_s", 0.0)


def test_sigterm_saves_and_the_same_command_continues_byte_for_byte(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(corpus, tmp_path / "undisturbed") == 0
    out = tmp_path / "run"
    sigterm_at([4, 17, 23], monkeypatch)  # 7 steps an epoch: at none of them a checkpoint is due
    for step in (4, 17, 23):
        capsys.readouterr()
        before = signal.getsignal(signal.SIGTERM)
        assert train(corpus, out) == 143
        assert signal.getsignal(signal.SIGTERM) is before
        last = f"terminated: {out} stopped at step {step}, which is saved; the same command continues it\n"
        assert capsys.readouterr().err.endswith(last)
        assert not (out / "stop").exists()
    assert train(corpus, out) == 0
    assert weights(out) == weights(tmp_path / "undisturbed")


def test_sigterm_outside_of_training_ends_a_command_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        cli.VERBS,
        "labels",
        cli.Verb(lambda _: os.kill(os.getpid(), signal.SIGTERM), lambda _: None, "x", ""),
    )
    assert cli.main(["labels"]) == 143
    assert capsys.readouterr().err == "terminated; the same command starts it again\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_within_a_callback_ends_a_command_too(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops exceptions of callbacks, among them those of each import's lock."""

    class Owner: ...

    def send(_: object) -> None:
        signal.raise_signal(number)

    def run(_: object) -> None:
        owner = Owner()
        reference = weakref.ref(owner, send)
        del owner
        threading.Event().wait(30)
        assert reference() is None

    monkeypatch.setitem(cli.VERBS, "labels", cli.Verb(run, lambda _: None, "x", ""))
    with handling(signal.SIGINT, signal.default_int_handler):
        assert cli.main(["labels"]) == code


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"])
def test_ray_leaves_our_handler_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # as ray.init does; its handler ends the process

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for name in (
        "RAY_AUTH_TOKEN",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_task_events_max_num_task_in_gcs",
        "RAY_worker_niceness",
    ):  # which it sets: back to what they were afterwards
        monkeypatch.setenv(name, "x")
    for handler in (print, signal.SIG_DFL):
        with handling(signal.SIGTERM, handler):
            start_ray()
            assert signal.getsignal(signal.SIGTERM) is handler


def test_a_thread_leaves_signals_alone() -> None:
    def connect() -> str:
        with _keep_sigterm_handler():
            return "connected"

    with handling(signal.SIGTERM, print), ThreadPoolExecutor(1) as pool:
        assert pool.submit(connect).result() == "connected"


def test_a_look_costs_a_broadcast_in_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = [1.0], list[int]()

    def broadcast(value: int) -> int:
        looks.append(value)
        return value

    monkeypatch.setattr(watch.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(collectives, "broadcast_int", broadcast)
    watcher = Watch(StopFlag(tmp_path))
    for step in range(2000):
        assert watcher.look(step) == "go on"
        clock[0] += 0.01 if step < 1500 else 1.0  # fast steps, then slow ones
    fast = [step for step in looks if step < 1500]
    assert fast[-3] + 200 == fast[-2]  # 200 steps of 10 ms
    assert len(fast) < 16
    assert looks[-2:] == [1998, 2000]  # two steps of a second


def test_a_node_that_leaves_is_answered_once(tmp_path: Path) -> None:
    leaving = [False, True, True, True]
    watcher = Watch(StopFlag(tmp_path), leaving=lambda: leaving.pop(0))
    watcher.every_s = 0
    assert [watcher.look(step) for step in range(4)] == ["go on", "save", "go on", "go on"]
    assert leaving == [True, True]
