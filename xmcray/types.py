"""The values that travel between the folders, and the letters that name tensor axes.

    B  queries of this rank            G  queries of the global batch (all ranks)
    L  labels                          S  labels owned by this rank (its shard)
    C  candidate labels of a query     P  (query, label) pairs in one flat list
    D  width of a vector               T  tokens in one flat list
    K  answers per query               N  training queries
    W  numbers of a side vector

`query_BD` is a float tensor of B rows and D columns. `label_id` is global, `local_label_id` counts
from the start of a shard. Inside corpus, run and bundle, label ids are *internal* (a seeded
permutation). All ids that a user sees or passes in are *source* ids (line numbers in the user's
files).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # code that only reads or writes a corpus does not import torch
    from torch import Tensor

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
ROWS_AT_ONCE = 65_536  # whose texts are read at once


def offsets_of(lengths: npt.ArrayLike) -> Int64Array:
    """int64 [rows + 1]: where each row starts in a flat array of rows of these lengths, and its end."""
    first_start = np.zeros(1, np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.concatenate([first_start, ends])


def id_blocks(num_rows: int) -> Iterator[Int64Array]:
    """The numbers 0 .. num_rows - 1, some at a time."""
    for span in spans(num_rows, ROWS_AT_ONCE):
        yield np.arange(span.start, span.stop)


def spans(num_rows: int, size: int) -> Iterator[slice]:
    """The slices of `size` rows, the last one perhaps shorter, that make up all rows."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths in one flat array: token ids of texts, label ids of queries.

    Attributes:
        values: int64 [T], the rows one after another.
        offsets: int64 [rows + 1]; row i is values[offsets[i]:offsets[i + 1]].
    """

    values: Int64Array
    offsets: Int64Array

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | Int64Array]) -> Ragged:
        """Concatenates `rows` (sequences of integers, possibly empty)."""
        # The empty array makes the concatenation of no rows an int64 array too.
        arrays = [np.asarray(row, dtype=np.int64) for row in rows]
        values = np.concatenate([np.empty(0, np.int64), *arrays])
        return cls(values, offsets_of([len(array) for array in arrays]))

    @classmethod
    def empty(cls, rows: int) -> Ragged:
        """`rows` rows without a value."""
        return cls(np.empty(0, np.int64), np.zeros(rows + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Int64Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> Int64Array:
        """int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def row_ids(self) -> Int64Array:
        """int64 [T]: the row each value belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    @property
    def places(self) -> Int64Array:
        """int64 [T]: the place of each value in its row, from 0."""
        starts = np.repeat(self.offsets[:-1], self.lengths)
        return np.arange(len(self.values), dtype=np.int64) - starts

    def pairs(self, num_ids: int) -> Int64Array:
        """int64 [T]: one number per pair of a row and a value, row * num_ids + value.

        So one look-up finds whether an id is in the row. Rows that ascend make pairs that ascend.

        Args:
            num_ids: all values are below.
        """
        return self.row_ids * num_ids + self.values

    def padded(self) -> Int64Array:
        """int64 [rows, widest]: the rows as a table, with -1 after each."""
        widest = int(self.lengths.max(initial=0))
        table = np.full((len(self), widest), -1, np.int64)
        table[self.row_ids, self.places] = self.values
        return table

    def take(self, rows: Int64Array) -> Ragged:
        """The chosen rows in the chosen order; of memory-mapped values only these are read."""
        index, offsets = self.positions(rows)
        return Ragged(np.asarray(self.values[index], dtype=np.int64), offsets)

    def positions(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where the values of the chosen rows lie, int64 [T], and the offsets of these rows."""
        starts = np.asarray(self.offsets[rows], dtype=np.int64)
        next_rows = np.asarray(rows) + 1
        stops = np.asarray(self.offsets[next_rows], dtype=np.int64)
        lengths = stops - starts
        offsets = offsets_of(lengths)
        # A value at position p of the result lies at p + (start of its row here - there).
        shifts = np.repeat(starts - offsets[:-1], lengths)
        index = np.arange(offsets[-1], dtype=np.int64) + shifts
        return index, offsets

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows start .. stop - 1."""
        first = int(self.offsets[start])
        last = int(self.offsets[stop])
        # A row more than there are rows: the last offset is the end.
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[first:last], offsets - first)

    def where(self, kept_T: BoolArray) -> Ragged:
        """All rows, with only the values that are kept; a row may become empty."""
        # A row now begins after as many values as were kept before its old start.
        num_kept_before = offsets_of(kept_T)
        return Ragged(self.values[kept_T], num_kept_before[self.offsets])

    def chunks(self, size: int) -> Iterator[Ragged]:
        """The rows, `size` at a time."""
        for span in spans(len(self), size):
            yield self.slice(span.start, span.stop)

    def with_vectors(self, vectors: Float32Array | None) -> Ragged:
        """The same rows with side vectors, float32 [rows, W]; as they are if there are none."""
        return self if vectors is None else SidedRagged(self.values, self.offsets, vectors)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one part after another."""
        lengths = np.concatenate([part.lengths for part in parts])
        joined = Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))
        width = max(side_width_of(part) for part in parts)
        if not width:
            return joined
        vectors = [side_vectors_of(part, width) for part in parts]
        return SidedRagged(joined.values, joined.offsets, np.concatenate(vectors))


