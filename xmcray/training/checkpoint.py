"""Sharded checkpoints: complete or absent, readable with another number of ranks, free of pickle.

checkpoints/step-00000340/
    encoder/                          as `Encoder.save` writes it
    modules.safetensors               other data-parallel modules, if the method has any
    optimizer.safetensors             state of the encoder's optimiser
    collected-0001.safetensors        query vectors that rank 1 collected for the hard negatives and
                                      has not written yet
    classifier-0000000000.safetensors rows from label 0 on, with their optimiser state
    state-0000000000.safetensors      rows from label 0 on of what the method keeps but does not
                                      optimise (`Method.state_tensors`)
    state.json                        step, epoch, ranks, rows, negatives
    manifest.json                     also holds the costs, by which runs with equal files may differ

Files of label rows have at most 64 MB.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import Tensor, nn

from xmcray.errors import StorageError, readable
from xmcray.negatives.shortlists import check_state
from xmcray.negatives.version_folder import QueryBlock
from xmcray.nn.row_table import copy_rows
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import check_contents, read_manifest
from xmcray.storage.whole_files import publish, read_json
from xmcray.training.step import Stepper

KIND = "checkpoint"
ROW_BLOCK_BYTES = 64 << 20
_DAMAGED = "damaged"
STATE = "state"  # files of the method's state tensors
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a training has taken, over all its attempts. Steps that were done again count once.

    Attributes:
        seconds: Time of the loop.
        blocked_s: How much of it went by waiting for hard negatives.
        peak_memory_mb: Of the trainer with the most.
    """

    seconds: float = 0.0
    blocked_s: float = 0.0
    peak_memory_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified checkpoint.

    Attributes:
        path: Its folder.
        step: Optimisation steps done.
        negatives: What `ShortlistFeed.state` returned.
        costs: Up to here; those of release 0.1.0 are not known.
    """

    path: Path
    step: int
    negatives: Mapping[str, Any]
    costs: Costs = Costs()


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose files all have the hashes of its manifest; collective.

    Each rank hashes some of the files. Damaged checkpoints that are passed over are named in the
    log.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        StorageError: on every rank, if there are checkpoints and all of them are damaged.
    """
    names_by_rank = collectives.gather_objects([path.name for path in _folders(folder)])
    # A folder on another node may show a change late, so all ranks go by what rank 0 sees.
    names = names_by_rank[0]
    for name in names:
        checkpoint = None
        error = None
        try:
            checkpoint = _check_share(folder / name)
        except StorageError as caught:
            error = str(caught)
        errors = [text for text in collectives.gather_objects(error) if text]
        if not errors:
            return checkpoint
        if collectives.rank() == 0:
            logger.warning("passed over a damaged checkpoint: %s", errors[0])
    if names:
        raise StorageError(
            f"all {len(names)} checkpoints of {folder} are damaged; put copies of them back, or"
            f" remove {folder.parent} and train anew"
        )
    return None


def _check_share(path: Path) -> Checkpoint:
    """A checkpoint with the hashes of this rank's share of its files compared."""
    checkpoint = open_checkpoint(path)
    manifest = read_manifest(path, KIND)
    own_names = sorted(manifest.files)[collectives.rank() :: collectives.num_ranks()]
    check_contents(path, manifest, own_names, source=path)
    return checkpoint


def set_aside_newer(folder: Path, step: int) -> None:
    """Renames the checkpoints after a step, which are damaged.

    Under their own names they would count as the newest, and whole ones would be removed first.
    The next checkpoint that is saved removes them.
    """
    for path in _folders(folder):
        if _step_of(path) > step:
            target = path.with_name(f"{_DAMAGED}-{path.name}")
            # An attempt that ended before its first checkpoint has set aside this step already.
            shutil.rmtree(target, ignore_errors=True)
            publish(path, target)


