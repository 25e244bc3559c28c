"""A predictor that is the weighted sum of several: the answers of a fused bundle (parts.py).

The bundle's own vectors are those of its first member. A further member is a folder members/NAME
with what it does not share: encoder, head, tokenizer, label side, the order and vectors of labels,
the vectors of training queries. A query's vector is the vectors of all members, one after another.

The search of vectors may run in several processes. Words are compared where the answers are ranked,
because their index is not sharded and takes part of a millisecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from xmcray.errors import ConfigError
from xmcray.retrieval.answers import AllReasons, Reasons
from xmcray.retrieval.bundle import Settings
from xmcray.retrieval.candidates import DEPTH, CandidateFinder
from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import Memory, RememberedQueries
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.part_reasons import PartReasons
from xmcray.retrieval.parts import KEYS, Candidates, PartsConfig
from xmcray.retrieval.readable import readable
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import MemoryConfig
from xmcray.retrieval.word_index import LABELS, QUERIES, WordIndex
from xmcray.types import Float32Array, Ragged, TopLabels, spans

MEMBERS = "members"  # folder of the members after the first
CHUNK = 64  # queries whose candidates are in memory at once, at most
COSINES = 1 << 24  # cosines of queries and label texts in memory at once, at most
NO_TEXTS = (
    "this bundle compares words, has several members or reads answers again, so it needs the"
    " queries' texts, not their tokens or vectors"
)


@dataclass(frozen=True, eq=False)
class Fusion:
    """What a bundle needs to add up parts.

    Attributes:
        config: weights and settings of the parts.
        words: the index of words, or None if no part uses it.
        queries: labels and names of the training queries that vote, or None if none do.
    """

    config: PartsConfig
    words: WordIndex | None = None
    queries: RememberedQueries | None = None

    @classmethod
    def load(cls, bundle: Path, settings: Settings) -> Fusion:
        """Opens the parts of a verified bundle, but for its vectors.

        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        section = settings.predictor
        with readable(f"{bundle}/settings.json is malformed", "fuse the bundle again"):
            config = PartsConfig.read(section["parts"])
            num_queries = int(section["num_queries"])
            if not config.used():
                raise ValueError("no part has a weight")
        used = config.used()
        queries = None
        if config.has_voters:
            queries = RememberedQueries.load(bundle, num_queries, settings.num_labels)
        kinds = []
        if "words" in used:
            kinds.append(QUERIES)
        if "texts" in used:
            kinds.append(LABELS)
        words = None
        if kinds:
            num_exported = settings.first_added or settings.num_labels
            words = WordIndex.load(bundle, num_queries, num_exported, kinds)
        return cls(config, words, queries)

    def with_labels(self, texts: Sequence[str]) -> Fusion:
        """A view with labels that join, in the order of their ids."""
        if self.words is None:
            return self
        return dataclasses.replace(self, words=self.words.with_labels(texts))


class Member(Protocol):
    """A trained model of a fused bundle."""

    @property
    def labels(self) -> LabelIndex:
        """The labels, with the member's vectors of them."""

    @property
    def memory(self) -> Memory | None:
        """The vectors of training queries, or None."""


@dataclass(frozen=True, eq=False)
class FusedPredictor:
    """Adds up the scores of parts. Implements `Predictor`.

    Attributes:
        fusion: the parts.
        members: the trained models.
    """

    fusion: Fusion
    members: Sequence[Member]

    def find(self, query_BD: Float32Array, k: int, scope: SearchScope) -> Neighbours:
        """See `Predictor.find`."""
        neighbours = []
        start = 0
        for member in self.members:
            # The vectors of all members follow one another.
            stop = start + member.labels.settings.dim
            own_BD = np.ascontiguousarray(query_BD[:, start:stop])
            neighbours.append(self._find(member, own_BD, k, scope))
            start = stop
        if start != query_BD.shape[1]:
            raise ConfigError(
                f"query vectors have {query_BD.shape[1]} numbers, expected {start}: those of all"
                " members; encode texts with this bundle"
            )
        return dataclasses.replace(neighbours[0], others=tuple(neighbours[1:]))

    def _find(
        self, member: Member, query_BD: Float32Array, k: int, scope: SearchScope
    ) -> Neighbours:
        """What one member finds."""
        labels = member.labels
        queries = TopLabels.empty(len(query_BD))
        if member.memory is not None:
            keys = MemoryConfig(weight=1.0, keys=self.fusion.config.memory_keys)
            queries = member.memory.search(query_BD, keys, scope)
        # The widths do not depend on the number of labels, so that sums keep their bits when a
        # label joins.
        nearest = labels.search(query_BD, max(k, DEPTH), scope)
        label_keys = nearest
        if not labels.answers_all or scope.excludes:
            # The softmax always is over all labels of the export, so that no other score changes.
            label_keys = labels.search_exported(query_BD, max(k, KEYS), scope.without_exclude)
        return Neighbours(queries, label_keys, fallback=nearest, vectors=query_BD)

    def rank(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None = None,
        texts: Sequence[str] | None = None,
    ) -> TopLabels:
        """See `Predictor.rank`."""
        config = self.fusion.config
        all_candidates = self.all_candidates(neighbours, k, exclude, texts)
        tops = [candidates.top(config, k) for candidates in all_candidates]
        return TopLabels.concatenate(tops, k)

    def explain(
        self,
        neighbours: Neighbours,
        top: TopLabels,
        num_ranked: int,
        texts: Sequence[str] | None = None,
    ) -> AllReasons:
        """See `Predictor.explain`."""
        reasons: list[list[Reasons]] = []
        start = 0
        for candidates in self.all_candidates(neighbours, num_ranked, None, texts):
            stop = start + len(candidates.labels)
            why = PartReasons(candidates, self.fusion.config, self.fusion.queries)
            reasons += why.of_answers(top.slice(start, stop))
            start = stop
        return reasons

    def all_candidates(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None,
        texts: Sequence[str] | None,
    ) -> Iterator[Candidates]:
        """The candidates of all queries, a bounded number of queries at a time.

        Args:
            neighbours: what `find` found.
            k: answers per query.
            exclude: source label ids that are no answers to a query.
            texts: the queries' texts.
        Raises:
            ConfigError: a part needs texts, and there are none.
        """
        fusion = self.fusion
        if texts is None and fusion.words is not None:
            raise ConfigError(NO_TEXTS)
        labels = [member.labels for member in self.members]
        finder = CandidateFinder(fusion.config, labels, fusion.queries, fusion.words)
        num_labels = labels[0].settings.num_labels
        at_once = min(CHUNK, max(1, COSINES // num_labels))
        for span in spans(len(neighbours), at_once):
            chunk = neighbours.slice(span.start, span.stop)
            chunk_texts = [] if texts is None else texts[span]
            chunk_exclude = None if exclude is None else exclude.slice(span.start, span.stop)
            yield finder.find(chunk, chunk_texts, k, chunk_exclude)


def other_members(bundle: Path, settings: Settings) -> list[Path]:
    """Folders of the members after the first.

    Args:
        bundle: local folder of the bundle.
        settings: its settings.
    """
    if not settings.is_fused:
        return []
    members = PartsConfig.read(settings.predictor["parts"]).members
    return [bundle / MEMBERS / member.name for member in members[1:]]


def fixed_parts() -> ConfigError:
    """The error of a request that changes the settings of a fused bundle."""
    return ConfigError(
        "the parts of a fused bundle have settings that were chosen together; leave other settings"
        " out, or fuse again"
    )
