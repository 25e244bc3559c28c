"""Events on their way from a replica to the coordinator, which is another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from xmcray.serving.events import MAX_QUEUED, FeedbackEvent, SearchEvent

MAX_WAITING = 1000  # searches of one model that wait in a replica


class EventSender:
    """Sends the events of a replica to the coordinator. Implements `EventSink`.

    Args:
        coordinator: has the methods of `SnapshotCoordinator`, as coroutines. Calls may overtake each
            other.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._waiting: dict[str, list[SearchEvent]] = {}
        self._num_letters = 0  # of the searches of all models that wait or are on their way
        self._num_dropped: dict[str, int] = {}
        self._sending: asyncio.Task[None] | None = None
        # Held while searches are on their way, so that feedback does not overtake the search that it is
        # about.
        self._on_their_way = asyncio.Lock()

    def note_searches(self, name: str, events: Sequence[SearchEvent]) -> None:
        """Queues searches of a model; never blocks or fails."""
        waiting = self._waiting.setdefault(name, [])
        num_letters = _num_letters(events)
        # A search with long texts takes as much memory as hundreds of others.
        has_room = self._num_letters + num_letters <= MAX_QUEUED
        if len(waiting) >= MAX_WAITING or not has_room:
            self._count_dropped(name, len(events))
            return
        self._num_letters += num_letters
        waiting += events
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def add_feedback(self, name: str, event: FeedbackEvent) -> int:
        """Makes feedback about a search of a model durable; returns the number of the event."""
        # The search that it is about may be among those that wait or are on their way.
        # A client that is gone takes no searches along.
        await asyncio.shield(self._send_waiting(name))
        number: int = await self._coordinator.add_feedback(name, event)
        return number

    async def _send(self) -> None:
        """Sends what waits, and what comes meanwhile."""
        while self._waiting:
            await self._send_waiting(next(iter(self._waiting)))

    async def _send_waiting(self, name: str) -> None:
        async with self._on_their_way:
            events = self._waiting.pop(name, [])
            if not events:
                return
            num_dropped = self._num_dropped.pop(name, 0)
            try:
                await self._coordinator.note_searches(name, events, num_dropped)
            except Exception:
                # The coordinator is being started again.
                self._count_dropped(name, num_dropped + len(events))
            finally:
                self._num_letters -= _num_letters(events)

    def _count_dropped(self, name: str, number: int) -> None:
        self._num_dropped[name] = self._num_dropped.get(name, 0) + number


def _num_letters(events: Sequence[SearchEvent]) -> int:
    return sum(event.num_letters for event in events)