def pairs_of(id_BK: Int64Array, num_ids: int) -> Int64Array:
    """int64 [B, K]: one number per pair of a row and an id, as `Ragged.pairs`.

    The pair of a missing id, -1, is that of the row before and its last id.
    """
    row_B1 = np.arange(len(id_BK))[:, None]
    pair_BK: Int64Array = row_B1 * num_ids + id_BK
    return pair_BK


def find_sorted(
    sorted_values: npt.NDArray[Any], values: npt.NDArray[Any]
) -> tuple[Int64Array, BoolArray]:
    """Looks values up among sorted ones.

    Args:
        sorted_values: ascending.
        values: of any shape.
    Returns:
        Places in `sorted_values`, and whether a value is there. The place of any other value is a
        valid one too, unless there is none at all.
    """
    if not len(sorted_values):
        return np.zeros(values.shape, np.int64), np.zeros(values.shape, bool)
    places = np.searchsorted(sorted_values, values)
    # A value beyond the last one would be out of range; it fails the comparison instead.
    places = np.minimum(places, len(sorted_values) - 1)
    return places, sorted_values[places] == values


def merged_sorted(values: Int64Array, others: Int64Array) -> Int64Array:
    """The values of two ascending arrays, ascending, each once.

    As `np.union1d`, which takes many times as long for millions of values.
    """
    merged = np.sort(np.concatenate([values, others]), kind="stable")
    is_first = np.ones(len(merged), bool)
    is_first[1:] = merged[1:] != merged[:-1]
    return merged[is_first]


def are_ids(ids: npt.NDArray[Any], num_ids: int) -> bool:
    """Whether all numbers are ids, which are 0 .. num_ids - 1; so are no numbers at all."""
    if not len(ids):
        return True
    return bool(ids.min() >= 0 and ids.max() < num_ids)


@dataclass(frozen=True, slots=True)
class WeightedRagged(Ragged):
    """Rows whose values have weights: positives of training queries, by their relevance.

    Attributes:
        weights: float32 [T], one per value.
    """

    weights: Float32Array

    def take(self, rows: Int64Array) -> WeightedRagged:
        """The chosen rows in the chosen order, with their weights."""
        index, offsets = self.positions(rows)
        values = np.asarray(self.values[index], dtype=np.int64)
        return WeightedRagged(values, offsets, self.weights[index])


@dataclass(frozen=True, slots=True)
class SidedRagged(Ragged):
    """Token ids of texts that have side vectors, such as embeddings of images.

    Attributes:
        vectors: float32 [rows, W]; a row of zeros is none.
    """

    vectors: Float32Array

    def take(self, rows: Int64Array) -> SidedRagged:
        """The chosen rows in the chosen order, with their vectors."""
        index, offsets = self.positions(rows)
        values = np.asarray(self.values[index], dtype=np.int64)
        return SidedRagged(values, offsets, self.vectors[rows])

    def slice(self, start: int, stop: int) -> SidedRagged:
        """Rows start .. stop - 1, with their vectors."""
        # A class with slots is made anew by its decorator, which `super()` does not know.
        rows = Ragged.slice(self, start, stop)
        return SidedRagged(rows.values, rows.offsets, self.vectors[start:stop])


