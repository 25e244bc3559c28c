"""The whole line as a user types it: raw files, corpus, two Ray workers with the pool, metrics, bundle, answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from corpora import planted_corpus
from planted import write_planted
from processes import When, descendants, last_step
from shell import run_command, set_options

from xmcray.doctor.sockets import Listener, listeners
from xmcray.training.records import read_records

pytestmark = pytest.mark.usefixtures("cluster")


def test_from_raw_text_to_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_planted(tmp_path / "raw", num_queries=300, num_labels=40)
    corpus, run, bundle = (str(tmp_path / name) for name in ("corpus", "run", "bundle"))
    settings = (
        "encoder.dim=32",
        "optim.batch_size=64",
        "optim.epochs=12",
        "optim.lr=0.01",
        "negatives.hard=3",
        "negatives.uniform=20",
        "negatives.start_epoch=2",
        "negatives.refresh_every=3",
        "method.classifier.kind=adagrad",
        "method.classifier.lr=0.1",
        "method.dropout=0.2",
        "log.every=2",
    )
    train = f"train astra --data {corpus} --out {run} --workers 2 {set_options(settings)}"
    assert run_command(f"prepare {tmp_path}/raw --out {corpus}") == 0
    ports: list[Listener] = []
    watch = When(lambda: last_step(Path(run)) >= 4, lambda: ports.extend(listeners()))
    assert run_command(train) == 0
    watch.close()
    workers = [
        port
        for port in ports
        if "RayTrainWorker" in port.command and port.pid in descendants(os.getpid())
    ]
    assert watch.done
    assert [f"{port.name} {port.address}" for port in workers if not port.loopback] == []
    out, err = capfd.readouterr()
    assert "next: xmcray search" in out
    lines = err.splitlines()  # progress, and not a line of Ray
    assert lines
    assert all(line.startswith("astra: epoch ") for line in lines)
    assert {
        record.get("negatives_version") for record in read_records(Path(run) / "metrics.jsonl")
    } - {None}
    assert run_command(f"evaluate {run} --data {corpus} --json") == 0
    metrics = json.loads(capfd.readouterr().out)
    assert metrics["P@1"] > 0.3  # by chance 0.05
    assert metrics["index_recall"] is None
    assert run_command(f"export {run} --out {bundle}") == 0
    capfd.readouterr()
    assert run_command(f"search {bundle} 'w0x0 w0x1 w0x2' -k 1 --json") == 0
    assert json.loads(capfd.readouterr().out)[0]["answers"][0]["uid"] == "label0"


def test_more_workers_than_cpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = planted_corpus(tmp_path, num_queries=30, num_labels=10).path
    run = str(tmp_path / "run")
    assert run_command(f"train astra --data {corpus} --out {run} --workers 9") == 2
    expected = "error: 9 workers ask for 1 CPUs each, the cluster's nodes have 4; lower --workers or cluster.cpus_per_worker\n"
    assert capfd.readouterr().err == expected
    assert not Path(run).exists()


def test_more_memory_than_there_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = planted_corpus(tmp_path, num_queries=30, num_labels=10).path
    run = str(tmp_path / "run")
    train = f"train astra --data {corpus} --out {run} --workers 1 --set negatives.hard=0"
    assert run_command(f"{train} --set encoder.dim=1000000000000000") == 2
    error = capfd.readouterr().err
    assert error.startswith("error: there is no memory for ")
    assert error.count("\n") == 1
    assert not Path(run).exists()
