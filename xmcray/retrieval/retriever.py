"""A bundle that answers. Needs neither Ray nor training code; evaluation and serving both call it.

texts -> QueryEncoder -> vectors -> Predictor.find -> neighbours -> Predictor.rank -> labels

A fused bundle also compares the words of the texts, in Predictor.rank.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xmcray.config import check_range
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import ConfigError, StorageError, XmcrayError
from xmcray.retrieval.answers import FoundLabel, named_answers
from xmcray.retrieval.bundle import KIND, Settings, read_settings
from xmcray.retrieval.calibration import Calibration, check_min_probability
from xmcray.retrieval.fused import NO_TEXTS, FusedPredictor, Fusion, fixed_parts, other_members
from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import Memory
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.predictors import LabelPredictor, MemoryPredictor, Predictor, no_memory
from xmcray.retrieval.query_encoder import QueryEncoder, check_side_vectors
from xmcray.retrieval.shards import ALL_SHARDS, EVERYTHING, SearchScope, ShardSubset
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.artifact import folder_identity, open_artifact
from xmcray.types import BoolArray, Float32Array, Int64Array, Ragged, TopLabels, spans

if TYPE_CHECKING:
    from xmcray.retrieval.new_vectors import RowMap
    from xmcray.retrieval.reranker import Reranker

CHUNK = 1024  # queries searched at once
_MOST_THREADS = 4_096
_MOST_OPENINGS = 5  # of a bundle that other processes change meanwhile


@dataclass(frozen=True, eq=False)
class Retriever:
    """Encodes queries and ranks the labels of one bundle. Make it with `load`.

    Attributes:
        query_encoder: makes query vectors.
        labels: the label vectors, their names, and which may be answered.
        memory: training queries that vote for labels, or None: the nearest labels are the answers.
        fusion: how several parts add up, or None.
        calibration: gives answers their probabilities, or None.
        sha256: names the bundle's content.
        others: the further members of a fused bundle: other trained models of the same labels.
        reranker: reads the best answers again, together with the query, or None.
        row_maps: by number of columns, how labels that join get rows of a classifier. All views of
            a loaded bundle share them, because they depend on its encoder and its export alone.
    """

    query_encoder: QueryEncoder
    labels: LabelIndex
    memory: Memory | None = None
    sha256: str = ""
    fusion: Fusion | None = None
    others: tuple[Retriever, ...] = ()
    calibration: Calibration | None = None
    reranker: Reranker | None = None
    row_maps: dict[int, RowMap] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        path: str | Path,
        threads: int | None = None,
        device: str | None = None,
        subset: ShardSubset = ALL_SHARDS,
        precision: str = "float32",
    ) -> Retriever:
        """Opens a bundle. Every file is compared with its hash before use; vectors stay on disk.

        Args:
            path: folder or fsspec URL.
            threads: threads of torch and FAISS in this process; torch's own setting if not given.
            device: where the encoder and exhaustive searches run, such as "cuda:0"; by default the
                CPU.
            subset: the shards that are going to be searched; the indexes of others are not read.
            precision: numbers that a transformer computes with: "float32", "bfloat16" or "int8",
                see nn/compact.py. A static encoder always computes in float32.
        Raises:
            StorageError: a file is missing or altered (named), or this is no bundle.
            BundleError: a file is malformed or does not fit the others.
            ConfigError: no such device, or it cannot compute with this precision.
        """
        for _ in range(_MOST_OPENINGS):
            before = folder_identity(path)
            try:
                folder, manifest = open_artifact(path, KIND)
                sha256 = manifest.sha256
                retriever = cls.of_folder(folder, threads, device, subset, precision, sha256)
            except XmcrayError:
                if folder_identity(path) == before:
                    raise
            else:
                if folder_identity(path) == before:
                    return retriever
            # Meanwhile another process has put a changed bundle in its place.
        raise StorageError(
            f"{path} was changed by another process each of the {_MOST_OPENINGS} times that it was"
            " opened; try again when that is done"
        )

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        threads: int | None = None,
        device: str | None = None,
        subset: ShardSubset = ALL_SHARDS,
        precision: str = "float32",
        sha256: str = "",
    ) -> Retriever:
        """As `load`, of a local folder whose files are verified, or were written by this process."""
        if threads is not None:
            check_range("threads", threads, 1, _MOST_THREADS)
            torch.set_num_threads(threads)
        num_threads = threads or torch.get_num_threads()
        opening = _Opening(num_threads, _device(device), subset, precision, sha256)
        settings = read_settings(folder)
        num_exported = settings.first_added or settings.num_labels
        calibration = Calibration.load(folder, num_exported)
        if not settings.is_fused:
            return dataclasses.replace(opening.model(folder), calibration=calibration)
        fusion = Fusion.load(folder, settings)
        first = opening.model(folder, fusion)
        members = other_members(folder, settings)
        others = tuple(opening.model(member, fusion, first) for member in members)
        joined = np.arange(num_exported, settings.num_labels)
        fusion = fusion.with_labels(first.labels.texts(joined))
        return dataclasses.replace(first, fusion=fusion, others=others, calibration=calibration)

    @property
    def members(self) -> tuple[Retriever, ...]:
        """The trained models of a fused bundle, each alone; any other bundle is one."""
        if not self.others:
            return (self,)
        first = dataclasses.replace(self, fusion=None, others=())
        return (first, *self.others)

    @property
    def settings(self) -> Settings:
        """The bundle's settings."""
        return self.labels.settings

    @property
    def tokenizer(self) -> TextTokenizer:
        """Makes token ids of texts."""
        return self.query_encoder.tokenizer

    @property
    def num_labels(self) -> int:
        """Labels that can be answered: L without those that were removed."""
        return self.labels.num_labels

    @property
    def is_exact(self) -> bool:
        """Whether every search compares a query with all vectors."""
        for member in self.members:
            if not member.labels.rows.is_exact:
                return False
            if member.memory is not None and not member.memory.rows.is_exact:
                return False
        return True

    @property
    def dim(self) -> int:
        """Numbers of a query's vector: in all members together."""
        return sum(member.settings.dim for member in self.members)

    @property
    def is_static(self) -> bool:
        """Whether texts are encoded by table look-ups; see `QueryEncoder.is_static`."""
        return all(member.query_encoder.is_static for member in self.members)

    @property
    def needs_texts(self) -> bool:
        """Whether a search needs the texts of queries, because token ids do not say enough.

        That is so if words are compared, if several members have tokenizers of their own, or if a
        reranker reads the texts.
        """
        compares_words = self.fusion is not None and self.fusion.words is not None
        return compares_words or len(self.members) > 1 or self.reranker is not None

    @property
    def explains(self) -> bool:
        """Whether an answer can say why it is one."""
        return self.memory is not None or self.fusion is not None

    @property
    def side_width(self) -> int:
        """W, the width of the side vectors that a query may have; 0 if the bundle uses none."""
        return max(member.query_encoder.encoder.side_width for member in self.members)

    def check_vectors(self, vectors: Float32Array | None, num_queries: int) -> None:
        """Raises ConfigError unless the bundle can use some side vectors.

        Args:
            vectors: float32 [B, W], or None.
            num_queries: B.
        """
        check_side_vectors(vectors, num_queries, self.side_width)

    def encode(
        self, queries: Sequence[str] | Ragged, vectors: Float32Array | None = None
    ) -> Float32Array:
        """Query vectors float32 [B, D] of B texts or rows of token ids; an empty text is legal.

        Args:
            queries: texts, or token ids, which may have side vectors.
            vectors: float32 [B, W], side vectors of the texts; members without a mixer ignore them.
        Raises:
            ConfigError: these are token ids, and there are several members; or `queries` is a
                single string, or has something that is no text.
        """
        if not isinstance(queries, Ragged):
            _check_texts("encode", queries)
        elif len(self.members) > 1:
            raise ConfigError(NO_TEXTS)
        parts = [member.query_encoder.encode(queries, vectors) for member in self.members]
        return np.concatenate(parts, axis=1)

    def encode_start(
        self, texts: Sequence[str], max_tokens: int, vectors: Float32Array | None = None
    ) -> tuple[Float32Array, BoolArray]:
        """Query vectors of texts, of which at most `max_tokens` tokens are read.

        Args:
            texts: B texts.
            max_tokens: tokens that are read of a text.
            vectors: as for `encode`.
        Returns:
            float32 [B, D], and bool [B]: whether a member reads only the start of the text.
        """
        parts = []
        truncated = np.zeros(len(texts), bool)
        for member in self.members:
            encoder = member.query_encoder
            own_part, own_truncated = encoder.encode_start(texts, max_tokens, vectors)
            parts.append(own_part)
            truncated |= own_truncated
        return np.concatenate(parts, axis=1), truncated

    def has_tokens(self, text: str) -> bool:
        """Whether a label's text has any token for each member; without one it has no vector."""
        for member in self.members:
            tokens = member.tokenizer.encode_labels([text])
            if not member.tokenizer.has_tokens(tokens).all():
                return False
        return True

    def search(
        self,
        texts: Sequence[str],
        k: int = 10,
        *,
        memory: MemoryConfig | None = None,
        explain: bool = False,
        min_probability: float | None = None,
        vectors: Float32Array | None = None,
    ) -> list[list[FoundLabel]]:
        """The k best labels of each text, best first.

        Args:
            texts: queries.
            k: answers per query, 1 .. L.
            memory: how training queries vote, in place of the bundle's own settings.
            explain: name the training queries that voted.
            min_probability: leave out answers that are less probable.
            vectors: float32 [texts, W], side vectors, for a bundle that mixes them; zeros, or None,
                for texts alone.
        Raises:
            ConfigError: k is not in 1 .. L, `texts` is a single string or has something that is
                no text, there is no memory, there are no probabilities, or the bundle cannot use
                these vectors.
        """
        _check_texts("search", texts)
        self._check_k(k)
        if explain and not self.explains:
            raise no_memory()
        self.check_min_probability(min_probability, memory)
        self.check_vectors(vectors, len(texts))
        answers: list[list[FoundLabel]] = []
        for span in spans(len(texts), CHUNK):
            chunk = texts[span]
            own_vectors = None if vectors is None else vectors[span]
            query_BD = self.encode(chunk, own_vectors)
            neighbours = self.find_neighbours(query_BD, k, memory=memory)
            answers += self.name_answers(
                neighbours,
                k,
                memory=memory,
                explain=explain,
                texts=chunk,
                min_probability=min_probability,
            )
        return answers

    def top_labels(
        self,
        queries: Sequence[str] | Ragged | Float32Array,
        k: int,
        *,
        exclude: Ragged | None = None,
        exact: bool = False,
        memory: MemoryConfig | None = None,
        vectors: Float32Array | None = None,
    ) -> TopLabels:
        """The k best labels as source ids, with scores and, if calibrated, probabilities.

        Equal scores are ordered by the lower source id.

        Args:
            queries: B texts, rows of token ids, or query vectors float32 [B, D]. A bundle that
                compares words needs texts.
            k: answers per query, 1 .. L.
            exclude: B lists of source label ids that are masked before the k best are taken.
            exact: compare all rows, whatever the index. So errors of the index can be separated from
                errors of the model.
            memory: how training queries vote, in place of the bundle's own settings.
            vectors: float32 [B, W], side vectors of texts, if they have some.
        Raises:
            ConfigError: k is not in 1 .. L, there is no memory, texts are needed, or query vectors
                have another width than the bundle's.
        """
        self._check_k(k)
        predictor = self.predictor(memory)
        num_ranked = self.num_ranked(k)
        tops = []
        for span in spans(len(queries), CHUNK):
            hidden = None if exclude is None else exclude.slice(span.start, span.stop)
            own_vectors = None if vectors is None else vectors[span]
            query_BD, texts = self._encoded(queries, span, own_vectors)
            neighbours = predictor.find(query_BD, num_ranked, SearchScope(hidden, exact))
            top = predictor.rank(neighbours, num_ranked, hidden, texts)
            top = self._with_probabilities(top, neighbours, memory)
            tops.append(self._reranked(top, k, texts))
        return TopLabels.concatenate(tops, k)

    def _encoded(
        self,
        queries: Sequence[str] | Ragged | Float32Array,
        span: slice,
        vectors: Float32Array | None,
    ) -> tuple[Float32Array, Sequence[str] | None]:
        """Query vectors of a span of the queries, and their texts if those are given."""
        if isinstance(queries, Ragged):
            return self.encode(queries.slice(span.start, span.stop)), None
        if isinstance(queries, np.ndarray):
            # FAISS reads as many numbers as a label's vector has, whatever a query's width is.
            if queries.ndim != 2 or queries.shape[1] != self.dim:
                raise ConfigError(
                    f"found query vectors {list(queries.shape)}, expected [queries, {self.dim}];"
                    " encode texts with this bundle"
                )
            return np.ascontiguousarray(queries[span], np.float32), None
        texts = queries[span]
        return self.encode(texts, vectors), texts

    def find_neighbours(
        self,
        query_BD: Float32Array,
        k: int,
        *,
        scope: SearchScope = EVERYTHING,
        memory: MemoryConfig | None = None,
    ) -> Neighbours:
        """The search alone, in all shards or in a subset; `Neighbours.merged` combines subsets."""
        self._check_k(k)
        return self.predictor(memory).find(query_BD, self.num_ranked(k), scope)

    def name_answers(
        self,
        neighbours: Neighbours,
        k: int,
        *,
        memory: MemoryConfig | None = None,
        explain: bool = False,
        texts: Sequence[str] | None = None,
        min_probability: float | None = None,
        pair_scores: Float32Array | None = None,
    ) -> list[list[FoundLabel]]:
        """The k best labels among the neighbours of some texts, as `search` returns them.

        `pair_scores` are those of `pairs_to_read`, if another process has read them.
        """
        predictor = self.predictor(memory)
        num_ranked = self.num_ranked(k)
        top = predictor.rank(neighbours, num_ranked, texts=texts)
        top = self._with_probabilities(top, neighbours, memory)
        top = self._reranked(top, k, texts, pair_scores)
        if min_probability is not None:
            top = top.at_least(min_probability)
        reasons = predictor.explain(neighbours, top, num_ranked, texts) if explain else None
        return named_answers(top, self.labels, reasons)

    def pairs_to_read(
        self,
        neighbours: Neighbours,
        k: int,
        texts: Sequence[str],
        memory: MemoryConfig | None = None,
    ) -> list[tuple[str, str]]:
        """Query and label text of each answer that the reranker needs to name the k best."""
        assert self.reranker is not None, "no reranker reads the answers"
        top = self.predictor(memory).rank(neighbours, self.num_ranked(k), texts=texts)
        return self.reranker.pairs(texts, top, self.labels)

    def reranked_by(self, reranker: str | os.PathLike[str] | None, reads: bool = True) -> Retriever:
        """A view whose best answers are read again by a cross-encoder; the same view without one.

        Args:
            reranker: folder or URL of `xmcray train-reranker`, or any cross-encoder by folder or
                hub id.
            reads: whether it reads in this process; see `pairs_to_read`.
        """
        if reranker is None:
            return self
        from xmcray.retrieval.reranker import Reranker  # its library takes seconds to import

        return dataclasses.replace(self, reranker=Reranker.load(str(reranker), reads))

    def restricted(self, allowed: BoolArray) -> Retriever:
        """A view that answers only some labels; in a memory all keys go on to vote.

        Args:
            allowed: bool [L] by source id; none at all is legal.
        """
        others = tuple(other.restricted(allowed) for other in self.others)
        return dataclasses.replace(self, labels=self.labels.restricted(allowed), others=others)

    def without(self, label_ids: Int64Array) -> Retriever:
        """A view in which some labels are no answers any more."""
        others = tuple(other.without(label_ids) for other in self.others)
        return dataclasses.replace(self, labels=self.labels.without(label_ids), others=others)

    def check_min_probability(
        self, min_probability: float | None, memory: MemoryConfig | None = None
    ) -> None:
        """Refuses a bound on probabilities where answers have none.

        Raises:
            ConfigError: the bundle is not calibrated, or the request changes how it answers.
        """
        if min_probability is not None:
            has_probabilities = self.calibration is not None and self._uses_own_settings(memory)
            check_min_probability(min_probability, has_probabilities)

    def num_ranked(self, k: int) -> int:
        """Answers that the reranker needs to give k; k without one."""
        if self.reranker is None:
            return k
        return min(self.num_labels, max(k, self.reranker.config.candidates))

    def _reranked(
        self,
        top: TopLabels,
        k: int,
        texts: Sequence[str] | None,
        pair_scores: Float32Array | None = None,
    ) -> TopLabels:
        if self.reranker is None:
            return top
        if texts is None:
            raise ConfigError(NO_TEXTS)
        return self.reranker.reordered(texts, top, self.labels, k, pair_scores)

    def _uses_own_settings(self, memory: MemoryConfig | None) -> bool:
        """Whether a request leaves the bundle's own settings as they are."""
        if memory is None:
            return True
        return self.memory is not None and memory == self.memory.config

    def _with_probabilities(
        self, top: TopLabels, neighbours: Neighbours, memory: MemoryConfig | None
    ) -> TopLabels:
        """Answers with probabilities, if the bundle has any for these settings."""
        if self.calibration is None or not self._uses_own_settings(memory):
            return top
        return self.calibration.with_probabilities(top, neighbours.labels)

    def predictor(self, memory_config: MemoryConfig | None = None) -> Predictor:
        """What ranks the labels of a request.

        Raises:
            ConfigError: the request has settings of a memory, and there is none, or its settings
                were chosen together with those of other parts.
        """
        if self.fusion is not None:
            if memory_config is not None:
                raise fixed_parts()
            return FusedPredictor(self.fusion, self.members)
        if self.memory is not None:
            config = memory_config or self.memory.config
            return MemoryPredictor(self.memory, self.labels, config)
        if memory_config is not None:
            raise no_memory()
        return LabelPredictor(self.labels, calibrated=self.calibration is not None)

    def _check_k(self, k: int) -> None:
        if not 1 <= k <= self.num_labels:
            raise ConfigError(f"k is {k}, expected 1 .. {self.num_labels} (the number of labels)")