def side_width_of(tokens: Ragged) -> int:
    """W, the width of the side vectors of texts; 0 if they have none."""
    return tokens.vectors.shape[1] if isinstance(tokens, SidedRagged) else 0


def side_vectors_of(tokens: Ragged, width: int) -> Float32Array:
    """float32 [rows, width], the side vectors of texts; zeros, which stand for none, without them."""
    if isinstance(tokens, SidedRagged):
        return tokens.vectors
    return np.zeros((len(tokens), width), np.float32)


def weights_of(lists: Ragged) -> Float32Array | None:
    """The weights of values; None if all count 1."""
    return lists.weights if isinstance(lists, WeightedRagged) else None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's global batch, and the slice of it that this rank encodes.

    Attributes:
        epoch: Counts from 0.
        step: Counts from 0 over the whole run.
        query_ids: int64 [G], global query ids; ids >= N are label texts added as queries.
        start: This rank's first position in the global batch.
        stop: One past its last position; B = stop - start.
        tokens: Token ids of this rank's B queries.
        positives: Internal label ids of all G queries, ascending within a row, without filter
            pairs.
        excluded: Internal label ids that are the query itself (filter pairs) of all G queries;
            never a negative.
        relevance: float64, how much each value of `positives` counts; None if all count 1.
        inputs: What the method's `prepare` returned for the batch ahead of the step; None if it was
            not called.
    """

    epoch: int
    step: int
    query_ids: Int64Array
    start: int
    stop: int
    tokens: Ragged
    positives: Ragged
    excluded: Ragged
    relevance: Float64Array | None = None
    inputs: Any = None

    def weights_of(self, queries: Int64Array, labels: Int64Array) -> Float64Array | None:
        """float64, how much some pairs of a query and its positive count; None if all count 1.

        Args:
            queries: Places in the global batch.
            labels: Internal label ids, each a positive of its query.
        """
        if self.relevance is None:
            return None
        stride = int(self.positives.values.max(initial=0)) + 1
        # Positives ascend by query and then by label, and so do these numbers.
        pairs = self.positives.pairs(stride)
        places = np.searchsorted(pairs, queries * stride + labels)
        return self.relevance[places]

    def counting(self, positives: Ragged) -> Ragged:
        """Those of some positives of the G queries that count more than 0 in this step."""
        weights = self.weights_of(positives.row_ids, positives.values)
        return positives if weights is None else positives.where(weights > 0)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A loss before division, with what the step learned on the way.

    A method that needs more of its loss in `after_step` returns a subclass with further fields.

    Attributes:
        total: Scalar tensor with a graph, this rank's part of the loss; the sum over ranks counts.
        divisor: Number that the total is divided by, the same on every rank. It is G for a sum
            over queries, and 1 for a loss whose terms are means of their own. Only
            `training/step.py` divides.
        query_vectors: [B, D], this rank's query vectors without a graph, as the index of hard
            negatives is searched with them. None if the method has none.
    """

    total: Tensor
    divisor: int
    query_vectors: Tensor | None


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Hard negatives of all queries, from one refresh of the index.

    Attributes:
        version: Counts refreshes from 0.
        snapshot_step: The step after which the indexed vectors were copied; the age counts from
            here.
        labels: int32 [query ids, h], internal label ids, best first; -1 if there are fewer. May be
            memory-mapped.
        index_recall: Share of the exact neighbours that the index finds, on a sample; None if it
            was not measured.
        left_out: Candidates that were left out as probable right answers; None if none can be.
    """

    version: int
    snapshot_step: int
    labels: npt.NDArray[np.int32]
    index_recall: float | None = None
    left_out: int | None = None

    def take(self, query_ids: Int64Array, width: int) -> Ragged:
        """The first `width` hard negatives of some queries."""
        rows = np.asarray(self.labels[query_ids, :width], dtype=np.int64)
        present = rows >= 0
        return Ragged(rows[present], offsets_of(present.sum(axis=1)))


@dataclass(frozen=True, slots=True)
class TopLabels:
    """Ranked answers.

    Attributes:
        ids: int64 [B, K], best first; -1 where there is no further answer.
        scores: float32 [B, K], inner products; -inf where there is no further answer.
        probabilities: float32 [B, K], that the label is relevant; 0 where there is no further
            answer. None if the bundle is not calibrated.
    """

    ids: Int64Array
    scores: Float32Array
    probabilities: Float32Array | None = None

    @classmethod
    def empty(cls, num_queries: int, k: int = 0) -> TopLabels:
        """No answer to each of some queries, in lists of width k."""
        ids = np.full((num_queries, k), -1, np.int64)
        return cls(ids, np.full(ids.shape, -np.inf, np.float32))

    def widened(self, k: int) -> TopLabels:
        """The same answers in lists of width k, at least their own."""
        missing = ((0, 0), (0, k - self.width))
        probabilities = None
        if self.probabilities is not None:
            probabilities = np.pad(self.probabilities, missing)
        ids = np.pad(self.ids, missing, constant_values=-1)
        scores = np.pad(self.scores, missing, constant_values=-np.inf)
        return TopLabels(ids, scores, probabilities)

    @classmethod
    def concatenate(cls, parts: Sequence[TopLabels], k: int) -> TopLabels:
        """The answers to the queries of all parts, which have width k; `parts` may be empty."""
        probabilities = [part.probabilities for part in parts if part.probabilities is not None]
        # Either all parts have probabilities or none has.
        all_probabilities = np.concatenate(probabilities) if probabilities else None
        parts = [cls.empty(0, k), *parts]
        ids = np.concatenate([part.ids for part in parts])
        scores = np.concatenate([part.scores for part in parts])
        return cls(ids, scores, all_probabilities)

    @classmethod
    def from_pairs(
        cls,
        query_P: Int64Array,
        label_P: Int64Array,
        score_P: npt.NDArray[np.floating],
        num_queries: int,
        k: int,
    ) -> TopLabels:
        """Ranks scored pairs: the k best labels of each query, equal scores by lower id.

        Args:
            query_P: int64, 0 .. num_queries - 1.
            label_P: int64, label ids.
            score_P: float.
            num_queries: B.
            k: width of the result.
        """
        # By query, then by falling score, then by rising label.
        order = np.lexsort((label_P, -score_P, query_P))
        query_P = query_P[order]
        count_B = np.bincount(query_P, minlength=num_queries)
        first_B = np.cumsum(count_B) - count_B
        # A pair's place in its list is its distance from the query's first pair.
        place_P = np.arange(len(order)) - np.repeat(first_B, count_B)
        listed = place_P < k
        place = query_P[listed], place_P[listed]
        top = cls.empty(num_queries, k)
        top.ids[place] = label_P[order[listed]]
        top.scores[place] = score_P[order[listed]]
        return top

    @property
    def width(self) -> int:
        """K."""
        return int(self.ids.shape[1])

    def slice(self, start: int, stop: int) -> TopLabels:
        """Those of queries start .. stop - 1."""
        probabilities = self.probabilities
        if probabilities is not None:
            probabilities = probabilities[start:stop]
        return TopLabels(self.ids[start:stop], self.scores[start:stop], probabilities)

    def first(self, k: int) -> TopLabels:
        """The first k answers to each query."""
        probabilities = self.probabilities
        if probabilities is not None:
            probabilities = probabilities[:, :k]
        return TopLabels(self.ids[:, :k], self.scores[:, :k], probabilities)

    def at_least(self, min_probability: float) -> TopLabels:
        """The answers of at least this probability; others become missing, at their places."""
        assert self.probabilities is not None, "these answers have no probabilities"
        too_low = self.probabilities < np.float32(min_probability)
        return TopLabels(
            np.where(too_low, -1, self.ids),
            np.where(too_low, np.float32(-np.inf), self.scores),
            np.where(too_low, np.float32(0), self.probabilities),
        )


def to_torch(array: npt.NDArray[np.generic]) -> Tensor:
    """A tensor over a copy of `array` that owns its memory (memory-mapped arrays are read-only)."""
    import torch

    return torch.from_numpy(np.array(array, copy=True))
