"""Checkpoints are complete or absent, verified, and readable with another number of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loops
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from xmcray.data.corpus import Corpus
from xmcray.errors import StorageError
from xmcray.negatives.version_folder import QueryBlock
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.storage.whole_files import publish, write_json
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Checkpoint
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Loop, Setup
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "optim.epochs=2",
    "negatives.hard=0",
    "negatives.uniform=10",
]


def loop_in(folder: Path, corpus: Corpus, *extra: str) -> tuple[Loop, Setup]:
    return loops.loop_in(folder, corpus, RunConfig.resolve("astra", {}, [*SETTINGS, *extra]))


def trained(folder: Path, corpus: Corpus) -> tuple[Path, Setup]:
    loop, setup = loop_in(folder, corpus)
    loop.train()
    return folder / "checkpoints", setup


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_any_number_of_ranks_reads_its_rows(
    corpus: Corpus, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "ROW_BLOCK_BYTES", 1000)  # many files
    folder, setup = trained(tmp_path, corpus)
    newest = checkpoints.newest(folder)
    assert newest is not None
    parts = [LabelPartition(len(corpus.label_order), num_ranks, rank) for rank in range(num_ranks)]
    wanted = setup.method.answer_rows()
    for part in parts:
        rows = torch.zeros(part.size, wanted.shape[1])
        for first, tensors in checkpoints.row_blocks(
            newest.path, "classifier", part.start, part.stop, only="weight"
        ):
            rows[first : first + len(tensors["weight"])] = tensors["weight"]
        assert torch.equal(rows, wanted[part.start : part.stop])


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_any_number_of_ranks_goes_on_with_the_vectors_that_were_collected(
    tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    for rank in range(3):
        # Queries come in any order.
        ids = np.arange(9)[::-1][rank::3].copy()
        block = QueryBlock(ids, vectors[ids], 2 * ids)
        save_arrays(block.arrays(), tmp_path / f"collected-{rank:04d}.safetensors")
    monkeypatch.setattr(collectives, "num_ranks", lambda: num_ranks)
    blocks = []
    for rank in range(num_ranks):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        blocks += checkpoints.collected(Checkpoint(tmp_path, 1, {}))
    joined = QueryBlock.concatenate(blocks)
    assert sorted(joined.ids) == list(range(9))
    np.testing.assert_array_equal(joined.vectors, vectors[joined.ids])
    np.testing.assert_array_equal(joined.extra, 2 * joined.ids)


def test_a_damaged_checkpoint_is_passed_over(corpus: Corpus, tmp_path: Path) -> None:
    folder, _ = trained(tmp_path, corpus)
    older, newer = sorted(folder.glob("step-*"))
    file = next(newer.glob("classifier-*"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    newest = checkpoints.newest(folder)
    assert newest is not None
    assert newest.path == older
    with pytest.raises(StorageError, match=file.name):
        open_artifact(newer, checkpoints.KIND)


def test_seconds_and_memory_are_those_of_all_attempts(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_kb = iter([3 << 10, 9 << 10, 1 << 10, 1 << 10])
    monkeypatch.setattr(
        "xmcray.training.loop.resource.getrusage",
        lambda _: SimpleNamespace(ru_maxrss=next(peaks_kb)),
    )
    first, _ = loop_in(tmp_path, corpus)
    first.last_step = first.steps_per_epoch
    first.on_step = lambda _: time.sleep(0.2)
    first.train()
    newest = checkpoints.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.costs.peak_memory_mb == 3
    assert newest.costs.seconds >= 0.2 * (first.last_step - 1)
    second, _ = loop_in(tmp_path, corpus)
    result = second.train()
    assert result["peak_memory_mb"] == 3
    assert result["steps_here"] == second.last_step - first.last_step
    assert result["seconds"] > newest.costs.seconds


def cut_rows(checkpoint: Path) -> None:
    """Leaves one row of the classifier out."""
    path = checkpoint / "classifier-0000000000.safetensors"
    save_file({name: rows[:-1].clone() for name, rows in load_file(path).items()}, path)


def cut_momentum(checkpoint: Path) -> None:
    """Leaves only the weights of the classifier."""
    path = checkpoint / "classifier-0000000000.safetensors"
    save_file({"weight": load_file(path)["weight"]}, path)


def narrow_rows(checkpoint: Path) -> None:
    """Leaves one column of the classifier, which would be repeated."""
    path = checkpoint / "classifier-0000000000.safetensors"
    save_file({name: rows[:, :1].clone() for name, rows in load_file(path).items()}, path)


def write_other_optimizer(checkpoint: Path) -> None:
    """Adds the state of a parameter that the encoder does not have."""
    path = checkpoint / "optimizer.safetensors"
    save_file({**load_file(path), "x": torch.zeros(1)}, path)


def write_other_collected(checkpoint: Path) -> None:
    save_arrays({"x": np.zeros(3)}, checkpoint / "collected-0000.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_rows, "has its classifier for 22 labels, expected 23"),
        (cut_momentum, "is malformed .KeyError"),
        (narrow_rows, r"found rows \[23, 1\], expected \[23, 16\]"),
        (write_other_optimizer, r"optimizer\.safetensors is malformed .* which no parameter has"),
        (write_other_collected, r"collected-0000\.safetensors is malformed"),
    ],
)
def test_a_malformed_checkpoint_with_a_manifest_that_fits_is_one_line(
    corpus: Corpus, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder, _ = trained(tmp_path, corpus)
    newest = max(folder.glob("step-*"))
    change(newest)
    renew(newest)
    loop, _ = loop_in(tmp_path, corpus)
    with pytest.raises(StorageError, match=message) as caught:
        loop.train()
    assert "\n" not in str(caught.value)


NEGATIVES = {
    "inputs": {},
    "published": [0],
    "version": 0,
    "clusters_version": None,
    "broken_at_step": None,
}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"negatives": None},
        {"negatives": []},
        {"negatives": {"version": 0}},
        {"negatives": {**NEGATIVES, "version": "0"}},
        {"negatives": {**NEGATIVES, "version": -1}},
        {"negatives": {**NEGATIVES, "published": [10**30]}},
        {"negatives": {**NEGATIVES, "inputs": {"../../x": "0"}}},
        {"negatives": {**NEGATIVES, "inputs": {"v00000-0000/queries/0.safetensors": None}}},
    ],
)
def test_a_checkpoint_with_a_malformed_state_is_passed_over(
    corpus: Corpus, tmp_path: Path, state: dict[str, Any]
) -> None:
    folder, _ = trained(tmp_path, corpus)
    older, newer = sorted(folder.glob("step-*"))
    write_json(newer / "state.json", {"negatives": NEGATIVES})
    renew(newer)
    assert checkpoints.open_checkpoint(newer).negatives == NEGATIVES
    write_json(newer / "state.json", state)
    renew(newer)
    newest = checkpoints.newest(folder)
    assert newest is not None
    assert newest.path == older


def renew(checkpoint: Path) -> None:
    """Makes the manifest fit the files."""
    manifest = read_manifest(checkpoint, checkpoints.KIND)
    finish_manifest(checkpoint, checkpoints.KIND, manifest.about, {})


def test_a_step_is_set_aside_twice(tmp_path: Path) -> None:
    # An attempt sets a checkpoint aside and ends before it saves; the step is damaged again later.
    (tmp_path / "step-00000010").mkdir()
    for attempt in ("first", "second"):
        newer = tmp_path / "step-00000015"
        newer.mkdir()
        (newer / "left.safetensors").write_text(attempt)
        checkpoints.set_aside_newer(tmp_path, 10)
    aside = tmp_path / "damaged-step-00000015" / "left.safetensors"
    assert aside.read_text() == "second"


def test_only_the_newest_stay(corpus: Corpus, tmp_path: Path) -> None:
    loop, _ = loop_in(tmp_path, corpus, "log.checkpoint_every=2", "log.keep=3")
    loop.train()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_steps_of_more_than_eight_digits_are_newer(corpus: Corpus, tmp_path: Path) -> None:
    loop, _ = loop_in(tmp_path, corpus)
    writer = CheckpointWriter(tmp_path, loop.setup.stepper, loop.setup.partition, keep=1)
    for step in (99_999_999, 100_000_000):
        writer.save(step, {"negatives": {}})
        writer.finish()
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.step == 100_000_000


def test_damaged_checkpoints_do_not_count_as_kept(corpus: Corpus, tmp_path: Path) -> None:
    """With three to keep, 6 stays although 9 is damaged, until 18 is there."""
    loop, _ = loop_in(tmp_path, corpus)
    writer = CheckpointWriter(tmp_path, loop.setup.stepper, loop.setup.partition, keep=3)

    def save(step: int) -> list[str]:
        writer.save(step, {"negatives": {}})
        writer.finish()
        return sorted(path.name.removeprefix("step-000000") for path in tmp_path.glob("step-*"))

    for step in (3, 6, 9, 12):
        kept = save(step)
    assert kept == ["06", "09", "12"]
    (tmp_path / "step-00000009" / "optimizer.safetensors").unlink()
    assert save(15) == ["06", "09", "12", "15"]
    assert save(18) == ["12", "15", "18"]


def test_a_copy_that_a_user_has_made_is_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    loop, _ = loop_in(tmp_path, corpus)
    writer = CheckpointWriter(tmp_path, loop.setup.stepper, loop.setup.partition, keep=1)
    for step in (3, 6):
        writer.save(step, {"negatives": {}})
        writer.finish()
        if step == 3:
            shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003-copy")
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000003-copy", "step-00000006"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB: room for one checkpoint, not for two."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_disk_full_leaves_the_last_checkpoint(corpus: Corpus, small_disk: Path) -> None:
    loop, setup = loop_in(
        small_disk, corpus, "log.checkpoint_every=1", "log.keep=50", "optim.epochs=20"
    )
    with pytest.raises(
        StorageError, match=r"no space left while writing .*disk is full; free some space"
    ) as caught:
        loop.train()
    assert "\n" not in str(caught.value)
    left = sorted(path.name for path in (small_disk / "checkpoints").iterdir())
    assert left, "not even the first checkpoint fitted: the test needs a larger disk"
    assert all(name.startswith("step-") for name in left), "something half-written was left"
    newest = checkpoints.newest(small_disk / "checkpoints")
    assert newest is not None
    assert newest.path.name == left[-1]
    checkpoints.load(newest, setup.stepper, setup.partition)


def test_rank_0_may_publish_as_soon_as_the_last_note_is_there(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = loop_in(tmp_path, corpus)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    writer = CheckpointWriter(tmp_path, loop.setup.stepper, loop.setup.partition, keep=2)
    replace = Path.replace

    def replace_and_publish(path: Path, target: Path) -> Path:
        moved = replace(path, target)
        if target.name.startswith("written-"):
            replace(target.parent, tmp_path / "step-00000003")
        return moved

    monkeypatch.setattr(Path, "replace", replace_and_publish)
    writer.save(3, {})
    writer.finish()
    assert (tmp_path / "step-00000003" / "written-0001.json").exists()


def test_training_goes_on_while_a_checkpoint_is_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = loop_in(tmp_path, corpus, "log.checkpoint_every=3")
    may_publish = threading.Event()

    def wait_and_publish(folder: Path, destination: Path) -> None:
        assert may_publish.wait(60), "the step after the checkpoint never ended"
        publish(folder, destination)

    def on_step(done: int) -> None:
        if done == 4:  # a step after the one that was saved
            assert not list((tmp_path / "checkpoints").glob("step-*"))
            may_publish.set()

    monkeypatch.setattr("xmcray.training.checkpoint_writer.publish", wait_and_publish)
    loop.on_step = on_step
    loop.train()
    assert may_publish.is_set()
    assert checkpoints.newest(tmp_path / "checkpoints") is not None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_steps_go_first_where_a_checkpoint_wants_the_same_core(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []

    def publish_and_look(folder: Path, destination: Path) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        publish(folder, destination)

    monkeypatch.setattr("xmcray.training.checkpoint_writer.publish", publish_and_look)
    _, setup = loop_in(tmp_path, corpus)
    writer = CheckpointWriter(tmp_path / "checkpoints", setup.stepper, setup.partition, keep=1)
    writer.save(3, {})
    writer.finish()
    training = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness == [training + 10]


def test_what_a_kill_left_of_a_checkpoint_is_not_used(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    folder, setup = trained(tmp_path / "whole", corpus)
    newest = checkpoints.newest(folder)
    assert newest is not None
    # All files of another step, and the note of the only rank, but no manifest.
    left = tmp_path / "cut" / "checkpoints" / ".step-00000001"
    shutil.copytree(newest.path, left)
    (left / "manifest.json").unlink()
    (left / "written-0000.json").write_text("{}")
    (left / "classifier-9999999999.safetensors").write_bytes(b"half")
    _, resumed = trained(tmp_path / "cut", corpus)
    assert torch.equal(resumed.method.answer_rows(), setup.method.answer_rows())
    assert not left.exists()
