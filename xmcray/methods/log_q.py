"""How likely a label is to be in a batch: the correction of in-batch negatives known as logQ.

The labels of a batch are those of its queries. A label that many queries have is a negative in
nearly every batch, and a label that few have in hardly any, so a loss over the labels of a batch
pushes frequent labels down. It estimates the loss over all labels once each term of its denominator
is divided by the probability that the label is there (Bengio and Senecal 2008; Yi et al., RecSys
2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmcray.data.batches import TrainingData
from xmcray.errors import ConfigError
from xmcray.negatives.plan import NegativesConfig
from xmcray.types import Float64Array, Int64Array, spans

_READ_AT_ONCE = 200_000
# A label of the pool was drawn, so this is one of a query with a thousand positives.
_FEWEST_DRAWS = 1e-3


@dataclass(frozen=True)
class BatchProbability:
    """Probabilities that a label, or a query, is in a random batch of an epoch.

    Attributes:
        draws_L: float64 [L], the expected number of an epoch's queries that draw each label as a
            positive.
        num_queries: of an epoch.
    """

    draws_L: Float64Array
    num_queries: int

    @classmethod
    def of(cls, data: TrainingData, num_positives: int) -> BatchProbability:
        """Reads the positives of all queries once.

        Args:
            data: What the batches are made of.
            num_positives: Drawn of each query, uniformly; 0 for all.
        """
        num_queries = len(data.query_ids)
        draws_L = np.zeros(data.num_labels)
        for span in spans(num_queries, _READ_AT_ONCE):
            positives = data.positives(data.query_ids[np.arange(span.start, span.stop)])
            share = np.ones(len(positives))
            if num_positives:
                share = np.minimum(1, num_positives / np.maximum(positives.lengths, 1))
            draws_L += np.bincount(positives.values, share[positives.row_ids], data.num_labels)
        return cls(draws_L, num_queries)

    def log_of_labels(self, label_ids: Int64Array, batch_size: int) -> Tensor:
        """float64 [U], on the host, for labels that occur in an epoch.

        Close as long as a batch is a small part of an epoch, or all positives are drawn.

        Args:
            label_ids: int64 [U], internal ids.
            batch_size: G, queries of the batch.
        """
        draws_U = np.maximum(self.draws_L[label_ids], _FEWEST_DRAWS)
        if batch_size >= self.num_queries:
            return torch.zeros(len(draws_U), dtype=torch.float64)
        log_miss = math.log1p(-batch_size / self.num_queries)
        return torch.from_numpy(np.log(-np.expm1(draws_U * log_miss)))

    def log_of_query(self, batch_size: int) -> float:
        """The logarithm for each of the G queries of a batch."""
        return math.log(min(1.0, batch_size / self.num_queries))


def check_log_q(negatives: NegativesConfig) -> None:
    """Raises ConfigError if a batch is not a random sample of the queries and their positives."""
    for setting in ("hard", "cluster_size"):
        value = getattr(negatives, setting)
        if value:
            raise ConfigError(
                f"method.log_q is on, and negatives.{setting} is {value}; the probability that a label"
                f" is in a batch is known for random batches only: set negatives.{setting}=0"
            )
