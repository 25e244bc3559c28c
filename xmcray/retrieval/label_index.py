"""The labels of a bundle: their shards of vectors, names, and which of them may be answered.

A row is a position in the shards (internal order), a label id is a source id. A view of the index
shares all vectors with the index that it was made from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmcray.retrieval.bundle import LABEL_SCHEMA, Settings, read_labels, read_row_labels
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_spec import FLAT_ROWS
from xmcray.retrieval.shards import EVERYTHING, SearchScope, ShardedIndex, ShardSubset
from xmcray.types import BoolArray, Float32Array, Int64Array, Ragged, TopLabels


@dataclass(frozen=True, eq=False)
class LabelIndex:
    """Label vectors that can be searched, and what their rows mean.

    Attributes:
        settings: what settings.json says, also of labels that joined in memory only.
        rows: the shards of label vectors.
        row_labels: int64 [rows], source id of each row; -1 for a row that is not used yet.
        table: uid and text of each label by source id, also of removed labels.
        removed: int64, ascending: source ids that are no answers any more.
        allowed: bool [L] by source id, the labels that a filter lets pass; None without a filter.
    """

    settings: Settings
    rows: ShardedIndex
    row_labels: Int64Array
    table: pa.Table
    removed: Int64Array
    allowed: BoolArray | None = None

    @classmethod
    def load(
        cls,
        bundle: Path,
        settings: Settings,
        threads: int,
        subset: ShardSubset,
        same_labels: LabelIndex | None = None,
    ) -> LabelIndex:
        """Reads the labels of a verified bundle; vectors stay on disk.

        Args:
            bundle: local folder of the bundle.
            settings: its settings.
            threads: threads of a search.
            subset: the shards that are going to be searched; the indexes of others are not read.
            same_labels: other vectors of the same labels, if the folder holds no names of its own.
        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        if same_labels is None:
            table, row_labels, removed = read_labels(bundle, settings)
        else:
            table = same_labels.table
            removed = same_labels.removed
            row_labels = read_row_labels(bundle, settings)
        rows = ShardedIndex.load(bundle, settings.shards, settings.dim, threads, subset)
        return cls(settings, rows, row_labels, table, removed)

    # --- What labels there are ---

    @property
    def num_labels(self) -> int:
        """Labels that can be answered without a filter: L without the removed ones."""
        return self.settings.num_labels - len(self.removed)

    @property
    def changed(self) -> bool:
        """Whether labels joined or were removed since the export."""
        return self.settings.first_added is not None or len(self.removed) > 0

    @property
    def answers_all(self) -> bool:
        """Whether the labels that may be answered are those of the export."""
        return not self.changed and self.allowed is None

    @functools.cached_property
    def label_rows(self) -> Int64Array:
        """int64 [L], the row of each source id: the inverse of `row_labels`."""
        used = np.flatnonzero(self.row_labels >= 0)
        label_rows = np.empty(len(used), np.int64)
        label_rows[self.row_labels[used]] = used
        return label_rows

    @functools.cached_property
    def hidden_labels(self) -> BoolArray | None:
        """bool [L], labels that were removed or do not pass the filter; None if there are none."""
        if not len(self.removed) and self.allowed is None:
            return None
        hidden = np.zeros(self.settings.num_labels, bool)
        hidden[self.removed] = True
        if self.allowed is not None:
            hidden |= ~self.allowed
        return hidden

    def ids_by_uid(self) -> dict[str, int]:
        """Source ids by uid, of the labels that can be answered."""
        removed = set(self.removed.tolist())
        uids = enumerate(self.table["uid"].to_pylist())
        return {uid: label_id for label_id, uid in uids if label_id not in removed}

    def ids_of(self, uids: Iterable[str]) -> dict[str, int]:
        """Source ids by uid, of those uids whose labels can be answered.

        Searches the uids where Arrow holds them. Finding a few among 10^8 takes 1 byte a label, where
        a dictionary of all takes 150.
        """
        # As bytes, because an argument of a command may hold some that are no UTF-8.
        wanted = pa.array([uid.encode(errors="surrogatepass") for uid in uids], pa.large_binary())
        all_uids = self.table["uid"].cast(pa.large_binary())
        is_wanted = pc.is_in(all_uids, value_set=wanted)
        label_ids = np.flatnonzero(is_wanted.to_numpy())
        # A label that was removed may have come back under another id.
        label_ids = label_ids[~np.isin(label_ids, self.removed)]
        found_uids, _ = self.uids_and_texts(label_ids)
        return dict(zip(found_uids, label_ids.tolist(), strict=True))

    def texts(self, label_ids: Int64Array) -> list[str]:
        """Texts of labels by source id."""
        return self.uids_and_texts(label_ids)[1]

    def uids_and_texts(self, label_ids: Int64Array) -> tuple[list[str], list[str]]:
        """Uids and texts of labels by source id."""
        names = self.names_of(label_ids)
        return names["uid"].to_pylist(), names["text"].to_pylist()

    def names_of(self, label_ids: Int64Array) -> pa.Table:
        """Uids and texts of labels by source id, as Arrow holds them.

        Arrow's own `take` first joins all blocks of a column into one, which copies 60 MB per
        request at 10^6 labels. Here only the blocks that hold the labels are read.
        """
        blocks, block_ends = self._blocks
        label_blocks = np.searchsorted(block_ends, label_ids, side="right")
        parts = []
        for number in np.unique(label_blocks).tolist():
            block_start = block_ends[number] - len(blocks[number])
            places = label_ids[label_blocks == number] - block_start
            parts.append(blocks[number].take(pa.array(places)))
        # The parts hold the labels by block; the inverse of that order gives back their own.
        by_block = np.argsort(label_blocks, kind="stable")
        return pa.Table.from_batches(parts, LABEL_SCHEMA).take(np.argsort(by_block))

    def vectors_of(self, label_ids: Int64Array) -> Float32Array:
        """float32 [n, D], vectors of labels by source id."""
        rows = self.label_rows[label_ids]
        vectors = np.empty((len(rows), self.settings.dim), np.float32)
        for number, shard in enumerate(self.settings.shards):
            is_inside = (rows >= shard.start) & (rows < shard.stop)
            shard_rows = rows[is_inside] - shard.start
            vectors[is_inside] = self.rows.vectors(number)[shard_rows]
        return vectors

    # --- Search ---

    def scores_of(self, query_BD: Float32Array, label_BC: Int64Array) -> Float32Array:
        """Inner products of queries and some labels, whatever the index.

        Args:
            query_BD: float32 [B, D].
            label_BC: int64 [B, C], source ids; -1 for none.
        Returns:
            float32 [B, C]; -inf where there is no label.
        """
        # The id -1 borrows the row of label 0 until the next line.
        rows = self.label_rows[np.maximum(label_BC, 0)]
        rows = np.where(label_BC >= 0, rows, -1)
        scores = np.full(rows.shape, -np.inf, np.float32)
        for shard, index in zip(self.rows.shards, self.rows.indexes, strict=True):
            inside = (rows >= shard.start) & (rows < shard.stop)
            if inside.any():
                positions = np.where(inside, rows - shard.start, -1)
                # A label that lies in another shard has -inf here.
                scores = np.maximum(scores, index.candidate_scores(query_BD, positions))
        return scores

    def search(
        self,
        query_BD: Float32Array,
        k: int,
        scope: SearchScope = EVERYTHING,
        joined_only: bool = False,
    ) -> TopLabels:
        """The k best labels among those that may be answered, best first.

        Args:
            query_BD: float32 [B, D].
            k: answers per query.
            scope: what to search.
            joined_only: search only labels that joined after the export.
        """
        # Shards of joined labels follow those of the export.
        first_shard = self._num_exported if joined_only else 0
        return self._answer_rows.search(
            query_BD,
            k,
            numbers=scope.subset.of(range(first_shard, len(self.settings.shards))),
            names=self.answer_labels,
            hidden=self._hidden_rows(scope.exclude),
            exact=scope.exact,
        )

    def search_exported(
        self, query_BD: Float32Array, k: int, scope: SearchScope = EVERYTHING
    ) -> TopLabels:
        """As `search`, but among all labels of the export, also those removed or filtered out."""
        return self.rows.search(
            query_BD,
            k,
            numbers=scope.subset.of(range(self._num_exported)),
            names=self.row_labels,
            hidden=self._hidden_rows(scope.exclude),
            exact=scope.exact,
        )

    def _hidden_rows(self, exclude: Ragged | None) -> Ragged | None:
        if exclude is None:
            return None
        return Ragged(self.label_rows[exclude.values], exclude.offsets)

    # --- Views ---

    def restricted(self, allowed: BoolArray) -> LabelIndex:
        """A view that answers only some labels.

        Args:
            allowed: bool [L] by source id; none at all is legal.
        """
        return dataclasses.replace(self, allowed=allowed)

    def without(self, label_ids: Int64Array) -> LabelIndex:
        """A view in which some labels are no answers any more."""
        return dataclasses.replace(self, removed=np.union1d(self.removed, label_ids))

    def with_rows(
        self,
        settings: Settings,
        names: pa.Table,
        row_labels: Int64Array,
        vectors: Mapping[int, Float32Array],
    ) -> LabelIndex:
        """A view with more labels; see `labels.with_labels`.

        Args:
            settings: with the shards there are then.
            names: uid and text of the new labels.
            row_labels: int64 [rows], source id of each row.
            vectors: float32 [rows of the shard, D] of the new or changed shards, by number.
        """
        assert self.allowed is None, "a filter's mask has one entry per label"
        return dataclasses.replace(
            self,
            settings=settings,
            rows=self.rows.with_vectors(settings.shards, vectors),
            row_labels=row_labels,
            table=_appended(self.table, names),
        )

    # --- Derived arrays, made at the first use ---

    def drop_derived(self) -> None:
        """Drops the derived arrays of one entry per label or row; the next use makes them again."""
        for name in ("label_rows", "hidden_labels", "answer_labels", "_answer_rows"):
            # A cached property keeps its value under its name.
            vars(self).pop(name, None)

    @functools.cached_property
    def _num_exported(self) -> int:
        """Number of shards that the export wrote: those of joined labels start at `first_added`."""
        first_added = self.settings.first_added
        if first_added is None:
            return len(self.settings.shards)
        return sum(shard.start < first_added for shard in self.settings.shards)

    @functools.cached_property
    def answer_labels(self) -> Int64Array:
        """int64 [rows], source id of each row, -1 for rows that are no answers."""
        if self.hidden_labels is None:
            return self.row_labels
        # An unused row (-1) reads the mask's last label and stays -1 by the first condition.
        is_answer = (self.row_labels >= 0) & ~self.hidden_labels[self.row_labels]
        return np.where(is_answer, self.row_labels, -1)

    @functools.cached_property
    def _answer_rows(self) -> ShardedIndex:
        """The shards as `search` uses them.

        An index proposes candidates of which some are no answers. So it proposes more of them, and
        where few rows are left, those are compared exhaustively instead.
        """
        if self.hidden_labels is None:
            return self.rows
        indexes: list[Index] = []
        for shard, index in zip(self.rows.shards, self.rows.indexes, strict=True):
            rows = np.flatnonzero(self.answer_labels[shard.start : shard.stop] >= 0)
            few = max(FLAT_ROWS, len(index) // 16)
            # A shard of few rows is not copied, whatever share of them is left.
            if len(rows) <= few < len(index):
                indexes.append(index.only(rows))
            elif index.is_exact:
                indexes.append(index)
            else:
                # With no answer at all, as many rows are compared as with a single one.
                indexes.append(index.filtered(max(len(rows), 1) / len(index)))
        return ShardedIndex(self.rows.shards, tuple(indexes))

    @functools.cached_property
    def _blocks(self) -> tuple[list[pa.RecordBatch], Int64Array]:
        """The blocks in which the table lies in memory, and the id after the last one of each."""
        blocks = self.table.to_batches()
        return blocks, np.cumsum([len(block) for block in blocks])


def _appended(table: pa.Table, names: pa.Table) -> pa.Table:
    """A table with more rows, in few blocks however often rows are appended.

    The new rows form one block with the blocks before them that are no longer than it. So lengths
    fall from block to block, and n labels that join one by one lie in about log2(n) blocks.
    """
    blocks = table.to_batches()
    end = names
    while blocks and len(blocks[-1]) <= len(end):
        last_block = pa.Table.from_batches([blocks.pop()])
        end = pa.concat_tables([last_block, end])
    blocks += end.combine_chunks().to_batches()
    return pa.Table.from_batches(blocks, table.schema)
