"""What a Ray Train worker makes of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from xmcray.training import worker
from xmcray.training.run import RunConfig


class BuiltError(Exception):
    """The worker has chosen its device, and the test ends."""


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
    settings = {
        "run": str(tmp_path),
        "run_id": "0123",
        "corpus": "corpus",
        "corpus_sha256": "4567",
        "config": RunConfig.resolve("astra", {}).to_dict(),
        "use_gpu": use_gpu,
        "threads": torch.get_num_threads(),
    }
    with pytest.raises(BuiltError):
        worker.work(settings)
    assert devices == ["cuda" if use_gpu else "cpu"]
