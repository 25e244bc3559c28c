"""Coalesces queued requests with equal keys into one batch.

Many texts in one search cost a fraction of as many searches. No request waits for others to come:
those that came while the thread was busy are its next batch.

Large requests do not starve small ones: an item takes its turn as if it had come later by the time
that its answers need. Only items that come within that time can overtake it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Answers that the queue counts as a second of work: of 64 texts with k = 100, two seconds. Slower
# than a server really is, so that small requests go first while many large ones wait.
ANSWERS_PER_S = 3_200
MAX_BATCH_ANSWERS = 6_400  # of several items in one batch

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[Item, Result]):
    """A queued item."""

    key: Hashable
    num_texts: int
    num_answers: int
    item: Item
    due: float
    future: Future[Result] = field(default_factory=Future)


class MicroBatcher(Generic[Item, Result]):
    """Calls a function on batches of queued items whose keys are equal.

    Args:
        thread: an executor of one thread, which may have other work too.
        function: returns one result for each item of a batch, in the same order.
        max_texts: number of texts in one batch, unless a single item has more.
    """

    def __init__(
        self,
        thread: Executor,
        function: Callable[[Sequence[Item]], Sequence[Result]],
        max_texts: int,
    ) -> None:
        self._thread = thread
        self._function = function
        self._max_texts = max_texts
        self._queue: list[_Entry[Item, Result]] = []
        # From the first item in the queue until the thread finds none.
        self._is_scheduled = False
        self._lock = threading.Lock()

    async def run(self, key: Hashable, num_texts: int, item: Item, num_answers: int = 0) -> Result:
        """The result of one item; an item is skipped if its caller was cancelled before its turn.

        Args:
            key: items with equal keys may be one batch.
            num_texts: number of texts in the item.
            item: what the function gets.
            num_answers: number of its texts times the labels that each of them gets.
        Raises:
            Exception: whatever the function raises for this item alone.
        """
        entry: _Entry[Item, Result] = _Entry(
            key,
            num_texts,
            num_answers,
            item,
            time.monotonic() + num_answers / ANSWERS_PER_S,
        )
        with self._lock:
            self._queue.append(entry)
            is_first = not self._is_scheduled
            self._is_scheduled = True
        if is_first:
            self._thread.submit(self._run_batch)
        return await asyncio.wrap_future(entry.future)

    def _run_batch(self) -> None:
        """Answers one batch; other work of the thread comes before the next one."""
        try:
            batch = self._take_batch()
            if batch:
                self._answer(batch)
        finally:
            with self._lock:
                has_more = bool(self._queue)
                self._is_scheduled = has_more
            if has_more:
                self._thread.submit(self._run_batch)

    def _answer(self, batch: Sequence[_Entry[Item, Result]]) -> None:
        try:
            results = self._function([entry.item for entry in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} results of {len(batch)} items")
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            # An error of one item must not reach the others.
            for entry in batch:
                self._answer([entry])
            return
        for entry, result in zip(batch, results, strict=True):
            entry.future.set_result(result)

    def _take_batch(self) -> list[_Entry[Item, Result]]:
        """Takes the item whose turn it is, and later ones with the same key for which there is room."""
        batch: list[_Entry[Item, Result]] = []
        remaining: list[_Entry[Item, Result]] = []
        num_texts = 0
        num_answers = 0
        with self._lock:
            self._queue.sort(key=lambda entry: entry.due)
            for entry in self._queue:
                has_room = (
                    num_texts + entry.num_texts <= self._max_texts
                    and num_answers + entry.num_answers <= MAX_BATCH_ANSWERS
                )
                if batch and not (entry.key == batch[0].key and has_room):
                    remaining.append(entry)
                # False for an item whose caller was cancelled.
                elif entry.future.set_running_or_notify_cancel():
                    batch.append(entry)
                    num_texts += entry.num_texts
                    num_answers += entry.num_answers
            self._queue = remaining
        return batch
