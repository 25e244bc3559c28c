"""Killed at any step and resumed, a run ends with the weights of one that was left alone, byte for byte."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import ray
from corpora import planted_corpus
from loops import final_weights, trained_on_rank
from pools import run_with_pool, train_with_pool
from processes import When, kill, last_step, longest_end_s, train_workers
from ranks import on_ranks

from xmcray.data.corpus import Corpus
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.pool import shard_name
from xmcray.training.launch import train
from xmcray.training.preemption import handling
from xmcray.training.records import read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "cluster.workers=2",
    "cluster.cpus_per_worker=0.5",
    "cluster.device=cpu",
    "encoder.dim=24",
    "optim.batch_size=64",
    "optim.epochs=10",
    "optim.warmup_steps=10",
    "optim.lr=0.01",
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "method.classifier.weight_decay=0.001",
    "negatives.uniform=50",
    "negatives.hard=5",
    "negatives.cluster_size=4",
    "negatives.cluster_doubles=[4]",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.wait_s=120",
    "log.every=1",
    "log.checkpoint_every=7",
    "log.validate_every=0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_corpus(tmp_path_factory.mktemp("kills"), num_queries=1500, num_labels=150).path


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of the final weights of the same loop on two bare processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    on_ranks(trained_on_rank, 2, corpus, folder, SETTINGS)
    return final_weights(folder)


def resolve(*extra: str) -> RunConfig:
    return RunConfig.resolve("astra", {}, [*SETTINGS, *extra])


def index_pids(run_id: str, num_shards: int) -> list[int]:
    actors = [ray.get_actor(shard_name(run_id, shard)) for shard in range(num_shards)]
    return ray.get([actor.pid.remote() for actor in actors])


@pytest.mark.usefixtures("cluster")
def test_killed_stopped_and_interrupted_a_run_ends_as_if_left_alone(
    corpus: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """One run meets everything, because starting the workers takes longer than the training.

    Index actors are killed in the middle of a build, one worker is killed, one is stopped, and the
    command is interrupted and given again. Drivers are killed by benchmarks/soak.py. Interrupts at
    other moments are in test_signals.py and benchmarks/soak_signals.py.
    """
    out = tmp_path / "run"
    config = resolve("cluster.stall_s=4")
    stopped: list[int] = []
    stalled: list[int] = []
    interrupted_s: list[float] = []

    def stop_index() -> None:
        """Stopped before the first version is published, the actors cannot finish it before they are killed."""
        stopped.extend(index_pids(Run.open(out).id, 2))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    def published() -> bool:
        return any(folder.published for folder in Ledger(out / "negatives").versions())

    def index_runs() -> bool:
        if last_step(out) < 1:
            return False
        return shard_name(Run.open(out).id, 1) in ray.util.list_named_actors()

    def stall() -> None:
        stalled.append(train_workers()[-1])
        os.kill(stalled[0], signal.SIGSTOP)

    def interrupt() -> None:
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    stop = When(index_runs, stop_index)
    kill_index = When(lambda: bool(stopped) and published(), lambda: kill(stopped))
    kill_worker = When(lambda: last_step(out) >= 61, lambda: kill(train_workers()[:1]))
    stop_worker = When(lambda: kill_worker.done and last_step(out) >= 90, stall)
    end = When(lambda: stop_worker.done and last_step(out) >= 110, interrupt)
    # In a shell's background SIGINT is ignored from the start.
    with handling(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        train(corpus, out, config)
    assert time.monotonic() - interrupted_s[0] < longest_end_s()
    for watcher in (stop, kill_index, kill_worker, stop_worker, end):
        watcher.close()
        assert watcher.done
    steps_before = last_step(out)
    train(corpus, out, config)
    assert last_step(out) > steps_before
    assert final_weights(out) == undisturbed
    reasons = [record["text"] for record in read_records(out / "interruptions.jsonl")]
    assert any(re.match(r"rank \d .*died", reason) for reason in reasons), reasons
    stopped_worker = f"(process {stalled[0]} on {socket.gethostname()})"
    silence = f"{stopped_worker} gave no sign of life for 4 s; the workers are started again"
    assert any(reason.endswith(silence) for reason in reasons), reasons
    assert stalled[0] not in train_workers(), "continued, it could write into the run"
    assert Run.open(out).result()["schedule_broken_at_step"] is None
    steps = [record["step"] for record in read_records(out / "metrics.jsonl") if "loss" in record]
    assert steps == sorted(set(steps)), "a step was recorded twice"


@pytest.mark.usefixtures("cluster")
def test_eager_training_goes_on_while_the_index_is_dead(corpus: Path, tmp_path: Path) -> None:
    config = resolve("negatives.schedule=eager", "optim.epochs=4")
    opened = Corpus.open(corpus)
    with run_with_pool(tmp_path / "run", config, opened) as run:
        for pid in index_pids(run.id, 1):
            os.kill(pid, signal.SIGSTOP)
        result = train_with_pool(run, opened)
    records = [record for record in read_records(run.path / "metrics.jsonl") if "loss" in record]
    assert {record["negatives_version"] for record in records} == {None}, (
        "a version that nothing could finish was used"
    )
    assert records[-1]["step"] == result["steps"]
