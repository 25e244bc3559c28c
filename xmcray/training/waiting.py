"""How long a run waits for nodes. Ray Train waits for ever when an elastic group has fewer nodes than it needs.

Its controller then asks for nodes again and again without a pause, and hears neither an interrupt nor SIGTERM. The
callback below runs after each turn of that loop, in the controller's process on the driver's node.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller import state as states

from xmcray.errors import ResourceError
from xmcray.training.preemption import StopFlag

_WITHOUT_WORKERS = (
    states.InitializingState,
    states.SchedulingState,
    states.ReschedulingState,
    states.RestartingState,
)
_PAUSE_S = 0.2  # between two turns of a controller that finds nothing to do


class Patience(ControllerCallback):
    """Ends a run that has had no workers for too long, or is asked to stop while it has none.

    Args:
        run: its folder. asked: what the workers ask for, in words. wait_s: seconds that are not too long.
    """

    def __init__(self, run: Path, asked: str, wait_s: float) -> None:
        self.run, self.asked, self.wait_s = run, asked, wait_s
        self._since: float | None = None

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Looks at the clock, and at RUN/stop, while there are no workers.

        Raises:
            ResourceError: it is time to end. Ray does not try again after an error that it does not know.
        """
        if not isinstance(current_state, _WITHOUT_WORKERS):
            self._since = None
            return
        if StopFlag(self.run).raised:
            raise ResourceError("the run was asked to stop before its workers had room")
        self._since = time.monotonic() if self._since is None else self._since
        if time.monotonic() - self._since > self.wait_s:
            raise ResourceError(
                f"the cluster has had no room for {self.asked} for {self.wait_s:g} s: a node was lost, or others hold"
                " it; add nodes, lower --workers, set cluster.min_workers or raise cluster.wait_s, and the same"
                " command goes on from the newest checkpoint"
            )
        if current_state is previous_state:
            time.sleep(_PAUSE_S)
