"""Writes a bundle that answers by the weighted sum of several parts (retrieval/parts.py).

Each member's bundle is written with a memory first, and the words of the corpus once. The trial by
which weights are chosen and the fused bundle are then put together from these files, which are
linked and not copied.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmcray import config as configs
from xmcray.data.corpus import KIND as CORPUS
from xmcray.data.corpus import REMOVED, Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.bundle import KIND, Settings, new_bundle, read_settings, write_settings
from xmcray.retrieval.calibration import FOLDER as CALIBRATION
from xmcray.retrieval.calibration import Calibration
from xmcray.retrieval.fused import MEMBERS, FusedPredictor
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import memory_writer, remembered_rows
from xmcray.retrieval.parts import Candidates, MemberConfig, PartsConfig
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import MemoryConfig
from xmcray.retrieval.word_index import FOLDER as WORDS
from xmcray.retrieval.word_index import LABELS, QUERIES, file_names, write_word_index
from xmcray.storage.artifact import (
    link_files,
    new_artifact,
    open_artifact,
    refuse_existing,
    unfinished_folder,
)
from xmcray.storage.manifest import FileEntry, read_manifest
from xmcray.storage.remote import is_url
from xmcray.training.export import check_refit
from xmcray.training.held_out import held_out_by, relevance_of, without_voters
from xmcray.training.outcome import bundle_of, check_fits
from xmcray.training.part_weights import (
    DEPTH,
    MEMORY_KEYS,
    METRICS,
    SUMMED,
    WORD_KEYS,
    Choice,
    WeightSearch,
)
from xmcray.training.probability_curves import FEW_QUERIES, fit_calibration
from xmcray.training.run import SELECTION, Run
from xmcray.types import Float32Array, Int64Array, Ragged, spans

logger = logging.getLogger(__name__)

MOST_QUERIES = 5000  # held-out queries by which weights are chosen, and probabilities are fitted
# Many queries vote, and those that are missed are mostly far and of little weight. A search for a
# recall of 0.95 takes twice as long (benchmarks/fused_latency.py).
MEMORY_INDEX = IndexSpec(recall=0.9)
_SETTINGS = "settings.json"
# Files of a member that a fused bundle has once.
_SHARED = (
    "labels.parquet",
    "removed.npy",
    "memory/labels.npy",
    "memory/label_offsets.npy",
    "memory/label_weights.npy",
    "memory/queries.parquet",
)
_CHUNK = 1024  # held-out queries that are encoded at once
Progress = Callable[[int], None]


def fuse(
    paths: Sequence[str],
    corpus: Corpus,
    out: str | Path,
    *,
    retokenized: Sequence[Corpus] = (),
    metrics: Sequence[str] = METRICS,
    most_queries: int = MOST_QUERIES,
    choice: Choice | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Choice:
    """Chooses the weights of the parts on held-out queries, and writes the fused bundle.

    Args:
        paths: runs, or bundles whose runs held queries out. Of a run with --refit the weights are
            chosen with RUN/selection, which has not seen the held-out queries, and the parts are
            those of the refit.
        corpus: the one that they were made from. Its training queries vote by vectors and words.
        out: folder or URL that does not exist yet.
        retokenized: the same queries and labels prepared with other tokenizers, if a run was
            trained on these.
        metrics: the metrics whose mean is maximised, of `part_weights.SUMMED`.
        most_queries: at most so many held-out queries choose the weights. Fewer take less time; more
            than MOST_QUERIES have no effect.
        choice: weights that were chosen before; `paths` are the runs of its members, in order.
        threads: of building indexes.
        progress: called with the number of training queries encoded so far for a member.
    Returns:
        The weights, and why.
    Raises:
        ConfigError: no query was held out by all runs, or a metric that cannot be maximised.
        DataError: bundles and corpus do not belong together.
        StorageError: `out` is not empty, or the disk is full.
    """
    refuse_existing(out)
    for name in metrics:
        _check_metric(name)
    for other in retokenized:
        _check_same_texts(corpus, other)
    sources = [_source(path, [corpus, *retokenized]) for path in paths]
    held_out = _held_out(sources)
    # On the disk of the bundle, so that files are moved and not copied.
    target = Path(tempfile.gettempdir(), "bundle") if is_url(out) else Path(out).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(target.parent, f"{target.name}.fusing") as folder:
        selected = [
            _write_member(
                source.selected, source.corpus, folder / f"selected-{place}", threads, progress
            )
            for place, source in enumerate(sources)
        ]
        words = _write_words(corpus, folder / WORDS)
        if choice is None:
            if len(held_out) < FEW_QUERIES:
                logger.warning(
                    "weights are chosen by %d held-out queries, too few to rely on; %s",
                    len(held_out),
                    _how_to_hold_out(sources, "hold out more with data.validation"),
                )
            choosing_rows = _evenly_spread(held_out, most_queries)
            choice = _choose_weights(selected, words, corpus, choosing_rows, metrics, folder)
        kept = _kept_members(selected, choice.config)
        chosen = [selected[place] for place in kept]
        _put_together(chosen, words, folder / "chosen", choice.config, {})
        retriever = Retriever.load(folder / "chosen")
        calibration = _calibration(retriever, [sources[place] for place in kept], held_out)
        members: list[Path] = []
        for place in kept:
            source = sources[place]
            member = selected[place]
            if source.refit is not None:
                member = folder / f"final-{place}"
                _write_member(source.final, source.corpus, member, threads, progress)
            members.append(member)
        about = {"fused": choice.plain()}
        _put_together(members, words, out, choice.config, about, calibration)
    return choice


def _calibration(
    retriever: Retriever, sources: Sequence[_Source], held_out: Int64Array
) -> Calibration | None:
    """The probabilities of the selected members; None if they do not fit the refit of one of them."""
    for source in sources:
        if source.refit is None:
            continue
        try:
            check_refit(source.refit)
        except ConfigError as problem:
            logger.warning("%s: %s", source.refit.path, problem)
            return None
    return fit_calibration(retriever, sources[0].corpus, held_out)


def _check_metric(name: str) -> None:
    """Raises ConfigError for a metric by which weights cannot be chosen."""
    if name in SUMMED:
        return
    if name in MAIN_METRICS:
        raise ConfigError(
            f"metric {name!r} is no sum over the hits among {DEPTH} answers, expected one of {', '.join(SUMMED)}"
        )
    raise ConfigError(configs.unknown("metric", name, SUMMED))


def _kept_members(selected: Sequence[Path], config: PartsConfig) -> list[int]:
    """Places of the members of which a part stays."""
    if len(config.members) == len(selected):
        # Weights that were chosen before may have other names of members.
        return list(range(len(selected)))
    names = [member.name for member in _all_parts(selected).members]
    return [names.index(member.name) for member in config.members]


@dataclass(frozen=True)
class _Source:
    """A trained model that is to be a member.

    Attributes:
        selected: the bundle by which weights are chosen.
        final: the bundle whose parts are fused.
        corpus: the one that it was trained on.
        refit: the run of `final`, if `selected` is that of its selection.
    """

    selected: str
    final: str
    corpus: Corpus
    refit: Run | None = None


def _source(path: str, corpora: Sequence[Corpus]) -> _Source:
    """Finds the bundles of a run or bundle, and its corpus: the first of `corpora` if none is its own."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        _, manifest = open_artifact(path, KIND, contents=False)
        corpus = _own_corpus(manifest.about.get("corpus_sha256"), corpora)
        return _Source(path, path, corpus)
    run = Run.open(folder)
    corpus = _own_corpus(run.corpus_sha256, corpora)
    final = bundle_of(run, corpus)
    if (folder / SELECTION / "run.json").is_file():
        return _Source(bundle_of(Run.open(folder / SELECTION), corpus), final, corpus, run)
    return _Source(final, final, corpus)


