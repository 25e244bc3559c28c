"""Which labels fulfil a condition: compared with a loop over labels; and attributes in bundles, from the command on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundles import TEXTS, write_bundle_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import delete, update
from shell import Shell

from xmcray.errors import BundleError, ConfigError, DataError
from xmcray.retrieval.attributes import FILE, LabelAttributes, checked_attributes
from xmcray.retrieval.bundle import read_attributes, read_settings
from xmcray.retrieval.labels import NewLabel, add_labels, annotate_labels, remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.log_place import Commit, LogPlace
from xmcray.serving.schema import Operation
from xmcray.serving.snapshot import Snapshot
from xmcray.storage.artifact import open_artifact


@dataclasses.dataclass(frozen=True)
class Range:
    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None


ROWS: list[dict[str, Any]] = [
    {"lang": "de", "year": 1999, "price": 1.5, "new": True},
    {"lang": "fr", "year": 2001, "price": 2},
    {},
    {"lang": "", "year": 2**62 + 1, "new": False},
    {"lang": "de", "price": -0.5},
]
KNOWN = LabelAttributes(5).with_rows(5, dict(enumerate(ROWS)))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"lang": "de"}, [0, 4]),
        ({"lang": ""}, [3]),
        ({"lang": "it"}, []),
        ({"lang": ["fr", "it", ""]}, [1, 3]),
        ({"lang": []}, []),
        ({"year": 1999}, [0]),
        ({"year": 1999.0}, [0]),
        ({"year": 1999.5}, []),
        ({"year": 2**62}, []),
        ({"year": [2**62 + 1, 10**400, -(2**63), 2.0**63]}, [3]),
        ({"year": Range()}, [0, 1, 3]),
        ({"year": Range(gt=1999)}, [1, 3]),
        ({"year": Range(gte=1999, lt=2001)}, [0]),
        ({"year": Range(gt=1998.5, lte=2000.5)}, [0]),
        ({"year": Range(gte=1999.5, lt=2001.5)}, [1]),
        ({"year": Range(gt=10**400)}, []),
        ({"year": Range(lt=float("inf"))}, [0, 1, 3]),
        ({"price": 2}, [1]),
        ({"price": [1.5, 10**400]}, [0]),
        ({"price": Range(gt=-(10**400), lt=1.5)}, [4]),
        ({"price": Range(gte=-0.5, lte=1.5)}, [0, 4]),
        ({"new": True}, [0]),
        ({"new": False}, [3]),
        ({"new": [True, False]}, [0, 3]),
        ({"lang": "de", "price": Range(lt=1)}, [4]),
    ],
)
def test_conditions(conditions: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    KNOWN.save(tmp_path)
    for attributes in (KNOWN, LabelAttributes.load(tmp_path / FILE)):
        assert np.flatnonzero(attributes.mask(conditions)).tolist() == expected


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"yaer": 1}, "unknown attribute 'yaer'; did you mean 'year'?"),
        ({"lang": 1}, "attribute 'lang' is of type string, found 1: compare it with that type"),
        ({"year": "1999"}, "attribute 'year' is of type int64, found '1999'"),
        ({"year": True}, "attribute 'year' is of type int64, found True"),
        ({"new": 1}, "attribute 'new' is of type bool, found 1"),
        ({"price": [1.5, "x"]}, "attribute 'price' is of type float64, found 'x'"),
        ({"price": None}, "attribute 'price' is of type float64, found None"),
        (
            {"lang": Range(gt=1)},
            "attribute 'lang' is of type string, expected a number for a range",
        ),
        ({"new": Range()}, "attribute 'new' is of type bool, expected a number for a range"),
        (
            {"year": Range(gt=float("nan"))},
            "bound 'gt' of attribute 'year' is nan, expected a number",
        ),
    ],
)
def test_conditions_that_make_no_sense(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KNOWN.mask(conditions)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError, match="unknown attribute 'x'; no label of this bundle has any"):
        LabelAttributes(3).mask({"x": 1})


VALUES = {
    "word": st.sampled_from(["", "a", "b", "é"]),
    "flag": st.booleans(),
    "count": st.integers(-3, 3) | st.sampled_from([2**63 - 1, -(2**63)]),
    "size": st.floats(-2, 2) | st.integers(-2, 2),
}
SETS = st.fixed_dictionaries({}, optional=VALUES)
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.dictionaries(st.integers(0, 9), SETS, max_size=4)), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, chosen=st.data())
def test_changes_and_conditions_against_a_plain_list(steps: Any, chosen: st.DataObject) -> None:
    attributes, plain = LabelAttributes(0), list[dict[str, Any]]()
    history = [(attributes, list(plain))]
    for more, rows in steps:
        plain = plain + [{} for _ in range(more)]
        rows = {label: row for label, row in rows.items() if label < len(plain)}
        for label, row in rows.items():
            plain[label] = row
        attributes = attributes.with_rows(len(plain), rows)
        history.append((attributes, list(plain)))
    for made, expected in history:  # older ones are what they were
        assert made.of(list(range(len(expected)))) == expected
    for name in attributes.names:
        value = chosen.draw(VALUES[name])
        found = attributes.mask({name: [value]}).tolist()
        assert (
            found
            == attributes.mask({name: value}).tolist()
            == [row.get(name) == value for row in plain]
        )
        if name in ("count", "size"):
            low = chosen.draw(st.floats(-3, 3))
            expected_above = [name in row and row[name] > low for row in plain]
            assert attributes.mask({name: Range(gt=low)}).tolist() == expected_above
            within = [name in row and low <= row[name] < 1 for row in plain]
            assert attributes.mask({name: Range(gte=low, lt=1)}).tolist() == within


def test_a_file_keeps_values_and_types(tmp_path: Path) -> None:
    assert LabelAttributes(5).save(tmp_path) == {FILE}
    assert not (tmp_path / FILE).exists()
    changed = KNOWN.with_rows(7, {0: {"lang": "fr"}, 5: {"lang": "it", "year": 3}})
    assert changed.save(tmp_path) == {FILE}
    read = LabelAttributes.load(tmp_path / FILE)
    assert (read.num_labels, read.names) == (7, ("lang", "new", "price", "year"))
    expected = [{"lang": "fr"}, *ROWS[1:], {"lang": "it", "year": 3}, {}]
    assert read.of(range(7)) == changed.of(range(7)) == expected  # type: ignore[arg-type]
    assert [type(value) for value in read.of([3])[0].values()] == [str, bool, int]
    assert pq.read_schema(tmp_path / FILE).types == [
        pa.large_string(),
        pa.bool_(),
        pa.float64(),
        pa.int64(),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "attributes are '[]', expected an object"),
        ({"": 1}, "attribute '' has no name of 1 to 100 characters"),
        ({"x" * 101: 1}, "has no name of 1 to 100 characters"),
        ({"a": None}, "attribute 'a' is 'None', expected a string, true, false or a number"),
        ({"a": [1]}, "attribute 'a' is '[1]', expected"),
        ({"a": float("nan")}, "attribute 'a' is nan, expected a finite number"),
        ({"a": 2**63}, "attribute 'a' is an integer of 64 bits, expected at most 63"),
        ({"a": "\ud800"}, "attribute 'a' is not UTF-8"),
        ({"\ud800": 1}, "attribute '\\ud800' is not UTF-8"),
    ],
)
def test_sets_that_are_none(row: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_attributes(row)
    assert message in str(caught.value)
    with pytest.raises(ConfigError):
        KNOWN.with_rows(5, {0: row})


def test_integers_between_floats_equal_none_and_bound_as_they_are() -> None:
    """2^53 + 1 is the first integer that is no float, and rounds to 2^53; 2^53 + 3 rounds up."""
    low, high = 2.0**53, 2.0**53 + 4
    attributes = LabelAttributes(2).with_rows(2, {0: {"x": low}, 1: {"x": high}})
    assert attributes.mask({"x": 2**53}).tolist() == [True, False]
    for number in (2**53 + 1, 2**53 + 3):
        assert not attributes.mask({"x": number}).any()
        for bounds in (Range(gte=number), Range(gt=number)):
            assert attributes.mask({"x": bounds}).tolist() == [False, True]
        for bounds in (Range(lte=number), Range(lt=number)):
            assert attributes.mask({"x": bounds}).tolist() == [True, False]


def test_an_attribute_has_one_type() -> None:
    for row in ({"year": "x"}, {"year": True}, {"lang": 1}, {"new": 0}, {"price": "1"}):
        (name,) = row
        with pytest.raises(
            ConfigError, match=f"attribute '{name}' of other labels is of type .*: give it one type"
        ):
            KNOWN.with_rows(5, {2: row})
    with pytest.raises(ConfigError, match="attribute 'a' of other labels"):
        LabelAttributes(2).with_rows(2, {0: {"a": 1}, 1: {"a": "1"}})
    with pytest.raises(
        ConfigError,
        match="attribute 'year' has fractions and the integer 4611686018427387905, which is no float64",
    ):
        KNOWN.with_rows(5, {0: {"year": 0.5}})
    few = KNOWN.with_rows(5, {3: {}}).with_rows(5, {2: {"year": 0.5}})
    assert few.of([0, 2]) == [ROWS[0], {"year": 0.5}]
    with pytest.raises(
        ConfigError, match="labels would have 132 different attributes, expected at most 128"
    ):
        KNOWN.with_rows(5, {0: {f"n{i}": 1 for i in range(128)}})


def test_the_type_of_an_attribute_can_be_corrected() -> None:
    texts = LabelAttributes(3).with_rows(3, {0: {"price": "19.5"}, 1: {"price": "7"}})
    with pytest.raises(ConfigError, match="attribute 'price' of other labels is of type string"):
        texts.with_rows(3, {0: {"price": 19.5}})

    # All of its labels at once, also with new labels among them.
    numbers = texts.with_rows(4, {0: {"price": 19.5}, 1: {}, 3: {"price": 7}})
    assert numbers.of([0, 1, 2, 3]) == [{"price": 19.5}, {}, {}, {"price": 7}]
    assert numbers.mask({"price": Range(gt=10)}).tolist() == [True, False, False, False]

    # Or first without it, which also frees its place among the names.
    without = texts.with_rows(3, {0: {}, 1: {"lang": "de"}})
    assert without.names == ("lang",)
    assert without.with_rows(3, {2: {"price": True}}).of([2]) == [{"price": True}]

    # An integer that is no float does not count if its label gets another value.
    large = LabelAttributes(2).with_rows(2, {0: {"year": 2**62 + 1}, 1: {"year": 3}})
    assert large.with_rows(2, {0: {"year": 0.5}}).of([0, 1]) == [{"year": 0.5}, {"year": 3}]


def test_a_million_labels_take_milliseconds() -> None:
    rng, number = np.random.default_rng(0), 1_000_000
    some = {i: {"lang": "abcd"[i % 4], "price": float(p)} for i, p in enumerate(rng.random(1000))}
    attributes = LabelAttributes(number).with_rows(number, some)
    conditions: dict[str, Any] = {"lang": ["a", "b"], "price": Range(gte=0.5)}

    def took() -> float:
        begin = time.perf_counter()
        attributes.mask(conditions)
        attributes.of(range(20))  # type: ignore[arg-type]
        return time.perf_counter() - begin

    assert min(took() for _ in range(5)) < 0.05


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("attributes") / "plain", "texts")


def attributes_of(path: Path) -> LabelAttributes:
    return read_attributes(path, read_settings(path), Retriever.load(path).labels.removed)


def test_attributes_come_with_labels_and_later(bundle: Path, tmp_path: Path) -> None:
    assert attributes_of(bundle).names == ()
    add_labels(bundle, [NewLabel("plain", TEXTS[0])], tmp_path / "b")
    assert not (tmp_path / "b" / FILE).exists()
    new = [NewLabel("n1", TEXTS[1], {"lang": "de", "year": 2000}), NewLabel("n2", TEXTS[2])]
    add_labels(tmp_path / "b", new)
    sets: dict[str, dict[str, Any]] = {
        "u3": {"lang": "fr", "price": 1.5},
        "n1": {"lang": "it"},
        "n2": {},
    }
    assert annotate_labels(tmp_path / "b", sets, tmp_path / "c") == len(TEXTS) + 3
    before, after = attributes_of(tmp_path / "b"), attributes_of(tmp_path / "c")
    ids = Retriever.load(tmp_path / "c").labels.ids_by_uid()
    assert before.of([ids[uid] for uid in ("u3", "n1", "n2")]) == [
        {},
        {"lang": "de", "year": 2000},
        {},
    ]
    assert after.of([ids[uid] for uid in ("u3", "n1", "n2")]) == [sets["u3"], sets["n1"], {}]
    remove_labels(tmp_path / "c", ["u3"])
    add_labels(tmp_path / "c", [NewLabel("late", TEXTS[3])])
    last = attributes_of(tmp_path / "c")
    assert last.num_labels == len(TEXTS) + 4
    assert np.flatnonzero(last.mask({"lang": ["fr", "it"]})).tolist() == [ids["n1"]]
    # No label that is left has a price, so that it may be of another type.
    annotate_labels(tmp_path / "c", {"n1": {"lang": "it", "price": "high"}})
    manifest = open_artifact(tmp_path / "c", "bundle")[1]
    assert FILE in manifest.files
    assert [change.get("annotated") for change in manifest.about["changes"]] == [
        None,
        None,
        3,
        None,
        None,
        1,
    ]
    with pytest.raises(DataError, match="label 'nobody' is not in"):
        annotate_labels(tmp_path / "c", {"nobody": {}})
    with pytest.raises(ConfigError, match="give it one type"):
        annotate_labels(tmp_path / "c", {"u1": {"lang": 7}})


def test_a_label_that_left_a_server_does_not_decide_the_type(bundle: Path) -> None:
    snapshot = Snapshot.load(str(bundle), "m", 1)
    priced = {"price": "high"}
    snapshot = snapshot.after([Operation(op="update", uid="u1", attributes=priced)])
    assert snapshot.attributes.names == ("price",)
    snapshot = snapshot.after([delete("u1")])
    assert snapshot.attributes.names == ()
    snapshot = snapshot.after([Operation(op="update", uid="u2", attributes={"price": 1.5})])
    # Another text makes another label of the same attributes.
    snapshot = snapshot.after([update("u2", TEXTS[0])])
    label_id = snapshot.label_id("u2")
    assert label_id == len(TEXTS)
    assert np.flatnonzero(snapshot.attributes.mask({"price": 1.5})).tolist() == [label_id]


@pytest.mark.parametrize("seed", range(6))
def test_how_commits_are_grouped_does_not_decide_the_type(bundle: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = Snapshot.load(str(bundle), "m", 1)
    one_by_one = start
    commits = []
    for number in range(1, 25):
        # Few labels, so that an attribute is often lost by all of them.
        uid = f"u{rng.integers(2)}"
        value = [1, 2, 0.5][rng.integers(3)]
        operation = [
            Operation(op="add", uid=uid, text=TEXTS[0], attributes={"n": value}),
            update(uid, TEXTS[rng.integers(len(TEXTS))]),
            delete(uid),
        ][rng.integers(3)]
        commits.append(Commit([operation], LogPlace(number)))
        one_by_one = one_by_one.after_commits(commits[-1:])
        together = start.after_commits(commits)
        assert together.attributes.names == one_by_one.attributes.names
        for label in ("u0", "u1"):
            label_id = one_by_one.label_id(label)
            assert together.label_id(label) == label_id
            if label_id is not None:
                expected = one_by_one.attributes.of([label_id])
                found = together.attributes.of([label_id])
                assert repr(found) == repr(expected), commits  # 1 is not 1.0


def test_attributes_that_all_labels_lose_stay_lost(bundle: Path, tmp_path: Path) -> None:
    annotate_labels(bundle, {"u1": {"lang": "de"}}, tmp_path / "b")
    annotate_labels(tmp_path / "b", {"u1": {}})
    assert attributes_of(tmp_path / "b").names == ()
    assert FILE not in open_artifact(tmp_path / "b", "bundle")[1].files


def test_a_damaged_file_of_attributes(bundle: Path, tmp_path: Path) -> None:
    good = LabelAttributes(len(TEXTS)).with_rows(len(TEXTS), {0: {"a": 1}})
    shutil.copytree(bundle, tmp_path / "b")
    good.with_rows(len(TEXTS) + 1, {}).save(tmp_path / "b")
    with pytest.raises(
        BundleError, match=f"has {len(TEXTS) + 1} rows, expected {len(TEXTS)}; annotate again"
    ):
        attributes_of(tmp_path / "b")
    for column in (pa.array([1] * len(TEXTS), pa.int8()), pa.array([float("inf")] * len(TEXTS))):
        pq.write_table(pa.table({"a": column}), tmp_path / "b" / FILE)
        with pytest.raises(
            BundleError, match=r"attributes\.parquet cannot be read \(ValueError: .*\); annotate"
        ):
            attributes_of(tmp_path / "b")
    (tmp_path / "b" / FILE).write_bytes(b"PAR1")
    with pytest.raises(BundleError, match="cannot be read"):
        attributes_of(tmp_path / "b")


BAD = {
    "none": ('{"uid": "u1"}', "x.jsonl:2: no attributes, expected an object"),
    "no uid": ('{"attributes": {}}', "x.jsonl:2: no uid"),
    "twice": ('{"uid": "u0", "attributes": {}}', "x.jsonl:2: duplicate uid 'u0'"),
    "null": (
        '{"uid": "u1", "attributes": {"a": null}}',
        "x.jsonl:2: attribute 'a' is 'None', expected a string",
    ),
    "number": (
        '{"uid": "u1", "attributes": 3}',
        "x.jsonl:2: attributes are '3', expected an object",
    ),
    "another type": (
        '{"uid": "u1", "attributes": {"a": "x"}}',
        "attribute 'a' of other labels is of type int64",
    ),
    "unknown uid": ('{"uid": "v", "attributes": {}}', "label 'v' is not in"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_one_line(name: str, bundle: Path, tmp_path: Path, shell: Shell) -> None:
    line, message = BAD[name]
    (tmp_path / "x.jsonl").write_text('{"uid": "u0", "attributes": {"a": 1}}\n' + line)
    command = f"labels annotate {bundle} {tmp_path}/x.jsonl --out {tmp_path}/b"
    assert message in shell.error(command)
    assert not (tmp_path / "b").exists()


def test_the_commands(bundle: Path, tmp_path: Path, shell: Shell) -> None:
    lines = [
        {"uid": "n", "text": "sort norm", "attributes": {"a": 1}},
        {"uid": "m", "text": "sort", "attributes": None},
    ]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "sets.jsonl").write_text('{"uid": "u0", "attributes": {"a": 2, "b": "x"}}')
    path = tmp_path / "b"
    shell.run(f"labels add {bundle} {tmp_path}/new.jsonl --out {path}")
    assert "has 562 labels" in shell.run(f"labels annotate {path} {tmp_path}/sets.jsonl")
    assert attributes_of(path).of([0, 1, 560, 561]) == [{"a": 2, "b": "x"}, {}, {"a": 1}, {}]
    (tmp_path / "new.jsonl").write_text('{"uid": "k", "text": "sort", "attributes": {"a": "1"}}')
    error = shell.error(f"labels add {path} {tmp_path}/new.jsonl")
    assert "attribute 'a' of other labels is of type int64, found '1': give it one type" in error
