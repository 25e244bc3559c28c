"""A data set that is not there: random queries and labels with the frequencies of a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.parallel.partition import share
from xmcray.planning.data_size import DataSize, Float64Array
from xmcray.training.run import RunConfig
from xmcray.types import Batch, Int64Array, Ragged, offsets_of

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
        self.num_query_ids = size.num_train + (size.num_labels if augmented else 0)
        self.entries = 0
        self._generator = draws.generator(0, "plan")
        self._token_sums = np.cumsum(size.token_share_V)
        self._label_sums = None
        if size.label_share_L is not None:
            self._label_sums = np.cumsum(size.label_share_L)
        self.query_ids = self._random_ids(min(_SAMPLED_IDS, self.num_query_ids))
        one_per_label = np.broadcast_to(np.int64(1), size.num_labels)
        self.corpus = SimpleNamespace(
            card=SimpleNamespace(num_train=size.num_train, propensity_a=0.55, propensity_b=1.5),
            label_order=slice(None),  # labels are numbered as they are stored
            train_counts=one_per_label,
            num_label_tokens=lambda: one_per_label,
        )

    def label_query_ids(self, start: int, stop: int) -> Int64Array:
        """Query ids that stand for the texts of labels start .. stop - 1."""
        return np.arange(self.num_train + start, self.num_train + stop, dtype=np.int64)

    def tokens(self, query_ids: Int64Array) -> Ragged:
        """Token ids of queries and label texts."""
        if len(query_ids) > _MOST_TEXTS:
            return Ragged.empty(len(query_ids))
        is_label = query_ids >= self.num_train
        means = np.where(is_label, self.size.tokens_per_label, self.size.tokens_per_query)
        return self._drawn_rows(means, self._token_sums)

    def positives(self, query_ids: Int64Array) -> Ragged:
        """Label ids, ascending within a query; a label's text has one."""
        means = np.where(query_ids >= self.num_train, 1, self.size.positives_per_query)
        rows = self._drawn_rows(means, self._label_sums)
        # The last key of lexsort is the primary one: by row, then by label.
        order = np.lexsort((rows.values, rows.row_ids))
        return Ragged(rows.values[order], rows.offsets)

    def excluded(self, query_ids: Int64Array) -> Ragged:
        """No query is itself a label."""
        return Ragged.empty(len(query_ids))

    def take(self, query_ids: Int64Array, width: int) -> Ragged:
        """Hard negatives, as a `Shortlist` gives them: labels alike by chance only."""
        labels = self._generator.integers(self.num_labels, size=len(query_ids) * width)
        self.entries += len(labels)
        return Ragged(labels, offsets_of(np.full(len(query_ids), width)))

    def batch(self, config: RunConfig, step: int, workers: int) -> Batch:
        """A global batch of an epoch that has hard negatives, with the texts of rank 0."""
        number = min(config.optim.batch_size, epoch_queries(config, self.size))
        query_ids = self._random_ids(number)
        start, stop = share(number, 0, workers)
        return Batch(
            epoch=config.negatives.start_epoch + config.negatives.curriculum,
            step=step,
            query_ids=query_ids,
            start=start,
            stop=stop,
            tokens=self.tokens(query_ids[start:stop]),
            positives=self.positives(query_ids),
            excluded=self.excluded(query_ids),
        )

    def _random_ids(self, number: int) -> Int64Array:
        return self._generator.integers(self.num_query_ids, size=number)

    def _drawn_rows(self, means: npt.NDArray[Any], sums: Float64Array | None) -> Ragged:
        """Rows of these mean lengths; places as often as their shares, or labels alike."""
        offsets = offsets_of(1 + self._generator.poisson(means - 1))
        number = int(offsets[-1])
        self.entries += number
        if sums is None:
            return Ragged(self._generator.integers(self.num_labels, size=number), offsets)
        points = self._generator.random(number) * sums[-1]
        places = np.searchsorted(sums, points, side="right")
        return Ragged(np.minimum(places, len(sums) - 1), offsets)


def epoch_queries(config: RunConfig, size: DataSize) -> int:
    """Queries of an epoch: those that are not held out, and label texts where they are queries."""
    num_held_in = round(size.num_train * (1 - config.data.validation))
    return num_held_in + (size.num_labels if config.data.augment_with_labels else 0)
