"""Load and kills for an application on Ray Serve, in tests and in the soak."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bundles import TEXTS
from processes import descendants

from xmcray.client import Client, ClientError
from xmcray.retrieval.retriever import Retriever

K = 7
ASKED = TEXTS[:40]
Answer = TypeVar("Answer")


def client_of(url: str, state: Path) -> Client:
    return Client(
        url,
        token_file=state / "token",
        admin_token=(state / "admin-token").read_text().strip(),
        timeout_s=60,  # a machine that is busy with other work answers late
    )


def insist(request: Callable[[], Answer]) -> Answer:
    """Repeats a write, as an operator does, if the process that took it died."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return request()
        except ClientError as error:
            if error.status not in (500, 502, 503) or time.monotonic() > deadline:
                raise


def replicas(deployment: str) -> list[int]:
    """Processes of a deployment's replicas."""
    return [
        pid
        for pid, command in descendants(os.getpid()).items()
        if f"ServeReplica:xmcray:{deployment}" in command
    ]


def known_answers(bundles: Sequence[Path]) -> dict[str, list[list[str]]]:
    """By version of the bundle, the uids of the K best labels of each text in ASKED."""
    retrievers = [Retriever.load(path, threads=1) for path in bundles]
    return {
        r.sha256: [[a.uid for a in answers] for answers in r.search(ASKED, K)] for r in retrievers
    }


class Askers:
    """Threads that search until `finish`, each by a client with its own retries.

    Attributes:
        asked: requests so far.
        seen: versions that answered.
        failed: errors that the client gave up on.
        mixed: versions of answers that are not wholly of the version that they name.
    """

    def __init__(
        self, url: str, state: Path, known: Mapping[str, list[list[str]]], threads: int = 4
    ) -> None:
        self.asked = 0
        self.seen: set[str] = set()
        self.failed: list[Exception] = []
        self.mixed: list[str] = []
        self._url = url
        self._state = state
        self._known = known
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, number: int = 0, deadline: float = float("inf")) -> None:
        """Ends when so many requests were made, or at a moment of time.monotonic()."""
        while self.asked < number and time.monotonic() < deadline:
            self._done.wait(0.1)
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        with client_of(self._url, self._state) as client:
            while not self._done.is_set():
                place = draw.randrange(len(ASKED) - 1)
                try:
                    found = client.search(ASKED[place : place + 2], K, filter={"deny": ["live"]})
                except Exception as error:
                    self.failed.append(error)
                else:
                    answers = [[a.uid for a in result.answers] for result in found.results]
                    self.seen.add(found.version)
                    if answers != self._known[found.version][place : place + 2]:
                        self.mixed.append(found.version)
                with self._lock:
                    self.asked += 1


class Killer(threading.Thread):
    """Kills one process every so often; `killed` tells which.

    Args:
        victims: returns the processes that may be killed now.
        every_s: seconds between kills.
    """

    def __init__(self, victims: Callable[[], Sequence[int]], every_s: float, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []
        self._victims = victims
        self._every_s = every_s
        self._draw = random.Random(seed)
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        due = time.monotonic() + self._every_s
        while not self._done.wait(max(0.2, due - time.monotonic())):
            if victims := self._victims():
                self.killed.append(self._draw.choice(list(victims)))
                os.kill(self.killed[-1], signal.SIGKILL)
                due = time.monotonic() + self._every_s

    def close(self) -> None:
        self._done.set()
        self.join()
