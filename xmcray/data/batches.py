"""Which queries form step s: a pure function of (seed, epoch, clusters, step) on every rank.

Training uses internal label ids and one id space for queries. Ids below N are rows of the training
split. Id N + l is the text of label l added as a query whose only positive is l (ASTRA, section 3).
Methods without this augmentation see N ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.config import check_choices, check_range
from xmcray.data.corpus import Corpus
from xmcray.data.kept_ids import KeptIds
from xmcray.data.relevance import Relevance, largest_of_rows
from xmcray.errors import ConfigError, DataError
from xmcray.parallel.partition import share
from xmcray.permutations import (
    Permutation,
    StoredPermutation,
    random_permutation,
    random_sample,
)
from xmcray.types import Batch, Float64Array, Int64Array, Ragged, merged_sorted, spans

_COUNTED_TEXTS = 200_000  # sample that document frequencies are estimated from
_COUNTED_AT_ONCE = 20_000
_Reader = Callable[[Int64Array], Ragged]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`.

    Attributes:
        validation: share of the training queries held out for model selection; 0 trains on all of
            them.
        augment_with_labels: label texts are training queries of their own label.
        validation_from: first training query that may be held out; those before it were trained on
            by the run that this one goes on from (`--from`).
        seed: of the validation split; the same split for every method and setting.
        relevance: of the positives, if the raw files have it: "ignore" counts each positive once,
            "weight" multiplies its terms in the loss and its votes in a memory by relevance / mean
            relevance. With "sample" a positive counts in a step with probability relevance /
            largest relevance of its query.
    """

    validation: float = 0.05
    validation_from: int = 0
    augment_with_labels: bool = True
    seed: int = 0
    relevance: Literal["ignore", "weight", "sample"] = "ignore"

    def __post_init__(self) -> None:
        check_choices(self, "data")
        check_range("data.validation", self.validation, 0, 0.5)
        check_range("data.validation_from", self.validation_from, low=0)
        check_range("data.seed", self.seed, low=0)

    def num_eligible(self, num_train: int) -> int:
        """Number of training queries that may be held out."""
        return max(0, num_train - self.validation_from)

    def num_held_out(self, num_train: int) -> int:
        """Number of training queries that are held out, with or without a positive."""
        return round(self.validation * self.num_eligible(num_train))


