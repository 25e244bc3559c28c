"""A client that changes labels of its own while the server is killed, and knows what each of them must be."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

import data_sets

from xmcray.client import Client, ClientError
from xmcray.serving.schema import Operation

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import TEXTS

PACE_S = 0.15


class Writer(threading.Thread):
    """Changes labels of its own, and knows what each of them must be.

    Attributes:
        acknowledged: number of operations.
        unknown: number of requests without an answer, which were looked up.
        wrong: number of mistakes by kind.
        text: text of each of its labels, None if there must be no such label.
    """

    def __init__(self, client: Client, number: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged = self.unknown = self._made = 0
        self.wrong = Counter[str]()
        self.done = threading.Event()
        self.text: dict[str, str | None] = {f"w{number}-{i}": None for i in range(40)}
        self._client = client
        self._draw = random.Random(seed)
        self.start()

    def run(self) -> None:
        while not self.done.wait(self._draw.uniform(0, 2 * PACE_S)):
            batch = [
                self._operation(uid)
                for uid in self._draw.sample(sorted(self.text), self._draw.choice((1, 1, 3)))
            ]
            if self._sent(batch):
                self.acknowledged += len(batch)
                self.text |= {operation.uid: operation.text for operation in batch}
            else:
                self.check()

    def check(self) -> None:
        """Compares every label with what it must be."""
        for uid, text in self.text.items():
            answered_text = self.read(uid)
            if answered_text != text:
                kind = (
                    "lost"
                    if answered_text is None
                    else "resurrected"
                    if text is None
                    else "of another text"
                )
                self.wrong[kind] += 1

    def read(self, uid: str) -> str | None:
        """The label's text as the server has it; asks until there is an answer."""
        for _ in range(10):
            try:
                return self._client.label(uid).text
            except ClientError as error:
                if error.kind == "not-found":
                    return None
        raise RuntimeError("the server does not come back")

    def _operation(self, uid: str) -> Operation:
        self._made += 1
        text = f"{self._draw.choice(TEXTS)} {' '.join(self._draw.choices(TEXTS[0].split(), k=self._made % 7))}"
        if self.text[uid] is None:
            return Operation(op="add", uid=uid, text=text)
        if self._draw.random() < 0.5 and text != self.text[uid]:
            return Operation(op="update", uid=uid, text=text)
        return Operation(op="delete", uid=uid)

    def _sent(self, batch: Sequence[Operation]) -> bool:
        """Whether the batch was applied; looked up if there was no answer. All of it or nothing."""
        try:
            self._client.change_labels(batch)
        except ClientError as error:
            if error.status == 409:
                self.wrong[f"refused ({error.kind})"] += 1
                return False
            self.unknown += 1
            time.sleep(1.0)
            done = {self.read(operation.uid) == operation.text for operation in batch}
            self.wrong["torn batch"] += len(done) > 1
            return done == {True}
        return True
