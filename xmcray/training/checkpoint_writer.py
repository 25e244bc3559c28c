"""Writes checkpoints in the background while training goes on.

    the step        copies what changes in the next step to host memory
    each rank's thread   writes and hashes its files, then .step-00000340/written-0001.json
    rank 0's thread      waits for these notes of all ranks, writes the manifest, renames the folder,
                         and removes checkpoints that are too old

The folder has its final name only when everything is on the disk. A kill at any moment leaves an
unfinished folder, which the next attempt removes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from xmcray.errors import StorageError, XmcrayError
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage.manifest import FileEntry, finish_manifest, hash_file
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import aside, fsync, publish, write_json
from xmcray.training import checkpoint as checkpoints
from xmcray.training.step import Stepper
from xmcray.types import spans

_NOTE = "written-*.json"
_POLL_S = 0.05
_NICE = 10  # a tenth of the share of a core that a step gets
_Entries = dict[str, list[Any]]  # file name -> [size, SHA-256], plain values for JSON


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What one rank writes, in memory that the next steps do not change.

    Attributes:
        step: Optimisation steps done.
        num_ranks: Ranks that write.
        rows: Tensors of this rank's labels by the beginning of their files' names.
        collected: Query vectors that this rank collected for the hard negatives.
        modules: Other data-parallel modules; empty on ranks other than 0.
        optimizer: State of the encoder's optimiser; empty on ranks other than 0.
        state: Contents of state.json.
        costs: What the training has taken up to the step.
    """

    step: int
    num_ranks: int
    rows: Mapping[str, Mapping[str, Tensor]]
    collected: Mapping[str, np.ndarray[Any, Any]]
    modules: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]
    costs: checkpoints.Costs


