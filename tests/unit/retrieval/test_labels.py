"""Labels join and leave a bundle: found at once by their own text, and nobody else's score changes by a bit."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundles import DIM, TEXTS, WORDS, write_bundle_of, write_fused, write_memory
from shell import Shell

from xmcray.data.tokens import train_wordpiece
from xmcray.errors import BundleError, DataError, StorageError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork
from xmcray.retrieval import labels as module
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import (
    NewLabel,
    add_labels,
    load_label_sides,
    remove_labels,
    with_labels,
)
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.new_vectors import new_vectors
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope, ShardBuild, ShardSubset
from xmcray.storage.artifact import exclusive, open_artifact
from xmcray.storage.manifest import finish_manifest
from xmcray.types import TopLabels

NEW = [
    NewLabel(f"new{i}", f"{a} {a} {b} {b} {b} {b}")
    for i, (a, b) in enumerate(zip(WORDS, WORDS[7:], strict=False))
]
PLANTED = [NewLabel(f"new{i}", f"w{i}x1 w{i}x1 w{i + 9}x2") for i in range(9)]
K = 20


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bundles by kind, each made once."""
    folder, made = tmp_path_factory.mktemp("labels"), {}

    def bundle(kind: str) -> Path:
        if kind not in made:
            if kind == "memory":
                made[kind] = write_memory(folder)
            elif kind == "fused":
                made[kind] = write_fused(bundle("memory"))
            else:
                made[kind] = write_bundle_of(folder / kind, kind)
        return made[kind]

    return bundle


def queries_of(retriever: Retriever, new: list[NewLabel]) -> Any:
    """So many queries that lists are scanned; fewer are answered by FAISS one by one."""
    return retriever.encode(texts_of_queries(new))


def texts_of_queries(new: list[NewLabel]) -> list[str]:
    """Texts of labels, of labels that join, and of planted queries."""
    planted = [f"w{i}x0 w{i}x1" for i in range(20)]
    return [*TEXTS[:250], *(label.text for label in new), *planted]


def bits(top: TopLabels) -> list[list[tuple[int, bytes]]]:
    """Of each query: answers in order, each with the bits of its score."""
    return [
        [(label, score.tobytes()) for label, score in zip(ids, scores, strict=True) if label >= 0]
        for ids, scores in zip(top.ids.tolist(), top.scores, strict=True)
    ]


def same_but(wanted: TopLabels, found: TopLabels, strangers: set[int]) -> int:
    """Asserts that both rank the labels that are no strangers alike, bit for bit; returns how many were met."""
    met = 0
    for one, other in zip(bits(wanted), bits(found), strict=True):
        known = [
            [answer for answer in answers if answer[0] not in strangers] for answers in (one, other)
        ]
        depth = min(map(len, known))
        assert known[0][:depth] == known[1][:depth]
        met += len(one) + len(other) - len(known[0]) - len(known[1])
    return met


@pytest.mark.parametrize(
    "kind", ["texts", "textsIVF", "rows", "rowsIVF", "both", "prototypes", "memory"]
)
def test_labels_join_and_leave(kind: str, bundles: Any, tmp_path: Path) -> None:
    source = bundles(kind)
    first = Retriever.load(source, threads=1)
    new = PLANTED if kind == "memory" else NEW
    own = first.encode([label.text for label in new])
    asked = [queries_of(first, new), own]
    depth = first.num_labels if kind == "memory" else K
    before = [first.top_labels(query_BD, depth) for query_BD in asked]
    assert add_labels(source, new[:2], tmp_path / "b") == first.num_labels + 2
    assert add_labels(tmp_path / "b", new[2:]) == first.num_labels + len(new)
    second = Retriever.load(tmp_path / "b", threads=1)
    assert second.is_exact == (not kind.endswith("IVF"))
    assert (second.labels.changed, first.labels.changed) == (True, False)
    joined = set(range(first.num_labels, second.num_labels))
    for query_BD, top in zip(asked, before, strict=True):
        assert same_but(top, second.top_labels(query_BD, depth), joined) > 0
    for label, answers in zip(new, second.search([label.text for label in new], K), strict=True):
        if kind != "prototypes":  # an untrained network makes them
            assert (answers[0].uid, answers[0].text) == (label.uid, label.text)
    # some of the export's best answers, and some that joined, leave
    gone = {*before[1].ids[:3, :2].ravel().tolist(), min(joined)}
    uids = [uid for uid, label in second.labels.ids_by_uid().items() if label in gone]
    assert remove_labels(tmp_path / "b", uids) == second.num_labels - len(gone)
    third = Retriever.load(tmp_path / "b", threads=1)
    for query_BD in asked:
        found = third.top_labels(query_BD, depth)
        assert not np.isin(found.ids, list(gone)).any()
        assert (found.ids[:, : depth - len(gone)] >= 0).all()
        assert same_but(second.top_labels(query_BD, depth), found, gone) > 0
    assert third.labels.ids_by_uid() == {
        uid: label for uid, label in second.labels.ids_by_uid().items() if label not in gone
    }
    assert open_artifact(tmp_path / "b", "bundle")[1].about["changes"][-1]["removed"] == len(gone)


