"""`prepare --append`: the corpus of old and new raw files, without preparing the old ones again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import Shell

from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import detect
from xmcray.data.pipeline import append, prepare
from xmcray.data.writer import CorpusWriter
from xmcray.errors import DataError
from xmcray.storage.artifact import open_artifact

pytestmark = pytest.mark.usefixtures("cluster")
SMALL: dict[str, Any] = {"name": "small", "shard_rows": 16, "array_rows": 32}


def label(number: int) -> dict[str, Any]:
    """Several labels have the same text, and every ninth has none."""
    has_text = number % 9 != 0
    text = f"label number {number % 7}" if has_text else ""
    return {"uid": f"l{number}", "text": text}


def query_of(number: int, labels: dict[str, int]) -> dict[str, Any]:
    """A query and the relevance of its labels by their uids."""
    return {
        "uid": f"q{number}",
        "text": f"query {number % 5} about number {number % 11}",
        "labels": list(labels),
        "relevance": list(labels.values()),
    }


def query(number: int) -> dict[str, Any]:
    """Its one or two labels are old ones; every eleventh query has none."""
    numbers = sorted({number % 20, (3 * number) % 20})
    if number % 11 == 0:
        numbers = []
    return query_of(number, {f"l{n}": 1 + n % 2 for n in numbers})


def query_with_a_new_label(number: int) -> dict[str, Any]:
    return query_of(number, {"l26": 2, f"l{number % 20}": 1})


OLD = {
    "labels": [label(n) for n in range(20)],
    "train": [query(n) for n in range(70)],
    "test": [query(n) for n in range(200, 205)],
}
ADDED = {
    "labels": [label(n) for n in range(20, 27)],
    "train": [query_with_a_new_label(n) for n in range(70, 103)],
    "test": [query(n) for n in range(205, 211)],
}
ALL = {name: OLD[name] + ADDED[name] for name in OLD}
# Labels that new queries name but the corpus has: in another order, and one without its text.
REPEATED = [label(n) for n in range(19, 0, -1)] + [{"uid": "l0"}]
NEW = {**ADDED, "labels": REPEATED + ADDED["labels"]}


def write(folder: Path, files: dict[str, list[dict[str, Any]]], filters: str = "") -> Path:
    folder.mkdir()
    for name, rows in files.items():
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "filter_labels_train.txt").write_text(filters)
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Corpus:
    folder = tmp_path_factory.mktemp("old")
    raw = write(folder / "raw", OLD, "3 9\n3 3\n69 9\n")
    return prepare(detect(raw), folder / "c", **SMALL)


def assert_same_files(corpus: Corpus, expected: Corpus) -> None:
    """All but the manifest and the card, which tell the two ways apart."""
    paths = {path.relative_to(expected.path) for path in expected.path.rglob("*") if path.is_file()}
    paths -= {Path("manifest.json"), Path("card.yaml")}
    assert len(paths) > 30
    for path in paths:
        assert (corpus.path / path).read_bytes() == (expected.path / path).read_bytes(), path


def shares_file(corpus: Corpus, old: Corpus, name: str) -> bool:
    """Whether a shard is a hard link to that of the old corpus."""
    return (corpus.path / name).samefile(old.path / name)


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def appended(old: Corpus, new: Path, out: Path, **options: Any) -> Corpus:
    _, manifest = open_artifact(old.path, KIND)
    return append(old, manifest, detect(new), out, **options)


def test_it_equals_a_preparation_of_everything_and_links_full_shards(
    old: Corpus, tmp_path: Path
) -> None:
    # Filter pairs count rows of their own files: row 2 of the new queries is row 72 of all.
    # Line 19 of the new label file is label l0, and line 26 is label l26.
    new = write(tmp_path / "new", NEW, "2 19\n2 26\n")
    everything = write(tmp_path / "all", ALL, "3 9\n3 3\n69 9\n72 0\n72 26\n")

    corpus = appended(old, new, tmp_path / "c2")
    # Both have the vocabulary of the old rows.
    with pytest.MonkeyPatch.context() as patch:
        trained = "xmcray.data.pipeline._Pipeline.trained_tokenizer"
        patch.setattr(trained, lambda self: old.tokenizer())
        expected = prepare(detect(everything), tmp_path / "expected", **SMALL)

    assert_same_files(corpus, expected)
    assert corpus.card.odd == expected.card.odd
    assert corpus.card.averages == expected.card.averages
    assert corpus.card.frequency == expected.card.frequency
    assert corpus.card.num_train == 103
    assert corpus.card.num_labels == 27

    # A shard has 16 rows and an array 32. Shards 0 to 3 hold 64 of the 70 old queries, and shard 4
    # has room for new ones.
    assert shares_file(corpus, old, "train/00003.parquet")
    assert shares_file(corpus, old, "train/00001.tokens.npy")
    assert shares_file(corpus, old, "labels/00000.parquet")
    assert not shares_file(corpus, old, "train/00004.parquet")
    Corpus.open(old.path)
    Corpus.open(corpus.path)


@pytest.mark.parametrize(
    ("split", "row", "message"),
    [
        ("labels", {"uid": "l3", "text": "changed"}, "label 'l3' has another text than in"),
        ("train", {"uid": "q69", "text": "x"}, "uid 'q69' is that of a query of the corpus"),
        ("train", {"uid": "x", "labels": ["l5"]}, "'l5' is not the uid of a label"),
    ],
    ids=["a label's text changed", "a query came again", "its label is in no new file"],
)
def test_one_rule_for_each_contradiction(
    old: Corpus, tmp_path: Path, split: str, row: dict[str, Any], message: str
) -> None:
    files = {"labels": [label(9), label(30)], "train": [{"text": "x", "labels": ["l9"]}]}
    files[split].append(row)
    new = write(tmp_path / "new", files)

    with pytest.raises(DataError, match=message) as caught:
        appended(old, new, tmp_path / "c2")

    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == ["new"]


def test_nothing_is_left_behind_where_it_fails(
    old: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = write(tmp_path / "new", NEW)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CorpusWriter, "finish", fail)
    with pytest.raises(KeyboardInterrupt):
        appended(old, new, tmp_path / "c2")

    assert entries(tmp_path) == ["new"]
    Corpus.open(old.path)


def test_skipped_rows_and_a_split_that_stays(old: Corpus, tmp_path: Path) -> None:
    # Query 69 is in the corpus. Integers are lines of the new label file: l9, and a new label.
    new_query = {"uid": "new", "text": "x", "labels": [0, 1]}
    files = {"labels": [label(9), label(30)], "train": [query(69), new_query]}
    new = write(tmp_path / "new", files)

    corpus = appended(old, new, tmp_path / "c2", on_error="skip")

    assert corpus.card.rejected == {"train": 1}
    train = corpus.split("train")
    new_row = np.array([70])  # behind the 70 old queries
    assert train.uids(new_row) == ["new"]
    assert train.positives(new_row).values.tolist() == [9, 20]
    assert corpus.label_uids(np.array([9, 20])) == ["l9", "l30"]
    # The new folder has no test queries.
    assert shares_file(corpus, old, "test/00000.parquet")
    assert corpus.card.num_test == 5


def test_rows_that_the_corpus_left_out_stay_counted(old: Corpus, tmp_path: Path) -> None:
    corpus = old
    for uid in ("first", "second"):
        files = {"labels": [label(9)], "train": [query(69), {"uid": uid, "text": "x"}]}
        new = write(tmp_path / uid, files)
        corpus = appended(corpus, new, tmp_path / f"c-{uid}", on_error="skip")

    assert corpus.card.rejected == {"train": 2}
    lines = (corpus.path / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 1]


def test_options_of_the_corpus_cannot_change(old: Corpus, tmp_path: Path, shell: Shell) -> None:
    new = write(tmp_path / "new", NEW)
    command = f"prepare --append {old.path} {new} --out {tmp_path}/c2"

    message = shell.error(f"{command} --tokenizer bert-base-uncased")

    assert "tokenizer is as in" in message
    assert not (tmp_path / "c2").exists()