class CheckpointWriter:
    """Saves the checkpoints of one rank.

    Args:
        folder: Folder of the run's checkpoints, which all ranks share.
        stepper: What is saved.
        partition: Which labels this rank owns.
        keep: Checkpoints that stay.
    """

    def __init__(
        self,
        folder: Path,
        stepper: Stepper,
        partition: LabelPartition,
        keep: int,
    ) -> None:
        self._folder = folder
        self._stepper = stepper
        self._partition = partition
        self._keep = keep
        self._is_first = collectives.rank() == 0
        self._thread: threading.Thread | None = None
        self._own_files_written = threading.Event()
        self._cancelled = threading.Event()
        self._error: str | None = None
        # Memory of the checkpoint before. Fresh memory takes longer to get than to fill.
        self._buffers: dict[str, dict[str, Tensor]] = {}

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        collected: Mapping[str, np.ndarray[Any, Any]] | None = None,
        costs: checkpoints.Costs | None = None,
        *,
        scheduled: bool = True,
    ) -> None:
        """Copies everything and starts to write it; collective.

        Waits for the checkpoint before, if that is still being written.

        Args:
            step: Optimisation steps done.
            state: Contents of state.json besides step and ranks.
            collected: Query vectors that this rank collected for the hard negatives, if any.
            costs: What the training has taken up to here, if anything.
            scheduled: an undisturbed run has this checkpoint too. Any other one leaves the rows as
                they are, with the weight decay that they still lack.

        Raises:
            StorageError: on every rank, if any rank could not write the checkpoint before this one.
        """
        self.finish()
        unfinished = self._unfinished(step)
        error = None
        try:
            with disk_errors(unfinished):
                unfinished.mkdir(parents=True, exist_ok=True)
                if self._is_first:
                    # Written at once: a frozen encoder may hold files that must not be copied.
                    self._stepper.encoder.save(unfinished / "encoder")
        except XmcrayError as caught:
            error = str(caught)
        self._raise_on_all_ranks(error, unfinished)
        if scheduled:
            for table in self._stepper.method.tables.values():
                table.flush()
        snapshot = self._snapshot(step, state, collected or {}, costs or checkpoints.Costs())
        self._own_files_written.clear()
        self._error = None
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete on the disk; collective.

        Raises:
            StorageError: on every rank, if any rank could not write; nothing half-written stays.
        """
        if self._thread is None:
            return
        self._own_files_written.wait()
        errors = collectives.gather_objects(self._error)
        if any(errors):
            # The note of a rank that failed will never come.
            self._cancelled.set()
        self._thread.join()
        self._thread = None
        self._cancelled.clear()
        self._raise_on_all_ranks(self._error, None)

    def abandon(self) -> None:
        """Ends the thread of a rank that fails, without the other ranks.

        A checkpoint for which all files are there is still completed.
        """
        if self._thread is None:
            return
        self._own_files_written.wait()
        if collectives.num_ranks() > 1:
            self._cancelled.set()
        self._thread.join()
        self._thread = None

    def _raise_on_all_ranks(self, error: str | None, unfinished: Path | None) -> None:
        """Raises the first error of any rank on every rank; collective."""
        errors = [text for text in collectives.gather_objects(error) if text]
        if not errors:
            return
        if self._is_first and unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise StorageError(errors[0])

    def _unfinished(self, step: int) -> Path:
        return self._folder / f".step-{step:08d}"

    def _snapshot(
        self,
        step: int,
        state: Mapping[str, Any],
        collected: Mapping[str, np.ndarray[Any, Any]],
        costs: checkpoints.Costs,
    ) -> _Snapshot:
        method = self._stepper.method
        rows: dict[str, Mapping[str, Tensor]] = {}
        for name, table in method.tables.items():
            assert name != checkpoints.STATE, "the name is taken by the method's state tensors"
            rows[name] = self._copies(name, table.tensors())
        rows[checkpoints.STATE] = self._copies(checkpoints.STATE, method.state_tensors())
        modules: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        if self._is_first:
            for module_name, module in checkpoints.other_modules(self._stepper).items():
                for name, tensor in module.state_dict().items():
                    modules[f"{module_name}/{name}"] = tensor
            modules = self._copies("modules", modules)
            optimizer = self._copies("optimizer", self._stepper.optimizer.tensors())
        device = next(self._stepper.encoder.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies to pinned memory are complete
        num_ranks = collectives.num_ranks()
        body = {"step": step, "num_ranks": num_ranks, **state}
        return _Snapshot(step, num_ranks, rows, dict(collected), modules, optimizer, body, costs)

    def _copies(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, pinned if they come from a GPU, in the order of their elements.

        Args:
            group: What these tensors belong to; their names are unique within it.
        """
        before = self._buffers.get(group, {})
        copies = {}
        for name, tensor in tensors.items():
            source = tensor.detach()
            copy = before.get(name)
            # A buffer of an earlier checkpoint is used again if the tensor still fits.
            if copy is None or (copy.shape, copy.dtype) != (source.shape, source.dtype):
                # safetensors refuses tensors whose memory is not in the order of their elements.
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            copies[name] = copy.copy_(source, non_blocking=True)
        self._buffers[group] = copies
        return copies

    def _write(self, snapshot: _Snapshot) -> None:
        """Runs in the thread: this rank's files, then, on rank 0, the whole checkpoint."""
        _yield_to_training()
        unfinished = self._unfinished(snapshot.step)
        try:
            with disk_errors(unfinished):
                self._write_own_files(unfinished, snapshot)
            self._own_files_written.set()
            if self._is_first and self._wait_for_all_ranks(unfinished, snapshot.num_ranks):
                with disk_errors(unfinished):
                    self._publish(unfinished, snapshot)
        except XmcrayError as error:
            self._error = str(error)
        except BaseException as error:  # a thread has no caller that would see it
            self._error = f"{unfinished} could not be written: {type(error).__name__}: {error}"
        finally:
            self._own_files_written.set()
            if self._is_first:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _write_own_files(self, unfinished: Path, snapshot: _Snapshot) -> None:
        entries: _Entries = {}
        for name, tensors in snapshot.rows.items():
            _write_blocks(unfinished, name, tensors, self._partition, entries)
        rank = collectives.rank()
        if snapshot.collected:
            file = unfinished / f"collected-{rank:04d}.safetensors"
            save_arrays(dict(snapshot.collected), file)
            _add_entry(file, entries)
        if self._is_first:
            if snapshot.modules:
                save_file(dict(snapshot.modules), unfinished / "modules.safetensors")
            save_file(dict(snapshot.optimizer), unfinished / "optimizer.safetensors")
            write_json(unfinished / "state.json", snapshot.state)
        note = unfinished / _NOTE.replace("*", f"{rank:04d}")
        temporary = aside(note)
        temporary.write_text(json.dumps(entries), encoding="utf-8")
        # Nothing may follow: rank 0 moves the folder as soon as it sees the last note. The note
        # needs no sync, because it counts only while this attempt runs.
        temporary.replace(note)

    def _wait_for_all_ranks(self, unfinished: Path, num_ranks: int) -> bool:
        """Whether the notes of all ranks came; false if a rank failed."""
        while len(list(unfinished.glob(_NOTE))) < num_ranks:
            if self._cancelled.wait(_POLL_S):
                return False
        return True

    def _publish(self, unfinished: Path, snapshot: _Snapshot) -> None:
        """Writes the manifest, moves the folder to its final name, and removes old checkpoints."""
        entries: dict[str, FileEntry] = {}
        for note in sorted(unfinished.glob(_NOTE)):
            written = json.loads(note.read_text(encoding="utf-8"))
            for name, (size, sha256) in written.items():
                entries[name] = FileEntry(size, sha256)
            note.unlink()
        about = {"step": snapshot.step, "costs": dataclasses.asdict(snapshot.costs)}
        finish_manifest(unfinished, checkpoints.KIND, about, entries)
        destination = checkpoints.step_folder(self._folder, snapshot.step)
        # A checkpoint of the same step whose files were altered may be in the way.
        shutil.rmtree(destination, ignore_errors=True)
        publish(unfinished, destination)
        checkpoints.remove_superseded(self._folder, self._keep)


def _yield_to_training() -> None:
    """Lets the steps of training go first where they and this thread want the same core."""
    # Linux has priorities of threads; elsewhere this would be that of the whole process.
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + _NICE)


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
    height = max(1, checkpoints.ROW_BLOCK_BYTES // max(1, row_bytes))
    for rows in spans(partition.size, height):
        file = folder / f"{name}-{partition.start + rows.start:010d}.safetensors"
        block = {key: tensor[rows].contiguous() for key, tensor in tensors.items()}
        save_file(block, file)
        _add_entry(file, entries)


def _add_entry(file: Path, entries: _Entries) -> None:
    """Syncs a file and adds its size and hash."""
    fsync(file)
    entry = hash_file(file)
    entries[file.name] = [entry.size, entry.sha256]
