"""A thread that takes all at once what waits for it and is alike: many texts in one search cost a fraction of as many
searches. Nobody waits for others to come: what came while the thread was busy is its next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[Item, Found]):
    key: Hashable
    size: int
    item: Item
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Found]


class Together(Generic[Item, Found]):
    """Items with equal keys, worked on in one call.

    Args:
        thread: an executor of one thread, which may have other work besides.
        work: what is found for each of some items of the same key, in their order.
        most: texts in one call, unless a single item has more.
    """

    def __init__(
        self, thread: Executor, work: Callable[[Sequence[Item]], Sequence[Found]], most: int
    ) -> None:
        self._thread, self._work, self._most = thread, work, most
        self._waiting: list[_Entry[Item, Found]] = []
        self._lock = threading.Lock()

    async def run(self, key: Hashable, size: int, item: Item) -> Found:
        """What is found for one item of `size` texts; not worked on at all if nobody waits for it any more.

        Raises whatever `work` raises for this item alone: a mistake in one is not told to others.
        """
        loop = asyncio.get_running_loop()
        entry: _Entry[Item, Found] = _Entry(key, size, item, loop, loop.create_future())
        with self._lock:
            self._waiting.append(entry)
        self._thread.submit(self._turn)  # finds nothing to do if an earlier turn took this item too
        return await entry.future

    def _turn(self) -> None:
        entries = self._next()
        if not entries:
            return
        try:
            found = self._work([entry.item for entry in entries])
        except Exception as error:
            if len(entries) == 1:
                _tell(entries[0], error=error)
                return
            for entry in entries:
                try:
                    _tell(entry, self._work([entry.item])[0])
                except Exception as own:
                    _tell(entry, error=own)
            return
        for entry, one in zip(entries, found, strict=True):
            _tell(entry, one)

    def _next(self) -> list[_Entry[Item, Found]]:
        """The item that waits longest, and those like it while there is room."""
        with self._lock:
            waiting = [entry for entry in self._waiting if not entry.future.done()]
            taken, rest, size = list[_Entry[Item, Found]](), list[_Entry[Item, Found]](), 0
            for entry in waiting:
                if not taken or (entry.key == taken[0].key and size + entry.size <= self._most):
                    taken.append(entry)
                    size += entry.size
                else:
                    rest.append(entry)
            self._waiting = rest
        return taken


def _tell(
    entry: _Entry[Item, Found], found: Found | None = None, error: Exception | None = None
) -> None:
    """Ends an item's wait, in the loop that waits."""

    def end() -> None:
        if entry.future.done():  # given up meanwhile
            return
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(found)  # type: ignore[arg-type]

    with contextlib.suppress(RuntimeError):  # the loop was closed: the server stops
        entry.loop.call_soon_threadsafe(end)
