"""Queued items with equal keys are one call; an error reaches its own item alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xmcray.serving.micro_batcher import MicroBatcher


class Work:
    """Doubles numbers, and records the batches; waits until `go` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.go.wait(60)
        self.calls.append(list(items))
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]


async def test_queued_items_with_equal_keys_are_one_call() -> None:
    work = Work()
    thread = ThreadPoolExecutor(1)

    batcher = MicroBatcher(thread, work, max_texts=4)
    held = threading.Event()
    thread.submit(held.wait, 10)  # the thread is busy while all of these come
    items = [
        ("a", 1, 1),
        ("b", 1, 2),
        ("a", 1, 3),
        ("a", 9, 4),
        ("a", 1, 13),
        ("b", 1, 5),
        ("a", 1, 6),
    ]
    waiting = [asyncio.ensure_future(batcher.run(*item)) for item in items]
    given_up = asyncio.ensure_future(batcher.run("a", 1, 99))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    work.go.set()
    held.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results.pop(4), ValueError), "no other item gets it"
    assert results == [2, 4, 6, 8, 10, 12]
    assert work.calls == [[1, 3, 13, 6], [1], [3], [13], [6], [2, 5], [4]]


@pytest.mark.parametrize("number", [1, 40])
def test_a_free_thread_begins_at_once_and_nothing_is_lost(number: int) -> None:
    work = Work()
    thread = ThreadPoolExecutor(1)
    work.go.set()

    async def main() -> list[int]:
        batcher = MicroBatcher(thread, work, max_texts=8)
        return await asyncio.gather(*(batcher.run("a", 1, i + 100) for i in range(number)))

    assert asyncio.run(main()) == [2 * (i + 100) for i in range(number)]
    assert max(map(len, work.calls)) <= 8


async def test_a_batch_is_one_turn_of_the_thread_and_other_work_comes_in_between() -> None:
    work = Work()
    order: list[str] = []

    class Thread(ThreadPoolExecutor):
        turns = 0

        def submit(self, function: Any, *arguments: Any, **options: Any) -> Any:
            self.turns += function == batcher._run_batch
            return super().submit(function, *arguments, **options)

    def answer(items: Sequence[int]) -> list[int]:
        order.append("batch")
        return work(items)

    thread = Thread(1)
    batcher = MicroBatcher(thread, answer, max_texts=10)
    held = threading.Event()
    thread.submit(held.wait, 10)
    # With a turn for each item, those without a batch would pile up under overload.
    waiting = [asyncio.ensure_future(batcher.run("a", 1, item + 100)) for item in range(30)]
    await asyncio.sleep(0)
    other = thread.submit(order.append, "other work")
    work.go.set()
    held.set()
    await asyncio.gather(*waiting)
    other.result(10)
    assert thread.turns == len(work.calls) == 3
    assert order == ["batch", "other work", "batch", "batch"]
    assert await batcher.run("a", 1, 7) == 14, "the thread is asked again after a rest"


async def test_a_mistake_of_the_function_does_not_end_the_turns() -> None:
    answers: list[list[int]] = [[], [2]]
    batcher = MicroBatcher(ThreadPoolExecutor(1), lambda items: answers.pop(0), max_texts=8)
    with pytest.raises(ValueError, match="0 results of 1 items"):
        await asyncio.wait_for(batcher.run("a", 1, 1), 10)
    assert await asyncio.wait_for(batcher.run("a", 1, 1), 10) == 2


async def test_large_items_do_not_starve_small_ones_and_do_not_share_a_batch() -> None:
    work = Work()
    thread = ThreadPoolExecutor(1)

    batcher = MicroBatcher(thread, work, max_texts=64)
    held = threading.Event()
    thread.submit(held.wait, 10)
    # Three large items come first, of which two do not fit into one batch.
    items = [("a", 8, 100, 6_400), ("a", 8, 101, 6_400), ("b", 8, 102, 3_200)]
    items += [("c", 1, 1, 10), ("c", 1, 2, 10)]
    waiting = [asyncio.ensure_future(batcher.run(*item)) for item in items]
    await asyncio.sleep(0)
    work.go.set()
    held.set()
    await asyncio.gather(*waiting)
    assert work.calls == [[1, 2], [102], [100], [101]]