def remove_superseded(folder: Path, keep: int) -> None:
    """Removes checkpoints older than the newest `keep` whole ones, and those that were set aside.

    To hash gigabytes again at each save would cost too much. Here a checkpoint counts as whole if
    its manifest and state are well-formed, and if all files have their sizes.
    """
    superseded = list(folder.glob(f"{_DAMAGED}-*"))
    num_whole = 0
    for path in _folders(folder):
        if num_whole == keep:
            superseded.append(path)
        elif _is_whole(path):
            num_whole += 1
    for path in superseded:
        shutil.rmtree(path, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    """Whether nothing is wrong with a checkpoint; hashes are not compared."""
    try:
        open_checkpoint(path)
    except StorageError:
        return False
    return True


def negatives_needed(folder: Path) -> list[Mapping[str, Any]]:
    """What each checkpoint says of the negatives that it needs.

    Raises:
        StorageError: a checkpoint is damaged, so what it needs is not known.
    """
    return [open_checkpoint(path).negatives for path in _folders(folder)]


def remove_unfinished(folder: Path) -> None:
    """Removes what an attempt that was killed left behind; no rank may be writing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose files are there and have their sizes; hashes are not compared.

    Raises:
        StorageError: a file is missing or has another size, or the state is malformed.
    """
    _, manifest = open_artifact(path, KIND, contents=False)
    with _readable(path):
        step = int(manifest.about["step"])
        costs = {name: float(cost) for name, cost in manifest.about.get("costs", {}).items()}
        negatives = read_json(path / "state.json")["negatives"]
        check_state(negatives, step)
        return Checkpoint(path, step, negatives, Costs(**costs))


def load(checkpoint: Checkpoint, stepper: Stepper, partition: LabelPartition) -> None:
    """Restores encoder, optimisers and this rank's rows, whatever number of ranks saved them.

    Raises:
        StorageError: a file is malformed, or rows are missing.
    """
    load_shared(checkpoint, stepper, checkpoint.step)
    for name, table in stepper.method.tables.items():
        blocks = row_blocks(checkpoint.path, name, partition.start, partition.stop)
        with _readable(checkpoint.path):
            table.load(blocks, checkpoint.step)
    _load_state(checkpoint.path, stepper, partition)


def load_shared(checkpoint: Checkpoint, stepper: Stepper, num_steps: int) -> None:
    """Restores what all ranks have: encoder, other modules and the state of their optimiser.

    Args:
        num_steps: Steps done, from the view of the run that goes on.
    """
    load_encoder_weights(checkpoint, stepper)
    _load_other_modules(checkpoint.path, stepper)
    path = checkpoint.path / "optimizer.safetensors"
    with _readable(path):
        stepper.optimizer.load(load_file(path), num_steps)


def module_shapes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Shapes of the tensors of modules besides the encoder, by "module/tensor"."""
    path = checkpoint.path / "modules.safetensors"
    if not path.is_file():
        return {}
    with _readable(path), safe_open(path, framework="pt") as file:
        return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def load_encoder_weights(checkpoint: Checkpoint, stepper: Stepper) -> None:
    """Restores the encoder."""
    path = checkpoint.path / "encoder"
    with _readable(path):
        stepper.encoder.restore(path)


def load_method(checkpoint: Checkpoint, stepper: Stepper, partition: LabelPartition) -> None:
    """Restores what answers queries besides the encoder, and nothing of the optimisers."""
    _load_other_modules(checkpoint.path, stepper)
    for name, table in stepper.method.tables.items():
        for first, tensors in row_blocks(
            checkpoint.path,
            name,
            partition.start,
            partition.stop,
            only="weight",
        ):
            with _readable(checkpoint.path):
                copy_rows(tensors["weight"], table.weight_SD, first)
    _load_state(checkpoint.path, stepper, partition)


def read_state(checkpoint: Checkpoint, name: str, num_labels: int) -> Tensor:
    """[L, ...], one of the method's state tensors with the rows of all labels.

    Raises:
        StorageError: the checkpoint does not have it for all labels.
    """
    blocks = []
    for _, tensors in row_blocks(checkpoint.path, STATE, 0, num_labels, only=name):
        blocks.append(tensors[name])
    return torch.cat(blocks)


def collected(checkpoint: Checkpoint) -> list[QueryBlock]:
    """This rank's part of the query vectors that ranks had collected when they saved.

    The files are dealt out over the ranks of today, whatever number of ranks wrote them.

    Raises:
        StorageError: a file is malformed.
    """
    files = sorted(checkpoint.path.glob("collected-*.safetensors"))
    own_files = files[collectives.rank() :: collectives.num_ranks()]
    blocks = []
    for file in own_files:
        with _readable(file):
            blocks.append(QueryBlock.from_arrays(load_arrays(file)))
    return blocks


def has_rows(path: Path, name: str) -> bool:
    """Whether a checkpoint has rows of a table, or state of the method, of this name."""
    return any(path.glob(f"{name}-*.safetensors"))


def row_blocks(
    path: Path,
    name: str,
    start: int,
    stop: int,
    only: str | None = None,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Rows start .. stop - 1 of a table or of the method's state, a file at a time.

    Args:
        path: Folder of the checkpoint.
        name: Beginning of the files' names.
        start: First label.
        stop: One past the last label.
        only: Name of one tensor ("weight", "momentum" ...), to read nothing else.

    Yields:
        The number of the block's first row, counted from `start`, and its tensors by name.

    Raises:
        StorageError: a file is malformed, or there are not all rows, each of them once.
    """
    num_rows = 0
    for file_path in sorted(path.glob(f"{name}-*.safetensors")):
        with _readable(file_path), safe_open(file_path, framework="pt") as file:
            file_start = int(file_path.stem.rsplit("-", 1)[1])
            names = [only] if only else list(file.keys())
            slices = {key: file.get_slice(key) for key in names}
            height = slices[names[0]].get_shape()[0]
            if any(rows.get_shape()[0] != height for rows in slices.values()):
                raise ValueError("its tensors have different numbers of rows")
            # The part of the file that lies within start .. stop - 1.
            low = max(start - file_start, 0)
            high = min(stop - file_start, height)
            if low >= high:
                continue
            tensors = {key: rows[low:high] for key, rows in slices.items()}
            first = file_start + low - start
            if first != num_rows:
                raise ValueError(f"it begins with row {first}, expected {num_rows}")
        yield first, tensors
        num_rows += high - low
    if num_rows != stop - start:
        raise StorageError(
            f"{path} has its {name} for {num_rows} labels, expected {stop - start}; another release"
            " wrote it or it is damaged, resume from an earlier checkpoint or train again with"
            " another --out"
        )


def _load_other_modules(path: Path, stepper: Stepper) -> None:
    others = other_modules(stepper)
    if not others:
        return
    with _readable(path / "modules.safetensors"):
        tensors = load_file(path / "modules.safetensors")
    for name, module in others.items():
        prefix = f"{name}/"
        own = {}
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                own[key.removeprefix(prefix)] = tensor
        with _readable(path / "modules.safetensors"):
            module.load_state_dict(own)


def _load_state(path: Path, stepper: Stepper, partition: LabelPartition) -> None:
    """Writes restored rows into the method's state tensors."""
    own = stepper.method.state_tensors()
    if not own:
        return
    for first, tensors in row_blocks(path, STATE, partition.start, partition.stop):
        with _readable(path):
            for name, tensor in own.items():
                copy_rows(tensors[name], tensor, first)


def other_modules(stepper: Stepper) -> dict[str, nn.Module]:
    """The method's modules, without the encoder."""
    return {name: module for name, module in stepper.modules.items() if name != "encoder"}


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    return readable(f"{path} is malformed", "resume from an earlier checkpoint")


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first.

    A copy that a user has put next to them, such as step-00000340-copy, is none of them: it would
    be removed with the checkpoints that are too old.
    """
    folders = [path for path in folder.glob("step-*") if path.is_dir()]
    own = [path for path in folders if path.name.removeprefix("step-").isdecimal()]
    return sorted(own, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    """The step of a checkpoint's folder. As texts, names of more than eight digits would come first."""
    return int(path.name.removeprefix("step-"))