@dataclass(frozen=True)
class TrainingData:
    """The training split of a corpus as a trainer sees it: internal label ids, validation held out.

    Attributes:
        corpus: the corpus.
        config: section `data`.
        query_ids: ids that are sampled: training rows with a positive, then label texts that have
            a token.
        training_rows: those of them that are rows.
        validation_rows: int64, held-out training rows with a positive that can be answered,
            ascending.
        relevance: of the positives; None if it is ignored.
    """

    corpus: Corpus
    config: DataConfig
    query_ids: KeptIds = field(init=False)
    training_rows: KeptIds = field(init=False)
    validation_rows: Int64Array = field(init=False)
    relevance: Relevance | None = field(init=False)

    def __post_init__(self) -> None:
        relevance = None
        if self.config.relevance != "ignore":
            relevance = Relevance.read(self.corpus.split("train"))
            if relevance is None:
                raise ConfigError(
                    f"data.relevance is {self.config.relevance}, but the raw files of"
                    f" {self.corpus.path} have no relevance; leave data.relevance=ignore"
                )
            relevance.check()
        object.__setattr__(self, "relevance", relevance)
        empty_rows = self.corpus.split("train").rows_without_positives
        # The split is drawn over all rows, so it does not depend on which have positives.
        num_eligible = self.config.num_eligible(self.num_train)
        num_held_out = self.config.num_held_out(self.num_train)
        generator = draws.generator(self.config.seed, "validation")
        first = self.num_train - num_eligible
        held_out = first + np.sort(random_sample(generator, num_eligible, num_held_out))
        left_out = merged_sorted(empty_rows, held_out)
        if len(left_out) == self.num_train:
            if len(empty_rows) < self.num_train:
                raise DataError(
                    f"data.validation={self.config.validation:g} holds out every training query of"
                    f" {self.corpus.path} that has a positive; lower it"
                )
            raise DataError(
                f"{self.corpus.path} has no training query with a positive; check the label ids"
            )
        training_rows = KeptIds(self.num_train, left_out)
        if self.config.augment_with_labels:
            empty_labels = self.corpus.label_rank[self.corpus.labels_without_tokens()]
            left_out = np.concatenate([left_out, self.num_train + np.sort(empty_labels)])
        # The class is frozen for its users; these fields follow from the others.
        object.__setattr__(self, "query_ids", KeptIds(self.num_query_ids, left_out))
        object.__setattr__(self, "training_rows", training_rows)
        validation_rows = np.setdiff1d(held_out, empty_rows, assume_unique=True)
        # A query whose labels were all removed cannot be answered. Few corpora have removed labels,
        # and reading the positives of a large one takes long.
        if len(self.corpus.removed_labels):
            positives = self.corpus.split("train").positives(validation_rows)
            is_answerable = self.corpus.answerable(positives).lengths > 0
            validation_rows = validation_rows[is_answerable]
        object.__setattr__(self, "validation_rows", validation_rows)

    def check_held_out(self) -> None:
        """Raises ConfigError if no query is held out, because nothing can be chosen then."""
        if len(self.validation_rows):
            return
        raise ConfigError(
            f"data.validation={self.config.validation:g} and"
            f" data.validation_from={self.config.validation_from} hold out no query with a positive,"
            f" of {self.num_train:,} training queries; raise the first or lower the second"
        )

    def with_validation_rows(self, rows: Int64Array) -> TrainingData:
        """A view with other `validation_rows`."""
        view = copy.copy(self)
        object.__setattr__(view, "validation_rows", rows)
        return view

    @property
    def num_labels(self) -> int:
        """L."""
        return len(self.corpus.label_order)

    @property
    def num_train(self) -> int:
        """N, rows of the training split."""
        return len(self.corpus.split("train"))

    @property
    def num_query_ids(self) -> int:
        """Size of the id space: N, or N + L with label texts.

        The text of internal label l is query N + l.
        """
        return self.num_train + (self.num_labels if self.config.augment_with_labels else 0)

    def label_tokens(self, labels: Int64Array) -> Ragged:
        """Token ids of the texts of internal labels, in the given order."""
        return self.corpus.label_tokens(self.corpus.label_order[labels])

    def tokens(self, query_ids: Int64Array) -> Ragged:
        """Token ids of queries and label texts, in the given order."""
        return self._merge(query_ids, self.corpus.split("train").tokens, self.label_tokens)

    def positives(self, query_ids: Int64Array) -> Ragged:
        """Internal label ids, ascending within a query; a label text has its label alone."""

        def of_rows(rows: Int64Array) -> Ragged:
            return self.to_internal(self.corpus.split("train").positives(rows))

        def of_labels(labels: Int64Array) -> Ragged:
            return Ragged(labels, np.arange(len(labels) + 1, dtype=np.int64))

        return self._merge(query_ids, of_rows, of_labels)

    def weights(self, query_ids: Int64Array) -> Float64Array | None:
        """float64, how much each value of `positives` counts; None if relevance is ignored."""
        relevance = self.relevance
        if relevance is None:
            return None

        def of_rows(rows: Int64Array) -> Ragged:
            source = self.corpus.split("train").positives(rows)
            positions = relevance.positions(rows)
            return Ragged(positions.values[self._internal_order(source)], positions.offsets)

        def of_labels(labels: Int64Array) -> Ragged:
            no_positions = np.full(len(labels), -1, np.int64)
            return Ragged(no_positions, np.arange(len(labels) + 1, dtype=np.int64))

        return relevance.weights(self._merge(query_ids, of_rows, of_labels).values)

    def excluded(self, query_ids: Int64Array) -> Ragged:
        """Internal ids of labels that are the query itself: neither positive nor negative.

        Label texts have none.
        """

        def of_rows(rows: Int64Array) -> Ragged:
            return self.to_internal(self.corpus.split("train").filters(rows))

        def of_labels(labels: Int64Array) -> Ragged:
            return Ragged.empty(len(labels))

        if not self.corpus.split("train").has_filters:
            return Ragged.empty(len(query_ids))
        return self._merge(query_ids, of_rows, of_labels)

    def to_internal(self, source: Ragged) -> Ragged:
        """Source label ids to internal ones, ascending within a row."""
        order = self._internal_order(source)
        return Ragged(self.corpus.label_rank[source.values][order], source.offsets)

    def _internal_order(self, source: Ragged) -> Int64Array:
        """The order of some lists of source label ids by internal ones, ascending within a row."""
        # The last key of lexsort is the primary one: by row, then by label.
        return np.lexsort((self.corpus.label_rank[source.values], source.row_ids))

    def token_counts(self, vocab_size: int) -> Int64Array:
        """int64 [vocab_size], number of texts with each token, in a seeded sample of queries."""
        generator = draws.generator(self.config.seed, "token_counts")
        # Sorted rows are read faster, because rows of one shard are neighbours.
        positions = random_sample(generator, len(self.query_ids), _COUNTED_TEXTS)
        sample = np.sort(self.query_ids[positions])
        counts = np.zeros(vocab_size, np.int64)
        for span in spans(len(sample), _COUNTED_AT_ONCE):
            tokens = self.tokens(sample[span])
            # One number per (text, token): a token that a text repeats counts once.
            distinct = np.unique(tokens.pairs(vocab_size))
            counts += np.bincount(distinct % vocab_size, minlength=vocab_size)
        return counts

    def _merge(self, query_ids: Int64Array, of_rows: _Reader, of_labels: _Reader) -> Ragged:
        """Reads training rows and label texts separately; puts them in the order of `query_ids`."""
        is_label = query_ids >= self.num_train
        if not is_label.any():
            return of_rows(query_ids)
        rows = of_rows(query_ids[~is_label])
        labels = of_labels(query_ids[is_label] - self.num_train)
        # A stable sort lists the queries as the concatenation does: rows first, then label texts.
        # The place of each query in that list is the inverse permutation.
        query_of_row = np.argsort(is_label, kind="stable")
        row_of_query = np.argsort(query_of_row)
        return Ragged.concatenate([rows, labels]).take(row_of_query)


