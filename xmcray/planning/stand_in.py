"""A data set that is not there: random queries and labels with the sizes and frequencies of a real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.parallel.partition import share
from xmcray.planning.data_size import DataSize
from xmcray.training.run import RunConfig
from xmcray.types import Batch, Int64Array, Ragged

_SAMPLED_IDS = 100_000
_READ_TEXTS = 2_000_000  # of more texts at once, only the number is needed


class StandInData:
    """Answers as `TrainingData` does, from random numbers.

    Args:
        size: the data set in numbers.
        augmented: label texts are training queries too.

    Attributes:
        entries: token ids and label ids that were given out.
        seconds: spent here, which no training spends.
    """

    def __init__(self, size: DataSize, augmented: bool) -> None:
        self.size = size
        self.num_labels = size.num_labels
        self.num_train = size.num_train
        self.num_query_ids = size.num_train + (size.num_labels if augmented else 0)
        self.entries = 0
        self.seconds = 0.0
        self._generator = draws.generator(0, "plan")
        self._token_sums = np.cumsum(size.token_share_V)
        self._label_sums = None
        if size.label_share_L is not None:
            self._label_sums = np.cumsum(size.label_share_L)
        self.query_ids = self._random_ids(min(_SAMPLED_IDS, self.num_query_ids))
        card = SimpleNamespace(num_train=size.num_train, propensity_a=0.55, propensity_b=1.5)
        self.corpus = SimpleNamespace(
            path="the planned corpus",
            card=card,
            label_order=slice(None),  # labels are numbered as they are stored
            train_counts=np.broadcast_to(np.int64(1), size.num_labels),
            num_label_tokens=lambda: np.broadcast_to(np.int64(1), size.num_labels),
        )

    def label_query_ids(self, start: int, stop: int) -> Int64Array:
        """Query ids that stand for the texts of labels start .. stop - 1."""
        return np.arange(self.num_train + start, self.num_train + stop, dtype=np.int64)

    def tokens(self, query_ids: Int64Array) -> Ragged:
        """Token ids of queries and label texts."""
        if len(query_ids) > _READ_TEXTS:
            return Ragged.empty(len(query_ids))
        with self._counted():
            size = self.size
            is_label = query_ids >= self.num_train
            mean_B = np.where(is_label, size.tokens_per_label, size.tokens_per_query)
            offsets = _offsets(1 + self._generator.poisson(mean_B - 1))
            values = _drawn(self._generator, offsets[-1], self._token_sums)
            self.entries += len(values)
            return Ragged(values, offsets)

    def positives(self, query_ids: Int64Array) -> Ragged:
        """Label ids, ascending within a query; a label's text has itself."""
        with self._counted():
            is_label = query_ids >= self.num_train
            more_B = self._generator.poisson(self.size.positives_per_query - 1, len(query_ids))
            rows = Ragged(np.empty(0, np.int64), _offsets(1 + np.where(is_label, 0, more_B)))
            values = self._labels(rows.offsets[-1])
            values[rows.offsets[:-1][is_label]] = query_ids[is_label] - self.num_train
            row_ids = np.repeat(np.arange(len(query_ids)), rows.lengths)
            self.entries += len(values)
            return Ragged(values[np.lexsort((values, row_ids))], rows.offsets)

    def excluded(self, query_ids: Int64Array) -> Ragged:
        """No query is itself a label."""
        return Ragged.empty(len(query_ids))

    def take(self, query_ids: Int64Array, width: int) -> Ragged:
        """Hard negatives, as a `Shortlist` gives them: labels alike by chance only."""
        with self._counted():
            count = len(query_ids) * width
            self.entries += count
            values = self._generator.integers(self.num_labels, size=count)
            return Ragged(values, np.arange(0, count + 1, max(width, 1), dtype=np.int64))

    def batch(self, config: RunConfig, step: int, workers: int) -> Batch:
        """A global batch of an epoch that has hard negatives, with the texts of rank 0."""
        number = min(config.optim.batch_size, epoch_queries(config, self.size))
        ids = self._random_ids(number)
        start, stop = share(number, 0, workers)
        return Batch(
            epoch=config.negatives.start_epoch + config.negatives.curriculum,
            step=step,
            query_ids=ids,
            start=start,
            stop=stop,
            tokens=self.tokens(ids[start:stop]),
            positives=self.positives(ids),
            excluded=self.excluded(ids),
        )

    def _random_ids(self, number: int) -> Int64Array:
        return self._generator.integers(self.num_query_ids, size=number)

    def _labels(self, number: int) -> Int64Array:
        if self._label_sums is None:
            return self._generator.integers(self.num_labels, size=number)
        return _drawn(self._generator, number, self._label_sums)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds += time.thread_time() - start


def epoch_queries(config: RunConfig, size: DataSize) -> int:
    """Queries of an epoch: those that are not held out, and label texts where they are queries."""
    held_in = round(size.num_train * (1 - config.data.validation))
    return held_in + (size.num_labels if config.data.augment_with_labels else 0)


def _offsets(lengths: npt.NDArray[np.integer]) -> Int64Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _drawn(
    generator: np.random.Generator, number: int, sums: npt.NDArray[np.float64]
) -> Int64Array:
    """Random places, each as often as its share says."""
    places = np.searchsorted(sums, generator.random(int(number)) * sums[-1], side="right")
    drawn: Int64Array = np.minimum(places, len(sums) - 1).astype(np.int64)
    return drawn
