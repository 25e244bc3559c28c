"""Seconds of a version of the hard negatives: an index is built and tuned, and all queries search it.

How much of an index a search visits depends on vectors that do not exist yet. Two cases are
planned: rows that point anywhere, as after a random start, and rows that training has moved apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.planning.rates import Rates
from xmcray.planning.sizes import CANDIDATES, ID, VALUE, num_lists
from xmcray.retrieval.ann import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import LONG_SHARE, TUNE_QUERIES, resolve_factory

_KMEANS_ROUNDS = 9  # eight, and one for the residuals that codes are made of
_TUNE_VISITS = 8  # searches of the tuning queries until the recall is right
_POLL_S = 0.05  # between two looks for a published version


@dataclass(frozen=True)
class Spread:
    """How rows lie.

    Attributes:
        visited: share of lists that have 95 % of the best rows.
        long: share of rows that are in no list, because they are much longer than others.
    """

    visited: float
    long: float


ANYWHERE = Spread(0.4, 0.0)  # random directions, about one length
APART = Spread(0.04, LONG_SHARE)  # a trained classifier's, by benchmarks/index_recall.py


@dataclass(frozen=True)
class Refresh:
    """The work of one index actor for one version.

    Attributes:
        rates: of the machine.
        factory: of the index, as `negatives.index`.
        rows: labels of a shard.
        dim: width of the vectors.
        queries: of an epoch.
        hard: hard negatives of a query.
        shards: indexes, one for each worker.
    """

    rates: Rates
    factory: str
    rows: int
    dim: int
    queries: int
    hard: int
    shards: int

    @property
    def lists(self) -> int:
        """Inverted lists; 0 for an exhaustive index."""
        return num_lists(resolve_factory(self.factory, self.rows))

    def build_s(self) -> float:
        """k-means on a sample, then every row to its list."""
        if not self.lists:
            return 0.0
        sample = min(self.rows, TRAIN_ROWS_PER_LIST * self.lists)
        flop = 2.0 * self.dim * self.lists * (_KMEANS_ROUNDS * sample + self.rows)
        return flop / self.rates.build_flop_s

    def search_s(self, spread: Spread, queries: int | None = None) -> float:
        """Queries against the lists that they visit, or against all rows."""
        queries = self.queries if queries is None else queries
        compared = float(self.rows)
        if self.lists:
            in_lists = (1 - spread.long) * spread.visited
            compared = self.lists + self.rows * (in_lists + spread.long)
        return 2.0 * self.dim * compared * queries / self.rates.search_flop_s

    def tune_s(self, spread: Spread) -> float:
        """Some queries against all rows, then against more and fewer lists."""
        if not self.lists:
            return 0.0
        exact_s = 2.0 * self.dim * self.rows * TUNE_QUERIES / self.rates.search_flop_s
        return exact_s + _TUNE_VISITS * self.search_s(spread, TUNE_QUERIES)

    def total_s(self, spread: Spread) -> float:
        """From published to complete, on cores of its own."""
        shortlist_bytes = self.queries * 4 * self.hard
        if not self.hard:
            return _POLL_S + shortlist_bytes / self.rates.disk_bytes_s
        candidates = self.queries * (self.hard + CANDIDATES)
        files = candidates * (ID + VALUE) + shortlist_bytes + self.rows * self.dim * VALUE
        merge_s = 2 * candidates * self.shards * self.rates.sort_s
        work_s = self.build_s() + self.tune_s(spread) + self.search_s(spread) + merge_s
        return _POLL_S + work_s + files / self.rates.disk_bytes_s


def shared_cores_s(
    work_s: float, epoch_s: float, rates: Rates, workers: int, niceness: int
) -> float:
    """Seconds that an actor's work takes on the cores that trainers leave, until those wait for it.

    Args:
        work_s: with cores of its own.
        epoch_s: for which trainers do not wait.
        rates: of the machine.
        workers: trainers, each with an actor.
        niceness: of actors; with fewer cores than threads both share one by their priorities.
    """
    threads = workers * rates.threads
    if not rates.cores or rates.on_gpu:
        return work_s
    alone = min(1.0, rates.cores / threads)
    weight = 1.25**-niceness
    share = max((rates.cores - threads) / threads, alone * weight / (1 + weight))
    share = min(share, alone)
    if work_s <= share * epoch_s:
        return work_s / share
    return epoch_s + (work_s - share * epoch_s) / alone
