"""Sharded checkpoints: complete or absent, readable with another number of ranks, free of pickle.

checkpoints/step-00000340/
    encoder/                               as `Encoder.save` writes it
    modules.safetensors                    other data-parallel modules, where a method has some
    optimizer.safetensors                  state of the encoder's optimiser
    collected-0001.safetensors             query vectors that rank 1 has collected for the negatives and not yet written
    classifier-0000000000.safetensors      rows from label 0 on, with their optimiser state: files of at most 64 MB
    state.json                             step, epoch, ranks, rows, negatives
    manifest.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from xmcray import storage
from xmcray.errors import StorageError, XmcrayError
from xmcray.nn.encoder import load_encoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.storage import FileEntry
from xmcray.training.step import Stepper

KIND = "checkpoint"
ROW_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified checkpoint.

    Attributes:
        path: its folder. step: optimisation steps done. state: what state.json holds.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


def save(
    folder: Path,
    step: int,
    stepper: Stepper,
    part: LabelPartition,
    state: Mapping[str, Any],
    keep: int,
    collected: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """Writes a checkpoint; collective. Older ones than the newest `keep` are removed.

    Args:
        collected: query vectors of this rank for the negatives, if there are any.
    Raises:
        StorageError: on every rank, if any rank could not write; nothing half-written stays.
    """
    aside = folder / f".step-{step:08d}"
    destination = folder / f"step-{step:08d}"
    if collectives.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    collectives.broadcast_int(0)

    def write() -> dict[str, list[Any]]:
        aside.mkdir(parents=True, exist_ok=True)
        written = _write_rows(aside, stepper, part)
        if collected:
            save_arrays(dict(collected), aside / f"collected-{collectives.rank():04d}.safetensors")
        if collectives.rank() == 0:
            _write_shared(aside, step, stepper, state)
        return written

    results = collectives.gather_objects(_guard(write, aside))
    errors = [result for result in results if isinstance(result, str)]
    if not errors and collectives.rank() == 0:
        entries = {
            name: FileEntry(*entry) for result in results for name, entry in dict(result).items()
        }

        def finish() -> dict[str, list[Any]]:
            storage.finish_manifest(aside, KIND, {"step": step}, entries)
            shutil.rmtree(destination, ignore_errors=True)
            storage.publish(aside, destination)
            return {}

        finished = _guard(finish, aside)
        errors = [finished] if isinstance(finished, str) else []
    errors = [e for part_errors in collectives.gather_objects(errors) for e in part_errors]
    if collectives.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        for old in _folders(folder)[keep:] if not errors else []:
            shutil.rmtree(old, ignore_errors=True)
    if errors:
        raise StorageError(errors[0])


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose files all have the hashes of its manifest."""
    for path in _folders(folder):
        try:
            return open_checkpoint(path)
        except StorageError:
            continue
    return None


def open_checkpoint(path: Path, contents: bool = True) -> Checkpoint:
    """A checkpoint whose manifest verifies; `contents` compares hashes too.

    Raises:
        StorageError: it does not.
    """
    _, manifest = storage.open_artifact(path, KIND, contents=contents)

    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(manifest.about["step"]), state)


def load(checkpoint: Checkpoint, stepper: Stepper, part: LabelPartition) -> None:
    """Restores a rank's encoder, optimisers and its rows, whatever the number of ranks that saved them."""
    _load_modules(checkpoint.path, stepper)
    stepper.optimizer.load(load_file(checkpoint.path / "optimizer.safetensors"), checkpoint.step)
    for name, table in stepper.method.tables.items():
        table.load(row_blocks(checkpoint.path, name, part.start, part.stop), checkpoint.step)


def load_weights(checkpoint: Checkpoint, stepper: Stepper, part: LabelPartition) -> None:
    """Restores what answers queries, and nothing of the optimisers."""
    _load_modules(checkpoint.path, stepper)
    for name, table in stepper.method.tables.items():
        for first, tensors in row_blocks(
            checkpoint.path, name, part.start, part.stop, only="weight"
        ):
            table.weight_SD[first : first + len(tensors["weight"])] = tensors["weight"]


def collected(checkpoint: Checkpoint) -> list[dict[str, np.ndarray[Any, Any]]]:
    """This rank's part of the query vectors that ranks had collected, whatever the number of ranks that saved them."""
    files = sorted(checkpoint.path.glob("collected-*.safetensors"))
    return [load_arrays(file) for file in files[collectives.rank() :: collectives.num_ranks()]]


def _load_modules(path: Path, stepper: Stepper) -> None:
    stepper.encoder.load_state_dict(load_encoder(path / "encoder").state_dict())
    others = {name: module for name, module in stepper.modules.items() if name != "encoder"}
    if others:
        tensors = load_file(path / "modules.safetensors")
        for name, module in others.items():
            prefix = f"{name}/"
            module.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )


def row_blocks(
    path: Path, name: str, start: int, stop: int, only: str | None = None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Rows start .. stop - 1 of a table, a file at a time: the first row's place after `start`, and tensors by name.

    Args:
        only: one tensor name ("weight", "momentum" ...), to read nothing else.
    """
    for file_path in sorted(path.glob(f"{name}-*.safetensors")):
        first = int(file_path.stem.rsplit("-", 1)[1])
        with safe_open(file_path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in ([only] if only else list(file.keys()))}
            height = next(iter(slices.values())).get_shape()[0]
            low, high = max(start - first, 0), min(stop - first, height)
            if low < high:
                yield first + low - start, {key: rows[low:high] for key, rows in slices.items()}


def _write_rows(folder: Path, stepper: Stepper, part: LabelPartition) -> dict[str, list[Any]]:
    written: dict[str, list[Any]] = {}
    for name, table in stepper.method.tables.items():
        table.flush()
        tensors = {key: tensor.detach() for key, tensor in table.tensors().items()}
        row_bytes = sum(tensor[:1].nbytes for tensor in tensors.values())
        height = max(1, ROW_BLOCK_BYTES // max(1, row_bytes))
        for low in range(0, part.size, height):  # in blocks: what is written is copied in memory
            file = folder / f"{name}-{part.start + low:010d}.safetensors"
            save_file(
                {
                    key: tensor[low : low + height].cpu().contiguous()
                    for key, tensor in tensors.items()
                },
                file,
            )
            storage.fsync(file)
            entry = storage.hash_file(file)
            written[file.name] = [entry.size, entry.sha256]
    return written


def _write_shared(folder: Path, step: int, stepper: Stepper, state: Mapping[str, Any]) -> None:
    stepper.encoder.save(folder / "encoder")
    others = {name: module for name, module in stepper.modules.items() if name != "encoder"}
    if others:
        tensors = {
            f"{m}/{k}": v.detach().cpu()
            for m, module in others.items()
            for k, v in module.state_dict().items()
        }
        save_file(tensors, folder / "modules.safetensors")
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in stepper.optimizer.tensors().items()},
        folder / "optimizer.safetensors",
    )
    storage.write_json(
        folder / "state.json", {"step": step, "num_ranks": collectives.num_ranks(), **state}
    )


def _guard(write: Callable[[], Any], path: Path) -> Any:
    """The result, or the message of what the disk refused: ranks must learn of it together."""
    try:
        with storage.disk_errors(path):
            return write()
    except XmcrayError as error:
        return str(error)


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True)
