"""A bundle that answers. Needs neither Ray nor training code; evaluation and serving both call it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.compact import compacted
from xmcray.nn.encoder import Encoder, load_encoder
from xmcray.nn.heads import Head, load_head
from xmcray.nn.static import StaticEncoder
from xmcray.retrieval.bundle import KIND, Settings, read_labels, read_settings
from xmcray.retrieval.index import FLAT_ROWS, Index
from xmcray.retrieval.memory import Memory, MemoryConfig, Neighbours
from xmcray.retrieval.shards import open_shards, search_shards
from xmcray.storage import open_artifact
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

CHUNK = 1024  # queries encoded and searched at once
WHOLE: tuple[int, int] = (0, 1)  # part 0 of 1


@dataclass(frozen=True, slots=True)
class Voter:
    """A training query that voted for an answer, and its part of the answer's probability."""

    uid: str
    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One label that was found.

    Attributes:
        label_id: source id, the label's line in the user's files.
        score: inner product of query and label vector. With a memory the probability; above 1 for a label that joined
            later and is nearer than all keys; where nobody voted for the label and it only completes the list, the
            inner product less 2.
        voters: where asked for, the training queries that voted for it, the largest weight first; what their weights
            lack of the probability is the vote of the label's own text.
    """

    label_id: int
    uid: str
    text: str
    score: float
    voters: tuple[Voter, ...] | None = None


class Retriever:
    """Encoder, tokenizer, labels and index shards of one bundle. Make it with `load`.

    Attributes:
        settings: the bundle's settings.
        sha256: names the bundle's content.
        tokenizer: makes `Ragged` queries for `top_labels`.
        memory: training queries that vote for labels, or None: labels are found by their own vectors.
        labels: uid and text of each label by source id, also of those removed since.
        label_order: int64 [rows], source id of each row, -1 for one that is not used yet. rank: int64 [L], its inverse.
        removed: int64, ascending: source ids that are no answers any more.
    """

    def __init__(
        self,
        encoder: Encoder,
        head: Head,
        tokenizer: TextTokenizer,
        labels: pa.Table,
        label_order: Int64Array,
        shards: Sequence[Index],
        settings: Settings,
        sha256: str = "",
        memory: Memory | None = None,
        removed: Int64Array | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.sha256, self.memory = (
            settings,
            tokenizer,
            sha256,
            memory,
        )
        self._encoder, self._head, self.labels, self.label_order = (
            encoder,
            head,
            labels,
            label_order,
        )
        self._shards = list(shards)
        self.removed = np.empty(0, np.int64) if removed is None else removed
        self._num_exported = sum(
            shard.start < (settings.first_added or shard.stop) for shard in settings.shards
        )
        rows = np.flatnonzero(label_order >= 0)
        self.rank = np.empty(len(rows), np.int64)
        self.rank[label_order[rows]] = rows
        self._names = label_order.copy()
        self._names[self.rank[self.removed]] = -1
        self._answering, self._filtered = self._shards, False  # see `restricted`

    @classmethod
    def load(
        cls,
        path: str | Path,
        threads: int | None = None,
        device: str | None = None,
        part: tuple[int, int] = WHOLE,
        encoder: str = "float32",
    ) -> Retriever:
        """Opens a bundle: every file is compared with its hash before it is used; vectors stay on disk.

        Args:
            path: folder or fsspec URL.
            threads: of torch and FAISS in this process; torch's own setting if not given.
            device: of the encoder and of exhaustive searches, such as "cuda:0"; the CPU if not given.
            part: the part of the shards that is going to be searched (see `find`); other indexes are not read.
            encoder: how a transformer computes: "float32", "bfloat16" or "int8", see nn/compact.py; a static encoder
                is float32 always.
        Raises:
            StorageError: a file is missing or altered (named), or this is no bundle.
            BundleError: a file is malformed or does not fit the others.
            ConfigError: no such device, or it cannot compute that way.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            where = torch.zeros(0, device=device or "cpu").device
        except (RuntimeError, AssertionError):
            raise ConfigError(
                f"device {device!r} is not available on this machine; use 'cpu'"
            ) from None
        folder, manifest = open_artifact(path, KIND)
        settings = read_settings(folder)
        labels, order, removed = read_labels(folder, settings)
        model = compacted(load_encoder(folder / "encoder").to(where).eval(), encoder)
        head = load_head(folder / "head").to(where)
        if (model.dim, head.out_dim) != (head.dim, settings.dim):
            raise BundleError(
                f"{path}: encoder of width {model.dim}, head from {head.dim} to {head.out_dim}, vectors of width"
                f" {settings.dim}; export again"
            )
        num_threads = threads or torch.get_num_threads()
        shards = list(
            open_shards(folder, manifest, settings.shards, settings.dim, num_threads, part=part)
        )
        memory = None
        if settings.predictor["kind"] == "memory":
            known = settings.predictor, settings.num_labels, settings.dim
            memory = Memory.load(folder, manifest, *known, num_threads, removed, part)
        if where.type != "cpu":
            for shard in [*shards, *(memory.indexes if memory else ())]:
                shard.vectors = shard.vectors.to(where)
        tokenizer = TextTokenizer.load(folder / "tokenizer")
        return cls(
            model,
            head,
            tokenizer,
            labels,
            order,
            shards,
            settings,
            manifest.sha256,
            memory,
            removed,
        )

    @property
    def num_labels(self) -> int:
        """Labels that can be answered: L without those that were removed."""
        return self.settings.num_labels - len(self.removed)

    @property
    def changed(self) -> bool:
        """Whether labels joined or were removed since the export."""
        return self.settings.first_added is not None or len(self.removed) > 0

    @property
    def indexed(self) -> bool:
        """Whether some search compares a query with a part of the vectors only."""
        return not all(
            index.is_exact
            for index in [*self._shards, *(self.memory.indexes if self.memory else ())]
        )

    @property
    def encodes_at_once(self) -> bool:
        """Whether a text is encoded in less time than it takes to send it to another process: a static encoder."""
        return isinstance(self._encoder, StaticEncoder)

    def encode(self, texts: Sequence[str] | Ragged) -> Float32Array:
        """Query vectors float32 [B, D]; texts or token ids, encoded in chunks. An empty text is legal."""
        parts = [np.empty((0, self.settings.dim), np.float32)]
        for start in range(0, len(texts), CHUNK):
            if isinstance(texts, Ragged):
                tokens = texts.slice(start, min(start + CHUNK, len(texts)))
            else:
                tokens = self.tokenizer.encode(list(texts[start : start + CHUNK]))
            parts.append(
                embed(self._encoder, self._head, tokens, normalised=self.memory is not None)
            )
        return np.concatenate(parts)

    def search(
        self,
        texts: Sequence[str],
        k: int = 10,
        *,
        memory: MemoryConfig | None = None,
        explain: bool = False,
    ) -> list[list[Answer]]:
        """The k best labels of each text, best first.

        Args:
            memory: how training queries vote, in place of the bundle's own settings. explain: name them.
        Raises:
            ConfigError: k is not in 1 .. L, `texts` is a single string, or there is no memory.
        """
        if isinstance(texts, str):
            raise ConfigError(
                "search was given one string, expected a list of texts; write search([text])"
            )
        self._check(k)
        self._voting(memory, explain)
        answers: list[list[Answer]] = []
        for start in range(0, len(texts), CHUNK):
            near = self.find(self.encode(texts[start : start + CHUNK]), k, memory)
            answers += self.answers(near, k, memory=memory, explain=explain)
        return answers

    def answers(
        self, near: Neighbours, k: int, *, memory: MemoryConfig | None = None, explain: bool = False
    ) -> list[list[Answer]]:
        """As `search`, from what `find` found."""
        voting, top = self._voting(memory, explain), self.fuse(near, k, memory)
        voters = _voters(voting[0], near, top, voting[1]) if voting and explain else None
        known = self._named(np.maximum(top.ids, 0).ravel())
        answers = []
        for row, (ids, scores) in enumerate(
            zip(top.ids.tolist(), top.scores.tolist(), strict=True)
        ):
            uids, texts = (known[name][row * k : (row + 1) * k] for name in ("uid", "text"))
            found = zip(
                ids, uids, texts, scores, voters[row] if voters else [None] * k, strict=True
            )
            answers.append([Answer(*values) for values in found if values[0] >= 0])
        return answers

    def top_labels(
        self,
        tokens: Ragged,
        k: int,
        exclude: Ragged | None = None,
        exact: bool = False,
        memory: MemoryConfig | None = None,
    ) -> TopLabels:
        """The k best labels of tokenised queries, as source ids; equal scores by lower source id.

        Args:
            tokens: B rows of token ids.
            k: answers per query, 1 .. L.
            exclude: B rows of source label ids that are masked before the k best are taken.
            exact: compare all labels, whatever the index: tells the index's error from the model's.
            memory: how training queries vote, in place of the bundle's own settings.
        Raises:
            ConfigError: k is not in 1 .. L, or there is no memory.
        """
        self._check(k)
        parts = []
        for start in range(0, len(tokens), CHUNK):
            stop = min(start + CHUNK, len(tokens))
            hide = None if exclude is None else exclude.slice(start, stop)
            parts.append(
                self.nearest(self.encode(tokens.slice(start, stop)), k, hide, exact, memory)
            )
        ids = [np.empty((0, k), np.int64), *(part.ids for part in parts)]
        scores = [np.empty((0, k), np.float32), *(part.scores for part in parts)]
        return TopLabels(np.concatenate(ids), np.concatenate(scores))

    def nearest(
        self,
        query_BD: Float32Array,
        k: int,
        exclude: Ragged | None = None,
        exact: bool = False,
        memory: MemoryConfig | None = None,
    ) -> TopLabels:
        """As `top_labels`, for query vectors float32 [B, D]."""
        return self.fuse(self.find(query_BD, k, memory, exclude, exact), k, memory, exclude)

    def find(
        self,
        query_BD: Float32Array,
        k: int,
        memory: MemoryConfig | None = None,
        exclude: Ragged | None = None,
        exact: bool = False,
        part: tuple[int, int] = WHOLE,
    ) -> Neighbours:
        """The first half of `nearest`: what lies near the queries, in all shards or in one part of them.

        Args:
            part: (i, n): shards i, i + n, i + 2 n ... only; what n parts found, `combined`, is what one finds in all.
        """
        self._check(k)
        voting = self._voting(memory)
        near = functools.partial(
            self._search, query_BD=query_BD, exclude=exclude, exact=exact, part=part
        )
        if voting is None:
            return Neighbours(TopLabels.nothing(len(query_BD)), near(k))
        remembering, config = voting
        # The keys are those of the export, whatever labels joined or were removed since: so no probability changes.
        queries = remembering.search(query_BD, config, exact, part)
        labels = near(
            remembering.width(k, config), shards=slice(self._num_exported), names=self.label_order
        )
        if not self.changed and not self._filtered:
            return Neighbours(queries, labels)
        joined = near(
            min(config.keys, self.settings.num_labels), shards=slice(self._num_exported, None)
        )
        return Neighbours(queries, labels, joined, completing=near(k))

    def fuse(
        self,
        near: Neighbours,
        k: int,
        memory: MemoryConfig | None = None,
        exclude: Ragged | None = None,
    ) -> TopLabels:
        """The second half of `nearest`: the k best labels among what was found."""
        voting = self._voting(memory)
        return near.labels if voting is None else voting[0].answer(near, k, voting[1], exclude)

    def restricted(self, allowed: npt.NDArray[np.bool_]) -> Retriever:
        """The same bundle with fewer answers: a view that shares everything else. In a memory all keys go on to vote.

        Args:
            allowed: bool [source ids], which labels may be answered; none at all is legal.
        """
        view = copy.copy(self)
        view._names = np.where((self._names >= 0) & allowed[self._names], self._names, -1)
        view._filtered = True
        if self.memory is not None:
            view.memory = self.memory.without(~allowed)
        # A long list of candidates would hold few that are allowed, or none: compare just these where they are few.
        rows = [
            np.flatnonzero(view._names[shard.start : shard.stop] >= 0)
            for shard in self.settings.shards
        ]
        view._answering = [
            index.only(few) if len(few) <= max(FLAT_ROWS, len(index) // 16) < len(index) else index
            for index, few in zip(self._shards, rows, strict=True)
        ]
        return view

    def without(self, label_ids: Int64Array) -> Retriever:
        """A view of the bundle in which some labels are no answers any more."""
        return self._changed(
            self.settings, self.labels, self.label_order, {}, np.union1d(self.removed, label_ids)
        )

    def with_rows(
        self,
        settings: Settings,
        labels: pa.Table,
        label_order: Int64Array,
        vectors: Mapping[int, Float32Array],
    ) -> Retriever:
        """A view of the bundle with more labels; see `labels.with_labels`.

        Args:
            settings: with the shards there are then. labels: uid and text of the new ones.
            label_order: int64 [rows]. vectors: of the shards that are new or changed, by number.
        """
        return self._changed(
            settings, pa.concat_tables([self.labels, labels]), label_order, vectors, self.removed
        )

    def new_shards(self, before: Retriever) -> list[int]:
        """The shards that another view of the bundle does not have, or has with other vectors."""
        theirs = set(map(id, before._shards))
        return [number for number, index in enumerate(self._shards) if id(index) not in theirs]

    def _changed(
        self,
        settings: Settings,
        labels: pa.Table,
        label_order: Int64Array,
        vectors: Mapping[int, Float32Array],
        removed: Int64Array,
    ) -> Retriever:
        one = self._shards[0]
        held = {
            number: Index(torch.from_numpy(rows).to(one.vectors.device), None, threads=one.threads)
            for number, rows in vectors.items()
        }
        shards = [held[n] if n in held else self._shards[n] for n in range(len(settings.shards))]
        memory = self.memory and self.memory.with_labels(settings.num_labels, removed)
        parts = self._encoder, self._head, self.tokenizer, labels, label_order
        return Retriever(*parts, shards, settings, self.sha256, memory, removed)

    def exported_near(self, query_BD: Float32Array, k: int) -> TopLabels:
        """The labels whose own vectors are nearest among all of the export, also those removed since."""
        return self._search(k, slice(self._num_exported), self.label_order, query_BD=query_BD)

    def label_ids(self) -> dict[str, int]:
        """Source ids by uid, of the labels that can be answered."""
        gone = set(self.removed.tolist())
        return {uid: i for i, uid in enumerate(self.labels["uid"].to_pylist()) if i not in gone}

    def label_texts(self, label_ids: Int64Array) -> list[str]:
        """Texts of labels by source id."""
        return self._named(label_ids)["text"]

    def _named(self, label_ids: Int64Array) -> dict[str, list[str]]:
        """Uids and texts of labels by source id.

        Arrow's own `take` first joins all blocks of a column into one: of 10^6 labels, 60 MB for each request.
        """
        blocks, ends = self._blocks
        number_N = np.searchsorted(ends, label_ids, side="right")
        found: dict[str, list[str]] = {name: [""] * len(label_ids) for name in ("uid", "text")}
        for number in np.unique(number_N).tolist():
            places = np.flatnonzero(number_N == number)
            rows = blocks[number].take(
                pa.array(label_ids[places] - ends[number] + len(blocks[number]))
            )
            for name, values in found.items():
                for place, value in zip(places.tolist(), rows[name].to_pylist(), strict=True):
                    values[place] = value
        return found

    @functools.cached_property
    def _blocks(self) -> tuple[list[pa.RecordBatch], Int64Array]:
        """The labels as they lie in memory, and the id after the last one of each block."""
        blocks = self.labels.to_batches()
        return blocks, np.cumsum([len(block) for block in blocks])

    def label_vectors(self, label_ids: Int64Array) -> Float32Array:
        """float32 [n, D], vectors of labels by source id."""
        rows = self.rank[label_ids]
        vectors = np.empty((len(rows), self.settings.dim), np.float32)
        for number, shard in enumerate(self.settings.shards):
            inside = (rows >= shard.start) & (rows < shard.stop)
            vectors[inside] = self.vectors(number)[rows[inside] - shard.start]
        return vectors

    def vectors(self, shard: int) -> Float32Array:
        """float32 [rows, D] of one shard."""
        vectors: Float32Array = self._shards[shard].vectors.cpu().numpy()
        return vectors

    def _search(
        self,
        k: int,
        shards: slice = slice(None),
        names: Int64Array | None = None,
        *,
        query_BD: Float32Array,
        exclude: Ragged | None = None,
        exact: bool = False,
        part: tuple[int, int] = WHOLE,
    ) -> TopLabels:
        """The labels whose own vectors are nearest in some shards, of those that may be answered, or by `names`."""
        hidden = None if exclude is None else Ragged(self.rank[exclude.values], exclude.offsets)
        indexes = self._answering if names is None else self._shards
        numbers = [n for n in range(len(indexes))[shards] if n % part[1] == part[0]]
        return search_shards(
            [self.settings.shards[n] for n in numbers],
            [indexes[n] for n in numbers],
            query_BD,
            k,
            names=self._names if names is None else names,
            hidden=hidden,
            exact=exact,
        )

    def _voting(
        self, asked: MemoryConfig | None, explain: bool = False
    ) -> tuple[Memory, MemoryConfig] | None:
        """The memory and its settings for one request; None where there is no memory."""
        if self.memory is not None:
            return self.memory, asked or self.memory.config
        if asked is not None or explain:
            raise ConfigError(
                "this bundle has no memory of training queries; make one with `xmcray memory`"
            )
        return None

    def _check(self, k: int) -> None:
        if not 1 <= k <= self.num_labels:
            raise ConfigError(f"k is {k}, expected 1 .. {self.num_labels} (the number of labels)")


def embed(encoder: Encoder, head: Head, tokens: Ragged, normalised: bool) -> Float32Array:
    """Vectors float32 [B, D] of one chunk of texts; a memory's have length 1 whatever the head makes."""
    with torch.inference_mode():
        vector_BD = head(encoder(tokens)).float()
        if normalised:
            vector_BD = F.normalize(vector_BD, dim=-1)
    vectors: Float32Array = vector_BD.cpu().numpy()
    return vectors


def _voters(
    memory: Memory, near: Neighbours, top: TopLabels, config: MemoryConfig
) -> list[list[tuple[Voter, ...]]]:
    """Of each answer in `top`."""
    found = memory.voters(near, config)
    rows = [
        [of_label.get(label, []) for label in ids]
        for of_label, ids in zip(found, top.ids.tolist(), strict=True)
    ]
    texts = memory.texts(row for answers in rows for voters in answers for row, _ in voters)
    return [
        [tuple(Voter(*texts[row], weight) for row, weight in voters) for voters in answers]
        for answers in rows
    ]
