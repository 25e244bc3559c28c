"""Bundles, corpora and raw files on the Hugging Face Hub; its service is a folder here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import pytest
from bundles import write_bundle_of
from corpora import planted_corpus
from fsspec.implementations.dirfs import DirFileSystem
from huggingface_hub import DatasetCard, ModelCard
from shell import run_command, set_options

from xmcray import api, hub
from xmcray.data import pipeline
from xmcray.data.corpus import Corpus
from xmcray.data.formats import RawFiles
from xmcray.errors import StorageError
from xmcray.hub import HubPath
from xmcray.retrieval.retriever import Retriever


class LocalHub:
    """Repositories as folders, with the calls of huggingface_hub that xmcray makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: list[dict[str, Any]] = []

    def create_repo(self, repo_id: str, **options: Any) -> None:
        assert options["private"], "nothing may become public by accident"
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> None:
        target = self.folder / repo_id
        if options["delete_patterns"] == "*":
            shutil.rmtree(target)
        shutil.copytree(folder_path, target / (options["path_in_repo"] or ""), dirs_exist_ok=True)
        self.commits.append(options)

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        return str(self.folder / repo_id)


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    folder = tmp_path / "hub"
    folder.mkdir()
    service = LocalHub(folder)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: service)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", service.snapshot_download)
    files = DirFileSystem(str(folder), fsspec.filesystem("file"))
    real = fsspec.core.url_to_fs

    def url_to_fs(url: str, **options: Any) -> Any:
        if url.startswith("hf://"):
            return files, url.removeprefix("hf://").removeprefix("datasets/")
        return real(url, **options)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    monkeypatch.setenv("XMCRAY_CACHE", str(tmp_path / "cache"))
    return service


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://acme/docs", HubPath("model", "acme/docs", None, "")),
        ("hf://datasets/acme/docs@v1", HubPath("dataset", "acme/docs", "v1", "")),
        ("hf://acme/docs@main/a/b/", HubPath("model", "acme/docs", "main", "a/b")),
    ],
)
def test_urls(url: str, expected: HubPath) -> None:
    assert HubPath.parse(url) == expected


@pytest.mark.parametrize("url", ["hf://acme", "hf://", "hf://a b/c", "hf://a/b@", "s3://a/b"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="expected hf://OWNER/NAME"):
        HubPath.parse(url)


def test_a_bundle_is_one_commit_and_answers_as_before(
    tmp_path: Path, local_hub: LocalHub, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    for _ in range(2):
        assert run_command(f"push {bundle} hf://acme/docs") == 0
    assert len(local_hub.commits) == 2
    answers = Retriever.load("hf://acme/docs").search(["matrix norm"], 5)
    assert answers == Retriever.load(str(bundle)).search(["matrix norm"], 5)
    card = ModelCard.load(local_hub.folder / "acme" / "docs" / "README.md")
    assert card.data.library_name == "xmcray"
    assert "xmcray search hf://acme/docs" in card.text


def test_a_run_is_measured_for_its_card(tmp_path: Path, local_hub: LocalHub) -> None:
    corpus = planted_corpus(tmp_path / "c", num_queries=60, num_labels=23)
    run = str(tmp_path / "run")
    settings = ("encoder.dim=16", "optim.epochs=1", "negatives.hard=0", "cluster.workers=0")
    train = f"train astra --data {corpus.path} --out {run} {set_options(settings)}"
    assert run_command(train) == 0
    assert run_command(f"push {run} hf://acme/docs --data {corpus.path}") == 0
    card = ModelCard.load(local_hub.folder / "acme" / "docs" / "README.md")
    measured = {result.metric_type for result in card.data.eval_results}
    assert {"P@1", "P@5", "PSP@5"} <= measured
    assert "astra" in card.data.tags


def test_a_corpus_trains_from_the_hub(tmp_path: Path, local_hub: LocalHub) -> None:
    corpus = planted_corpus(tmp_path / "c", num_queries=60, num_labels=23)
    assert run_command(f"push {corpus.path} hf://acme/set") == 2
    assert run_command(f"push {corpus.path} hf://datasets/acme/set") == 0
    assert Corpus.open("hf://datasets/acme/set").sha256 == corpus.sha256
    card = DatasetCard.load(local_hub.folder / "acme" / "set" / "README.md")
    assert card.data.pretty_name == corpus.card.name


def test_offline_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError) as failure:
        hub.downloaded_folder("hf://datasets/acme/raw")
    assert "\n" not in str(failure.value)
    bundle = write_bundle_of(tmp_path / "b", "texts")
    with pytest.raises(StorageError) as failure:
        hub.commit_folder(bundle, "hf://acme/docs", "test")
    assert "\n" not in str(failure.value)


def test_raw_files_are_prepared_from_the_hub(
    tmp_path: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = planted_corpus(tmp_path / "c", num_queries=60, num_labels=23).path.parent / "raw"
    shutil.copytree(raw, local_hub.folder / "acme" / "words")
    prepared: list[tuple[Path, str]] = []

    def prepare(source: RawFiles, out: str, name: str, **_: Any) -> None:
        prepared.append((source.path, name))

    monkeypatch.setattr(pipeline, "prepare", prepare)
    api.prepare("hf://datasets/acme/words", tmp_path / "out")
    assert prepared == [(local_hub.folder / "acme" / "words", "words")]
