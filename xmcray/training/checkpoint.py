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
    manifest.json

Files of label rows have at most 64 MB.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xmcray import storage
from xmcray.errors import StorageError, XmcrayError
from xmcray.nn.encoder import load_encoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage import FileEntry
from xmcray.training.step import Stepper

KIND = "checkpoint"
ROW_BLOCK_BYTES = 64 << 20
_DAMAGED = "damaged"
_STATE = "state"  # files of the method's state tensors
logger = logging.getLogger(__name__)

_Entries = dict[str, list[Any]]  # file name -> [size, SHA-256], plain values for JSON


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified checkpoint.

    Attributes:
        path: Its folder.
        step: Optimisation steps done.
        state: Contents of state.json.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


def save(
    folder: Path,
    step: int,
    stepper: Stepper,
    partition: LabelPartition,
    state: Mapping[str, Any],
    keep: int,
    collected: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """Writes a checkpoint and removes all older ones but the newest `keep`; collective.

    Args:
        folder: Folder of the run's checkpoints.
        step: Optimisation steps done.
        stepper: What is saved.
        partition: Which labels this rank owns.
        state: Contents of state.json besides step and ranks.
        keep: Checkpoints that stay.
        collected: Query vectors that this rank collected for the hard negatives, if there are any.

    Raises:
        StorageError: on every rank, if any rank could not write; nothing half-written stays.
    """
    unfinished = folder / f".step-{step:08d}"
    is_first = collectives.rank() == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
    # No rank may write before the leftovers of an earlier attempt are gone.
    collectives.broadcast_int(0)

    def write() -> _Entries:
        unfinished.mkdir(parents=True, exist_ok=True)
        entries = _write_label_rows(unfinished, stepper, partition)
        if collected:
            file = unfinished / f"collected-{collectives.rank():04d}.safetensors"
            save_arrays(dict(collected), file)
        if is_first:
            _write_shared(unfinished, step, stepper, state)
        return entries

    # This exchange is also the barrier: the manifest is written when all files are there.
    results = collectives.gather_objects(_entries_or_error(write, unfinished))
    errors = [result for result in results if isinstance(result, str)]
    if is_first and not errors:

        def publish() -> _Entries:
            _publish(unfinished, step_folder(folder, step), step, results)
            return {}

        result = _entries_or_error(publish, unfinished)
        if isinstance(result, str):
            errors.append(result)
    # Errors of publishing are known to rank 0 alone.
    errors = list(itertools.chain(*collectives.gather_objects(errors)))
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not errors:
            superseded = [*_folders(folder)[keep:], *folder.glob(f"{_DAMAGED}-*")]
            for old in superseded:
                shutil.rmtree(old, ignore_errors=True)
    if errors:
        raise StorageError(errors[0])


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose files all have the hashes of its manifest.

    Damaged checkpoints that are passed over are named in the log.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        StorageError: there are checkpoints, and all of them are damaged.
    """
    paths = _folders(folder)
    for path in paths:
        try:
            return open_checkpoint(path)
        except StorageError as error:
            logger.warning("passed over a damaged checkpoint: %s", error)
    if paths:
        raise StorageError(
            f"all {len(paths)} checkpoints of {folder} are damaged; put copies of them back, or"
            " train from the start with --restart"
        )
    return None


def set_aside_newer(folder: Path, step: int) -> None:
    """Renames the checkpoints after a step, which are damaged.

    Under their own names they would count as the newest, and whole ones would be removed first.
    The next checkpoint that is saved removes them.
    """
    for path in _folders(folder):
        if path > step_folder(folder, step):
            storage.publish(path, path.with_name(f"{_DAMAGED}-{path.name}"))


def open_checkpoint(path: Path, contents: bool = True) -> Checkpoint:
    """A checkpoint whose manifest verifies.

    Args:
        path: Its folder.
        contents: Whether the hashes of all files are compared too.

    Raises:
        StorageError: a file is missing, has another size, or has another hash.
    """
    _, manifest = storage.open_artifact(path, KIND, contents=contents)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(manifest.about["step"]), state)


def load(checkpoint: Checkpoint, stepper: Stepper, partition: LabelPartition) -> None:
    """Restores encoder, optimisers and this rank's rows, whatever number of ranks saved them."""
    _load_modules(checkpoint.path, stepper)
    stepper.optimizer.load(load_file(checkpoint.path / "optimizer.safetensors"), checkpoint.step)
    for name, table in stepper.method.tables.items():
        blocks = row_blocks(checkpoint.path, name, partition.start, partition.stop)
        table.load(blocks, checkpoint.step)
    _load_state(checkpoint.path, stepper, partition)


def load_weights(checkpoint: Checkpoint, stepper: Stepper, partition: LabelPartition) -> None:
    """Restores what answers queries, and nothing of the optimisers."""
    _load_modules(checkpoint.path, stepper)
    for name, table in stepper.method.tables.items():
        for first, tensors in row_blocks(
            checkpoint.path, name, partition.start, partition.stop, only="weight"
        ):
            weight = tensors["weight"]
            table.weight_SD[first : first + len(weight)] = weight
    _load_state(checkpoint.path, stepper, partition)


def read_state(checkpoint: Checkpoint, name: str, num_labels: int) -> Tensor:
    """[L, ...], one of the method's state tensors with the rows of all labels.

    Raises:
        StorageError: the checkpoint does not have it for all labels.
    """
    blocks = []
    for _, tensors in row_blocks(checkpoint.path, _STATE, 0, num_labels, only=name):
        blocks.append(tensors[name])
    num_rows = sum(map(len, blocks))
    _check_rows(checkpoint.path, num_rows, num_labels)
    return torch.cat(blocks)


def collected(checkpoint: Checkpoint) -> list[dict[str, np.ndarray[Any, Any]]]:
    """This rank's part of the query vectors that ranks had collected when they saved.

    The files are dealt out over the ranks of today, whatever number of ranks wrote them.
    """
    files = sorted(checkpoint.path.glob("collected-*.safetensors"))
    own_files = files[collectives.rank() :: collectives.num_ranks()]
    return [load_arrays(file) for file in own_files]


def row_blocks(
    path: Path, name: str, start: int, stop: int, only: str | None = None
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
    """
    for file_path in sorted(path.glob(f"{name}-*.safetensors")):
        file_start = int(file_path.stem.rsplit("-", 1)[1])
        with safe_open(file_path, framework="pt") as file:
            names = [only] if only else list(file.keys())
            slices = {key: file.get_slice(key) for key in names}
            height = slices[names[0]].get_shape()[0]
            # The part of the file that lies within start .. stop - 1.
            low = max(start - file_start, 0)
            high = min(stop - file_start, height)
            if low < high:
                yield (
                    file_start + low - start,
                    {key: rows[low:high] for key, rows in slices.items()},
                )


def _load_modules(path: Path, stepper: Stepper) -> None:
    stepper.encoder.load_state_dict(load_encoder(path / "encoder").state_dict())
    others = _other_modules(stepper)
    if not others:
        return
    tensors = load_file(path / "modules.safetensors")
    for name, module in others.items():
        prefix = f"{name}/"
        own = {}
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                own[key.removeprefix(prefix)] = tensor
        module.load_state_dict(own)


def _load_state(path: Path, stepper: Stepper, partition: LabelPartition) -> None:
    """Writes restored rows into the method's state tensors."""
    own = stepper.method.state_tensors()
    if not own:
        return
    num_rows = 0
    for first, tensors in row_blocks(path, _STATE, partition.start, partition.stop):
        for name, tensor in own.items():
            rows = tensors[name]
            tensor[first : first + len(rows)] = rows
        num_rows += len(rows)
    _check_rows(path, num_rows, partition.size)


def _check_rows(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise StorageError(
            f"{path} has the method's state for {found} labels, expected {expected};"
            " another release wrote it, train again with another --out"
        )


def _write_label_rows(folder: Path, stepper: Stepper, partition: LabelPartition) -> _Entries:
    """Writes this rank's rows of all tables and of the method's state."""
    entries: _Entries = {}
    for name, table in stepper.method.tables.items():
        assert name != _STATE, "the name is taken by the method's state tensors"
        table.flush()
        _write_blocks(folder, name, table.tensors(), partition, entries)
    _write_blocks(folder, _STATE, stepper.method.state_tensors(), partition, entries)
    return entries


def _write_blocks(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    partition: LabelPartition,
    entries: _Entries,
) -> None:
    """Writes tensors [S, ...] in files of a bounded size, and adds them to `entries`."""
    if not tensors:
        return
    # All tensors share a file, so one row of each counts. A rank without labels has no first row.
    row_bytes = sum(tensor[:1].nbytes for tensor in tensors.values())
    height = max(1, ROW_BLOCK_BYTES // max(1, row_bytes))
    for low in range(0, partition.size, height):
        file = folder / f"{name}-{partition.start + low:010d}.safetensors"
        # Saving copies in memory, so only a block is copied at a time.
        block = {
            key: tensor[low : low + height].detach().cpu().contiguous()
            for key, tensor in tensors.items()
        }
        save_file(block, file)
        storage.fsync(file)
        entry = storage.hash_file(file)
        entries[file.name] = [entry.size, entry.sha256]


def _write_shared(folder: Path, step: int, stepper: Stepper, state: Mapping[str, Any]) -> None:
    """Writes what is the same on every rank."""
    stepper.encoder.save(folder / "encoder")
    module_tensors = {}
    for module_name, module in _other_modules(stepper).items():
        for name, tensor in module.state_dict().items():
            module_tensors[f"{module_name}/{name}"] = tensor.detach().cpu()
    if module_tensors:
        save_file(module_tensors, folder / "modules.safetensors")
    # safetensors refuses tensors whose memory is not in the order of their elements.
    optimizer_tensors = {}
    for name, tensor in stepper.optimizer.tensors().items():
        optimizer_tensors[name] = tensor.detach().cpu().contiguous()
    save_file(optimizer_tensors, folder / "optimizer.safetensors")
    body = {"step": step, "num_ranks": collectives.num_ranks(), **state}
    storage.write_json(folder / "state.json", body)


def _publish(unfinished: Path, destination: Path, step: int, results: list[_Entries]) -> None:
    """Writes the manifest and moves the folder to its final name."""
    entries = {}
    for result in results:
        for name, entry in result.items():
            entries[name] = FileEntry(*entry)
    storage.finish_manifest(unfinished, KIND, {"step": step}, entries)
    # A checkpoint of the same step whose files were altered may be in the way.
    shutil.rmtree(destination, ignore_errors=True)
    storage.publish(unfinished, destination)


def _other_modules(stepper: Stepper) -> dict[str, nn.Module]:
    """The method's modules, without the encoder."""
    return {name: module for name, module in stepper.modules.items() if name != "encoder"}


def _entries_or_error(write: Callable[[], _Entries], path: Path) -> Any:
    """The result, or the message of a storage error: ranks must learn of it together."""
    try:
        with storage.disk_errors(path):
            return write()
    except XmcrayError as error:
        return str(error)


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)
