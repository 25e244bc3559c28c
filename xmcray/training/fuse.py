"""Writes a bundle that answers by the weighted sum of several parts (retrieval/parts.py)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmcray import config as configs
from xmcray import storage
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.retrieval.bundle import KIND, read_settings, write_settings
from xmcray.retrieval.fused import FusedPredictor
from xmcray.retrieval.index import IndexSpec
from xmcray.retrieval.memory import remember, remembered_rows
from xmcray.retrieval.parts import Candidates, PartsConfig
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import MemoryConfig
from xmcray.retrieval.word_index import FOLDER as WORDS
from xmcray.retrieval.word_index import LABELS, QUERIES, file_names, write_word_index
from xmcray.training.held_out import held_out_by
from xmcray.training.outcome import bundle_of, check_fits
from xmcray.training.part_weights import MEMORY_KEYS, METRICS, WORD_KEYS, Choice, WeightSearch
from xmcray.training.run import SELECTION, Run
from xmcray.types import Float32Array, Int64Array, Ragged

# By these the candidates are found among which weights are chosen.
ALL_PARTS = PartsConfig(
    memory=1.0,
    words=1.0,
    texts=1.0,
    memory_keys=MEMORY_KEYS,
    word_keys=max(WORD_KEYS),
)
_SETTINGS = "settings.json"
_CHUNK = 1024  # held-out queries that are encoded at once
Progress = Callable[[int], None]


def fuse(
    path: str,
    corpus: Corpus,
    out: str | Path,
    *,
    metrics: Sequence[str] = METRICS,
    threads: int = 1,
    progress: Progress | None = None,
) -> Choice:
    """Chooses the weights of the parts on held-out queries, and writes the fused bundle.

    Args:
        path: a run, or a bundle whose run held queries out. Of a run with --refit the weights are
            chosen with RUN/selection, which has not seen the held-out queries, and the parts are
            those of the refit.
        corpus: the one that it was made from. Its training queries vote by vectors and words.
        out: folder or URL that does not exist yet.
        metrics: the metrics whose mean is maximised.
        threads: of building indexes.
        progress: called with the number of training queries encoded so far.
    Returns:
        The weights, and why.
    Raises:
        ConfigError: no query was held out, or an unknown metric.
        DataError: bundle and corpus do not belong together.
        StorageError: `out` is not empty, or the disk is full.
    """
    storage.refuse_existing(out)
    for name in metrics:
        if name not in MAIN_METRICS:
            raise ConfigError(configs.unknown("metric", name, list(MAIN_METRICS)))
    selected, final = _sources(path, corpus)
    parent = None if storage.is_url(out) else Path(out).absolute().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fusing.", dir=parent) as folder:
        trial = Path(folder) / "selected"
        write_parts(selected, corpus, trial, ALL_PARTS, threads, progress)
        choice = _choose(trial, selected, corpus, metrics)
        made = trial
        if final != selected:
            made = Path(folder) / "final"
            write_parts(final, corpus, made, ALL_PARTS, threads, progress)
        _write_chosen(made, out, choice)
    return choice


def _sources(path: str, corpus: Corpus) -> tuple[str, str]:
    """The bundle by which weights are chosen, and the bundle whose parts are fused."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        return path, path
    final = bundle_of(Run.open(folder), corpus)
    if (folder / SELECTION / "run.json").is_file():
        return bundle_of(Run.open(folder / SELECTION), corpus), final
    return final, final


