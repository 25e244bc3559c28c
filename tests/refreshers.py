"""A stand-in for the negative pool."""

from __future__ import annotations

from pathlib import Path

from xmcray.data.batches import TrainingData
from xmcray.negatives.ledger import VersionFolder
from xmcray.negatives.refresh import RefreshSpec, run_version, wait_published


class HeldRefresher:
    """Finishes versions only when `finish` is called."""

    def __init__(self, data: TrainingData, spec: RefreshSpec) -> None:
        self.data = data
        self.spec = spec
        self.started: list[VersionFolder] = []

    def start(self, folder: Path) -> None:
        self.started.append(VersionFolder(folder))

    def check(self) -> None: ...

    def close(self) -> None: ...

    def finish(self) -> None:
        while self.started:
            folder = self.started.pop()
            wait_published(folder)
            run_version(folder, self.data, self.spec)
