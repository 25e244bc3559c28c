"""What waits for a thread is worked on at once where it is alike, and told apart where it is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from xmcray.serving.together import Together


class Work:
    """Doubles numbers, and writes down which came at once; begins when it is let go."""

    def __init__(self) -> None:
        self.calls, self.go = list[list[int]](), threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.go.wait(10)
        self.calls.append(list(items))
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]


def test_alike_items_that_wait_are_one_call() -> None:
    work, thread = Work(), ThreadPoolExecutor(1)

    async def main() -> None:
        together = Together(thread, work, most=4)
        held = threading.Event()
        thread.submit(held.wait, 10)  # the thread is busy while all of these come
        asked = [
            ("a", 1, 1),
            ("b", 1, 2),
            ("a", 1, 3),
            ("a", 9, 4),
            ("a", 1, 13),
            ("b", 1, 5),
            ("a", 1, 6),
        ]
        waiting = [asyncio.ensure_future(together.run(*one)) for one in asked]
        given_up = asyncio.ensure_future(together.run("a", 1, 99))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        work.go.set()
        held.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found.pop(4), ValueError), "told to nobody else"
        assert found == [2, 4, 6, 8, 10, 12]

    asyncio.run(main())
    assert work.calls == [[1, 3, 13, 6], [1], [3], [13], [6], [2, 5], [4]]


@pytest.mark.parametrize("number", [1, 40])
def test_a_free_thread_begins_at_once_and_nothing_is_lost(number: int) -> None:
    work, thread = Work(), ThreadPoolExecutor(1)
    work.go.set()

    async def main() -> list[int]:
        together = Together(thread, work, most=8)
        return await asyncio.gather(*(together.run("a", 1, i + 100) for i in range(number)))

    assert asyncio.run(main()) == [2 * (i + 100) for i in range(number)]
    assert max(map(len, work.calls)) <= 8
