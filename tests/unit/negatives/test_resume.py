"""A run cut at any step of collecting, building, searching or switching resumes to the same
bits.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from corpora import planted_corpus
from refreshers import HeldRefresher

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ShortlistError, StorageError, XmcrayError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher, complete_version
from xmcray.training import checkpoint as checkpoints
from xmcray.training.launch import train
from xmcray.training.loop import Loop, Setup, build
from xmcray.training.records import read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "encoder.dim=8",
    "optim.batch_size=64",
    "optim.epochs=5",
    "optim.lr=0.01",
    "optim.warmup_steps=3",
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "method.classifier.weight_decay=0.01",
    "negatives.uniform=8",
    "negatives.hard=4",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.recall_queries=0",
    "data.validation=0",
    "log.every=1",
    "log.checkpoint_every=3",
    "log.validate_every=0",
]


class CutError(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("resume"), num_queries=200, num_labels=40)


def loop_in(
    folder: Path, corpus: Corpus, *extra: str, cut: int = 0
) -> tuple[Loop, Setup, RefreshSpec]:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, *extra])
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    spec = RefreshSpec(2, config.negatives, 0)

    def on_step(step: int) -> None:
        if step == cut:
            raise CutError

    folder.mkdir(exist_ok=True)
    run = Run(folder, "test", config, corpus.origin, corpus.sha256)
    return Loop(run, setup, ThreadRefresher(data, spec), on_step if cut else None), setup, spec


@pytest.fixture(scope="module")
def undisturbed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    loop, setup, _ = loop_in(tmp_path_factory.mktemp("undisturbed"), corpus)
    assert loop.steps_per_epoch == 4
    loop.train()
    return setup.method.answer_rows()


@pytest.mark.parametrize("cut", [3, 4, 5, 6, 8, 9, 11, 12, 14, 17])
def test_cut_and_resumed(
    corpus: Corpus, undisturbed: torch.Tensor, tmp_path: Path, cut: int
) -> None:
    with pytest.raises(CutError):
        loop_in(tmp_path, corpus, cut=cut)[0].train()
    loop, setup, _ = loop_in(tmp_path, corpus)
    loop.train()
    assert torch.equal(setup.method.answer_rows(), undisturbed)
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == list(range(1, 21))


def test_cut_after_a_version_was_completed_beyond_the_checkpoint(
    corpus: Corpus, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    """Checkpoint at 3, version 0 published at 4 and complete at 5: its inputs must still be there
    to start again.
    """
    loop, _, _ = loop_in(tmp_path, corpus, cut=5)
    with pytest.raises(CutError):
        loop.train()
    loop.feed.refresher.close()
    assert Ledger(tmp_path / "negatives").version(0).complete
    again, setup, _ = loop_in(tmp_path, corpus)
    again.train()
    assert torch.equal(setup.method.answer_rows(), undisturbed)


@pytest.mark.parametrize("first", [4, 8, 10])
def test_cut_twice_after_one_checkpoint(
    corpus: Corpus, undisturbed: torch.Tensor, tmp_path: Path, first: int
) -> None:
    for _ in range(2):
        loop, _, _ = loop_in(tmp_path, corpus, cut=first)
        with pytest.raises(CutError):
            loop.train()
    loop, setup, _ = loop_in(tmp_path, corpus)
    loop.train()
    assert torch.equal(setup.method.answer_rows(), undisturbed)


def test_an_index_nobody_can_build_ends_the_run_at_once(corpus: Corpus, tmp_path: Path) -> None:
    loop, _, _ = loop_in(tmp_path, corpus, "negatives.index=IVFx,Nonsense")
    with pytest.raises(XmcrayError, match="IVFx,Nonsense"):
        loop.train()


def test_a_second_merge_does_not_undo_a_finished_version(corpus: Corpus, tmp_path: Path) -> None:
    loop, setup, spec = loop_in(tmp_path, corpus)
    loop.train()
    (folder,) = [f for f in Ledger(tmp_path / "negatives").versions() if f.version == 2]
    before = folder.shortlist().labels.copy()
    complete_version(folder, setup.data, spec)
    assert (folder.shortlist().labels == before).all()
    assert (before >= 0).any()


def test_scheduled_waits_for_a_late_version(
    corpus: Corpus, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    loop, setup, spec = loop_in(tmp_path, corpus)
    held = loop.feed.refresher = HeldRefresher(setup.data, spec)
    trainer = threading.Thread(target=loop.train)
    trainer.start()
    while trainer.is_alive():
        held.finish()
    assert torch.equal(setup.method.answer_rows(), undisturbed)
    assert loop.feed.broken_at_step is None


def test_scheduled_goes_on_without_a_version_that_never_comes(
    corpus: Corpus, tmp_path: Path
) -> None:
    loop, setup, spec = loop_in(tmp_path, corpus, "negatives.wait_s=0")
    loop.feed.refresher = HeldRefresher(setup.data, spec)
    result = loop.train()
    assert result["schedule_broken_at_step"] == 8
    assert loop.feed.current is None


def test_eager_takes_a_version_between_epochs(corpus: Corpus, tmp_path: Path) -> None:
    loop, setup, spec = loop_in(tmp_path, corpus, "negatives.schedule=eager")
    held = loop.feed.refresher = HeldRefresher(setup.data, spec)
    loop.on_step = lambda step: held.finish() if step == 10 else None
    loop.train()
    versions = {r["step"]: r["negatives_version"] for r in read_records(tmp_path / "metrics.jsonl")}
    assert versions[10] is None
    assert versions[11] == 1, "the newest complete version counts, versions 0 and 1 were complete"


def test_negatives_too_old_end_the_run(corpus: Corpus, tmp_path: Path) -> None:
    settings = ["negatives.schedule=eager", "negatives.max_age=1", "optim.epochs=9"]
    loop, setup, spec = loop_in(tmp_path, corpus, *settings)
    held = loop.feed.refresher = HeldRefresher(setup.data, spec)
    loop.on_step = lambda step: held.finish() if step == 6 else None
    with pytest.raises(ShortlistError, match="the negative pool does not answer"):
        loop.train()


def test_a_shortlist_holds_no_positive_and_no_filter_pair(corpus: Corpus, tmp_path: Path) -> None:
    loop, setup, _ = loop_in(tmp_path, corpus)
    loop.train()
    shortlist = loop.feed.current
    assert shortlist is not None
    ids = setup.data.query_ids[:]
    hard = shortlist.take(ids, 4)
    assert (hard.lengths == 4).all()
    for forbidden in (setup.data.positives(ids), setup.data.excluded(ids)):
        assert not any(set(hard[i]) & set(forbidden[i]) for i in range(len(ids)))


def damage(checkpoint: Path) -> None:
    """Flips one bit of a file that every checkpoint has."""
    file = checkpoint / "optimizer.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)


def test_damaged_checkpoints_are_named_and_never_kept_in_place_of_whole_ones(
    corpus: Corpus, tmp_path: Path, undisturbed: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CutError):
        loop_in(tmp_path, corpus, cut=17)[0].train()
    older, damaged = sorted((tmp_path / "checkpoints").iterdir())
    damage(damaged)
    # Killed again before the damaged step: the new checkpoint has a lower number, and has to stay.
    with pytest.raises(CutError):
        loop_in(tmp_path, corpus, "log.keep=1", "log.checkpoint_every=1", cut=14)[0].train()
    assert str(damaged) in caplog.text
    assert older.name == "step-00000012"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000014"]
    loop, setup, _ = loop_in(tmp_path, corpus)
    loop.train()
    assert torch.equal(setup.method.answer_rows(), undisturbed)


def test_a_flipped_bit_in_the_state_of_an_older_checkpoint_changes_nothing(
    corpus: Corpus, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    with pytest.raises(CutError):
        loop_in(tmp_path, corpus, cut=17)[0].train()
    older, _ = sorted((tmp_path / "checkpoints").iterdir())
    state = older / "state.json"
    text = state.read_text()
    assert '"version"' in text
    state.write_text(text.replace('"version"', '"wersion"'))
    loop, setup, _ = loop_in(tmp_path, corpus)
    loop.train()
    assert torch.equal(setup.method.answer_rows(), undisturbed)


def test_a_run_without_a_whole_checkpoint_starts_over_only_if_that_is_wanted(
    corpus: Corpus, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, "cluster.workers=0"])
    run = train(corpus.origin, tmp_path / "run", config)
    (run.path / "result.json").unlink()
    for checkpoint in run.checkpoints.iterdir():
        damage(checkpoint)
    with pytest.raises(StorageError, match=rf"all 2 checkpoints .* remove {run.path} and"):
        train(corpus.origin, run.path, config)
    assert len(list(run.checkpoints.iterdir())) == 2
    train(corpus.origin, run.path, config, restart=True)
    rows = torch.zeros_like(undisturbed)
    newest = checkpoints.newest(run.checkpoints)
    assert newest is not None
    for first, tensors in checkpoints.row_blocks(
        newest.path, "classifier", 0, len(rows), only="weight"
    ):
        rows[first : first + len(tensors["weight"])] = tensors["weight"]
    assert torch.equal(rows, undisturbed)
