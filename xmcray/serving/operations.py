"""Checks of label operations, and which of them a bundle holds already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xmcray.errors import DataError
from xmcray.serving.schema import Operation


def check_operations(operations: Sequence[Operation], exists: Callable[[str], bool]) -> None:
    """Checks a batch of operations, one after the other, before it is appended to the log.

    Args:
        exists: whether a label of this uid exists before the batch.
    Raises:
        DataError: an existing label is added, a missing one updated or deleted, or a text is
            missing.
    """
    exists_now: dict[str, bool] = {}  # changes within the batch
    for place, operation in enumerate(operations, 1):
        uid = operation.uid
        what = f"operation {place} of {len(operations)}: {operation.op} of label {uid[:80]!r}"
        there = exists_now[uid] if uid in exists_now else exists(uid)
        if operation.op == "add" and there:
            raise DataError(f"{what}, which is there already; update it")
        if operation.op != "add" and not there:
            raise DataError(f"{what}, which is not there; add it first")
        _check_content(operation, what)
        exists_now[uid] = operation.op != "delete"


def _check_content(operation: Operation, what: str) -> None:
    has_attributes = operation.attributes is not None
    if operation.op == "delete":
        if operation.text is not None or has_attributes:
            raise DataError(f"{what} has a text or attributes, expected the uid alone")
        return
    attributes_alone = operation.op == "update" and operation.text is None and has_attributes
    if not attributes_alone and not (operation.text or "").strip():
        raise DataError(f"{what} has no text, expected one: the label's vector is computed from it")


def number_in(about: Mapping[str, Any], model: str) -> int:
    """Number of the last operation in a bundle.

    Args:
        about: `about` of the bundle's manifest.
        model: name of the model whose log is meant.
    Returns:
        The number; 0 if the bundle holds no operation of this model's log.
    """
    held = about.get("label_log") or {}
    if held.get("model") != model:
        return 0
    return int(held["number"])
