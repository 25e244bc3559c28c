"""Serving under faults as a state machine: seeded operations, kills and damage against a dictionary of labels.

The server runs in a process of its own, without a port. A dictionary says which labels there must be. What must hold:

    an acknowledged operation    is there from then on, after each kill, restart, swap and compaction
    a refused one                changes nothing, and says why in one line
    one without an answer        the server was killed meanwhile: all of its batch is there or nothing of it
    a search                     finds only labels that are there, with their present texts
    damaged state                is read exactly or refused with one line, and undone it is read exactly
    a full disk                  refuses changes and answers searches; with room again, changes go on
    tokens                       only those that the file names now are accepted
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundles import TEXTS, WORDS, write_bundle_of
from file_changes import BYTES
from served import ADMIN, TOKEN
from serving_process import MODEL, Server

from xmcray.storage.manifest import CARD

EVENTS = {  # with how often each is drawn
    "change labels": 20,
    "change labels wrongly": 3,
    "search": 6,
    "swap": 2,
    "swap to something wrong": 2,
    "compact": 1,
    "kill while labels change": 3,
    "kill while bundles are swapped": 1,
    "end and start": 1,
    "damage the state": 2,
    "fill the disk": 2,
    "rotate a token": 2,
    "empty a token file": 1,
    "clock jumps": 1,
}


@dataclass
class Label:
    """What a label must be."""

    text: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """What the sequences did and met; `faults` must stay empty."""

    sequences: int = 0
    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    labels_compared: int = 0
    searches: int = 0
    faults: list[str] = field(default_factory=list)


class ServingMachine:
    """Two bundles, and sequences of events.

    Args:
        folder: for everything that is written.
        disk: a folder on a small file system of its own for the state, which can be filled; without
            one no disk is filled.
        num_events: of a sequence.
    """

    def __init__(self, folder: Path, disk: Path | None = None, num_events: int = 40) -> None:
        self.folder = folder
        self.disk = disk
        self.num_events = num_events
        self.tally = Tally()
        self.bundles = folder / "bundles"
        self.bundles.mkdir()
        write_bundle_of(self.bundles / "first", "texts")
        write_bundle_of(self.bundles / "second", "textsIVF", shard_rows=300)

    def run_sequence(self, seed: int) -> None:
        """Plays one sequence; faults are added to the tally with the seed that repeats them."""
        sequence = _Sequence(self, seed)
        try:
            sequence.play()
        except AssertionError as error:
            history = "; ".join(sequence.history[-12:])
            self.tally.faults.append(f"seed {seed}: ... {history}: {error}")
        finally:
            sequence.server.close()
            if self.disk is not None:
                shutil.rmtree(sequence.home, ignore_errors=True)
            self.tally.sequences += 1


class _Sequence:
    """One state folder and what has happened to it."""

    def __init__(self, machine: ServingMachine, seed: int) -> None:
        self.machine = machine
        self.draw = random.Random(seed)
        self.home = (machine.disk or machine.folder) / f"serving-{seed}"
        self.home.mkdir()
        # Hard links cost nothing, and each sequence may damage its own bundles.
        for name in ("first", "second"):
            source = machine.bundles / name
            shutil.copytree(
                source,
                self.home / name,
                copy_function=os.link if machine.disk is None else shutil.copy2,
            )
        self.state = self.home / "state"
        self.server = Server(self.home, self.home / "first")
        self.labels = {f"u{number}": Label(text) for number, text in enumerate(TEXTS)}
        self.touched: set[str] = set()
        self.swappable = [str(self.home / "first"), str(self.home / "second")]
        self.compacted = 0
        self.admin = ADMIN
        self.history: list[str] = []

    def play(self) -> None:
        self._start()
        events = list(EVENTS)
        if self.machine.disk is None:
            events.remove("fill the disk")
        weights = [EVENTS[name] for name in events]
        for name in self.draw.choices(events, weights, k=self.machine.num_events):
            self.machine.tally.events[name] += 1
            self.history.append(name)
            getattr(self, "_" + name.replace(" ", "_"))()
        self._compare()
        self._end_and_start()

    # --- Events ---

    def _change_labels(self) -> None:
        labels, operations = self._batch()
        status, text = self._admin("labels", {"operations": operations})
        assert status == 200, text
        self._acknowledge(labels, operations)

    def _change_labels_wrongly(self) -> None:
        """One operation of the batch does not fit: all are refused."""
        _, operations = self._batch()
        existing = self.draw.choice(list(self.labels))
        wrong = self.draw.choice(
            (
                {"op": "add", "uid": existing, "text": "sparse"},
                {"op": "delete", "uid": "not there"},
                {"op": "update", "uid": "nor this", "text": "sparse"},
                {"op": "add", "uid": "empty", "text": "   "},
                {"op": "rename", "uid": existing, "text": "sparse"},
                {"op": "delete"},
            )
        )
        used = {operation["uid"] for operation in operations}
        if wrong.get("uid") not in used:
            operations.insert(self.draw.randint(0, len(operations)), wrong)
            status, text = self._admin("labels", {"operations": operations})
            assert status in (409, 422), (status, text)
            assert "Traceback" not in text
        self._compare()

    def _search(self) -> None:
        uid = self.draw.choice(list(self.labels))
        text = self.labels[uid].text
        status, answer = self.server.ask("ask", "/v1/search", {"texts": [text], "k": 10}, TOKEN)
        assert status == 200, (status, answer)
        for label in json.loads(answer)["results"][0]["answers"]:
            there = self.labels.get(label["uid"])
            assert there is not None, f"found {label['uid']}, which was deleted"
            assert label["text"] == there.text, f"found an earlier text of {label['uid']}"
        self.machine.tally.searches += 1

    def _swap(self) -> None:
        bundle = self.draw.choice(self.swappable)
        status, text = self._admin("swap", {"bundle": bundle, "recall_floor": 0})
        assert status == 200, text
        self._compare()

    def _swap_to_something_wrong(self) -> None:
        damaged = self.home / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.home / "second", damaged)
        # The card, a page for readers, is no part of what the manifest proves.
        files = [path for path in damaged.rglob("*") if path.is_file() and path.name != CARD]
        path = self.draw.choice(sorted(files))
        data = path.read_bytes()
        path.unlink()
        if self.draw.random() < 0.8:
            path.write_bytes(BYTES[0](data, self.draw))
        bundle = self.draw.choice((str(damaged), str(damaged), "/etc", str(self.home / "none")))
        body = {"bundle": bundle, "recall_floor": 0}
        status, text = self._admin("swap", body)
        assert status in (409, 422), (bundle, path, status, text)
        shutil.rmtree(damaged)
        self._search()

    def _compact(self) -> None:
        out = str(self.home / f"compacted-{self.compacted}")
        self.compacted += 1
        status, text = self._admin("compact", {"out": out})
        assert status == 200, text
        self.swappable.append(out)

    def _kill_while_labels_change(self) -> None:
        labels, operations = self._batch()
        body = {"operations": operations}
        self.server.send("ask", "/admin/v1/labels", body, self.admin)
        time.sleep(self.draw.choice((0.0, self.draw.random() * 0.01, 0.05)))
        self.server.kill()
        self._start()
        uids = [operation["uid"] for operation in operations]
        found = self.server.ask("labels", uids)
        before = self._expected(self.labels, uids)
        after = self._expected(labels, uids)
        # Its answer was lost, so both are right, but nothing between.
        assert found in (before, after), "half of a batch"
        if found == after:
            self._acknowledge(labels, operations, count=False)
        self._compare()

    def _kill_while_bundles_are_swapped(self) -> None:
        body = {"bundle": self.draw.choice(self.swappable), "recall_floor": 0}
        self.server.send("ask", "/admin/v1/swap", body, self.admin)
        time.sleep(self.draw.random() * 0.3)
        self.server.kill()
        self._start()
        self._compare()

    def _end_and_start(self) -> None:
        self.server.close()
        self._start()
        self._compare()

    def _damage_the_state(self) -> None:
        if self.draw.random() < 0.5:
            self.server.kill()
        else:
            self.server.close()
        folder = self.state / MODEL
        files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        # SQLite builds its shared memory anew at each start.
        files = [path for path in files if not path.name.endswith("-shm")]
        path = self.draw.choice(sorted(files))
        data = path.read_bytes()
        changes = list(BYTES)
        if path.name.endswith("-wal"):
            # A write-ahead log that is cut between two commits is what a crash leaves.
            changes = [change for change in BYTES if change.__name__ != "_truncate"]
        path.write_bytes(self.draw.choice(changes)(data, self.draw))
        self.history.append(path.name)
        kept = {other: other.read_bytes() for other in files if other.exists()}
        refusal = self._start_or_refuse()
        self.history.append(f"-> {refusal[:200] or 'ready'}")
        self.machine.tally.outcomes["refused" if refusal else "ready"] += 1
        if refusal:
            for other, content in kept.items():
                assert other.read_bytes() == content, f"{other.name} was changed by a refusal"
            path.write_bytes(data)
            self._start()
        self._compare()

    def _fill_the_disk(self) -> None:
        disk = self.machine.disk
        assert disk is not None
        filler = disk / "filler"
        room = shutil.disk_usage(disk).free - self.draw.choice((0, 0, 4096, 20_000))
        filler.write_bytes(bytes(max(0, room)))
        try:
            for _ in range(self.draw.randint(1, 4)):
                labels, operations = self._batch()
                status, text = self._admin("labels", {"operations": operations})
                assert status in (200, 409), (status, text)
                self.machine.tally.outcomes["full" if status == 409 else "had room"] += 1
                if status == 200:
                    self._acknowledge(labels, operations)
            self._search()
        finally:
            filler.unlink()
        self._change_labels()
        self._compare()

    def _rotate_a_token(self) -> None:
        path = self.state / "admin-token"
        new = "".join(self.draw.choices("abcdefgh", k=24))
        self._write_tokens(path, f"{new}\n{self.admin}\n")
        for token in (new, self.admin):
            assert self._admin_status(token) == 200
        old, self.admin = self.admin, new
        self._write_tokens(path, f"{new}\n")
        assert self._admin_status(old) == 401
        assert self._admin_status(new) == 200

    def _empty_a_token_file(self) -> None:
        path = self.state / "admin-token"
        self._write_tokens(path, self.draw.choice(("", "\n\n", "\udcff", "short\n")))
        assert self._admin_status(self.admin) == 401
        status, _ = self.server.ask("ask", "/healthz", None, None)
        assert status == 200
        self._write_tokens(path, f"{self.admin}\n")
        assert self._admin_status(self.admin) == 200

    def _clock_jumps(self) -> None:
        self.server.ask("jump", self.draw.choice((-3600.0, 3600.0, 86_400.0)))
        self._change_labels()
        self._search()

    # --- Helpers ---

    def _start(self) -> None:
        refusal = self._start_or_refuse()
        assert not refusal, refusal

    def _start_or_refuse(self) -> str:
        refusal = self.server.start()
        # `served` writes its own tokens at each start.
        if not refusal:
            self._write_tokens(self.state / "admin-token", f"{self.admin}\n")
        return refusal

    def _write_tokens(self, path: Path, text: str) -> None:
        temporary = path.with_name(".new-token")
        descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", errors="surrogateescape"))
        temporary.replace(path)

    def _admin(self, action: str, body: Any) -> tuple[int, str]:
        status, text = self.server.ask("ask", f"/admin/v1/{action}", body, self.admin)
        return status, text

    def _admin_status(self, token: str) -> int:
        """Status of a change that a token asks for: an update of a label to what it is."""
        uid = next(iter(self.labels))
        operation = {"op": "update", "uid": uid, "text": self.labels[uid].text}
        status, _ = self.server.ask("ask", "/admin/v1/labels", {"operations": [operation]}, token)
        if status == 200:
            self.machine.tally.acknowledged += 1
            self.touched.add(uid)
        return int(status)

    def _batch(self) -> tuple[dict[str, Label], list[dict[str, Any]]]:
        """Operations that fit, and the labels after them."""
        labels = dict(self.labels)
        operations: list[dict[str, Any]] = []
        used: set[str] = set()
        for _ in range(self.draw.choice((1, 1, 2, 5, 20))):
            known = self.draw.random() < 0.5
            uid = self.draw.choice(list(labels)) if known else f"new{self.draw.randrange(60)}"
            if uid in used:
                continue
            used.add(uid)
            old = labels.get(uid)
            op = "add" if old is None else self.draw.choice(("update", "update", "delete"))
            operation: dict[str, Any] = {"op": op, "uid": uid}
            if op == "delete":
                del labels[uid]
            else:
                operation["text"] = " ".join(self.draw.choices(WORDS, k=3))
                attributes = {} if old is None else dict(old.attributes)
                if self.draw.random() < 0.5:
                    operation["attributes"] = {"n": self.draw.randrange(9)}
                    attributes |= operation["attributes"]
                labels[uid] = Label(operation["text"], attributes)
            operations.append(operation)
        return labels, operations

    def _acknowledge(
        self, labels: dict[str, Label], operations: list[dict[str, Any]], count: bool = True
    ) -> None:
        self.labels = labels
        self.touched |= {operation["uid"] for operation in operations}
        if count:
            self.machine.tally.acknowledged += len(operations)

    def _expected(
        self, labels: dict[str, Label], uids: list[str]
    ) -> dict[str, tuple[str, dict[str, Any]] | None]:
        expected: dict[str, tuple[str, dict[str, Any]] | None] = {}
        for uid in uids:
            label = labels.get(uid)
            expected[uid] = None if label is None else (label.text, label.attributes)
        return expected

    def _compare(self) -> None:
        """All labels that were ever changed, and some others, are what they must be."""
        others = self.draw.sample(sorted(self.labels), 5)
        uids = sorted(self.touched | set(others))
        found = self.server.ask("labels", uids)
        expected = self._expected(self.labels, uids)
        different = [uid for uid in uids if found[uid] != expected[uid]]
        assert not different, [(uid, found[uid], expected[uid]) for uid in different[:3]]
        self.machine.tally.labels_compared += len(uids)
