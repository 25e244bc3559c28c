"""What the loop may rely on with every method: `loss` changes nothing, state is restored exactly."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import loops
import pytest
import torch

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import StorageError
from xmcray.methods.registry import method_names
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.training import checkpoint as checkpoints
from xmcray.training.loop import Loop, Setup, build
from xmcray.training.run_config import RunConfig

COMMON = ["encoder.dim=8", "optim.batch_size=32", "negatives.hard=0", "log.checkpoint_every=2"]
PRIME = ["method.free_vectors=4", "method.feed_forward=8"]
CASES = {
    **{name: (name, []) for name in method_names()},
    "astra": ("astra", ["negatives.uniform=9"]),
    "dexml-cache": ("dexml", ["method.columns=cache", "method.cache_hard=3"]),
    "prime": ("prime", PRIME),
    "renee-texts": ("renee", ["method.init=centroids"]),
}
WITH_STATE = ["dexml-cache", "prime"]


def config_of(case: str) -> RunConfig:
    method, settings = CASES[case]
    return RunConfig.resolve(method, {}, [*COMMON, *settings])


def built(corpus: Corpus, case: str, partition: LabelPartition | None = None) -> Setup:
    config = config_of(case)
    return build(config, TrainingData(corpus, config.data), torch.device("cpu"), partition)


def loop_in(folder: Path, corpus: Corpus, case: str) -> Loop:
    loop, _ = loops.loop_in(folder, corpus, config_of(case))
    return loop


def tensors_of(setup: Setup) -> dict[str, torch.Tensor]:
    """Everything that a step may change."""
    tensors = dict(setup.method.state_tensors())
    for name, module in setup.stepper.modules.items():
        tensors |= {f"{name}/{key}": value for key, value in module.state_dict().items()}
    for name, table in setup.method.tables.items():
        tensors |= {f"{name}/{key}": value for key, value in table.tensors().items()}
    return tensors


def hashes(setup: Setup) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in tensors_of(setup).items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_loss_changes_nothing_and_a_step_does(corpus: Corpus, case: str) -> None:
    setup = built(corpus, case)
    setup.method.start()
    batch = setup.sampler.batch(0, 0, 1)
    before = hashes(setup)
    setup.method.loss(batch, None)
    assert hashes(setup) == before

    fresh = built(corpus, case)
    fresh.method.start()
    assert hashes(fresh) == before
    # The first step encodes with the encoder that filled the cache; the second one does not.
    for step in range(2):
        fresh.stepper.step(fresh.sampler.batch(step, 0, 1), None)
    after = hashes(fresh)
    for name in fresh.method.state_tensors():
        # A cluster stays; centroids and cached vectors move.
        assert (after[name] != before[name]) == (name != "clusters"), name
    assert after != before


@pytest.mark.parametrize("case", CASES)
def test_inputs_that_were_made_ahead_give_the_same_loss(corpus: Corpus, case: str) -> None:
    setup = built(corpus, case)
    setup.method.start()
    batch = setup.sampler.batch(0, 0, 1)
    inputs = setup.method.prepare(batch, None)
    assert inputs is not None
    before = hashes(setup)
    ahead = setup.method.loss(dataclasses.replace(batch, inputs=inputs), None)
    assert torch.equal(ahead.total, setup.method.loss(batch, None).total)
    # Preparing moves no state, so it may run during another step.
    setup.method.prepare(setup.sampler.batch(1, 0, 1), None)
    assert hashes(setup) == before


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_cut_continues_exactly(
    corpus: Corpus, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loop_in(tmp_path / "whole", corpus, case)
    whole.last_step = 4
    whole.train()

    cut = loop_in(tmp_path / "cut", corpus, case)
    cut.last_step = 2
    cut.train()
    resumed = loop_in(tmp_path / "cut", corpus, case)
    resumed.last_step = 4
    started: list[bool] = []
    monkeypatch.setattr(resumed.setup.method, "start", lambda: started.append(True))
    resumed.train()
    assert not started, "start() was called after a restore"
    assert hashes(resumed.setup) == hashes(whole.setup)


def test_exchanges_have_less_time_once_a_run_has_started(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_in(tmp_path, corpus, "prime")
    loop.last_step = 1
    events: list[object] = []
    monkeypatch.setattr(loop.setup.method, "start", lambda: events.append("started"))
    monkeypatch.setattr(collectives, "set_time_limit", events.append)
    loop.train()
    # That of the start, of four hours, is set with the group.
    assert events == ["started", 900.0]


@pytest.mark.parametrize("case", WITH_STATE)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_another_number_of_ranks_reads_the_state(
    corpus: Corpus, case: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "ROW_BLOCK_BYTES", 200)  # several files a rank
    loop = loop_in(tmp_path, corpus, case)
    loop.last_step = 2
    loop.train()
    checkpoint = checkpoints.newest(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert len(list(checkpoint.path.glob("state-*.safetensors"))) > 2
    whole = loop.setup.method.state_tensors()
    num_labels = loop.setup.data.num_labels
    for rank in range(num_ranks):
        part = LabelPartition(num_labels, num_ranks, rank)
        setup = built(corpus, case, part)
        checkpoints.load(checkpoint, setup.stepper, part)
        for name, tensor in setup.method.state_tensors().items():
            assert torch.equal(tensor, whole[name][part.start : part.stop]), name
    for name, tensor in whole.items():
        assert torch.equal(checkpoints.read_state(checkpoint, name, num_labels), tensor)


def test_a_checkpoint_without_the_state_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    loop = loop_in(tmp_path, corpus, "prime")
    loop.last_step = 2
    loop.train()
    checkpoint = checkpoints.newest(tmp_path / "checkpoints")
    assert checkpoint is not None
    for file in checkpoint.path.glob("state-*.safetensors"):
        file.unlink()
    setup = loop.setup
    with pytest.raises(StorageError, match="state for 0 labels, expected 23; another release"):
        checkpoints.load(checkpoint, setup.stepper, setup.partition)
