"""Bundles, corpora and raw files on the Hugging Face Hub; its service is a folder here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import numpy as np
import pytest
from bundles import write_bundle_of
from corpora import corpus_of, planted_corpus
from fsspec.implementations.dirfs import DirFileSystem
from huggingface_hub import DatasetCard, ModelCard
from planted import write_planted
from shell import Shell, run_command, set_options

from xmcray import api
from xmcray.data import pipeline
from xmcray.data.corpus import Corpus
from xmcray.data.formats import RawFiles
from xmcray.errors import StorageError
from xmcray.hub import HubPath
from xmcray.hub_licences import hub_licence
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
        ("hf://acme/docs@refs%2Fpr%2F1", HubPath("model", "acme/docs", "refs/pr/1", "")),
    ],
)
def test_urls(url: str, expected: HubPath) -> None:
    assert HubPath.parse(url) == expected


@pytest.mark.parametrize(
    "url", ["hf://acme", "hf://", "hf://a b/c", "hf://a/b@", "hf://datasets/acme", "s3://a/b"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="expected hf://OWNER/NAME"):
        HubPath.parse(url)


def test_a_malformed_url_is_refused_before_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_: pytest.fail("it was opened"))
    shell = Shell(capsys)
    for command in (
        "search hf://acme x",
        "evaluate hf://acme --data hf://datasets/acme",
        f"train astra --data hf://datasets/acme --out {tmp_path}/run",
        f"fuse hf://acme --data hf://datasets/acme --out {tmp_path}/run",
    ):
        assert "expected hf://OWNER/NAME" in shell.error(command)


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
    assert card.data.license == "unknown"
    assert "pypi.org" not in card.text


def test_a_bundle_has_a_card_that_evaluate_renews(tmp_path: Path, local_hub: LocalHub) -> None:
    write_planted(tmp_path / "raw", num_queries=60, num_labels=23)
    corpus = corpus_of(tmp_path / "raw", tmp_path / "corpus", licence="CC0", vocab_size=2000).path
    run = tmp_path / "run"
    settings = ("encoder.dim=16", "optim.epochs=1", "negatives.hard=0", "cluster.workers=0")
    train = f"train astra --data {corpus} --out {run} --no-evaluate {set_options(settings)}"
    assert run_command(train) == 0
    manifest = (run / "bundle" / "manifest.json").read_bytes()
    card = ModelCard.load(run / "bundle" / "README.md")
    assert card.data.license == "cc0-1.0"
    assert card.data.eval_results is None
    assert "xmcray evaluate RUN --data CORPUS" in card.text
    assert "xmcray[cpu]" in card.text
    assert run_command(f"evaluate {run} --data {corpus}") == 0
    assert (run / "bundle" / "manifest.json").read_bytes() == manifest
    evaluated = (run / "bundle" / "README.md").read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    assert f"| P@1 | {round(100 * metrics['P@1'], 2)} |" in evaluated
    # An equal bundle has equal metrics; so has the one on the Hub.
    assert run_command(f"export {run} --out {tmp_path / 'same'}") == 0
    assert (tmp_path / "same" / "README.md").read_text() == evaluated
    assert run_command(f"push {run} hf://acme/docs") == 0
    pushed = ModelCard.load(local_hub.folder / "acme" / "docs" / "README.md")
    assert {result.dataset_name for result in pushed.data.eval_results} == {"planted"}
    # A bundle with other labels is another one, whose metrics nobody knows.
    label = Corpus.open(corpus).label_uids(np.array([0]))[0]
    assert run_command(f"labels remove {run / 'bundle'} {label}") == 0
    changed = ModelCard.load(run / "bundle" / "README.md")
    assert changed.data.eval_results is None
    assert run_command(f"push {run} hf://acme/docs") == 0
    pushed = ModelCard.load(local_hub.folder / "acme" / "docs" / "README.md")
    assert pushed.data.eval_results is None


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("CC BY-SA 4.0", {"license": "cc-by-sa-4.0"}),
        ("cc0", {"license": "cc0-1.0"}),
        ("OpenRAIL++", {"license": "openrail++"}),
        ("GPL-3.0-only", {"license": "gpl-3.0"}),
        ("", {"license": "unknown"}),
        ("none", {"license": "unknown"}),
        ("internal", {"license": "other", "license_name": "internal"}),
        ("internal-only", {"license": "other", "license_name": "internal-only"}),
        ("CC-BY", {"license": "other", "license_name": "cc-by"}),
        ("other", {"license": "other", "license_name": "other"}),
        ("GPL-3.0+", {"license": "other", "license_name": "gpl-3.0-plus"}),
        ("Ours: ask (legal)\nfirst!", {"license": "other", "license_name": "ours-ask-legal-first"}),
        ("専有", {"license": "other", "license_name": "unnamed"}),
    ],
)
def test_licences_of_cards_are_those_of_the_hubs_list(
    licence: str, expected: dict[str, str]
) -> None:
    assert hub_licence(licence) == expected


def test_a_corpus_trains_from_the_hub(tmp_path: Path, local_hub: LocalHub) -> None:
    write_planted(tmp_path / "raw", num_queries=60, num_labels=23)
    licence = "Internal use"
    corpus = corpus_of(tmp_path / "raw", tmp_path / "c", licence=licence, vocab_size=2000)
    assert run_command(f"push {corpus.path} hf://acme/set") == 2
    assert run_command(f"push {corpus.path} hf://datasets/acme/set") == 0
    assert Corpus.open("hf://datasets/acme/set").sha256 == corpus.sha256
    card = DatasetCard.load(local_hub.folder / "acme" / "set" / "README.md")
    assert card.data.pretty_name == corpus.card.name
    assert card.data.license == "other"
    assert card.data.license_name == "internal-use"


def test_offline_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    # A file system that an earlier test opened knows the other address.
    huggingface_hub.HfFileSystem.clear_instance_cache()
    bundle = write_bundle_of(tmp_path / "b", "texts")
    shell = Shell(capsys)
    for command in (
        f"prepare hf://datasets/acme/raw --out {tmp_path}/c",
        f"push {bundle} hf://acme/docs",
        "search hf://acme/docs x",
        f"train astra --data hf://datasets/acme/set --out {tmp_path}/run",
    ):
        message = shell.error(command)
        assert "cannot be used (" in message
        assert "the network and HF_TOKEN" in message
    huggingface_hub.HfFileSystem.clear_instance_cache()


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
