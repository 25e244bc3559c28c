"""Which operations make sense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from operations import add, delete, update

from xmcray.errors import DataError
from xmcray.serving.log_place import (
    BEGINNING,
    LogPlace,
    compacted_from,
    place_in,
    record_of,
    record_origin,
)
from xmcray.serving.operations import check_operations
from xmcray.serving.schema import Operation


class OneLabel:
    """A label of the uid "old"; texts of question marks have no token."""

    @property
    def retriever(self) -> OneLabel:
        return self

    def label_ids(self, uids: Iterable[str]) -> dict[str, int]:
        return {uid: 0 for uid in uids if uid == "old"}

    def has_tokens(self, text: str) -> bool:
        return text != "??"


ONE_LABEL: Any = OneLabel()


def test_a_bundle_says_what_it_holds() -> None:
    # The record of an earlier version.
    about = {"label_log": {"model": "m", "number": 7}}
    assert place_in(about, "m") == LogPlace(7)
    assert place_in(about, "n") == place_in({}, "m") == BEGINNING
    for place in (LogPlace(7), LogPlace(7, "ab", "cd")):
        assert place_in({"label_log": record_of("m", place)}, "m") == place


def test_a_compacted_bundle_names_the_one_before_until_it_is_changed() -> None:
    about = {"changes": [{"operations": 7}], "label_log": record_of("m", LogPlace(7))}
    assert compacted_from(about, "m") is None
    record_origin(about, "abcd")
    assert compacted_from(about, "m") == "abcd"
    assert compacted_from(about, "n") is None
    # What is made of it keeps the record: a prefix of its vectors, or a bundle with added labels.
    assert compacted_from({**about, "prefix_dim": 8}, "m") is None
    assert compacted_from({**about, "changes": [*about["changes"], {"added": 1}]}, "m") is None


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (
            [add("new"), add("old")],
            "operation 2 of 2: add of label 'old', which is there already; update it",
        ),
        (
            [update("new", "x")],
            "operation 1 of 1: update of label 'new', which is not there; add it first",
        ),
        (
            [delete("old"), delete("old")],
            "operation 2 of 2: delete of label 'old', which is not there",
        ),
        ([Operation(op="add", uid="new")], "add of label 'new' has no text"),
        ([update("old", " ")], "update of label 'old' has no text"),
        ([update("old", "??")], "the text of label 'old' has no token"),
        (
            [Operation(op="delete", uid="old", text="x")],
            "delete of label 'old' has a text or attributes",
        ),
    ],
)
def test_operations_that_make_no_sense(operations: list[Operation], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_operations(operations, ONE_LABEL)


def test_operations_that_follow_from_each_other() -> None:
    attributes = Operation(op="update", uid="old", attributes={"n": 1})
    batch = [
        attributes,
        delete("old"),
        add("old"),
        update("old", "x"),
        add("new"),
        delete("new"),
        add("new"),
    ]
    check_operations(batch, ONE_LABEL)