def _own_corpus(sha256: str | None, corpora: Sequence[Corpus]) -> Corpus:
    for corpus in corpora:
        if corpus.sha256 == sha256:
            return corpus
    return corpora[0]


def _check_same_texts(corpus: Corpus, other: Corpus) -> None:
    """Checks that two corpora differ in their tokens alone.

    Raises:
        DataError: they hold other queries, labels or positives.
    """
    files = []
    for path in (corpus.path, other.path):
        manifest = read_manifest(path, CORPUS)
        hashes = {}
        for name, entry in manifest.files.items():
            if name.endswith((".parquet", ".labels.npy", REMOVED)) or name.startswith("filters/"):
                hashes[name] = entry.sha256
        files.append(hashes)
    if files[0] != files[1]:
        raise DataError(
            f"corpora {corpus.path} and {other.path} hold other texts or positives, expected the"
            " same raw files prepared with two tokenizers"
        )


def _held_out(sources: Sequence[_Source]) -> Int64Array:
    """Rows of the training split that no source was trained on, ascending; at most MOST_QUERIES.

    Raises:
        ConfigError: there is none.
    """
    rows = remembered_rows(sources[0].corpus)
    for source in sources:
        bundle = source.selected
        _, manifest = open_artifact(bundle, KIND, contents=False)
        if manifest.about.get("members"):
            raise ConfigError(f"bundle {bundle} has several members; name their runs instead")
        held_out = held_out_by(bundle, manifest.about, source.corpus)
        rows = np.intersect1d(rows, held_out.validation_rows)
    if not len(rows):
        advice = _how_to_hold_out(sources, "train them with equal data.validation and data.seed")
        raise ConfigError(
            "each training query was used by one of the runs, so none is left to choose weights by;"
            f" {advice}"
        )
    return _evenly_spread(rows, MOST_QUERIES)


