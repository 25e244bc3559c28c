"""Labels that join a bundle are found at once, and no other label's score changes by a bit."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundles import DIM, NEW, TEXTS

from xmcray.errors import BundleError, StorageError
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork
from xmcray.retrieval import labels as module
from xmcray.retrieval import retriever as retriever_module
from xmcray.retrieval.answers import FoundLabel
from xmcray.retrieval.bundle import KIND, Settings, read_settings
from xmcray.retrieval.labels import (
    NewLabel,
    add_labels,
    load_label_sides,
    remove_labels,
    with_labels,
)
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.new_vectors import new_vectors
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope, ShardSubset
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage import artifact
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import Manifest, check_contents, read_manifest
from xmcray.types import Ragged, TopLabels

NEW_TEXTS = [label.text for label in NEW]
# Labels of the words of planted corpora.
PLANTED = [
    NewLabel(f"new{number}", f"w{number}x1 w{number}x1 w{number + 9}x2") for number in range(9)
]
K = 20


def queries_of(retriever: Retriever, new: list[NewLabel]) -> Any:
    """So many queries that lists are scanned; fewer are answered by FAISS one by one."""
    return retriever.encode(texts_of_queries(new))


def texts_of_queries(new: list[NewLabel]) -> list[str]:
    """Texts of labels, of labels that join, and of planted queries."""
    texts = TEXTS[:250]
    texts += [label.text for label in new]
    texts += [f"w{number}x0 w{number}x1" for number in range(20)]
    return texts


def load(path: Path) -> Retriever:
    return Retriever.load(path, threads=1)


def uids_of(answers: list[FoundLabel]) -> list[str]:
    return [answer.uid for answer in answers]


def scores_of(answers: list[FoundLabel]) -> list[float]:
    return [answer.score for answer in answers]


def assert_known_are_ranked_alike(
    expected: TopLabels,
    top: TopLabels,
    strangers: set[int],
) -> None:
    """Both rank the labels that are no strangers alike, bit for bit, and met some strangers."""
    assert len(top.ids) == len(expected.ids)
    num_met = 0
    for query in range(len(expected.ids)):
        ids = expected.ids[query]
        other_ids = top.ids[query]
        is_known = ~np.isin(ids, [*strangers, -1])
        other_is_known = ~np.isin(other_ids, [*strangers, -1])
        num_met += np.isin(ids, list(strangers)).sum()
        num_met += np.isin(other_ids, list(strangers)).sum()

        # The list with more strangers has room for fewer of the others.
        depth = min(is_known.sum(), other_is_known.sum())
        np.testing.assert_array_equal(
            ids[is_known][:depth],
            other_ids[other_is_known][:depth],
        )
        scores = expected.scores[query][is_known]
        other_scores = top.scores[query][other_is_known]
        assert scores[:depth].tobytes() == other_scores[:depth].tobytes()
    assert num_met > 0


@pytest.mark.parametrize(
    "kind",
    [
        "texts",
        "textsIVF",
        "rows",
        "rowsIVF",
        "both",
        "prototypes",
        "memory",
    ],
)
def test_labels_join_and_leave(
    kind: str,
    bundles: Any,
    tmp_path: Path,
) -> None:
    source = bundles(kind)
    bundle = tmp_path / "b"
    new = PLANTED if kind == "memory" else NEW
    new_texts = [label.text for label in new]
    first = load(source)
    depth = first.num_labels if kind == "memory" else K
    queries = [
        queries_of(first, new),
        first.encode(new_texts),
    ]
    before = [first.top_labels(query_BD, depth) for query_BD in queries]

    # Labels join.
    assert add_labels(source, new[:2], bundle) == first.num_labels + 2
    assert add_labels(bundle, new[2:]) == first.num_labels + len(new)

    second = load(bundle)
    assert second.is_exact == (not kind.endswith("IVF"))
    assert second.labels.changed
    assert not first.labels.changed
    joined = set(range(first.num_labels, second.num_labels))
    for query_BD, expected in zip(queries, before, strict=True):
        top = second.top_labels(query_BD, depth)
        assert_known_are_ranked_alike(expected, top, joined)
    answers_of_texts = second.search(new_texts, K)
    # An untrained network makes the vectors of prototypes.
    if kind != "prototypes":
        for label, answers in zip(new, answers_of_texts, strict=True):
            assert answers[0].uid == label.uid
            assert answers[0].text == label.text

    # Some of the export's best answers, and one that joined, leave.
    best_ids = before[1].ids[:3, :2]
    gone = {*best_ids.ravel().tolist(), min(joined)}
    ids_by_uid = second.labels.ids_by_uid()
    uids = [uid for uid, label in ids_by_uid.items() if label in gone]
    assert remove_labels(bundle, uids) == second.num_labels - len(gone)

    third = load(bundle)
    for query_BD in queries:
        top = third.top_labels(query_BD, depth)
        expected = second.top_labels(query_BD, depth)
        assert not np.isin(top.ids, list(gone)).any()
        assert (top.ids[:, : depth - len(gone)] >= 0).all()
        assert_known_are_ranked_alike(expected, top, gone)
    remaining = dict(ids_by_uid)
    for uid in uids:
        del remaining[uid]
    assert third.labels.ids_by_uid() == remaining
    _, manifest = open_artifact(bundle, "bundle")
    assert manifest.about["changes"][-1]["removed"] == len(gone)


def test_a_removed_label_may_come_back_under_a_new_number(bundles: Any, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    text = NEW[0].text

    remove_labels(bundles("texts"), ["u3"], bundle)
    add_labels(bundle, [NewLabel("u3", text)])

    ((answer,),) = Retriever.load(bundle).search([text], 1)
    assert answer.uid == "u3"
    assert answer.label_id == len(TEXTS)


def test_more_labels_than_a_shard_has_room_for(
    bundles: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROOM", 4)
    add_labels(bundles("texts"), NEW[:6], tmp_path / "parts")
    add_labels(tmp_path / "parts", NEW[6:])
    add_labels(bundles("texts"), NEW, tmp_path / "whole")

    parts = Retriever.load(tmp_path / "parts")
    whole = Retriever.load(tmp_path / "whole")

    num_joined = [shard.stop - len(TEXTS) for shard in parts.settings.shards]
    assert num_joined == [0, 4, 8, 12]
    # A process that catches up has the same shards as one that applied each operation.
    assert whole.settings.shards == parts.settings.shards
    np.testing.assert_array_equal(whole.labels.row_labels, parts.labels.row_labels)
    of_parts = parts.search(NEW_TEXTS, 3)
    of_whole = whole.search(NEW_TEXTS, 3)
    for answers, expected in zip(of_parts, of_whole, strict=True):
        assert uids_of(answers) == uids_of(expected)
        # Products of other shapes may differ in the last bit.
        assert scores_of(answers) == pytest.approx(scores_of(expected), abs=1e-6)


def test_labels_that_join_one_by_one_lie_in_few_blocks(bundles: Any) -> None:
    retriever = Retriever.load(bundles("texts"))
    label_sides = load_label_sides(bundles("texts"), retriever.settings)

    for label in NEW:
        retriever = with_labels(retriever, label_sides, [label])

    # A block for each of them would cost every search after a change, and kilobytes of memory.
    labels = retriever.labels
    assert len(labels.table.to_batches()) <= 5
    joined = np.arange(560, labels.num_labels)
    assert labels.texts(joined) == NEW_TEXTS
    assert labels.ids_by_uid()["u3"] == 3


def test_a_link_to_a_bundle_stays_a_link(bundles: Any, tmp_path: Path) -> None:
    bundle = shutil.copytree(bundles("texts"), tmp_path / "bundle-1")
    link = tmp_path / "current"
    link.symlink_to("bundle-1")
    num_before = Retriever.load(bundle).num_labels

    add_labels(link, NEW[:1])

    assert link.is_symlink()
    assert Retriever.load(bundle).num_labels == num_before + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle-1", "current"]


def test_known_labels_are_encoded_once_for_all_that_join(
    bundles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = Retriever.load(bundles("both"))
    label_sides = load_label_sides(bundles("both"), retriever.settings)
    assert label_sides[0].row_columns
    num_encoded = []
    encode_labels = QueryEncoder.encode_labels

    def counted(encoder: QueryEncoder, tokens: Ragged) -> Any:
        num_encoded.append(len(tokens))
        return encode_labels(encoder, tokens)

    monkeypatch.setattr(QueryEncoder, "encode_labels", counted)
    for label in NEW[:3]:
        retriever = with_labels(retriever, label_sides, [label])

    assert num_encoded == [1, len(TEXTS), 1, 1]
    alone = with_labels(Retriever.load(bundles("both")), label_sides, NEW[2:3])
    assert_same_vector(alone, retriever, NEW[2].uid)


def assert_same_vector(one: Retriever, other: Retriever, uid: str) -> None:
    """Both have the same vector of a label, bit for bit."""
    vectors = []
    for retriever in (one, other):
        label_ids = np.array(list(retriever.labels.ids_of([uid]).values()))
        vectors.append(retriever.labels.vectors_of(label_ids))
    np.testing.assert_array_equal(*vectors)


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
    side = LabelSide(prototypes=network, cluster_L=clusters)
    retriever = Retriever.load(bundles("prototypes"))
    text_1D = retriever.encode([NEW[0].text])

    vectors = new_vectors(retriever, side, [NEW[0].text])

    # A new label has no centroid yet: its text stands for it.
    nearest = retriever.top_labels(text_1D, 1).ids[0, 0]
    row = int(retriever.labels.label_rows[nearest])
    text = torch.from_numpy(text_1D)
    with torch.no_grad():
        expected = network(text, text, clusters[[row]])
    np.testing.assert_array_equal(vectors, expected.numpy())


def test_labels_that_join_a_memory_do_not_take_each_others_votes(bundles: Any) -> None:
    retriever = Retriever.load(bundles("memory"))
    sides = load_label_sides(bundles("memory"), retriever.settings)
    fewest_keys = MemoryConfig(keys=1)

    def scores(*new: NewLabel) -> dict[str, float]:
        joined = with_labels(retriever, sides, list(new))
        (answers,) = joined.search(["solve sparse trace"], 8, memory=fewest_keys)
        return {answer.uid: answer.score for answer in answers}

    near = NewLabel("near", "solve sparse trace rank")
    nearest = NewLabel("nearest", "solve sparse trace")
    both = scores(near, nearest)
    assert both["near"] == pytest.approx(scores(near)["near"])
    assert both["nearest"] == pytest.approx(scores(nearest)["nearest"])


@pytest.mark.parametrize("kind", ["texts", "rowsIVF", "memory", "fused"])
def test_parts_of_the_shards_find_together_what_one_search_finds(
    kind: str,
    bundles: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROOM", 2)
    bundle = tmp_path / "b"
    new = PLANTED if kind in ("memory", "fused") else NEW
    add_labels(bundles(kind), new[:2], bundle)
    for start in (2, 4, 6):
        add_labels(bundle, new[start : start + 2])
    retriever = load(bundle)
    assert len(retriever.settings.shards) == 5
    texts = texts_of_queries(NEW)
    query_BD = retriever.encode(texts)

    whole = retriever.find_neighbours(query_BD, K)
    expected = retriever.name_answers(whole, K, texts=texts)

    for count in (2, 3, 9):
        parts = []
        for number in range(count):
            scope = SearchScope(subset=ShardSubset(number, count))
            part = retriever.find_neighbours(query_BD, K, scope=scope)
            parts.append(part)
        merged = Neighbours.merged(parts)
        assert retriever.name_answers(merged, K, texts=texts) == expected


def test_shards_searched_in_parallel_answer_alike(
    bundles: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_labels(bundles("rowsIVF"), NEW, tmp_path / "b")
    retriever = load(tmp_path / "b")
    expected = retriever.search(TEXTS[:1], K)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    in_parallel = retriever.search(TEXTS[:1], K)

    assert in_parallel == expected
    names = [thread.name for thread in threading.enumerate()]
    assert any(name.startswith("xmcray-shards") for name in names)


def num_shared(ids: Any, other_ids: Any) -> int:
    return len(np.intersect1d(ids, other_ids))


@pytest.mark.parametrize("kind", ["texts", "rowsIVF", "memory"])
@pytest.mark.parametrize("share", [0.5, 0.05, 0.0])
def test_only_allowed_labels_are_answered(
    kind: str,
    share: float,
    bundles: Any,
) -> None:
    k = 10
    retriever = load(bundles(kind))
    rng = np.random.default_rng(3)
    is_allowed = rng.random(retriever.num_labels) < share
    query_BD = queries_of(retriever, NEW)

    top = retriever.restricted(is_allowed).top_labels(query_BD, k)

    is_label = top.ids >= 0
    assert is_allowed[top.ids[is_label]].all()
    num_expected = min(k, is_allowed.sum())
    assert (is_label.sum(axis=1) == num_expected).all()

    # Compared with an exact ranking of all labels, a restricted search finds nearly as large a
    # share of its answers as one without a restriction.
    ranking = retriever.top_labels(query_BD, retriever.num_labels, exact=True)
    unrestricted = retriever.top_labels(query_BD, k)
    num_hits = 0
    num_wanted = 0
    recalls = []
    for query, ids in enumerate(ranking.ids):
        wanted = ids[is_allowed[ids]][:k]
        num_wanted += len(wanted)
        num_hits += num_shared(top.ids[query], wanted)
        recalls.append(num_shared(unrestricted.ids[query], ids[:k]) / k)
    recall = np.mean(recalls)
    assert num_hits >= 0.9 * recall * num_wanted
    assert recall == 1 or kind == "rowsIVF"


@pytest.mark.parametrize("after", ["manifest", "files"])
def test_a_bundle_that_is_changed_while_it_is_opened_is_one_of_the_two(
    after: str, bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    add_labels(bundles("texts"), NEW, path)
    num_labels = load(path).num_labels
    changes = 0

    def changed_once() -> None:
        nonlocal changes
        changes += 1
        if changes == 1:
            remove_labels(path, [NEW[0].uid])

    def noting_contents(folder: Path, manifest: Manifest, *more: Any, **named: Any) -> None:
        if folder == path and after == "manifest":
            changed_once()
        check_contents(folder, manifest, *more, **named)

    def noting_settings(folder: Path) -> Settings:
        if folder == path and after == "files":
            changed_once()
        return read_settings(folder)

    monkeypatch.setattr(artifact, "check_contents", noting_contents)
    monkeypatch.setattr(retriever_module, "read_settings", noting_settings)
    retriever = load(path)
    assert retriever.num_labels == num_labels - 1
    assert retriever.sha256 == read_manifest(path, KIND).sha256


def test_a_bundle_that_is_changed_all_the_time_is_one_line(
    bundles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = iter(range(100))
    monkeypatch.setattr(retriever_module, "folder_identity", lambda path: next(identities))
    with pytest.raises(StorageError, match=r"was changed by another process each of the 5 times"):
        load(bundles("texts"))
