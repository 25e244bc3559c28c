"""Checks of label operations."""

from __future__ import annotations

from collections.abc import Sequence

from xmcray.errors import DataError
from xmcray.serving.schema import Operation
from xmcray.serving.snapshot import Snapshot


def check_operations(operations: Sequence[Operation], snapshot: Snapshot) -> None:
    """Checks a batch of operations, one after the other, before it is appended to the log.

    Args:
        operations: the batch.
        snapshot: the labels before the batch.
    Raises:
        DataError: an existing label is added, a missing one updated or deleted, or a text is
            missing or has no token.
    """
    existing = snapshot.label_ids(operation.uid for operation in operations)
    exists_now: dict[str, bool] = {}  # changes within the batch
    for place, operation in enumerate(operations, 1):
        uid = operation.uid
        where = f"operation {place} of {len(operations)}"
        what = f"{where}: {operation.op} of label {uid[:80]!r}"
        exists = exists_now.get(uid, uid in existing)
        if operation.op == "add" and exists:
            raise DataError(f"{what}, which is there already; update it")
        if operation.op != "add" and not exists:
            raise DataError(f"{what}, which is not there; add it first")
        _check_content(operation, what)
        exists_now[uid] = operation.op != "delete"
    # Last: finding tokens takes longest.
    for operation in operations:
        if operation.text is not None and not snapshot.retriever.has_tokens(operation.text):
            raise DataError(
                f"the text of label {operation.uid[:80]!r} has no token, expected some:"
                " its vector is made of it; reword it"
            )


def _check_content(operation: Operation, what: str) -> None:
    has_attributes = operation.attributes is not None
    if operation.op == "delete":
        if operation.text is not None or has_attributes:
            raise DataError(f"{what} has a text or attributes, expected the uid alone")
        return
    attributes_alone = operation.op == "update" and operation.text is None and has_attributes
    if not attributes_alone and not (operation.text or "").strip():
        raise DataError(f"{what} has no text, expected one: the label's vector is computed from it")