@dataclass(frozen=True, slots=True)
class _Opening:
    """Settings by which each trained model of a bundle is opened; see `Retriever.load`."""

    threads: int
    device: torch.device
    subset: ShardSubset
    precision: str
    sha256: str

    def model(
        self, folder: Path, fusion: Fusion | None = None, first: Retriever | None = None
    ) -> Retriever:
        """One trained model of a bundle, alone.

        Args:
            folder: of the model.
            fusion: of a fused bundle, which has the training queries of all memories.
            first: the first member of a fused bundle, whose names of labels others share.
        """
        settings = read_settings(folder)
        shared_labels = None if first is None else first.labels
        labels = LabelIndex.load(folder, settings, self.threads, self.subset, shared_labels)
        query_encoder = QueryEncoder.load(folder, settings, self.device, self.precision)
        memory = None
        if settings.has_memory:
            queries = None if fusion is None else fusion.queries
            memory = Memory.load(folder, settings, self.threads, self.subset, queries)
        if self.device.type != "cpu":
            labels.rows.move_to(self.device)
            if memory is not None:
                memory.rows.move_to(self.device)
        return Retriever(query_encoder, labels, memory, self.sha256)


def _check_texts(function: str, texts: Sequence[str]) -> None:
    """Raises ConfigError unless a function was given texts that a tokenizer can read."""
    if isinstance(texts, str):
        raise ConfigError(
            f"{function} was given one string, expected a list of texts; write {function}([text])"
        )
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f"{function} was given {text!r:.80}, expected texts; write {function}([text])"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"text {text[:80]!a} is not UTF-8 (a lone surrogate); write it anew"
            ) from None


def _device(name: str | None) -> torch.device:
    try:
        return torch.zeros(0, device=name or "cpu").device
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'cpu'") from None
