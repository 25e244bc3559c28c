"""Raw files of an event log, as `xmcray prepare` reads them: queries with graded labels.

    RAW/train.jsonl, test.jsonl   uid, text, labels, relevance; and what is for people and programs
                                  of your own: positions, version, at
    RAW/labels.jsonl              uid, and the text of labels that the corpus lacks
    RAW/removed_labels.jsonl      uids of the labels that were removed from the server
    RAW/manifest.json             which events these are, and the hashes of the files

A query is one text of one search. Its labels are those that users liked. A label that was rejected
later, or removed from the server, is none of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xmcray.errors import DataError, StorageError
from xmcray.serving.event_files import event_files, read_lines
from xmcray.serving.events import KEY, keyed_hash, redaction_key
from xmcray.serving.label_log import removed_labels
from xmcray.serving.schema import EventName
from xmcray.serving.state_folder import EVENTS, LABELS, folder_name
from xmcray.storage.artifact import new_artifact, refuse_existing

logger = logging.getLogger(__name__)

KIND = "events"
REMOVED_UIDS = "removed_labels.jsonl"  # as data/appended_labels.py reads it
GRADES: Mapping[str, float] = {"click": 1.0, "accept": 2.0, "purchase": 3.0}


class NoFeedbackError(DataError):
    """An event log has no label that users liked after some event."""


@dataclass(slots=True)
class GradedQuery:
    """One text of a search, and the labels that users liked.

    Attributes:
        uid: unique among all exports of one log.
        text: the text.
        version: SHA-256 of the bundle that answered.
        at: Unix time of the first feedback, seconds.
        shown: uids of its answers, best first.
        relevance: the largest grade of each label.
    """

    uid: str
    text: str
    version: str
    at: float
    shown: Sequence[str]
    relevance: dict[str, float] = field(default_factory=dict)

    def add(self, label: str, event: EventName, grades: Mapping[str, float]) -> None:
        """Adds what a user did with a label; a rejection takes back what came before."""
        if event == "reject":
            self.relevance.pop(label, None)
        else:
            grade_before = self.relevance.get(label, 0.0)
            self.relevance[label] = max(grades[event], grade_before)

    def row(self) -> dict[str, Any]:
        """The row of the raw file."""
        places = {uid: place for place, uid in enumerate(self.shown, start=1)}
        return {
            "uid": self.uid,
            "text": self.text,
            "labels": list(self.relevance),
            "relevance": list(self.relevance.values()),
            # A label that was not among the stored answers has none.
            "positions": [places.get(label) for label in self.relevance],
            "version": self.version,
            "at": self.at,
        }


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        first: number of the first event that was read: the one after the export before.
        last: number of the last event in the log; the next export goes on after it.
        train: queries in train.jsonl.
        test: queries in test.jsonl.
        labels: labels in labels.jsonl.
        left_out: texts with feedback that gave no query: all labels rejected or removed, the
            search removed from the log, or its text unknown because of redaction.
        gone: labels that the server has again, but the corpus has removed for good. Feedback about
            them counts nowhere.
    """

    first: int
    last: int
    train: int
    test: int
    labels: int
    left_out: int
    gone: int


def export_events(
    state_dir: str | Path,
    model: str,
    out: str | Path,
    *,
    split_of: Callable[[str], str],
    after: int = 0,
    grades: Mapping[str, float] | None = None,
    known_labels: Container[str] = (),
    gone_labels: Container[str] = (),
    texts: Sequence[str] = (),
) -> Exported:
    """Writes raw files of the feedback in an event log.

    Args:
        state_dir: state folder of the server, which may run.
        model: name of the model.
        out: folder to write, which must not exist.
        split_of: "train" or "test" for the text of a query; the same in every export.
        after: number of the last event of the export before.
        grades: relevance by event; `GRADES` holds for the others.
        known_labels: uids of labels whose texts are left out, because their corpus has them.
        gone_labels: uids of labels that the corpus has removed, and cannot learn again.
        texts: texts that redacted searches may have had.
    Raises:
        NoFeedbackError: there is no feedback after that event.
        StorageError: the log is missing or damaged, ends before that event, or the folder exists.
    """
    refuse_existing(out)
    folder = Path(state_dir) / folder_name(model)
    reading = _Reading(folder, model, after, {**GRADES, **(grades or {})}, texts)
    reading.read()
    removed = removed_labels(folder / LABELS, model)
    gone = [uid for uid in reading.liked_labels() if uid in gone_labels and uid not in removed]
    if gone:
        logger.warning(
            "feedback about %d labels such as %r is left out: the corpus has removed them, and the"
            " server has them again; add a label that comes back under a new uid",
            len(gone),
            min(gone)[:80],
        )
    queries = _without_removed(reading.queries.values(), removed.union(gone))
    if not queries:
        raise NoFeedbackError(
            f"{folder / EVENTS} has no label that users liked after event {after}, expected some;"
            " export again when there is more feedback"
        )
    about: dict[str, Any] = {"model": model}
    with new_artifact(out, KIND, about) as target:
        rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
        for query in queries:
            rows[split_of(query.text)].append(query.row())
        for split, rows_of_split in rows.items():
            _write(target / f"{split}.jsonl", rows_of_split)
        label_rows = {}
        for query in queries:
            for uid in query.relevance:
                text = "" if uid in known_labels else reading.label_texts[uid]
                label_rows[uid] = {"uid": uid, "text": text}
        _write(target / REMOVED_UIDS, [{"uid": uid} for uid in sorted(removed)])
        exported = Exported(
            first=after + 1,
            last=reading.last,
            train=len(rows["train"]),
            test=len(rows["test"]),
            labels=_write(target / "labels.jsonl", list(label_rows.values())),
            left_out=len(reading.unknown) + len(reading.queries) - len(queries),
            gone=len(gone),
        )
        about |= asdict(exported)
    return exported


