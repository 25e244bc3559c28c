"""Processes of one machine share one copy of a corpus, and nothing half copied is ever taken for one."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import fsspec
import pytest
from corpora import planted_corpus
from fsspec.implementations.local import LocalFileSystem

from xmcray.data.corpus import Corpus
from xmcray.data.node_copy import CorpusSource, open_on_node
from xmcray.errors import DataError, StorageError
from xmcray.storage.cache import local_copy
from xmcray.storage.manifest import MANIFEST


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("XMCRAY_CACHE", str(tmp_path / "cache"))
    return planted_corpus(tmp_path / "data")


def copies(tmp_path: Path) -> list[str]:
    paths = (tmp_path / "cache").iterdir()
    return [path.name for path in paths if not path.name.endswith((".lock", ".used"))]


class Counting(LocalFileSystem):  # type: ignore[misc]
    """The local file system, with a line in a file for every copy."""

    protocol = "counting"

    def get_file(self, rpath: str, lpath: str, *args: object, **options: object) -> None:
        with Path(rpath).parents[1].joinpath("asked").open("a") as file:  # data/asked
            file.write(f"{rpath}\n")
        super().get_file(rpath, lpath, *args, **options)


def open_there(source: CorpusSource, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    assert len(open_on_node(source).label_order) == 23


def test_processes_that_come_together_copy_once(corpus: Corpus, tmp_path: Path) -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    source = CorpusSource(f"counting://{corpus.path}", corpus.sha256)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=open_there, args=(source, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    asked = [
        line for path in corpus.path.parent.rglob("asked") for line in path.read_text().splitlines()
    ]
    files = json.loads((corpus.path / MANIFEST).read_text())["files"]
    assert len(files) == len(asked) == len(set(asked))
    assert len(copies(tmp_path)) == 1


def test_what_a_killed_process_left_is_not_used(corpus: Corpus, tmp_path: Path) -> None:
    source = CorpusSource(str(corpus.path), corpus.sha256, copy_folder=True)
    whole = open_on_node(source).path
    part = whole.with_name(f".{whole.name}.part")
    whole.rename(part)  # as it is while files are copied
    (part / "label_order.npy").write_bytes(b"half")
    assert (open_on_node(source).label_order == corpus.label_order).all()
    assert copies(tmp_path) == [whole.name]


def test_an_altered_source_is_refused_and_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    path = corpus.path / "label_order.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"label_order\.npy was altered"):
        local_copy(str(corpus.path), "corpus")
    assert copies(tmp_path) == []


def test_another_corpus_in_its_place_is_refused(corpus: Corpus) -> None:
    with pytest.raises(DataError, match="holds another corpus than the run was started with"):
        open_on_node(CorpusSource(str(corpus.path), "0" * 64))
    assert open_on_node(CorpusSource(str(corpus.path), corpus.sha256)).path == corpus.path, (
        "a folder is read in place"
    )


def test_no_room_for_a_copy(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"free": 1000}))
    with pytest.raises(StorageError, match=r"has room for 0\.0 GB; remove old copies"):
        local_copy(str(corpus.path), "corpus")
    assert copies(tmp_path) == []
