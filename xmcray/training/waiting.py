"""How long a run waits for nodes. Ray Train waits for ever when an elastic group has fewer nodes
than it needs.

Its controller then asks for nodes again and again without a pause, and reacts neither to an
interrupt nor to SIGTERM. `Patience` runs after each turn of that loop, in the controller's process
on the driver's node.
"""

from __future__ import annotations

import time
from pathlib import Path

from xmcray.errors import ResourceError
from xmcray.training.preemption import StopFlag

_PAUSE_S = 0.2  # between two turns of a controller that finds nothing to do


class WorkersMark:
    """RUN/ray/workers, a file that is there while the workers of a run train.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "ray" / "workers"

    @property
    def is_set(self) -> bool:
        """Whether workers train."""
        return self.path.exists()

    def set(self, value: bool) -> None:
        """Makes or removes the file."""
        if value:
            self.path.parent.mkdir(exist_ok=True)
            self.path.touch()
        else:
            self.path.unlink(missing_ok=True)


class Patience:
    """Ends a run that has had no workers for too long, or that is asked to stop while it has none.

    It also tells the driver by `WorkersMark` whether there are workers, because the controller does
    not answer while it starts them.

    Args:
        run: folder of the run.
        request: what the workers ask for, in words.
        wait_s: seconds without workers after which the run ends.
    """

    def __init__(self, run: Path, request: str, wait_s: float) -> None:
        self.run = run
        self.request = request
        self.wait_s = wait_s
        self._waiting_since: float | None = None

    def after_turn(self, without_workers: bool, same_state: bool) -> None:
        """Checks the clock and RUN/stop while there are no workers.

        Args:
            without_workers: no worker trains now.
            same_state: the controller's state is the same as in the turn before.
        Raises:
            ResourceError: it is time to end. Ray does not retry after an error that it does not
                know.
        """
        if not same_state:
            WorkersMark(self.run).set(not without_workers)
        if not without_workers:
            self._waiting_since = None
            return
        if StopFlag(self.run).raised:
            raise ResourceError("the run was asked to stop before its workers had room")
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since > self.wait_s:
            raise ResourceError(
                f"the cluster has had no room for {self.request} for {self.wait_s:g} s: a node was lost, or others"
                " hold it; add nodes, lower --workers, set cluster.min_workers or raise cluster.wait_s, and the same"
                " command continues from the newest checkpoint"
            )
        if same_state:
            time.sleep(_PAUSE_S)
