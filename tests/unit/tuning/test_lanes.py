"""Several trainings at the same time: each in a process, and none outlives the one that began it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import planted_corpus
from processes import last_step, wait_until

from xmcray import config as configs
from xmcray.errors import RunError, StorageError
from xmcray.storage.work_folder import locked
from xmcray.training.preemption import Terminated
from xmcray.training.run import RUN_FOLDER
from xmcray.training.run_config import RunConfig
from xmcray.tuning import lanes
from xmcray.tuning.lanes import Lanes

WAIT_S = 120


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_corpus(tmp_path_factory.mktemp("corpus"), num_queries=101, num_labels=11).path


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    monkeypatch.setattr(lanes, "number_of_lanes", lambda: 2)
    return Lanes()


def config(epochs: int) -> RunConfig:
    settings: dict[str, Any] = {
        "cluster": {"workers": 0, "threads_per_process": 1},
        "data": {"validation": 0.1},
        "encoder": {"dim": 8, "bigram_buckets": 0},
        "negatives": {"hard": 0, "uniform": 4},
        "optim": {"epochs": epochs, "batch_size": 32, "warmup_steps": 0},
        "log": {"every": 1},
    }
    return RunConfig.resolve("astra", configs.overlay({}, settings))


@contextlib.contextmanager
def unwatched(_: Path, __: Callable[[], None]) -> Iterator[None]:
    yield


def wait_for_steps(run: Path) -> None:
    wait_until(lambda: last_step(run) > 2, WAIT_S, lambda: f"{run} does not train")


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*"))


def test_a_mistake_of_one_training_is_raised_and_the_others_save_a_checkpoint(
    corpus: Path, tmp_path: Path, two_lanes: Lanes
) -> None:
    long = tmp_path / "long"

    def run(name: str) -> None:
        if name == "wrong":
            wait_for_steps(long)
            two_lanes.train(str(tmp_path / "missing"), tmp_path / name, config(1), False, unwatched)
        else:
            two_lanes.train(str(corpus), tmp_path / name, config(10**6), False, unwatched)

    with pytest.raises(StorageError, match="missing does not exist"):
        two_lanes.map(run, ["long", "wrong", "later"])
    assert has_checkpoint(long)
    assert not (tmp_path / "later").exists()
    with pytest.raises(Terminated), locked(long, RUN_FOLDER):
        # The lock is free, and nothing begins any more.
        two_lanes.train(str(corpus), long, config(1), False, unwatched)


def test_a_training_that_is_asked_to_end_saves_a_checkpoint_and_a_killed_one_is_named(
    corpus: Path, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def asked(run: Path, stop: Callable[[], None]) -> Iterator[None]:
        wait_for_steps(run)
        stop()
        yield

    Lanes().train(str(corpus), tmp_path / "asked", config(10**6), False, asked)
    assert has_checkpoint(tmp_path / "asked")

    @contextlib.contextmanager
    def killed(run: Path, stop: Callable[[], None]) -> Iterator[None]:
        wait_for_steps(run)
        stop.__self__.kill()  # type: ignore[attr-defined]
        yield

    with pytest.raises(RunError, match="killed ended with exit code -9"):
        Lanes().train(str(corpus), tmp_path / "killed", config(10**6), False, killed)


def test_a_training_ends_at_once_if_its_parent_is_killed(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "orphan"
    # Not a daemon, because daemons have no children.
    parent = multiprocessing.get_context("forkserver").Process(target=_parent, args=(corpus, run))
    parent.start()
    try:
        wait_for_steps(run)
        assert parent.pid is not None
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not _is_locked(run), WAIT_S, lambda: "the orphan keeps its lock")
    finally:
        parent.kill()
        parent.join()


def _parent(corpus: Path, run: Path) -> None:
    Lanes().train(str(corpus), run, config(10**6), False, unwatched)


def _is_locked(run: Path) -> bool:
    try:
        with locked(run, RUN_FOLDER):
            return False
    except RunError:
        return True