def write_parts(
    source: str | Path,
    corpus: Corpus,
    target: str | Path,
    config: PartsConfig,
    threads: int = 1,
    progress: Progress | None = None,
) -> None:
    """Writes a fused bundle with the files of all parts.

    Args:
        source: a bundle. A memory of its own is made anew.
        corpus: the one that it was made from.
        target: folder or URL that does not exist yet.
        config: weights and settings.
        threads: of building indexes.
        progress: called with the number of training queries encoded so far.
    """
    folder, manifest = storage.open_artifact(source, KIND)
    settings = read_settings(folder)
    check_fits(Retriever.load(folder), corpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = QueryEncoder.load(folder, settings, device, "float32")
    encode = _Encoder(dataclasses.replace(encoder, normalised=True), progress)
    train = corpus.split("train")
    # A memory or words that the bundle has already are written anew.
    replaced = [name for name in manifest.files if name.startswith(("memory/", f"{WORDS}/"))]
    linked: dict[str, storage.FileEntry] = {}
    with storage.new_artifact(target, KIND, manifest.about, linked) as made:
        memory = remember(train, encode, MemoryConfig(), IndexSpec(), threads)(made)
        query_texts = train.texts(remembered_rows(train))
        label_texts = corpus.label_texts(np.arange(corpus.card.num_labels))
        write_word_index(made, query_texts, label_texts)
        predictor = {
            "kind": "fused",
            "parts": configs.dump(config),
            "num_queries": memory["num_queries"],
            "shards": memory["shards"],
        }
        write_settings(made, dataclasses.replace(settings, predictor=predictor))
        linked |= storage.link_files(folder, manifest, made, [*replaced, _SETTINGS])


@dataclass
class _Encoder:
    """Encodes training queries, and reports how many it has encoded so far."""

    query_encoder: QueryEncoder
    progress: Progress | None
    num_encoded: int = 0

    def __call__(self, tokens: Ragged) -> Float32Array:
        """float32 [queries, D]."""
        vectors = self.query_encoder.encode(tokens)
        self.num_encoded += len(tokens)
        if self.progress is not None:
            self.progress(self.num_encoded)
        return vectors


def _choose(trial: Path, source: str, corpus: Corpus, metrics: Sequence[str]) -> Choice:
    """Chooses weights on the queries that the run of `source` held out."""
    folder, manifest = storage.open_artifact(trial, KIND, contents=False)
    rows = held_out_by(source, manifest.about, corpus).validation_rows
    retriever = _without_voters(Retriever.load(folder), corpus, rows)
    assert retriever.fusion is not None
    predictor = FusedPredictor(retriever.fusion, retriever.labels, retriever.memory)
    train = corpus.split("train")
    candidates: list[Candidates] = []
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        texts = train.texts(chunk)
        filters = train.filters(chunk)
        query_BD = retriever.encode(texts)
        # Ten answers are enough for every metric that is chosen by.
        neighbours = predictor.find(query_BD, 1, SearchScope(filters))
        candidates += predictor.all_candidates(neighbours, 1, filters, texts)
    return WeightSearch(corpus, candidates, train.positives(rows), metrics).choose()


def _without_voters(retriever: Retriever, corpus: Corpus, rows: Int64Array) -> Retriever:
    """A view in which some training queries do not vote.

    Args:
        retriever: a fused bundle.
        corpus: its corpus.
        rows: rows of the training split.
    """
    assert retriever.fusion is not None
    assert retriever.fusion.queries is not None
    assert retriever.memory is not None
    # A memory numbers the training queries that have a positive.
    hidden = np.searchsorted(remembered_rows(corpus.split("train")), rows)
    queries = dataclasses.replace(retriever.fusion.queries, hidden=hidden)
    return dataclasses.replace(
        retriever,
        memory=dataclasses.replace(retriever.memory, queries=queries),
        fusion=dataclasses.replace(retriever.fusion, queries=queries),
    )


def _write_chosen(made: Path, out: str | Path, choice: Choice) -> None:
    """Writes the bundle with the chosen weights; files of other parts are left out."""
    folder, manifest = storage.open_artifact(made, KIND, contents=False)
    settings = read_settings(folder)
    used = choice.config.used()
    predictor: dict[str, Any] = {**settings.predictor, "parts": configs.dump(choice.config)}
    if "memory" not in used:
        del predictor["shards"]
    left_out = _unused_files(list(manifest.files), used)
    about = {**manifest.about, "fused": choice.plain()}
    linked: dict[str, storage.FileEntry] = {}
    with storage.new_artifact(out, KIND, about, linked) as target:
        write_settings(target, dataclasses.replace(settings, predictor=predictor))
        linked |= storage.link_files(folder, manifest, target, [*left_out, _SETTINGS])


def _unused_files(names: Sequence[str], used: Sequence[str]) -> list[str]:
    """Files that no used part reads."""
    prefixes = []
    if "memory" not in used:
        prefixes += ["memory/vectors/", "memory/index/"]
    if not {"memory", "words"} & set(used):
        prefixes.append("memory/")
    if "words" not in used:
        prefixes += file_names(QUERIES)
    if "texts" not in used:
        prefixes += file_names(LABELS)
    if not {"words", "texts"} & set(used):
        prefixes.append(f"{WORDS}/")
    return [name for name in names if name.startswith(tuple(prefixes))]
