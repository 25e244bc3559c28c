"""Which rows a search may answer and under which ids, cut to shards, queries and selected rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmcray.types import Int64Array, Ragged, find_sorted, offsets_of


@dataclass(frozen=True, slots=True)
class AnswerableRows:
    """The rows of a search.

    Attributes:
        ids: int64 [n], id of each row in the answer; a row with a negative id is no answer.
        hidden: Q rows of positions that must not be answered to that query.
    """

    ids: Int64Array
    hidden: Ragged

    @classmethod
    def of(
        cls, num_rows: int, num_queries: int, ids: Int64Array | None, hidden: Ragged | None
    ) -> AnswerableRows:
        """Fills in what is not given: ids are positions, and no row is hidden."""
        if ids is None:
            ids = np.arange(num_rows)
        if hidden is None:
            hidden = Ragged.empty(num_queries)
        return cls(ids, hidden)

    def for_queries(self, start: int, stop: int) -> AnswerableRows:
        """The same rows for the queries start .. stop - 1."""
        return AnswerableRows(self.ids, self.hidden.slice(start, stop))

    def between(self, start: int, stop: int) -> AnswerableRows:
        """The rows start .. stop - 1, counted from `start`."""
        ids = self.ids[start:stop]
        if not len(self.hidden.values):
            return AnswerableRows(ids, self.hidden)
        places = self.hidden.values - start
        is_inside = (places >= 0) & (places < stop - start)
        return AnswerableRows(ids, _kept(self.hidden, places, is_inside))

    def selected(self, rows: Int64Array) -> AnswerableRows:
        """Only some rows, counted by their places in `rows` (ascending positions)."""
        places, is_inside = find_sorted(rows, self.hidden.values)
        return AnswerableRows(self.ids[rows], _kept(self.hidden, places, is_inside))


def _kept(rows: Ragged, values: Int64Array, kept: npt.NDArray[np.bool_]) -> Ragged:
    """The kept ones among `values`, which take the places of the values of `rows`."""
    # The number of kept values before each position, read at the old row boundaries, is the
    # position of the new boundaries.
    kept_before = offsets_of(kept)
    return Ragged(values[kept], kept_before[rows.offsets])
