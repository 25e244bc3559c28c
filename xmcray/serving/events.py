"""What an event log holds: searches, and what users did with the answers.

With redaction it holds keyed hashes (HMAC-SHA256) in the place of queries' texts, and of the ids of
requests, which a client chooses. The key is the file `key` in the folder of the log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel

from xmcray.errors import StorageError, readable
from xmcray.serving import schema
from xmcray.serving.security import MIN_LENGTH, new_token_file

KEY = "key"
NOT_COLLECTED = "this server collects no events; start it with --collect-events"
MAX_QUEUED = 32 << 20  # letters of texts and uids that wait, in a log and in a replica
MAX_ANSWERS = 100  # of each text; the rest is not stored
_HASH_DIGITS = 32

EventT = TypeVar("EventT", "SearchEvent", "FeedbackEvent")


class SearchEvent(BaseModel):
    """What a request searched for, and what it was shown.

    Attributes:
        request: id of the request.
        version: SHA-256 of the bundle that answered.
        texts: its texts.
        answers: for each text the uids of its answers, best first.
        redacted: true if `request` and `texts` are hashes.
    """

    kind: Literal["search"] = "search"
    request: str
    version: str
    texts: list[str]
    answers: list[list[str]]
    redacted: bool | None = None

    @classmethod
    def of(cls, texts: Sequence[str], response: schema.SearchResponse) -> SearchEvent:
        """The event of an answered search, whose answers have uids."""
        answers = []
        for result in response.results:
            shown = result.answers[:MAX_ANSWERS]
            answers.append([answer.uid or "" for answer in shown])
        # Without a validation, which would cost a large answer half a millisecond.
        return cls.model_construct(
            request=response.request_id,
            version=response.version,
            texts=list(texts),
            answers=answers,
        )

    @property
    def num_letters(self) -> int:
        """Letters of texts and uids: about the memory that it takes."""
        num_letters = sum(map(len, self.texts))
        for uids in self.answers:
            num_letters += sum(map(len, uids))
        return num_letters


class FeedbackEvent(BaseModel):
    """What a user did with an answer.

    Attributes:
        request: id of the search.
        text: place of the text in the search.
        label: uid of the label.
        label_text: its text at that time.
        event: what the user did.
    """

    kind: Literal["feedback"] = "feedback"
    request: str
    text: int
    label: str
    label_text: str
    event: schema.EventName


def redacted(event: EventT, key: bytes) -> EventT:
    """The event with hashes in the place of what a client wrote."""
    changes: dict[str, object] = {"request": keyed_hash(event.request, key)}
    if isinstance(event, SearchEvent):
        changes["texts"] = [keyed_hash(text, key) for text in event.texts]
        changes["redacted"] = True
    return event.model_copy(update=changes)


def keyed_hash(text: str, key: bytes) -> str:
    """32 hexadecimal digits that cannot be computed without the key."""
    stripped = text.strip().encode(errors="surrogatepass")
    return hmac.new(key, stripped, hashlib.sha256).hexdigest()[:_HASH_DIGITS]


def redaction_key(folder: Path) -> bytes:
    """The key of an event log; made, readable by its owner alone, if there is none.

    Args:
        folder: of the log.
    Raises:
        StorageError: the key is damaged.
    """
    path = new_token_file(folder / KEY)
    with readable(f"{path} cannot be read", "restore it, or move the event log away"):
        key = path.read_text(encoding="ascii").strip()
    if len(key) < MIN_LENGTH:
        raise StorageError(f"{path} is damaged, expected a key; restore it or move the log away")
    return key.encode()