def _without_removed(queries: Iterable[GradedQuery], removed: Container[str]) -> list[GradedQuery]:
    """Takes removed labels out of queries; returns the queries that still have a liked label."""
    liked = []
    for query in queries:
        for uid in list(query.relevance):
            if uid in removed:
                del query.relevance[uid]
        if query.relevance:
            liked.append(query)
    return liked


class _Reading:
    """Reads the feedback of a log, and the searches that it is about.

    Attributes:
        queries: by search and place of the text.
        label_texts: the newest text of each label with feedback.
        last: number of the last event.
        unknown: request id and place of texts with feedback whose search or text is not known.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        after: int,
        grades: Mapping[str, float],
        texts: Sequence[str],
    ) -> None:
        self.queries: dict[tuple[int, int], GradedQuery] = {}
        self.label_texts: dict[str, str] = {}
        self.last = 0
        self._folder = folder / EVENTS
        self._model = model
        self._after = after
        self._grades = grades
        self._texts = texts
        self.unknown: set[tuple[str, int]] = set()
        # Number and event of the newest search of each request id that has feedback.
        self._searches: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._text_by_hash: dict[str, str] = {}

    def read(self) -> None:
        """Reads all events, in order."""
        requests = self._requests_with_feedback()
        self._text_by_hash = self._hashed_texts()
        for at, number, event in self._events():
            # What came since the first reading is for the next export.
            if number > self.last:
                break
            request = str(event["request"])
            if event["kind"] == "search":
                if request in requests:
                    self._searches[request] = (number, event)
            elif number > self._after:
                self.label_texts[event["label"]] = event["label_text"]
                query = self._query_of(event, number, at)
                if query is None:
                    self.unknown.add((request, int(event["text"])))
                else:
                    query.add(event["label"], event["event"], self._grades)

    def liked_labels(self) -> set[str]:
        """Uids of the labels that a query has."""
        uids: set[str] = set()
        for query in self.queries.values():
            uids.update(query.relevance)
        return uids

    def _query_of(self, feedback: Mapping[str, Any], number: int, at: float) -> GradedQuery | None:
        """The query that feedback is about, made at its first feedback; None if it is not known.

        Args:
            feedback: the event.
            number: of the event.
            at: its Unix time, seconds.
        """
        request = str(feedback["request"])
        place = int(feedback["text"])
        if request not in self._searches:
            return None
        search_number, search = self._searches[request]
        key = (search_number, place)
        if key not in self.queries:
            text = search["texts"][place]
            if search.get("redacted"):
                text = self._text_by_hash.get(text)
            if text is None:
                return None
            self.queries[key] = GradedQuery(
                uid=f"{request}:{place}:{number}",
                text=text,
                version=search["version"],
                at=at,
                shown=search["answers"][place],
            )
        return self.queries[key]

    def _events(self) -> Iterator[tuple[float, int, Mapping[str, Any]]]:
        """Time, number and content of each event."""
        for line in read_lines(self._folder, self._model):
            for number, event in enumerate(line.operations, line.first):
                yield line.at, number, event

    def _requests_with_feedback(self) -> set[str]:
        requests = set()
        # All events may be too old to be kept; then the newest file says what number comes next.
        self.last = max((file.begin for file in event_files(self._folder)), default=0)
        for _, number, event in self._events():
            self.last = number
            if event["kind"] == "feedback" and number > self._after:
                requests.add(str(event["request"]))
        if self.last < self._after:
            raise StorageError(
                f"{self._folder} ends with event {self.last}, expected {self._after} or a later one:"
                " it was begun anew, or is an old copy; restore it, or export all of it (--after 0;"
                " for `continual`, another --out)"
            )
        return requests

    def _hashed_texts(self) -> dict[str, str]:
        """The texts that redacted searches may have had, by hash."""
        # An export makes no key: without one, nothing was redacted.
        if not self._texts or not (self._folder / KEY).exists():
            return {}
        key = redaction_key(self._folder)
        return {keyed_hash(text, key): text for text in self._texts}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Writes rows as JSON lines, unless there are none; returns their number."""
    if rows:
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    return len(rows)
