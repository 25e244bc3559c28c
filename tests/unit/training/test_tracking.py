"""TensorBoard, MLflow and W&B hold what metrics.jsonl holds, each step once, whatever happened to run or tracker."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import planted_corpus
from shell import run_command, set_options

from xmcray.errors import ConfigError
from xmcray.training import trackers, tracking
from xmcray.training.records import Records, read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

SECRET = "hunter2-planted"
NAMES = ("tensorboard", "mlflow", "wandb")


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's own accounts and servers, and nothing sent anywhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_MODE",
        "MLFLOW_EXPERIMENT_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def run_in(tmp_path: Path, *names: str) -> Run:
    config = RunConfig.resolve("astra", {}, [f"log.track=[{', '.join(names)}]"])
    run = Run(
        tmp_path / "one",
        "0123456789ab",
        config,
        f"https://me:{SECRET}@host/corpus?sig={SECRET}",
        "0" * 64,
    )
    run.path.mkdir(exist_ok=True)
    return run


def read_tensorboard(run: Run) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "trackers" / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def read_mlflow(run: Run) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    (found,) = client.search_runs(["1"])
    assert found.data.params["optim.epochs"] == "15"
    assert found.data.params["corpus"] == "https://me:***@host/corpus?sig=***"
    history = {
        name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics
    }
    return {
        name.replace("_at_", "@"): [(m.step, m.value) for m in values]
        for name, values in history.items()
    }


def read_wandb(run: Run) -> dict[str, list[tuple[int, float]]]:
    import wandb
    from wandb.proto import wandb_internal_pb2 as messages

    wandb.teardown()  # waits for the process that writes the files

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(
        (run.path / "trackers" / "wandb").glob("offline-run-*/run-0123456789ab.wandb")
    ):
        for data in wandb_messages(path.read_bytes()):
            message = messages.Record.FromString(data)
            values = {
                "".join(i.nested_key) or i.key: json.loads(i.value_json)
                for i in message.history.item
            }
            for name in values.keys() - {"step", "_step", "_timestamp", "_runtime"}:
                found.setdefault(name, []).append((values["step"], values[name]))
    return found


def wandb_messages(data: bytes) -> Iterator[bytes]:
    """The file is LevelDB's log: blocks of 32 KB, in each pieces of (checksum, length, kind); the file begins with 7
    bytes of its own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


def step(number: int) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": 0,
        "loss": 1.0 / number,
        "negatives_age": None,
        "schedule_broken_at_step": None,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    run = run_in(tmp_path, name)
    records = Records(run.path / "metrics.jsonl")
    with contextlib.suppress(KeyboardInterrupt), tracking.tracked(run):
        for number in (20, 40, 60):
            records.add(step(number))
        raise KeyboardInterrupt
    records.add(step(80))  # and killed before anybody was told
    with tracking.tracked(run):
        records.truncate(40)  # to the checkpoint
        for number in (60, 80, 100):
            records.add(step(number))
        records.add({"step": 100, "epoch": 0, "P@1": 0.5})
    (run.path / "result.json").write_text('{"steps": 100}')
    (run.path / "metrics.json").write_text(
        '{"P@1": 0.25, "queries": 8, "intervals": {"P@1": [0, 1]}}'
    )
    tracking.catch_up(run)
    tracking.catch_up(run)
    found = READERS[name](run)
    assert set(found) == {"train/loss", "validation/P@1", "test/P@1"}
    assert [at for at, _ in found["train/loss"]] == [20, 40, 60, 80, 100]
    assert [value for _, value in found["train/loss"]] == pytest.approx(
        [1 / s for s in (20, 40, 60, 80, 100)]
    )
    assert (found["validation/P@1"], found["test/P@1"]) == ([(100, 0.5)], [(100, 0.25)])
    told = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert told == []


class Down:
    """A server that does not answer until `up` is set."""

    def __init__(self) -> None:
        self.up = False
        self.received: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: dict[str, float], step: int, order: int, time: float) -> None:
        if not self.up:
            raise ConnectionError(f"https://me:{SECRET}@host/api refused")
        self.received.append((metrics, step))

    def close(self, finished: bool) -> None: ...


def test_a_tracker_that_fails_is_one_warning_and_catches_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Down()
    monkeypatch.setattr(trackers, "connect", lambda *_: server)
    monkeypatch.setattr(tracking, "_RETRY_S", 0.0)
    run = run_in(tmp_path, "mlflow")
    with caplog.at_level(logging.WARNING), tracking.tracked(run):
        for number in (20, 40):
            Records(run.path / "metrics.jsonl").add(step(number))
    (warning,) = caplog.messages
    assert (
        "mlflow gets no records of the run (ConnectionError: https://me:***@host/api refused)"
        in warning
    )
    server.up = True
    tracking.catch_up(run)
    assert server.received == [({"train/loss": 0.05}, 20), ({"train/loss": 0.025}, 40)]


def test_a_tracker_that_was_added_on_resume_gets_the_test_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Down()
    server.up = True
    monkeypatch.setattr(trackers, "connect", lambda *_: server)
    first = run_in(tmp_path)
    with tracking.tracked(run_in(tmp_path, "mlflow")):
        Records(first.path / "metrics.jsonl").add(step(20))
    (first.path / "result.json").write_text('{"steps": 20}')
    (first.path / "metrics.json").write_text('{"P@1": 0.25, "queries": 8, "intervals": {}}')
    tracking.catch_up(first)
    assert server.received == [({"train/loss": 0.05}, 20), ({"test/P@1": 0.25}, 20)]


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else name)
    trackers.check(["tensorboard", "mlflow"])
    with pytest.raises(
        ConfigError, match=r"log\.track names wandb, .* pip install 'xmcray\[wandb\]'"
    ):
        trackers.check(NAMES)
    assert RunConfig.resolve("astra", {}, ["log.track=mlflow"]).log.track == ("mlflow",)
    with pytest.raises(ConfigError, match="expected one of tensorboard, mlflow, wandb"):
        RunConfig.resolve("astra", {}, ["log.track=mlfow"])


def test_a_training_sends_everything_from_the_first_record_to_the_test_metrics(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    planted_corpus(tmp_path)
    small = (
        "encoder.dim=8",
        "optim.epochs=1",
        "negatives.hard=0",
        "log.every=1",
        "cluster.threads_per_process=1",
    )
    options = set_options([*small, "log.track=tensorboard"])
    out = tmp_path / "one"
    train = f"train astra --data {tmp_path}/corpus --out {out} --workers 0 {options}"
    assert run_command(train) == 0
    run = Run.open(out)
    found, records = read_tensorboard(run), read_records(run.path / "metrics.jsonl")
    losses = [(r["step"], pytest.approx(r["loss"])) for r in records if "loss" in r]
    assert found["train/loss"] == losses
    measured = json.loads((run.path / "metrics.json").read_text())["P@1"]
    assert found["test/P@1"] == [(len(losses), pytest.approx(measured))]