def _how_to_hold_out(sources: Sequence[_Source], otherwise: str) -> str:
    """What to do so that all sources hold out the same queries."""
    starts = set()
    for source in sources:
        _, manifest = open_artifact(source.selected, KIND, contents=False)
        data = manifest.about.get("config", {}).get("data") or {}
        starts.add(data.get("validation_from", 0))
    if len(starts) == 1:
        return otherwise
    # A run with --from holds out only queries that are new to it.
    return f"train all runs with data.validation_from={max(starts)}"


def _evenly_spread(rows: Int64Array, most: int) -> Int64Array:
    """Some of the rows, evenly spread, so that the same runs give the same bundle."""
    if len(rows) <= most:
        return rows
    places = np.linspace(0, len(rows) - 1, most).astype(np.int64)
    return rows[places]


def write_parts(
    sources: Sequence[str | Path], corpus: Corpus, target: str | Path, config: PartsConfig
) -> None:
    """Writes a fused bundle with given weights.

    Args:
        sources: a bundle per member. A memory of its own is made anew.
        corpus: the one that they were made from.
        target: folder or URL that does not exist yet.
        config: weights and settings.
    """
    with tempfile.TemporaryDirectory(prefix=".fusing.") as name:
        folder = Path(name)
        members: list[Path] = []
        for number, source in enumerate(sources):
            members.append(_write_member(source, corpus, folder / str(number)))
        _put_together(members, _write_words(corpus, folder / WORDS), target, config, {})


def _write_words(corpus: Corpus, target: Path) -> Path:
    """Writes the words of training queries and labels; returns their folder."""
    train = corpus.split("train")
    query_texts = train.texts(remembered_rows(corpus))
    label_texts = corpus.label_texts(np.arange(corpus.card.num_labels))
    with new_artifact(target, WORDS, {}) as made:
        write_word_index(made, query_texts, label_texts)
    return target


