"""Which rows a search may answer and under which ids, cut to shards, queries and selected rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray.types import Int64Array, Ragged, find_sorted


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

    @property
    def most_hidden(self) -> int:
        """Hidden rows of the query that has the most."""
        return int(self.hidden.lengths.max()) if len(self.hidden.values) else 0

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
        hidden_places = Ragged(places, self.hidden.offsets)
        return AnswerableRows(ids, hidden_places.where(is_inside))

    def selected(self, rows: Int64Array) -> AnswerableRows:
        """Only some rows, counted by their places in `rows` (ascending positions)."""
        places, is_inside = find_sorted(rows, self.hidden.values)
        hidden_places = Ragged(places, self.hidden.offsets)
        return AnswerableRows(self.ids[rows], hidden_places.where(is_inside))