def test_a_removed_label_may_come_back_under_a_new_number(bundles: Any, tmp_path: Path) -> None:
    remove_labels(bundles("texts"), ["u3"], tmp_path / "b")
    add_labels(tmp_path / "b", [NewLabel("u3", NEW[0].text)])
    answer = Retriever.load(tmp_path / "b").search([NEW[0].text], 1)[0][0]
    assert (answer.uid, answer.label_id) == ("u3", len(TEXTS))


def test_more_labels_than_a_shard_has_room_for(
    bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOM", 4)
    add_labels(bundles("texts"), NEW[:6], tmp_path / "parts")
    add_labels(tmp_path / "parts", NEW[6:])
    retriever = Retriever.load(tmp_path / "parts")
    assert [shard.stop - len(TEXTS) for shard in retriever.settings.shards] == [0, 8, 12]
    add_labels(bundles("texts"), NEW, tmp_path / "whole")
    texts = [label.text for label in NEW]
    parts = Retriever.load(tmp_path / "parts").search(texts, 3)
    whole = Retriever.load(tmp_path / "whole").search(texts, 3)
    for one, other in zip(parts, whole, strict=True):
        assert [answer.uid for answer in one] == [answer.uid for answer in other]
        # Products of other shapes may differ in the last bit.
        scores = [answer.score for answer in other]
        assert [answer.score for answer in one] == pytest.approx(scores, abs=1e-6)


def test_labels_that_join_one_by_one_lie_in_few_blocks(bundles: Any) -> None:
    # A block for each of them would cost every search after a change, and kilobytes of memory.
    retriever = Retriever.load(bundles("texts"))
    label_sides = load_label_sides(bundles("texts"), retriever.settings)
    for label in NEW:
        retriever = with_labels(retriever, label_sides, [label])
    labels = retriever.labels
    assert len(labels.table.to_batches()) <= 5
    assert labels.texts(np.arange(560, labels.num_labels)) == [label.text for label in NEW]
    assert labels.ids_by_uid()["u3"] == 3


@pytest.mark.parametrize("row_columns", [-1, DIM + 1, 10**12])
def test_a_label_side_of_another_width_is_refused(row_columns: int, bundles: Any) -> None:
    retriever = Retriever.load(bundles("texts"))
    with pytest.raises(BundleError, match=f"expected 0 to {DIM}"):
        new_vectors(retriever, LabelSide(row_columns), [NEW[0].text])


def test_clusters_of_fewer_labels_are_refused(bundles: Any) -> None:
    retriever = Retriever.load(bundles("prototypes"))
    network = PrototypeNetwork(DIM, 8, 4, seed=0)
    side = LabelSide(prototypes=network, cluster_L=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(BundleError, match="has the clusters of 0 labels, expected 560"):
        new_vectors(retriever, side, [NEW[0].text])


def test_prototypes_share_the_free_vector_of_the_nearest(bundles: Any, tmp_path: Path) -> None:
    network = PrototypeNetwork(DIM, 8, 4, seed=0)
    clusters = torch.arange(len(TEXTS)) % 4
    retriever = Retriever.load(bundles("prototypes"))
    text = retriever.encode([NEW[0].text])
    row = int(retriever.labels.label_rows[retriever.top_labels(text, 1).ids[0, 0]])
    with torch.no_grad():
        expected = network(torch.from_numpy(text), torch.from_numpy(text), clusters[[row]])
    side = LabelSide(prototypes=network, cluster_L=clusters)
    made = new_vectors(retriever, side, [NEW[0].text])
    np.testing.assert_array_equal(made, expected.numpy())


@pytest.mark.parametrize("system", ["exchanges", "renames"])
def test_a_bundle_changes_at_one_moment(
    system: str, bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "renames":
        # Refused, as by a system without the call.
        monkeypatch.setattr("xmcray.storage.whole_files._RENAME_EXCHANGE", 1 << 20)
    shutil.copytree(bundles("texts"), tmp_path / "b")
    reader = Retriever.load(tmp_path / "b")
    answers = reader.search(TEXTS[:5], 3)
    sha256 = reader.sha256
    monkeypatch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(StorageError, match="disk is full"):
        add_labels(tmp_path / "b", NEW)
    monkeypatch.undo()
    with (
        exclusive(tmp_path / "b"),
        pytest.raises(StorageError, match="is being changed by another process"),
    ):
        remove_labels(tmp_path / "b", ["u1"])
    assert open_artifact(tmp_path / "b", "bundle")[1].sha256 == sha256
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    remove_labels(tmp_path / "b", [reader.search(TEXTS[:1], 1)[0][0].uid])
    assert reader.search(TEXTS[:5], 3) == answers, "a reader goes on with what it opened"
    assert Retriever.load(tmp_path / "b").search(TEXTS[:5], 3) != answers
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


BAD = {
    "broken JSON": ('{"uid": "a", "te', "new.jsonl:2: broken JSON"),
    "no uid": ('{"text": "x"}', "new.jsonl:2: no uid"),
    "uid twice": ('{"uid": "new0", "text": "x"}', "new.jsonl:2: duplicate uid 'new0'"),
    "no text": ('{"uid": "a", "text": " "}', "new.jsonl:2: label 'a' has no text"),
    "no token": ('{"uid": "a", "text": "\\u0000"}', "has no token; reword it"),
    "known uid": ('{"uid": "u7", "text": "x"}', "label 'u7' is in "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_labels_are_one_line(name: str, bundles: Any, tmp_path: Path, shell: Shell) -> None:
    line, message = BAD[name]
    (tmp_path / "new.jsonl").write_text(json.dumps({"uid": "new0", "text": "sort"}) + "\n" + line)
    command = f"labels add {bundles('texts')} {tmp_path}/new.jsonl --out {tmp_path}/b"
    assert message in shell.error(command)
    assert [path.name for path in tmp_path.iterdir()] == ["new.jsonl"]


def test_other_mistakes_are_one_line(bundles: Any, tmp_path: Path, shell: Shell) -> None:
    bundle = bundles("texts")
    memory = bundles("memory")
    remove_labels(memory, ["label1"], tmp_path / "less")
    all_uids = " ".join(f"u{number}" for number in range(len(TEXTS)))
    for command, message in (
        (f"labels remove {bundle} u1 nobody", "label 'nobody' is not in"),
        (f"labels remove {bundle} {all_uids}", "these are all 560 labels"),
        (f"labels add {bundle} {tmp_path}/none.jsonl", "none.jsonl is no file"),
        (f"labels remove {bundle} u1 --out {bundle}", "exists and is not empty"),
        ("labels remove memory://b u1", "is a URL"),
        (f"labels remove {tmp_path}/none u1", "does not exist; expected a bundle"),
        (f"labels drop {bundle} u1", "invalid choice: 'drop'"),
        (
            f"evaluate {tmp_path}/less --data {memory.parent}/corpus",
            "joined or were removed since the bundle was exported",
        ),
    ):
        assert message in shell.error(command)
    shutil.copytree(
        bundle, tmp_path / "old", ignore=shutil.ignore_patterns("label_side", "manifest.json")
    )
    finish_manifest(tmp_path / "old", "bundle", {}, {})
    with pytest.raises(BundleError, match=r"label side in .* cannot be read"):
        add_labels(tmp_path / "old", NEW)
    rows = write_texts_without(tmp_path / "empty")
    with pytest.raises(DataError, match="no label of the bundle has a text"):
        add_labels(rows, NEW)


def write_texts_without(path: Path) -> Path:
    """A bundle of rows whose labels have no text."""
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    model = BundleModel(
        encoder=encoder, head=Head(DIM), tokenizer=tokenizer, label_side=LabelSide(DIM)
    )
    labels = BundleLabels(
        uids=map(str, range(DIM)),
        texts=[""] * DIM,
        order=np.arange(DIM),
        vectors=[np.eye(DIM, dtype=np.float32)],
    )
    write_bundle(path, model, labels, ShardBuild(spec=IndexSpec()), {})
    return path


def test_the_command(bundles: Any, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "new.jsonl").write_text(
        json.dumps({"uid": "n", "title": "sort sort", "content": "norm norm"})
    )
    bundle = tmp_path / "b"
    rows = bundles("rows")
    printed = shell.run(f"labels add {rows} {tmp_path}/new.jsonl --out {bundle}")
    assert "has 561 labels" in printed
    search = f"search {bundle} 'sort sort norm norm' -k 1 --json"
    (answer,) = json.loads(shell.run(search))[0]["answers"]
    assert (answer["uid"], answer["label_id"]) == ("n", 560)
    shell.run(f"labels remove {bundle} n")
    assert json.loads(shell.run(search))[0]["answers"][0]["uid"] != "n"


@pytest.mark.parametrize("kind", ["texts", "rowsIVF", "memory", "fused"])
def test_parts_of_the_shards_find_together_what_one_search_finds(
    kind: str, bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOM", 2)
    new = PLANTED if kind in ("memory", "fused") else NEW
    add_labels(bundles(kind), new[:2], tmp_path / "b")
    for start in (2, 4, 6):
        add_labels(tmp_path / "b", new[start : start + 2])
    retriever = Retriever.load(tmp_path / "b", threads=1)
    assert len(retriever.settings.shards) == 5
    texts = texts_of_queries(NEW)
    query_BD = retriever.encode(texts)
    wanted = retriever.name_answers(retriever.find_neighbours(query_BD, K), K, texts=texts)
    for count in (2, 3, 9):
        parts = []
        for i in range(count):
            subset = ShardSubset(i, count)
            parts.append(retriever.find_neighbours(query_BD, K, scope=SearchScope(subset=subset)))
        merged = Neighbours.merged(parts)
        assert retriever.name_answers(merged, K, texts=texts) == wanted


def test_shards_searched_in_parallel_answer_alike(
    bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_labels(bundles("rowsIVF"), NEW, tmp_path / "b")
    retriever = Retriever.load(tmp_path / "b", threads=1)
    wanted = retriever.search(TEXTS[:1], K)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert retriever.search(TEXTS[:1], K) == wanted
    assert any(thread.name.startswith("xmcray-shards") for thread in threading.enumerate())


@pytest.mark.parametrize("kind", ["texts", "rowsIVF", "memory"])
@pytest.mark.parametrize("share", [0.5, 0.05, 0.0])
def test_only_allowed_labels_are_answered(kind: str, share: float, bundles: Any) -> None:
    retriever = Retriever.load(bundles(kind), threads=1)
    allowed = np.random.default_rng(3).random(retriever.num_labels) < share
    query_BD, k = queries_of(retriever, NEW), 10
    found = retriever.restricted(allowed).top_labels(query_BD, k)
    assert allowed[found.ids[found.ids >= 0]].all()
    assert ((found.ids >= 0).sum(axis=1) == min(k, allowed.sum())).all()
    # the best of all labels, without those that are not allowed
    everything = retriever.top_labels(query_BD, retriever.num_labels, exact=True)
    wanted = [ids[allowed[ids]][:k] for ids in everything.ids]
    hits = [len(np.intersect1d(a, b)) for a, b in zip(found.ids, wanted, strict=True)]
    plain = retriever.top_labels(query_BD, k).ids
    recall = np.mean(
        [len(np.intersect1d(a, b[:k])) / k for a, b in zip(plain, everything.ids, strict=True)]
    )
    assert sum(hits) >= 0.9 * recall * sum(map(len, wanted))
    assert recall == 1 or kind == "rowsIVF"
