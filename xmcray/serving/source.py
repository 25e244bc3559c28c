"""Where requests get their snapshots: from a follower, or from the coordinator itself."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from xmcray.serving.problems import ProblemError
from xmcray.serving.snapshot import Snapshot


class SnapshotSource(abc.ABC):
    """Holds the snapshots that are served."""

    @abc.abstractmethod
    def snapshots(self) -> Mapping[str, Snapshot | None]:
        """By model, the snapshot from which requests that begin now are answered; None before the
        model is loaded. The first model answers requests that name none.
        """

    @property
    def ready(self) -> bool:
        """Whether every model can answer."""
        return all(self.snapshots().values())

    def current(self, model: str | None) -> Snapshot:
        """The snapshot from which a request that begins now is answered.

        Args:
            model: name of the model that the request gives, if it gives one.
        Raises:
            ProblemError: no such model, or it is not loaded yet.
        """
        snapshots = self.snapshots()
        name = next(iter(snapshots)) if model is None else model
        if name not in snapshots:
            expected = ", ".join(snapshots)
            message = f"model {name[:80]!r} is not served, expected one of: {expected}"
            raise ProblemError("not-found", message)
        snapshot = snapshots[name]
        if snapshot is None:
            raise ProblemError("not-ready", f"model {name!r} is being loaded; ask again")
        return snapshot
