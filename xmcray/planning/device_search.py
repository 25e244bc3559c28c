"""Seconds of searches on a GPU, by the operations that they start and the bytes that they move."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from xmcray.planning.rates import Rates
from xmcray.retrieval import inverted_lists, list_scan
from xmcray.retrieval.ann_create import KMEANS_ROUNDS, TRAIN_ROWS_PER_LIST
from xmcray.retrieval.exact import GPU_BLOCK, GROUP
from xmcray.retrieval.index_building import LONG_SHARE
from xmcray.retrieval.index_tuning import TUNE_QUERIES

_VALUE = 4  # bytes of a float32
TUNE_VISITS = 8  # searches of the tuning queries until the recall is right
# Counted in tests/gpu: operations of an exact search on a block of scores; of a search of lists on
# those that are scored together, besides a product for each; and on all visits of a round.
BLOCK_CALLS = 50
BATCH_CALLS = 42
ROUND_CALLS = 60
# Of each group of scores: its maximum, its visit and its bar, written and read.
_GROUP_BYTES = 29


@dataclass(frozen=True)
class Spread:
    """How rows lie.

    Attributes:
        visited: Share of lists that have 95 % of the best rows.
        long: Share of rows that are in no such list, because they are much longer than others.
    """

    visited: float
    long: float


ANYWHERE = Spread(0.4, 0.0)  # random directions, about one length
APART = Spread(0.04, LONG_SHARE)  # a trained classifier's, by benchmarks/index_recall.py


@dataclass(frozen=True, kw_only=True)
class DeviceSearch:
    """The work of one index actor on its device.

    Attributes:
        rates: Rates of the device.
        rows: Labels of a shard.
        dim: Width of the vectors.
        queries: Queries of an epoch.
        lists: Inverted lists; 0 to compare all rows.
    """

    rates: Rates
    rows: int
    dim: int
    queries: int
    lists: int

    def build_s(self) -> float:
        """k-means on a sample, then every row to its list."""
        sample = min(self.rows, TRAIN_ROWS_PER_LIST * self.lists)
        return self._scores_s(self.lists * ((KMEANS_ROUNDS + 1) * sample + self.rows))

    def search_s(self, spread: Spread) -> float:
        """Queries against the rows of the lists that they visit, or against all rows."""
        if not self.lists:
            return self.exact_s()
        tuning = dataclasses.replace(self, queries=TUNE_QUERIES)
        tuning_s = tuning.exact_s() + TUNE_VISITS * tuning.lists_s(spread)
        return tuning_s + self.lists_s(spread)

    def exact_s(self) -> float:
        """All queries against all rows."""
        block_queries, block_rows = GPU_BLOCK
        query_blocks = math.ceil(self.queries / block_queries)
        row_blocks = math.ceil(self.rows / block_rows)
        num_calls = query_blocks * row_blocks * BLOCK_CALLS
        compared = float(self.rows * self.queries)
        return self._scores_s(compared) + num_calls * self.rates.call_s

    def lists_s(self, spread: Spread) -> float:
        """All queries against the lists that they visit, and those of long rows."""
        work = self.list_work(spread)
        rates = self.rates
        # The nearest lists are selected, and visits are sorted by list.
        nearest = float(self.queries * self.lists)
        nearest_s = self._scores_s(nearest) + nearest * rates.sort_s
        sort_s = work.visits * rates.sort_s
        group_s = work.scores / GROUP * _GROUP_BYTES / rates.pass_bytes_s
        copied_bytes = _VALUE * self.dim * (work.visits + work.copied_rows)
        copy_s = copied_bytes / rates.row_bytes_s + copied_bytes / rates.pass_bytes_s
        parts_s = nearest_s + sort_s + group_s + copy_s + work.calls * rates.call_s
        return self._scores_s(work.scores, work.products) + parts_s

    def list_work(self, spread: Spread) -> ListWork:
        """What a search of lists does."""
        limits = inverted_lists.gpu_limits(self.rows, self.dim)
        long_rows = spread.long * self.rows
        list_rows = (self.rows - long_rows) / self.lists
        long_lists = math.ceil(long_rows / max(inverted_lists.LONG_ROWS, list_rows))
        nprobe = max(1, round(spread.visited * self.lists))
        # On average, the last group of a list is half full.
        near_rows = nprobe * (list_rows + GROUP / 2)
        visits = self.queries * (nprobe + long_lists)
        scores = self.queries * (near_rows + long_rows)
        chunk = min(limits.queries, limits.visits // max(nprobe, long_lists))
        chunks = math.ceil(self.queries / chunk)
        rounds = _rounds(nprobe)
        copied_rows = chunks * (rounds * self.lists * list_rows + long_rows)
        num_rounds = chunks * (rounds + _rounds(long_lists))
        elements = scores + self.dim * (visits + copied_rows)
        products = chunks * (rounds * self.lists + long_lists)
        # On average, half of a product more would have fitted what is scored together.
        full = limits.scores - elements / products / 2
        # A round ends with scores that are not full, and the first round takes a quarter at once.
        first_visits = self.queries * (list_rows + self.dim)
        first_elements = first_visits + chunks * self.rows * self.dim
        batches = elements / full + num_rounds + 3 * first_elements / limits.scores
        return ListWork(
            scores=scores,
            visits=visits,
            copied_rows=copied_rows,
            products=products,
            calls=BATCH_CALLS * batches + ROUND_CALLS * num_rounds,
        )

    def _scores_s(self, compared: float, products: float = 0) -> float:
        """Seconds of scores: products write them, and one pass finds the best.

        Args:
            compared: Pairs of query and row.
            products: If they are small and many, starting them may take longer than they take. They
                are started while the device still computes earlier ones.
        """
        pass_s = _VALUE * compared / self.rates.pass_bytes_s
        product_s = 2.0 * self.dim * compared / self.rates.product_flop_s
        return max(product_s, pass_s, products * self.rates.call_s) + pass_s


@dataclass(frozen=True, kw_only=True)
class ListWork:
    """What a search of lists does.

    Attributes:
        scores: Pairs of query and row.
        visits: Pairs of query and list, of which each has a copy of the query's vector.
        copied_rows: Rows, of which lists that are scored together have copies.
        products: Matrix products.
        calls: Other operations.
    """

    scores: float
    visits: float
    copied_rows: float
    products: float
    calls: float


def _rounds(num_lists: int) -> int:
    """Rounds in which a query visits so many lists: 1, then up to 16, 256 and so on."""
    rounds = 0
    while num_lists > 0 and list_scan.ROUND_GROWTH ** (rounds - 1) < num_lists:
        rounds += 1
    return rounds