def _write_member(
    source: str | Path,
    corpus: Corpus,
    target: Path,
    threads: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Writes a bundle with a memory, as a part of a fused bundle; returns its folder."""
    folder, manifest = open_artifact(source, KIND)
    settings = read_settings(folder)
    check_fits(Retriever.load(folder), corpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = QueryEncoder.load(folder, settings, device, "float32")
    encode = _Encoder(dataclasses.replace(encoder, normalised=True), progress)
    # A memory or words that the bundle has already are written anew. Its probabilities are those of
    # other scores.
    outdated = ("memory/", f"{WORDS}/", f"{CALIBRATION}/")
    replaced = [name for name in manifest.files if name.startswith(outdated)]
    linked: dict[str, FileEntry] = {}
    with new_artifact(target, KIND, manifest.about, linked) as made:
        relevance = relevance_of(manifest.about, corpus)
        write = memory_writer(corpus, encode, MemoryConfig(), MEMORY_INDEX, threads, relevance)
        memory = write(made)
        predictor = {
            "kind": "fused",
            "num_queries": memory["num_queries"],
            "shards": memory["shards"],
        }
        write_settings(made, dataclasses.replace(settings, predictor=predictor))
        linked |= link_files(folder, manifest, made, [*replaced, _SETTINGS])
    return target


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


def _all_parts(members: Sequence[Path]) -> PartsConfig:
    """Settings that use every part of the members.

    Candidates are found with them, and weights are chosen on these candidates.
    """
    names = _names([read_settings(member).method for member in members])
    return PartsConfig(
        members=tuple(MemberConfig(name=name, memory=1.0) for name in names),
        words=1.0,
        texts=1.0,
        memory_keys=MEMORY_KEYS,
        word_keys=max(WORD_KEYS),
    )


def _names(methods: Sequence[str]) -> list[str]:
    """A name per member: its method, with a number if another member has the same."""
    if len(methods) == 1:
        return [""]
    names = []
    seen: Counter[str] = Counter()
    for method in methods:
        name = method or "model"
        seen[name] += 1
        if seen[name] > 1:
            name += f"-{seen[name]}"
        names.append(name)
    return names


def _choose_weights(
    selected: Sequence[Path],
    words: Path,
    corpus: Corpus,
    rows: Int64Array,
    metrics: Sequence[str],
    folder: Path,
) -> Choice:
    """Chooses weights by the answers of a bundle of all parts, FOLDER/trial, to held-out queries."""
    start = _all_parts(selected)
    _put_together(selected, words, folder / "trial", start, {})
    retriever = without_voters(Retriever.load(folder / "trial"), corpus, rows)
    assert retriever.fusion is not None
    predictor = FusedPredictor(retriever.fusion, retriever.members)
    train = corpus.split("train")
    candidates: list[Candidates] = []
    for span in spans(len(rows), _CHUNK):
        chunk = rows[span]
        texts = train.texts(chunk)
        filters = train.filters(chunk)
        query_BD = retriever.encode(texts, train.side_vectors(chunk))
        # Ten answers are enough for every metric that is chosen by.
        neighbours = predictor.find(query_BD, 1, SearchScope(filters))
        candidates += predictor.all_candidates(neighbours, 1, filters, texts)
    truth = corpus.answerable(train.positives(rows))
    return WeightSearch(corpus, candidates, truth, start, metrics).choose()


def _put_together(
    members: Sequence[Path],
    words: Path,
    out: str | Path,
    config: PartsConfig,
    about: Mapping[str, Any],
    calibration: Calibration | None = None,
) -> None:
    """Writes a fused bundle; files of parts without a weight are left out.

    Args:
        members: their folders, in the order of `config.members`.
        words: the folder of the words.
        out: folder or URL that does not exist yet.
        config: weights and settings.
        about: more entries of the manifest.
        calibration: the probabilities of its answers.
    """
    manifests = [read_manifest(member, KIND) for member in members]
    about = {**manifests[0].about, **about}
    if len(members) > 1:
        names = [member.name for member in config.members]
        runs = [manifest.about for manifest in manifests]
        about["members"] = dict(zip(names, runs, strict=True))
    linked: dict[str, FileEntry] = {}
    with new_bundle(out, about, linked) as target:
        for place, member in enumerate(config.members):
            # The first member is the bundle itself.
            prefix = f"{MEMBERS}/{member.name}/" if place else ""
            folder = target / prefix
            settings = read_settings(members[place])
            without = _unused_files(list(manifests[place].files), config, place)
            entries = link_files(members[place], manifests[place], folder, without)
            linked |= {f"{prefix}{name}": entry for name, entry in entries.items()}
            write_settings(folder, _member_settings(settings, config, place))
        for path, manifest in zip(members, manifests, strict=True):
            # Labels have the attributes of the first member that has some.
            if ATTRIBUTES in manifest.files:
                others = manifest.files.keys() - {ATTRIBUTES}
                linked |= link_files(path, manifest, target, others)
                break
        if calibration is not None:
            calibration.save(target)
        manifest = read_manifest(words, WORDS)
        unused_words = _unused_words(list(manifest.files), config)
        linked |= link_files(words, manifest, target, unused_words)


def _member_settings(settings: Settings, config: PartsConfig, place: int) -> Settings:
    """Settings of a member; the first one has those of all parts."""
    predictor: dict[str, Any] = dict(settings.predictor)
    if not config.members[place].memory:
        del predictor["shards"]
    if place == 0:
        predictor["parts"] = configs.dump(config)
    return dataclasses.replace(settings, predictor=predictor)


def _unused_files(names: Sequence[str], config: PartsConfig, place: int) -> list[str]:
    """Files of a member that its parts do not read, or that the first member has for all."""
    prefixes = [_SETTINGS, ATTRIBUTES]
    if not config.members[place].memory:
        prefixes += ["memory/vectors/", "memory/index/"]
    if place > 0:
        prefixes += _SHARED
    elif not config.has_voters:
        prefixes.append("memory/")
    return [name for name in names if name.startswith(tuple(prefixes))]


def _unused_words(names: Sequence[str], config: PartsConfig) -> list[str]:
    """Files of words that no used part reads."""
    prefixes = []
    if not config.words:
        prefixes += file_names(QUERIES)
    if not config.texts:
        prefixes += file_names(LABELS)
    if not config.words and not config.texts:
        prefixes.append(f"{WORDS}/")
    return [name for name in names if name.startswith(tuple(prefixes))]
