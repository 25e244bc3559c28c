"""Bundles of 10^8 labels: what is read in blocks, shared by processes, and found without a dictionary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bundles import TEXTS, write_bundle_of

from xmcray.data import checked_files
from xmcray.errors import BundleError
from xmcray.retrieval import uid_index
from xmcray.retrieval.bundle import KIND, names_each_once
from xmcray.retrieval.labels import NewLabel, add_labels, remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.uid_index import UidIndex
from xmcray.storage.manifest import finish_manifest, read_manifest

BLOCK = 100


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("large") / "texts", "texts")


def test_names_are_read_in_blocks(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "TEXTS_AT_ONCE", BLOCK)
    labels = Retriever.load(bundle).labels
    sizes = [len(block) for block in labels.table.to_batches()]
    assert sizes == [BLOCK] * 5 + [60]
    # In an order of their own, from several blocks.
    label_ids = np.array([559, 0, 250, 99, 100, 0])
    uids, texts = labels.uids_and_texts(label_ids)
    assert uids == ["u559", "u0", "u250", "u99", "u100", "u0"]
    assert texts == [TEXTS[label_id] for label_id in label_ids]


def test_the_order_of_the_labels_is_mapped(bundle: Path) -> None:
    retriever = Retriever.load(bundle)
    assert len(retriever.labels.row_labels) == len(TEXTS)
    assert f"{bundle}/label_order.npy" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("row_labels", "names_each"),
    [
        ([2, 0, 1], True),
        ([2, -1, 0, 1, -1], True),
        ([2, 0], False),
        ([2, 0, 0], False),
        ([2, 0, 1, 1], False),
        ([3, 0, 1], False),
        ([2, -1, 1], False),
        ([], False),
    ],
)
def test_each_label_has_one_row(
    row_labels: list[int], names_each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmcray.retrieval.bundle.LABEL_BLOCK", 2)
    assert names_each_once(np.array(row_labels, np.int64), 3) == names_each


def test_an_order_that_lacks_a_label_is_one_line(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "b"
    remove_labels(bundle, ["u0"], copy)
    order = np.load(copy / "label_order.npy")
    order[0] = order[1]
    # The file has a second name in the other bundle.
    (copy / "label_order.npy").unlink()
    np.save(copy / "label_order.npy", order)
    about = read_manifest(copy, KIND).about
    finish_manifest(copy, KIND, about, {})
    with pytest.raises(BundleError, match=r"label_order\.npy does not hold 560 labels"):
        Retriever.load(copy)


def test_labels_are_found_by_uid(bundle: Path, tmp_path: Path) -> None:
    changed = tmp_path / "b"
    remove_labels(bundle, ["u3", "u4"], changed)
    add_labels(changed, [NewLabel("u3", TEXTS[3])])
    labels = Retriever.load(changed).labels
    # u4 is gone, u3 has come back under another number, and the last one is no text at all.
    uids = ["u559", "u3", "u4", "u0", "u0", "other", "\udcff"]
    found = {"u0": 0, "u3": 560, "u559": 559}
    index = UidIndex(labels)
    assert labels.ids_of(uids) == index.ids_of(uids, labels) == found
    assert labels.ids_of([]) == index.ids_of([], labels) == {}


def test_uids_of_one_hash_are_told_apart(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes_of_lengths(uids: list[str]) -> np.ndarray:
        return np.array([len(uid) for uid in uids], np.int64)

    monkeypatch.setattr(uid_index, "_hashes", hashes_of_lengths)
    labels = Retriever.load(bundle).labels
    index = UidIndex(labels)
    assert index.ids_of(["u12", "u34", "u6", "v6"], labels) == {"u12": 12, "u34": 34, "u6": 6}
