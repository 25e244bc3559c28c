"""A data set that is not there: random queries and labels with the frequencies of a real one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from xmcray import draws
from xmcray.parallel.partition import share
from xmcray.planning.data_size import DataSize
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Float64Array, Int64Array, Ragged, offsets_of

_SAMPLED_IDS = 100_000
_MOST_TEXTS = 2_000_000  # of more texts at once, only the number is needed


class StandInData:
    """Answers as `TrainingData` and `Shortlist` do, from random numbers.

    Args:
        size: The data set in numbers.
        augmented: Whether label texts are training queries too.

    Attributes:
        entries: Token ids and label ids that were given out.
    """

    def __init__(self, size: DataSize, augmented: bool) -> None:
        self.size = size
        self.num_labels = size.num_labels
        self.num_train = size.num_train
        # The ids of label texts follow those of queries, as in `TrainingData`.
        self.num_query_ids = size.num_train
        if augmented:
            self.num_query_ids += size.num_labels
        self.entries = 0
        self._generator = draws.generator(0, "plan")
        # Running sums of shares: a random point below the last sum falls on an entry as often as
        # its share says.
        self._token_sums = np.cumsum(size.token_share_V)
        self._label_sums = None
        if size.label_share_L is not None:
            self._label_sums = np.cumsum(size.label_share_L)
        num_sampled = min(_SAMPLED_IDS, self.num_query_ids)
        self.query_ids = self._random_ids(num_sampled)
        self.training_rows = self.query_ids[self.query_ids < self.num_train]
        self.corpus = _corpus(size)

    def tokens(self, query_ids: Int64Array) -> Ragged:
        """Token ids of queries and label texts, with side vectors if the data have them."""
        if len(query_ids) > _MOST_TEXTS:
            return Ragged.empty(len(query_ids))
        means = self._means(
            query_ids,
            query_mean=self.size.tokens_per_query,
            label_mean=self.size.tokens_per_label,
        )
        tokens = self._random_rows(means, self._token_sums)
        if not self.size.side_width:
            return tokens
        vectors = np.ones((len(tokens), self.size.side_width), np.float32)
        return tokens.with_vectors(vectors)

    def positives(self, query_ids: Int64Array) -> Ragged:
        """Label ids, ascending within a query; a label's text has one."""
        means = self._means(
            query_ids,
            query_mean=self.size.positives_per_query,
            label_mean=1.0,
        )
        rows = self._random_rows(means, self._label_sums)
        # The last key of lexsort is the primary one: by row, then by label.
        order = np.lexsort((rows.values, rows.row_ids))
        return Ragged(rows.values[order], rows.offsets)

    def excluded(self, query_ids: Int64Array) -> Ragged:
        """No query is itself a label."""
        return Ragged.empty(len(query_ids))

    def take(self, query_ids: Int64Array, width: int) -> Ragged:
        """Hard negatives, as a `Shortlist` gives them: every label is as likely as any other."""
        number = len(query_ids) * width
        labels = self._generator.integers(self.num_labels, size=number)
        self.entries += number
        offsets = width * np.arange(len(query_ids) + 1)
        return Ragged(labels, offsets)

    def batch(self, config: RunConfig, step: int, workers: int) -> Batch:
        """A global batch of an epoch that has hard negatives, with the texts of rank 0.

        Args:
            config: Settings of the training.
            step: Number of the step.
            workers: Number of ranks, each of which encodes its share of the texts.
        """
        number = min(config.optim.batch_size, epoch_queries(config, self.size))
        query_ids = self._random_ids(number)
        start, stop = share(number, 0, workers)
        own_ids = query_ids[start:stop]
        return Batch(
            epoch=config.negatives.start_epoch + config.negatives.curriculum,
            step=step,
            query_ids=query_ids,
            start=start,
            stop=stop,
            tokens=self.tokens(own_ids),
            positives=self.positives(query_ids),
            excluded=self.excluded(query_ids),
        )

    def _random_ids(self, number: int) -> Int64Array:
        """Ids of queries and label texts, each as likely as any other."""
        return self._generator.integers(self.num_query_ids, size=number)

    def _means(
        self,
        query_ids: Int64Array,
        query_mean: float,
        label_mean: float,
    ) -> Float64Array:
        """Average length of each row: that of a query, or that of a label's text."""
        is_label = query_ids >= self.num_train
        return np.where(is_label, label_mean, query_mean)

    def _random_rows(self, means: Float64Array, sums: Float64Array | None) -> Ragged:
        """Rows of random entries.

        Args:
            means: float64 [B], average length of each row; at least 1.
            sums: float64 [V or L], running sums of how often each entry occurs. None: every label
                is as likely as any other.
        """
        lengths = 1 + self._generator.poisson(means - 1)
        offsets = offsets_of(lengths)
        number = int(offsets[-1])
        self.entries += number
        if sums is None:
            labels = self._generator.integers(self.num_labels, size=number)
            return Ragged(labels, offsets)
        points = self._generator.random(number) * sums[-1]
        entries = np.searchsorted(sums, points, side="right")
        # Rounding can put a point on the last sum itself, behind the last entry.
        last = len(sums) - 1
        return Ragged(np.minimum(entries, last), offsets)


class _AsStored:
    """The order of labels that are numbered as they are stored."""

    def __getitem__(self, labels: Int64Array) -> Int64Array:
        return labels


def _corpus(size: DataSize) -> SimpleNamespace:
    """What methods read of a corpus: each label occurs once, and is numbered as it is stored."""
    one_per_label = np.broadcast_to(np.int64(1), size.num_labels)
    card = SimpleNamespace(
        num_train=size.num_train,
        propensity_a=0.55,
        propensity_b=1.5,
    )
    return SimpleNamespace(
        card=card,
        label_order=_AsStored(),
        train_counts=one_per_label,
        labels_without_tokens=lambda: np.empty(0, np.int64),
    )


def epoch_queries(config: RunConfig, size: DataSize) -> int:
    """Queries of an epoch: those that are not held out, and label texts where they are queries."""
    number = size.num_train - config.data.num_held_out(size.num_train)
    if config.data.augment_with_labels:
        number += size.num_labels
    return number
