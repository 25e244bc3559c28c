"""Writes bundles and corpora to the Hugging Face Hub, each with its card."""

from __future__ import annotations

import tempfile
from pathlib import Path

from xmcray import hub, storage
from xmcray.data.corpus import KIND as CORPUS
from xmcray.data.corpus import Corpus
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.retriever import Retriever
from xmcray.training.hub_cards import bundle_card, corpus_card
from xmcray.training.outcome import measure_bundle

CARD = "README.md"


def push_bundle(bundle: str, url: str, data: str | None) -> None:
    """Writes a bundle to the Hub as one commit.

    Args:
        bundle: folder.
        url: see `hub.HubPath`; what is there is replaced, and stays in earlier commits.
        data: the corpus that it was trained on, to measure it for the card; not measured if None.
    Raises:
        StorageError: the bundle is damaged, or the Hub cannot be reached.
        DataError: bundle and corpus do not belong together.
    """
    folder, manifest = storage.open_artifact(bundle, BUNDLE)
    retriever = Retriever.load(bundle)
    corpus = Corpus.open(data) if data else None
    evaluation = None
    if corpus is not None:
        evaluation = measure_bundle(retriever, corpus, "test")
    card = corpus.card if corpus is not None else None
    text = bundle_card(retriever, manifest.about, url, card, evaluation)
    _commit(folder, [*manifest.files, storage.MANIFEST], text, url)


def push_corpus(path: str, url: str) -> None:
    """As `push_bundle`, for a corpus."""
    folder, manifest = storage.open_artifact(path, CORPUS)
    text = corpus_card(Corpus.open(path, verify=False), url)
    _commit(folder, [*manifest.files, storage.MANIFEST], text, url)


def _commit(folder: Path, names: list[str], card: str, url: str) -> None:
    """Commits the files of an artifact and its card."""
    with tempfile.TemporaryDirectory(prefix="xmcray-push.") as staging:
        for name in names:
            target = Path(staging) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(folder / name)
        (Path(staging) / CARD).write_text(card, encoding="utf-8")
        hub.commit_folder(Path(staging), url, f"Push {folder.name}", replace=True)
