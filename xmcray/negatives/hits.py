"""What an index shard finds for queries that need lists of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray.negatives.plan import NegativesConfig
from xmcray.retrieval.index import Index
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, offsets_of


@dataclass(frozen=True, slots=True)
class Hits:
    """The best labels of each query, best first, one query after another.

    A query with many positives needs a long list. As rows of a table, all others would be padded to
    its length.

    Attributes:
        labels: ids of each query's labels; -1 where there is no further one.
        scores: float32 [T], the score of each of them; -inf where there is none.
    """

    labels: Ragged
    scores: Float32Array

    @classmethod
    def search(cls, index: Index, vectors: Float32Array, width_B: Int64Array) -> Hits:
        """Finds the `width_B[i]` best rows of query i.

        Queries of equal width are searched together, because a few need far more rows than the
        rest.

        Args:
            index: the rows.
            vectors: float32 [B, D], the queries.
            width_B: int64.
        """
        offsets = offsets_of(width_B)
        ids = np.empty(offsets[-1], np.int64)
        scores = np.empty(offsets[-1], np.float32)
        hits = cls(Ragged(ids, offsets), scores)
        for width in np.unique(width_B):
            queries = np.flatnonzero(width_B == width)
            top = index.search(vectors[queries], int(width))
            places, _ = hits.labels.positions(queries)
            ids[places] = top.ids.reshape(-1)
            scores[places] = top.scores.reshape(-1)
        return hits

    def slice(self, start: int, stop: int) -> Hits:
        """Those of the queries start .. stop - 1."""
        offsets = self.labels.offsets
        return Hits(self.labels.slice(start, stop), self.scores[offsets[start] : offsets[stop]])

    def table(self, queries: Int64Array) -> TopLabels:
        """Those of some queries, whose lists have one length."""
        places, _ = self.labels.positions(queries)
        shape = (len(queries), len(places) // max(1, len(queries)))
        ids = self.labels.values[places].reshape(shape)
        return TopLabels(ids, self.scores[places].reshape(shape))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What is stored."""
        return {
            "ids": self.labels.values,
            "scores": self.scores,
            "offsets": self.labels.offsets,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Hits:
        """Makes hits of what `arrays` returned, or of the table that earlier releases wrote."""
        ids = arrays["ids"]
        offsets = arrays.get("offsets")
        if offsets is None:
            num_queries, width = ids.shape
            offsets = width * np.arange(num_queries + 1)
        return cls(Ragged(ids.reshape(-1), offsets), arrays["scores"].reshape(-1))


def reach(extra: Int64Array, negatives: NegativesConfig) -> Int64Array:
    """Returns int64 [B], how many labels are searched for each query.

    Args:
        extra: int64 [B], as in `QueryBlock`.
        negatives: settings.
    """
    # Forbidden labels may be among the best, so each query gets as many more as it has of them.
    reach_B = negatives.hard + _rounded_up(extra)
    if negatives.max_relative_score:
        # The best ones may be left out, and those that follow take their places.
        reach_B = reach_B + negatives.hard
    return reach_B


def _rounded_up(extra: Int64Array) -> Int64Array:
    """Rounds up to 4, 8, 16, 32 ..., so that many queries are searched with one width."""
    at_least_4 = np.maximum(extra, 4)
    exponents = np.ceil(np.log2(at_least_4)).astype(np.int64)
    return 1 << exponents
