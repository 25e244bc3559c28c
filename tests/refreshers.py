"""A stand-in for the negative pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xmcray.data.batches import TrainingData
from xmcray.negatives.refresh import RefreshSpec, run_version, wait_published
from xmcray.negatives.version_folder import VersionFolder
from xmcray.types import Ragged


def few_queries(num_queries: int, num_labels: int) -> Any:
    """As much of `TrainingData` as a refresh reads, of queries that may have every label."""
    return SimpleNamespace(
        num_query_ids=num_queries,
        num_labels=num_labels,
        positives=lambda ids: Ragged.empty(len(ids)),
        excluded=lambda ids: Ragged.empty(len(ids)),
    )


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