@dataclass(frozen=True, slots=True, eq=False)
class QueryClusters:
    """Groups of similar queries that stay together in an epoch.

    Attributes:
        version: of the negatives that the clusters were made with.
        num_clusters: how many there are.
        cluster: int32 [query ids], the cluster of each query id; -1 for queries in none.
    """

    version: int
    num_clusters: int
    cluster: npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchSampler:
    """The steps of an epoch over a fixed set of query ids; every id occurs once in an epoch.

    The last step of an epoch takes what is left. The order of an epoch is random. With clusters,
    the order of the clusters is random, and so is that of their members; queries in no cluster come
    last (NGAME, section 3).

    Attributes:
        data: what is sampled.
        batch_size: G, queries of the global batch.
        seed: of the order.
    """

    data: TrainingData
    batch_size: int
    seed: int
    # The order of the current epoch, by (epoch, version of the clusters); holds one entry.
    _order: dict[tuple[int, int], Permutation] = field(default_factory=dict, compare=False)

    @property
    def steps_per_epoch(self) -> int:
        """ceil(queries / batch_size)."""
        return math.ceil(len(self.data.query_ids) / self.batch_size)

    def query_ids(self, step: int, clusters: QueryClusters | None = None) -> Int64Array:
        """Global query ids of a step.

        Args:
            step: counted over the whole run.
            clusters: those of the step's epoch.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        key = (epoch, -1 if clusters is None else clusters.version)
        if key not in self._order:
            self._order.clear()
            self._order[key] = self._epoch_order(epoch, clusters)
        start = position * self.batch_size
        stop = min(start + self.batch_size, len(self.data.query_ids))
        chosen = self._order[key].take(np.arange(start, stop))
        return self.data.query_ids[chosen]

    def _epoch_order(self, epoch: int, clusters: QueryClusters | None) -> Permutation:
        """The order of the queries of an epoch, by their positions in `data.query_ids`."""
        num_queries = len(self.data.query_ids)
        generator = draws.generator(self.seed, "order", epoch)
        random_order = random_permutation(generator, num_queries)
        if clusters is None:
            return random_order
        # The extra entry at the end is the place of cluster -1, queries in none: it is the last
        # place.
        shuffled = generator.permutation(clusters.num_clusters)
        place = np.append(shuffled, clusters.num_clusters)
        shuffled_queries = random_order.take(np.arange(num_queries))
        cluster = clusters.cluster[self.data.query_ids[shuffled_queries]]
        by_cluster = np.argsort(place[cluster], kind="stable")
        return StoredPermutation(shuffled_queries[by_cluster])

    def batch(
        self, step: int, rank: int, num_ranks: int, clusters: QueryClusters | None = None
    ) -> Batch:
        """The global batch of a step with the tokens of this rank's slice."""
        ids = self.query_ids(step, clusters)
        start, stop = share(len(ids), rank, num_ranks)
        positives = self.data.positives(ids)
        return Batch(
            epoch=step // self.steps_per_epoch,
            step=step,
            query_ids=ids,
            start=start,
            stop=stop,
            tokens=self.data.tokens(ids[start:stop]),
            positives=positives,
            excluded=self.data.excluded(ids),
            relevance=self._relevance(step, ids, positives),
        )

    def _relevance(self, step: int, ids: Int64Array, positives: Ragged) -> Float64Array | None:
        """How much each positive of a step counts; None if relevance is ignored."""
        weights = self.data.weights(ids)
        if weights is None or self.data.config.relevance == "weight":
            return weights
        # The same on all ranks. A positive that is not drawn counts 0.
        generator = draws.generator(self.seed, "relevance", step)
        limit = generator.random(len(weights)) * largest_of_rows(weights, positives)
        return (limit < weights).astype(np.float64)
