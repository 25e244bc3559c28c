"""A position in a label log that distinguishes it from the same position in another log.

Every log numbers its operations from 1. A log that is restored from an older copy assigns numbers
a second time. A number alone therefore does not say which operations a bundle or a replica has. A
place also names the log and the commit that ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The place behind an operation.

    Attributes:
        number: number of the operation.
        commit: hash of the commit that ends with it, or of the log's first line; "" if unknown.
        log: identity of the log; "" if unknown. Earlier versions wrote none.
    """

    number: int = 0
    commit: str = ""
    log: str = ""


BEGINNING = LogPlace()  # before all operations


def place_in(about: Mapping[str, Any], model: str) -> LogPlace:
    """The place behind the operations in a bundle, as it was recorded.

    Args:
        about: `about` of the bundle's manifest.
        model: name of the model whose log is meant.
    Returns:
        The place; that before all operations if the bundle holds none of a log of this model.
    """
    held = about.get("label_log") or {}
    if held.get("model") != model:
        return BEGINNING
    return LogPlace(int(held["number"]), held.get("commit", ""), held.get("log", ""))


def record_of(model: str, place: LogPlace) -> dict[str, Any]:
    """What the manifest of a bundle records, for `place_in`."""
    record = {"model": model, "number": place.number}
    if place.commit:
        record["commit"] = place.commit
    if place.log:
        record["log"] = place.log
    return record
