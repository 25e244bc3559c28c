"""A position in a label log that distinguishes it from the same position in another log.

Every log numbers its operations from 1. A log that is restored from an older copy assigns numbers
a second time. A number alone therefore does not say which operations a bundle or a replica has. A
place also names the log and the commit that ends there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xmcray.serving.schema import Operation


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The place right after an operation.

    Attributes:
        number: number of the operation; 0 is before the first one.
        commit: hash of the commit that ends with it, or of the log's first line; "" if unknown.
        log: identity of the log; "" if unknown. Earlier versions wrote none.
    """

    number: int = 0
    commit: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """Operations that came together.

    Attributes:
        operations: the operations, or the last of them if a reader has the others.
        place: the place right after them.
    """

    operations: Sequence[Operation]
    place: LogPlace


BEGINNING = LogPlace()  # before all operations


def place_in(about: Mapping[str, Any], model: str) -> LogPlace:
    """The place after the operations in a bundle, as it was recorded.

    Args:
        about: `about` of the bundle's manifest.
        model: name of the model whose log is meant.
    Returns:
        The place; `BEGINNING` if the bundle records none, or one of another model.
    """
    record = about.get("label_log") or {}
    if record.get("model") != model:
        return BEGINNING
    return LogPlace(int(record["number"]), record.get("commit", ""), record.get("log", ""))


def record_of(model: str, place: LogPlace) -> dict[str, Any]:
    """The value of `about["label_log"]` in the manifest of a bundle, which `place_in` reads."""
    record = {"model": model, "number": place.number}
    if place.commit:
        record["commit"] = place.commit
    if place.log:
        record["log"] = place.log
    return record


def compacted_from(about: Mapping[str, Any], model: str) -> str | None:
    """SHA-256 of the bundle from which a compacted one differs by operations of its log alone.

    Args:
        about: `about` of the compacted bundle's manifest.
        model: name of the model whose log is meant.
    Returns:
        None if the bundle was not compacted, or changed or exported again since.
    """
    record = about.get("label_log") or {}
    if record.get("model") != model or record.get("about") != _hash_of(about):
        return None
    origin: str | None = record.get("from")
    return origin


def record_origin(about: dict[str, Any], origin: str) -> None:
    """Adds to `about["label_log"]` what `compacted_from` reads.

    Args:
        about: all that the manifest will say.
        origin: SHA-256 of the bundle that was compacted, or of the one that that was compacted from.
    """
    about["label_log"] |= {"from": origin, "about": _hash_of(about)}


def _hash_of(about: Mapping[str, Any]) -> str:
    """A hash of all but the record itself. Bundles that are made of this one copy the record."""
    rest = {key: value for key, value in about.items() if key != "label_log"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
