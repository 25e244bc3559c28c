"""The replicas that follow the coordinator: what each of them has, and waiting for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from xmcray.serving.decisions import ReplicaState, Report, Update

ALIVE_S = 10.0  # a replica that was silent for so long is gone
CHECK_S = 1.0  # between two looks for replicas that are gone


class Replicas:
    """The replicas by name, as they last reported themselves."""

    def __init__(self) -> None:
        # When the newest report came, and the report.
        self._reports: dict[str, tuple[float, Report]] = {}
        self._changed = asyncio.Condition()
        self._all_heard_at = 0.0  # from then on, a replica without a report is gone

    def expect_reports(self) -> None:
        """From now on replicas can report. Those of an earlier coordinator live, and have not yet."""
        self._all_heard_at = time.monotonic() + ALIVE_S

    async def report(
        self,
        report: Report,
        updates: Callable[[], dict[str, Update]],
        wait_s: float,
    ) -> dict[str, Update]:
        """Notes what a replica has, and waits for updates.

        Args:
            report: what it has.
            updates: what it lacks by now.
            wait_s: longest wait, seconds.
        Returns:
            The first updates that are not empty; none after `wait_s`.
        """
        _, newest = self._reports.get(report.replica, (0.0, report))
        # An older report may arrive after a newer one.
        if report.number >= newest.number:
            self._reports[report.replica] = (time.monotonic(), report)
        async with self._changed:
            self._changed.notify_all()  # a swap may wait for this replica
            try:
                return await asyncio.wait_for(self._changed.wait_for(updates), wait_s)
            except TimeoutError:
                return {}

    async def notify(self) -> None:
        """Lets the replicas that wait look for updates."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(
        self, model: str, is_done: Callable[[ReplicaState], bool], wait_s: float
    ) -> int:
        """Waits until a condition holds for all replicas that are alive and serve a model.

        Args:
            model: name of the model.
            is_done: the condition; what it raises ends the wait.
            wait_s: longest wait, seconds.
        Returns:
            For how many it does not hold after `wait_s`, or when all were heard if that is later.
        """
        deadline = max(time.monotonic() + wait_s, self._all_heard_at)
        async with self._changed:
            while True:
                num_missing = 0
                for states in self.alive():
                    if model in states and not is_done(states[model]):
                        num_missing += 1
                now = time.monotonic()
                is_done_by_all = not num_missing and now >= self._all_heard_at
                if is_done_by_all or now >= deadline:
                    return num_missing
                # Replicas also leave in silence.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), CHECK_S)

    def alive(self) -> list[Mapping[str, ReplicaState]]:
        """The states of the replicas that were heard of lately; the others are forgotten."""
        oldest = time.monotonic() - ALIVE_S
        for replica, (reported, _) in list(self._reports.items()):
            if reported <= oldest:
                del self._reports[replica]
        return [report.states for _, report in self._reports.values()]
