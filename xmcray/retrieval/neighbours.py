"""What a search of the label vectors and of the memory finds, before it becomes an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xmcray.retrieval.shards import merge
from xmcray.types import Float32Array, TopLabels


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The rows nearest to B queries, best first; -1 and -inf where there are no more.

    A bundle without a memory uses `labels` only.

    Attributes:
        queries: training queries, by row of the memory.
        labels: labels by source id. With a memory these are keys: labels of the export.
        joined: labels that joined after the export, by source id. They are no keys, see
            `votes.joined_weights`. None if no label joined, left or is filtered out.
        fallback: labels that follow if fewer than k labels got votes; None means `labels`. In a
            fused bundle these are the nearest labels that may be answered.
        vectors: the query vectors, float32 [B, D], if labels are scored again after the search.
        others: what the further members of a fused bundle found, in their order (fused.py).
    """

    queries: TopLabels
    labels: TopLabels
    joined: TopLabels | None = None
    fallback: TopLabels | None = None
    vectors: Float32Array | None = None
    others: tuple[Neighbours, ...] = ()

    @property
    def by_member(self) -> tuple[Neighbours, ...]:
        """What each member of a fused bundle found; any other bundle is one member."""
        return (self, *self.others)

    @staticmethod
    def merged(parts: Sequence[Neighbours]) -> Neighbours:
        """Combines searches of disjoint subsets of the shards into what one search would find."""
        queries = merge([part.queries for part in parts])
        labels = merge([part.labels for part in parts])
        joined = _merge_optional([part.joined for part in parts])
        fallback = _merge_optional([part.fallback for part in parts])
        # All subsets searched the same queries.
        vectors = parts[0].vectors
        return Neighbours(queries, labels, joined, fallback, vectors, _merge_others(parts))

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.labels.ids)

    def slice(self, start: int, stop: int) -> Neighbours:
        """The neighbours of queries start .. stop - 1."""
        return Neighbours(
            self.queries.slice(start, stop),
            self.labels.slice(start, stop),
            self.joined and self.joined.slice(start, stop),
            self.fallback and self.fallback.slice(start, stop),
            None if self.vectors is None else self.vectors[start:stop],
            tuple(other.slice(start, stop) for other in self.others),
        )


def _merge_others(parts: Sequence[Neighbours]) -> tuple[Neighbours, ...]:
    # The same member of every part is merged.
    by_member = zip(*[part.others for part in parts], strict=True)
    return tuple(Neighbours.merged(of_member) for of_member in by_member)


def _merge_optional(parts: Sequence[TopLabels | None]) -> TopLabels | None:
    # Every subset answers the same kind of request, so all parts are there or none is.
    tops = [part for part in parts if part is not None]
    return merge(tops) if tops else None
