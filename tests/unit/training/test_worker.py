"""What a Ray Train worker makes of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from xmcray.errors import RunError
from xmcray.storage.whole_files import write_json
from xmcray.training import worker
from xmcray.training.run_config import RunConfig


class BuiltError(Exception):
    """The worker has chosen its device, and the test ends."""


def settings_of(folder: Path, *, use_gpu: bool = False) -> dict[str, Any]:
    return {
        "run": str(folder),
        "run_id": "0123",
        "corpus": "corpus",
        "corpus_sha256": "4567",
        "config": RunConfig.resolve("astra", {}).to_dict(),
        "use_gpu": use_gpu,
        "threads": torch.get_num_threads(),
    }


def write_run(folder: Path, run_id: str) -> None:
    """What a worker reads of a run's folder."""
    body = {"id": run_id, "config": RunConfig.resolve("astra", {}).to_dict()}
    write_json(folder / "run.json", {**body, "corpus": "corpus", "corpus_sha256": "4567"})


@pytest.mark.parametrize("use_gpu", [True, False])
def test_a_worker_takes_a_gpu_only_if_it_has_reserved_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_gpu: bool
) -> None:
    devices = []

    def build(config: RunConfig, data: Any, device: torch.device, vectors: Path) -> None:
        devices.append(device.type)
        raise BuiltError

    monkeypatch.setattr(worker, "open_on_node", lambda source: None)
    monkeypatch.setattr(worker, "TrainingData", lambda corpus, config: None)
    monkeypatch.setattr(worker, "build", build)
    # Ray hides no GPU from a worker that has reserved none.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    write_run(tmp_path, "0123")
    with pytest.raises(BuiltError):
        worker.work(settings_of(tmp_path, use_gpu=use_gpu))
    assert devices == ["cuda" if use_gpu else "cpu"]


@pytest.mark.parametrize("other", [None, "89ab"])
def test_a_node_that_does_not_share_the_folder_of_the_run_is_named(
    tmp_path: Path, other: str | None
) -> None:
    if other is not None:
        write_run(tmp_path, other)
    with pytest.raises(RunError, match=f"{tmp_path} on .* in a folder that all nodes share"):
        worker.work(settings_of(tmp_path))
