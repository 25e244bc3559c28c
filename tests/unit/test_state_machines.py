"""A few sequences of faults in training and serving; benchmarks/state_machines.py plays hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import Served
from serving_machine import ServingMachine
from training_attempt import Injection
from training_machine import Sequence, TrainingMachine

from xmcray.serving.label_log import LabelLog
from xmcray.training import checkpoint as checkpoints

# Seeds whose sequences are short and have kills, damage and other numbers of workers among them.
TRAINING_SEEDS = (102, 105, 104)
SERVING_SEEDS = (1, 2)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> TrainingMachine:
    return TrainingMachine(tmp_path_factory.mktemp("training"))


def test_training_resumes_exactly_or_refuses_after_random_faults(training: TrainingMachine) -> None:
    for seed in TRAINING_SEEDS:
        training.run_sequence(seed)
    assert training.tally.faults == []
    assert training.tally.attempts > len(TRAINING_SEEDS), "nothing was resumed"


def test_serving_loses_no_acknowledged_operation_in_random_faults(tmp_path: Path) -> None:
    machine = ServingMachine(tmp_path, num_events=25)
    for seed in SERVING_SEEDS:
        machine.run_sequence(seed)
    assert machine.tally.faults == []
    assert machine.tally.acknowledged > 50
    assert machine.tally.events["kill while labels change"]


def test_a_checkpoint_that_restores_other_rows_is_noticed(
    training: TrainingMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = checkpoints.load

    def load_wrongly(
        checkpoint: checkpoints.Checkpoint, stepper: object, partition: object
    ) -> None:
        load(checkpoint, stepper, partition)  # type: ignore[arg-type]
        for parameter in stepper.encoder.parameters():  # type: ignore[attr-defined]
            parameter.data.mul_(1 + 1e-12)

    monkeypatch.setattr(checkpoints, "load", load_wrongly)
    training.run_sequence(TRAINING_SEEDS[0])
    assert "other weights" in training.tally.faults.pop()


def test_a_refusal_while_a_checkpoint_is_whole_is_noticed(
    training: TrainingMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = Sequence(training, TRAINING_SEEDS[0])
    sequence.method = "astra"
    sequence.workers = 0
    sequence._try(Injection("kill the driver", 0, 16), is_full=False)
    *_, newer = sorted((sequence.out / "checkpoints").glob("step-*"))
    file = newer / "optimizer.safetensors"
    sequence.backups[file] = file.read_bytes()
    file.write_bytes(b"")
    newest = checkpoints.newest

    def refuse_damaged(folder: Path) -> checkpoints.Checkpoint | None:
        for path in folder.glob("step-*"):
            checkpoints.open_checkpoint(path)
        return newest(folder)

    monkeypatch.setattr(checkpoints, "newest", refuse_damaged)
    with pytest.raises(AssertionError, match="refused without a reason"):
        sequence._try(Injection(), is_full=False)


def test_an_operation_that_is_acknowledged_and_not_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ServingMachine(tmp_path, num_events=10)
    append = LabelLog.append

    def forget_the_last(log: LabelLog, operations: list[object]) -> int:
        number = append(log, operations[:-1]) if len(operations) > 1 else log.last  # type: ignore[arg-type]
        return number + 1

    monkeypatch.setattr(LabelLog, "append", forget_the_last)
    monkeypatch.setattr(Served, "visible_s", 1.0)
    machine.run_sequence(SERVING_SEEDS[0])
    assert machine.tally.faults
