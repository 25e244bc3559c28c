"""Writes bundles and corpora to the Hugging Face Hub, each with its card."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmcray import hub
from xmcray.data.corpus import KIND as CORPUS
from xmcray.data.corpus import Corpus
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import card_of
from xmcray.retrieval.cards import corpus_card
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import CARD, MANIFEST
from xmcray.training.outcome import measure_bundle


def push_bundle(
    bundle: str, url: str, data: str | None, metrics: Mapping[str, Any] | None = None
) -> None:
    """Writes a bundle to the Hub as one commit.

    Args:
        bundle: folder.
        url: see `hub.HubPath`; what is there is replaced, and stays in earlier commits.
        data: the corpus that it was trained on, to measure it for the card; not measured if None.
        metrics: what is known if it is not measured: content of metrics.json.
    Raises:
        StorageError: the bundle is damaged, or the Hub cannot be reached.
        DataError: bundle and corpus do not belong together.
    """
    folder, manifest = open_artifact(bundle, BUNDLE)
    card = None
    if data is not None:
        corpus = Corpus.open(data)
        card = corpus.card
        evaluation = measure_bundle(Retriever.load(bundle), corpus, "test")
        metrics = {**evaluation.to_json(), "bundle_sha256": manifest.sha256}
    text = card_of(folder, url, metrics, card)
    _commit(folder, [*manifest.files, MANIFEST], text, url)


def push_corpus(path: str, url: str) -> None:
    """As `push_bundle`, for a corpus."""
    folder, manifest = open_artifact(path, CORPUS)
    text = corpus_card(Corpus.open(path, verify=False), url)
    _commit(folder, [*manifest.files, MANIFEST], text, url)


def _commit(folder: Path, names: list[str], card: str, url: str) -> None:
    """Commits the files of an artifact and its card."""
    with tempfile.TemporaryDirectory(prefix="xmcray-push.") as staging:
        for name in names:
            target = Path(staging) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(folder / name)
        (Path(staging) / CARD).write_text(card, encoding="utf-8")
        hub.commit_folder(Path(staging), url, f"Push {folder.name}", replace=True)
