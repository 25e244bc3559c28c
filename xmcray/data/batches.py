"""Which queries form step s: a pure function of (seed, epoch, clusters, step), on every rank, after every restart.

Training speaks internal label ids and one id space for queries: ids below N are rows of the training split, id N + l
is the text of label l added as a query whose only positive is l (ASTRA, section 3; methods without it see N ids).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.config import check_range
from xmcray.data.corpus import Corpus
from xmcray.errors import DataError
from xmcray.parallel.partition import share
from xmcray.types import Batch, Int64Array, Ragged

_COUNTED = 200_000  # texts that document frequencies are estimated from
_COUNTED_AT_ONCE = 20_000
_Reader = Callable[[Int64Array], Ragged]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`.

    Attributes:
        validation: share of the training queries held out for model selection; 0 trains on all of them.
        augment_with_labels: label texts are training queries of their own label.
        seed: of the validation split; the same split for every method and setting.
    """

    validation: float = 0.05
    augment_with_labels: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("data.validation", self.validation, 0, 0.5)
        check_range("data.seed", self.seed, low=0)


@dataclass(frozen=True)
class TrainingData:
    """The training split of a corpus as a trainer sees it: internal label ids, validation rows held out.

    Attributes:
        corpus: the corpus. config: section `data`.
        query_ids: int64, ids that are sampled: training rows with a positive, then label texts that have a token.
        validation_rows: int64, held-out training rows with a positive, ascending.
    """

    corpus: Corpus
    config: DataConfig
    query_ids: Int64Array = field(init=False)
    validation_rows: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        train = self.corpus.split("train")
        rows = np.flatnonzero(train.num_positives())
        held_out = np.zeros(len(train), dtype=bool)
        num_held_out = round(self.config.validation * len(train))
        held_out[
            draws.generator(self.config.seed, "validation").permutation(len(train))[:num_held_out]
        ] = True
        ids = rows[~held_out[rows]]
        if not len(ids):
            raise DataError(
                f"{self.corpus.path} has no training query with a positive; check the label ids"
            )
        if self.config.augment_with_labels:
            num_tokens = self.corpus.num_label_tokens()[self.corpus.label_order]
            ids = np.concatenate([ids, self.num_train + np.flatnonzero(num_tokens)])
        object.__setattr__(self, "query_ids", ids)
        object.__setattr__(self, "validation_rows", rows[held_out[rows]])

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
        """Size of the id space: N, or N + L with label texts."""
        return self.num_train + (self.num_labels if self.config.augment_with_labels else 0)

    def label_query_ids(self, start: int, stop: int) -> Int64Array:
        """Query ids that stand for the texts of internal labels start .. stop - 1."""
        return np.arange(self.num_train + start, self.num_train + stop, dtype=np.int64)

    def tokens(self, query_ids: Int64Array) -> Ragged:
        """Token ids of queries and label texts, in the given order."""
        return self._merge(
            query_ids,
            lambda rows: self.corpus.split("train").tokens(rows),
            lambda labels: self.corpus.label_tokens(self.corpus.label_order[labels]),
        )

    def positives(self, query_ids: Int64Array) -> Ragged:
        """Internal label ids, ascending within a query."""
        return self._merge(
            query_ids,
            lambda rows: self.to_internal(self.corpus.split("train").positives(rows)),
            _own,
        )

    def excluded(self, query_ids: Int64Array) -> Ragged:
        """Internal ids of labels that are the query itself: neither positive nor negative. Label texts have none."""
        return self._merge(
            query_ids,
            lambda rows: self.to_internal(self.corpus.split("train").filters(rows)),
            lambda labels: Ragged.empty(len(labels)),
        )

    def to_internal(self, source: Ragged) -> Ragged:
        """Source label ids to internal ones, ascending within a row."""
        values = self.corpus.label_rank[source.values]
        order = np.lexsort((values, source.row_ids))
        return Ragged(values[order], source.offsets)

    def token_counts(self, vocab_size: int) -> Int64Array:
        """int64 [vocab_size], in how many texts each token occurs, from a seeded sample of the query ids."""
        order = draws.generator(self.config.seed, "token_counts").permutation(len(self.query_ids))[
            :_COUNTED
        ]
        counts = np.zeros(vocab_size, np.int64)
        for ids in np.array_split(
            np.sort(self.query_ids[order]), -(-len(order) // _COUNTED_AT_ONCE)
        ):
            tokens = self.tokens(ids)
            distinct = np.unique(tokens.row_ids * vocab_size + tokens.values)
            counts += np.bincount(distinct % vocab_size, minlength=vocab_size)
        return counts

    def _merge(self, query_ids: Int64Array, of_rows: _Reader, of_labels: _Reader) -> Ragged:
        is_label = query_ids >= self.num_train
        if not is_label.any():
            return of_rows(query_ids)
        parts = Ragged.concatenate(
            [of_rows(query_ids[~is_label]), of_labels(query_ids[is_label] - self.num_train)]
        )
        position = np.empty(len(query_ids), np.int64)
        position[np.flatnonzero(~is_label)] = np.arange(len(query_ids) - is_label.sum())
        position[np.flatnonzero(is_label)] = np.arange(
            len(query_ids) - is_label.sum(), len(query_ids)
        )
        return parts.take(position)


@dataclass(frozen=True, slots=True, eq=False)
class QueryClusters:
    """Groups of alike queries that stay together in an epoch.

    Attributes:
        version: of the negatives they were made with. num_clusters: how many there are.
        cluster: int32 [query ids], the cluster of each query id; -1 for queries in none.
    """

    version: int
    num_clusters: int
    cluster: npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchSampler:
    """Steps of an epoch over a fixed set of query ids; every id once an epoch, the last step takes what is left.

    The order of an epoch is random. With clusters it is one of clusters: theirs is random, and so is that of their
    members; queries in none come last (NGAME, section 3).

    Attributes:
        data: what is sampled. batch_size: G, queries of the global batch. seed: of the order.
    """

    data: TrainingData
    batch_size: int
    seed: int
    _order: dict[tuple[int, int], Int64Array] = field(default_factory=dict, compare=False)

    @property
    def steps_per_epoch(self) -> int:
        """ceil(queries / batch_size)."""
        return -(-len(self.data.query_ids) // self.batch_size)

    def query_ids(self, step: int, clusters: QueryClusters | None = None) -> Int64Array:
        """Global query ids of a step, counted over the whole run; `clusters` are those of the step's epoch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        key = epoch, -1 if clusters is None else clusters.version
        if key not in self._order:
            self._order.clear()
            self._order[key] = self._ordered(epoch, clusters)
        return self._order[key][position * self.batch_size : (position + 1) * self.batch_size]

    def _ordered(self, epoch: int, clusters: QueryClusters | None) -> Int64Array:
        generator = draws.generator(self.seed, "order", epoch)
        ids = generator.permutation(self.data.query_ids)
        if clusters is None:
            return ids
        place = np.append(
            generator.permutation(clusters.num_clusters), clusters.num_clusters
        )  # -1 is the last one
        order = np.argsort(place[clusters.cluster[ids]], kind="stable")
        return ids[order]

    def batch(
        self, step: int, rank: int, num_ranks: int, clusters: QueryClusters | None = None
    ) -> Batch:
        """The global batch of a step with the tokens of this rank's slice."""
        ids = self.query_ids(step, clusters)
        start, stop = share(len(ids), rank, num_ranks)
        return Batch(
            epoch=step // self.steps_per_epoch,
            step=step,
            query_ids=ids,
            start=start,
            stop=stop,
            tokens=self.data.tokens(ids[start:stop]),
            positives=self.data.positives(ids),
            excluded=self.data.excluded(ids),
        )


def _own(labels: Int64Array) -> Ragged:
    return Ragged(labels, np.arange(len(labels) + 1, dtype=np.int64))
