"""Events: what is acknowledged is exported, what is redacted is nowhere, and searching goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_bundle_of
from collectors import kill_collectors
from corpora import planted_corpus
from served import Served, served
from shell import run_command

from xmcray.data.formats import detect
from xmcray.errors import StorageError
from xmcray.serving import event_log, event_sender
from xmcray.serving.event_files import event_files, read_lines
from xmcray.serving.event_log import EventLog
from xmcray.serving.event_sender import EventSender
from xmcray.serving.events import FeedbackEvent, SearchEvent
from xmcray.serving.log_database import LogDatabase

SECRETS = ("planted-secret-alpha", "planted-secret-beta")
DAY_S = 86_400


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("events") / "b", "texts")


async def test_feedback_does_not_overtake_a_search_on_its_way() -> None:
    arrived: list[str] = []
    on_its_way = asyncio.Event()
    may_arrive = asyncio.Event()

    class Coordinator:
        async def note_searches(self, name: str, events: list[SearchEvent], dropped: int) -> None:
            on_its_way.set()
            await may_arrive.wait()
            arrived.extend(event.request for event in events)

        async def add_feedback(self, name: str, event: FeedbackEvent) -> int:
            arrived.append(event.event)
            return 1

    sender = EventSender(Coordinator())
    search = SearchEvent(request="r1", version="v", texts=["a"], answers=[["u"]])
    sender.note_searches("default", [search])
    await on_its_way.wait()
    feedback = FeedbackEvent(request="r1", text=0, label="u", label_text="", event="accept")
    acknowledged = asyncio.create_task(sender.add_feedback("default", feedback))
    await asyncio.sleep(0)
    may_arrive.set()
    await acknowledged
    assert arrived == ["r1", "accept"]


async def test_searches_that_wait_in_a_replica_are_bounded_by_their_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_sender, "MAX_QUEUED", 10)
    arrived: list[tuple[int, int]] = []

    class Coordinator:
        async def note_searches(self, name: str, events: list[SearchEvent], dropped: int) -> None:
            arrived.append((len(events), dropped))

    sender = EventSender(Coordinator())
    search = SearchEvent(request="r1", version="v", texts=["four"], answers=[["u"]])
    for _ in range(3):
        sender.note_searches("default", [search])
    await sender._send()
    # What was sent makes room.
    sender.note_searches("default", [search])
    await sender._send()
    assert arrived == [(2, 1), (1, 0)]


async def react(one: Served, search: Any, place: int, event: str, status: int = 200) -> Any:
    """Feedback about an answer of a search."""
    label = search["results"][0]["answers"][place]["uid"]
    body = {"request_id": search["request_id"], "label": label, "event": event}
    answer = await one.ask("/v1/feedback", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def export(folder: Path, out: Path, *options: str) -> int:
    return run_command(f"events export {folder}/state --out {out}", *options)


async def test_a_text_of_the_corpus_stays_in_its_split(bundle: Path, tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path)
    [trained] = corpus.split("train").texts(np.array([0]))
    [tested] = corpus.split("test").texts(np.array([0]))
    texts = [f"{trained.upper()} ", tested, "a text of its own"]
    async with served(tmp_path, {"default": bundle}, collect_events=True) as one:
        for text in texts:
            search = await one.search([text])
            await react(one, search, 0, "click")
    # A log that was not redacted has no key, and an export makes none.
    (tmp_path / "texts").write_text("a text of its own\n")
    assert export(tmp_path, tmp_path / "with-texts", "--texts", f"{tmp_path}/texts") == 0
    assert not list((tmp_path / "state").glob("**/key"))
    for hold_out, train, test in (("0", [0, 2], [1]), ("0.999999", [0], [1, 2])):
        raw = tmp_path / f"raw-{hold_out}"
        assert export(tmp_path, raw, "--data", str(corpus.path), "--hold-out", hold_out) == 0
        assert [row["text"] for row in rows_of(raw / "train.jsonl")] == [texts[i] for i in train]
        assert [row["text"] for row in rows_of(raw / "test.jsonl")] == [texts[i] for i in test]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_feedback_becomes_graded_queries(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uids: list[str] = []
    versions: list[str] = []

    async with served(tmp_path, {"default": bundle}, collect_events=True) as one:
        assert (await one.ask("/v1/models")).json()["models"][0]["feedback"]
        await one.search(["a search without feedback"])
        search = await one.search(["sort join"], k=4, fields=["score"])
        uids.extend(answer["uid"] for answer in search["results"][0]["answers"])
        versions.append(search["version"])
        await react(one, search, 0, "click")
        await react(one, search, 2, "purchase")
        await react(one, search, 3, "accept")
        await react(one, search, 3, "reject")
        # While the server runs.
        assert await asyncio.to_thread(export, tmp_path, tmp_path / "raw", "--hold-out", "0") == 0
        await one.change({"op": "delete", "uid": uids[2]})
    [row] = rows_of(tmp_path / "raw" / "train.jsonl")
    assert row["text"] == "sort join"
    assert row["labels"] == [uids[0], uids[2]]
    assert row["relevance"] == [1.0, 3.0]
    assert row["positions"] == [1, 3]
    assert row["version"] == versions[0]
    raw = detect(tmp_path / "raw")
    [query] = raw.queries("train", 2, pytest.fail)
    assert (query.text, query.label_ids, query.relevance) == ("sort join", (0, 1), (1.0, 3.0))
    assert export(tmp_path, tmp_path / "later", "--hold-out", "0", "--grade", "click=0.5") == 0
    [row] = rows_of(tmp_path / "later" / "train.jsonl")
    assert (row["labels"], row["relevance"]) == ([uids[0]], [0.5]), "the other label was removed"
    last = json.loads((tmp_path / "later" / "manifest.json").read_text())["about"]["last"]
    capsys.readouterr()
    assert export(tmp_path, tmp_path / "no", "--after", str(last)) == 2
    error = capsys.readouterr().err
    assert "has no label that users liked after event 6" in error
    assert export(tmp_path, tmp_path / "no", "--after", str(last + 1)) == 2
    error = capsys.readouterr().err
    assert "ends with event 6, expected 7 or a later one: it was begun anew" in error
    assert not (tmp_path / "no").exists()


async def test_redaction_leaves_no_text_on_the_disk(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    alpha, beta = SECRETS

    async with served(
        tmp_path, {"default": bundle}, collect_events=True, redact_events=True
    ) as one:
        body = {"texts": [f"sort {alpha}"], "k": 3}
        search = (await one.ask("/v1/search", body, headers={"x-request-id": beta})).json()
        assert search["request_id"] == beta
        await react(one, search, 1, "accept")
        refused = await one.ask(
            "/v1/feedback", {"request_id": beta, "label": alpha, "event": "click"}
        )
        assert refused.status_code == 404
        # What is on the disk before the log is closed, too.
        assert_absent(tmp_path / "state")
    assert_absent(tmp_path / "state")
    assert not any(secret in caplog.text for secret in SECRETS)
    key = tmp_path / "state" / "default" / "events" / "key"
    assert key.stat().st_mode & 0o077 == 0
    texts = tmp_path / "texts.txt"
    texts.write_text(f"another text\nsort {alpha}\n")
    assert export(tmp_path, tmp_path / "raw") == 2, "the text is unknown"
    assert export(tmp_path, tmp_path / "raw", "--texts", str(texts), "--hold-out", "0") == 0
    [row] = rows_of(tmp_path / "raw" / "train.jsonl")
    assert (row["text"], row["positions"]) == (f"sort {alpha}", [2])


def assert_absent(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".sqlite" for path in files)
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS), path


async def test_what_cannot_be_feedback_is_refused(bundle: Path, tmp_path: Path) -> None:
    async with served(tmp_path, {"default": bundle}, collect_events=True) as one:
        search = await one.search(["sort"], k=2)
        body = {"request_id": search["request_id"], "label": "u1", "event": "accept"}
        wrong: list[tuple[dict[str, Any], int]] = [
            ({"request_id": "of no search"}, 404),
            ({"label": "of no label"}, 404),
            ({"text": 1}, 422),
            ({"event": "like"}, 422),
            ({"more": 1}, 422),
        ]
        for change, status in wrong:
            answer = await one.ask("/v1/feedback", body | change)
            assert answer.status_code == status, answer.text
        assert (await one.ask("/v1/feedback", body, token=None)).status_code == 401
        # Only the right one is in the log.
        assert (await one.ask("/v1/feedback", body)).json() == {"model": "default", "number": 2}

    async with served(tmp_path / "off", {"default": bundle}) as one:
        search = await one.search(["sort"])
        await react(one, search, 0, "click", status=404)
        assert not list((tmp_path / "off").rglob("events"))


async def test_a_failing_disk_drops_searches_and_refuses_feedback(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, {"default": bundle}, collect_events=True) as one:

        def full(*_: object) -> None:
            raise StorageError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(LogDatabase, "append", full)
            search = await one.search(["sort"])
            problem = await react(one, search, 0, "accept", status=409)
            assert "not acknowledged: no space left" in problem["detail"]
        # The search was dropped with it.
        await react(one, search, 0, "accept", status=404)
        await react(one, await one.search(["sort"]), 0, "accept")
        metrics = (await one.ask("/metrics")).text
        labels = '{model="default",replica="coordinator"}'
        assert f"xmcray_events_dropped_total{labels} 1.0" in metrics
        assert f"xmcray_events_total{labels} 2.0" in metrics


def test_a_killed_collector_loses_nothing_acknowledged(tmp_path: Path) -> None:
    assert kill_collectors(tmp_path / "events", kills=1) > 0


class Clock:
    """The wall clock of a log."""

    now = 2e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


def opened(folder: Path, clock: Clock, max_bytes: int = 1 << 30) -> EventLog:
    return EventLog(folder, "m", redact=False, max_days=10, max_bytes=max_bytes, clock=clock)


def add(log: EventLog, request: str, text: str = "text") -> int:
    """A search and feedback about it."""
    log.note(SearchEvent(request=request, version="v", texts=[text], answers=[["u"]]))
    return log.add_feedback(feedback(request)).result()


def feedback(request: str) -> FeedbackEvent:
    return FeedbackEvent(request=request, text=0, label="u", label_text="t", event="click")


def texts_in(folder: Path) -> list[str]:
    texts = []
    for line in read_lines(folder, "m"):
        texts += [event["texts"][0] for event in line.operations if event["kind"] == "search"]
    return texts


def test_events_are_kept_for_some_days(tmp_path: Path, clock: Clock) -> None:
    for day in range(25):
        # Also feedback that comes after a restart.
        with opened(tmp_path, clock) as log:
            add(log, f"r{day}", f"day {day}")
        with opened(tmp_path, clock) as log:
            log.add_feedback(feedback(f"r{day}")).result()
            if day > 12:
                with pytest.raises(Exception, match="no search 'r1' of this model"):
                    log.add_feedback(feedback("r1")).result()
        clock.now += DAY_S
    kept = texts_in(tmp_path)
    assert kept == [f"day {day}" for day in range(25 - len(kept), 25)]
    assert 9 <= len(kept) <= 11


def test_old_events_are_removed_although_no_new_file_can_be_begun(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise StorageError("the disk is full")

    with opened(tmp_path, clock) as log:
        for day in range(25):
            if day == 12:
                monkeypatch.setattr(event_log, "new_event_file", full)
            with contextlib.suppress(StorageError):
                add(log, f"r{day}", f"day {day}")
            clock.now += DAY_S
    # The newest file cannot be removed while it is written.
    assert len(event_files(tmp_path)) == 1


def test_the_log_stays_within_its_bytes(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path, clock, max_bytes=1 << 20) as log:
        for number in range(200):
            clock.now += 1
            assert add(log, f"r{number}", f"{number} " + "x" * 20_000) == 2 * number + 2
        assert log.counts().num_bytes < 2 << 20
    kept = texts_in(tmp_path)
    assert len(event_files(tmp_path)) > 2
    assert 20 < len(kept) < 60
    assert kept[-1].startswith("199 ")


def test_searches_beyond_the_queue_are_dropped(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_QUEUED", 10)
    with opened(tmp_path, clock) as log:
        log.note(SearchEvent(request="r", version="v", texts=["x" * 11], answers=[["u"]]))
        assert log.counts().dropped == 1


def test_damage_is_one_line(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state" / "default" / "events"
    for number in range(3):
        clock.now += 2 * DAY_S
        with EventLog(
            folder, "default", redact=False, max_days=10, max_bytes=1 << 30, clock=clock
        ) as log:
            add(log, f"r{number}")
    first, middle, last = event_files(folder)
    content = middle.path.read_bytes()
    place = content.index(b'"text"')
    damages = {
        "damaged": content[:place] + b"?" + content[place + 1 :],
        "is damaged": content[: len(content) // 2],
        "0 bytes": b"",
        "file is missing": None,
    }
    for reason, damaged in damages.items():
        middle.path.unlink()
        if damaged is not None:
            middle.path.write_bytes(damaged)
        assert export(tmp_path, tmp_path / "raw") == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1, error
        middle.path.write_bytes(content)
    with pytest.raises(StorageError, match="has no event log"):
        list(read_lines(tmp_path / "state", "default"))
    last.path.write_bytes(last.path.read_bytes()[:5000])
    with pytest.raises(StorageError, match="is damaged"):
        opened(folder, clock)
    assert first.path.exists()
