"""A bundle is what it was when it was written, or it is refused by the name of the file that changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
from bundles import TEXTS, write_bundle_of

from xmcray.errors import StorageError
from xmcray.retrieval.retriever import Retriever


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dual encoder without training: a label's vector is its text's, so a label's text finds the label."""
    return write_bundle_of(tmp_path_factory.mktemp("bundle") / "b", "textsIVF")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_a_known_query_finds_its_label_after_saving_and_loading(bundle: Path) -> None:
    for number, (best,) in enumerate(Retriever.load(bundle, threads=1).search(TEXTS, k=1)):
        assert best.label_id == number
        assert best.score == pytest.approx(1, abs=1e-5)


def test_one_changed_byte_is_refused_by_name(copy: Path) -> None:
    files = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    files.remove("README.md")  # for people: no program reads it
    assert {"index/00000.faiss", "labels.parquet", "manifest.json"} <= set(files)
    rng = np.random.default_rng(0)
    for name in files:
        original = (copy / name).read_bytes()
        for place in rng.integers(len(original), size=3):
            changed = bytearray(original)
            changed[place] ^= 1 << rng.integers(8)
            (copy / name).write_bytes(changed)
            with pytest.raises(StorageError, match=name) as error:
                Retriever.load(copy)
            assert "\n" not in str(error.value)
        (copy / name).write_bytes(original)
    Retriever.load(copy)


def test_a_malformed_index_never_reaches_faiss(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 alterations of the index file: each is refused by its hash, before FAISS reads a byte of it."""
    monkeypatch.setattr(faiss, "read_index", lambda path: pytest.fail(f"{path} was read"))
    index = copy / "index/00000.faiss"
    original = index.read_bytes()
    rng = np.random.default_rng(1)
    for trial in range(200):
        changed = bytearray(original)
        if trial % 3 == 0:
            changed = changed[: rng.integers(len(changed))]
        else:
            place = rng.integers(len(changed) if trial % 3 == 1 else 100)
            changed[place : place + 4] = bytes(255 - byte for byte in changed[place : place + 4])
        index.write_bytes(changed)
        with pytest.raises(StorageError, match=r"index/00000\.faiss"):
            Retriever.load(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "label_order.npy").unlink()
    with pytest.raises(StorageError, match=r"label_order\.npy is missing"):
        Retriever.load(copy)
