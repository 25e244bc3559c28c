"""Seconds of a version of the hard negatives: an index is built and tuned, and all queries search it.

How much of an index a search visits depends on vectors that do not exist yet. Two cases are
planned: rows that point anywhere, as after a random start, and rows that training has moved apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.negatives.plan import NegativesConfig
from xmcray.planning.rates import Rates
from xmcray.planning.sizes import CANDIDATES, ID, VALUE, num_lists, shortlist_bytes
from xmcray.retrieval.ann import KMEANS_ROUNDS, TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import LONG_SHARE, TUNE_QUERIES

_TUNE_VISITS = 8  # searches of the tuning queries until the recall is right


@dataclass(frozen=True)
class Spread:
    """How rows lie.

    Attributes:
        visited: Share of lists that have 95 % of the best rows.
        long: Share of rows that are in no list, because they are much longer than others.
    """

    visited: float
    long: float


ANYWHERE = Spread(0.4, 0.0)  # random directions, about one length
APART = Spread(0.04, LONG_SHARE)  # a trained classifier's, by benchmarks/index_recall.py


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """The work of one index actor for one version.

    Attributes:
        rates: Rates of the machine.
        config: Section `negatives`.
        rows: Labels of a shard.
        dim: Width of the vectors.
        queries: Queries of an epoch.
        shards: Indexes, one for each worker.
    """

    rates: Rates
    config: NegativesConfig
    rows: int
    dim: int
    queries: int
    shards: int

    @property
    def lists(self) -> int:
        """Inverted lists; 0 for an exhaustive index."""
        return num_lists(self.config.index, self.rows)

    def build_s(self) -> float:
        """k-means on a sample, then every row to its list."""
        sample = min(self.rows, TRAIN_ROWS_PER_LIST * self.lists)
        # The last round is for the residuals that codes are made of.
        assigned = (KMEANS_ROUNDS + 1) * sample + self.rows
        return 2.0 * self.dim * self.lists * assigned / self.rates.build_flop_s

    def search_s(self, spread: Spread) -> float:
        """Queries against the lists that they visit, or against all rows."""
        compared = float(self.rows * self.queries)
        if self.lists:
            in_lists = (1 - spread.long) * spread.visited
            visited_rows = self.lists + self.rows * (in_lists + spread.long)
            # To tune it, some queries meet all rows, and then more and fewer lists.
            compared = visited_rows * (self.queries + _TUNE_VISITS * TUNE_QUERIES)
            compared += self.rows * TUNE_QUERIES
        return 2.0 * self.dim * compared / self.rates.search_flop_s

    def total_s(self, spread: Spread) -> float:
        """From published to complete, on cores of its own."""
        file_bytes = shortlist_bytes(self.config, self.queries)
        work_s = 0.0
        if self.config.hard:
            candidates = self.queries * (self.config.hard + CANDIDATES)
            file_bytes += candidates * (ID + VALUE) + self.rows * self.dim * VALUE
            merge_s = 2 * candidates * self.shards * self.rates.sort_s
            work_s = self.build_s() + self.search_s(spread) + merge_s
        return work_s + file_bytes / self.rates.disk_bytes_s


def shared_cores_s(
    work_s: float,
    epoch_s: float,
    rates: Rates,
    workers: int,
    niceness: int,
) -> float:
    """Seconds that an actor's work takes on the cores that trainers leave, until those wait for it.

    Args:
        work_s: Seconds with cores of its own.
        epoch_s: Seconds for which trainers do not wait.
        rates: Rates of the machine.
        workers: Number of trainers, each with an actor.
        niceness: Niceness of actors; with fewer cores than threads both share one by priority.
    """
    threads = workers * rates.threads
    if not rates.cores:
        return work_s
    alone = min(1.0, rates.cores / threads)
    weight = 1.25**-niceness
    share = max((rates.cores - threads) / threads, alone * weight / (1 + weight))
    share = min(share, alone)
    if work_s <= share * epoch_s:
        return work_s / share
    return epoch_s + (work_s - share * epoch_s) / alone
