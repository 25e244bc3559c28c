"""A stand-in for the negative pool."""

from __future__ import annotations

from pathlib import Path

from xmcray.data.batches import TrainingData
from xmcray.negatives.ledger import VersionFolder
from xmcray.negatives.refresh import RefreshSpec, run_version, wait_published


class HeldRefresher:
    """Finishes versions only when told to."""

    def __init__(self, data: TrainingData, spec: RefreshSpec) -> None:
        self.data, self.spec = data, spec
        self.asked: list[VersionFolder] = []

    def start(self, folder: Path) -> None:
        self.asked.append(VersionFolder(folder))

    def check(self) -> None: ...

    def close(self) -> None: ...

    def finish(self) -> None:
        while self.asked:
            folder = self.asked.pop()
            wait_published(folder)
            run_version(folder, self.data, self.spec)
