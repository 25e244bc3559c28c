"""Seconds of a version of the hard negatives: an index is built and tuned, and all queries search it.

How much of an index a search visits depends on vectors that do not exist yet. Two cases are
planned: rows that point anywhere, as after a random start, and rows that training has moved apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.negatives.plan import NegativesConfig
from xmcray.planning.device_search import TUNE_VISITS, DeviceSearch, Spread
from xmcray.planning.rates import Rates
from xmcray.planning.sizes import ID, VALUE, shortlist_bytes
from xmcray.retrieval.ann_create import KMEANS_ROUNDS, TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index_spec import num_lists
from xmcray.retrieval.index_tuning import TUNE_QUERIES


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """The work of one index actor for one version.

    Attributes:
        rates: Rates of the machine.
        config: Section `negatives`.
        rows: Labels of a shard.
        dim: Width of the vectors.
        queries: Queries of an epoch.
        found: Labels that a shard finds for a query.
        on_device: Whether rows are searched on the trainers' devices.
    """

    rates: Rates
    config: NegativesConfig
    rows: int
    dim: int
    queries: int
    found: int
    on_device: bool = False

    @property
    def lists(self) -> int:
        """Inverted lists; 0 for an exhaustive index."""
        return num_lists(self.config.index, self.rows)

    def build_s(self) -> float:
        """k-means on a sample, then every row to its list."""
        if self.on_device:
            return self._on_device().build_s()
        sample = min(self.rows, TRAIN_ROWS_PER_LIST * self.lists)
        # Two more rounds are for the means of lists, and for the residuals that codes are made of.
        assigned = (KMEANS_ROUNDS + 2) * sample + self.rows
        return 2.0 * self.dim * self.lists * assigned / self.rates.build_flop_s

    def search_s(self, spread: Spread) -> float:
        """Queries against the lists that they visit, or against all rows."""
        if self.on_device:
            return self._on_device().search_s(spread)
        compared = float(self.rows * self.queries)
        if self.lists:
            in_lists = (1 - spread.long) * spread.visited
            visited_rows = self.lists + self.rows * (in_lists + spread.long)
            # To tune it, some queries meet all rows, and then more and fewer lists.
            compared = visited_rows * (self.queries + TUNE_VISITS * TUNE_QUERIES)
            compared += self.rows * TUNE_QUERIES
        return 2.0 * self.dim * compared / self.rates.search_flop_s

    def _on_device(self) -> DeviceSearch:
        return DeviceSearch(
            rates=self.rates,
            rows=self.rows,
            dim=self.dim,
            queries=self.queries,
            lists=self.lists,
        )

    def merge_s(self) -> float:
        """The hits of all shards for a share of the queries; there are as many shares as shards."""
        return self.queries * self.found * self.rates.merge_s

    def host_s(self) -> float:
        """All but the index and its search: the merge and the files."""
        file_bytes = shortlist_bytes(self.config, self.queries)
        work_s = 0.0
        if self.config.hard:
            # Hits are written by the shard that finds them, and read by those that merge them.
            file_bytes += 2 * self.queries * self.found * (ID + VALUE)
            file_bytes += self.rows * self.dim * VALUE
            work_s = self.merge_s()
        return work_s + file_bytes / self.rates.disk_bytes_s

    def total_s(self, spread: Spread) -> float:
        """From published to complete, on cores and a device of its own."""
        if not self.config.hard:
            return self.host_s()
        return self.host_s() + self.build_s() + self.search_s(spread)


def shared_device_s(work_s: float, epoch_s: float, busy: float) -> float:
    """Seconds that a search takes on a device where trainers work, until those wait for it.

    Processes take turns on a device. While both have work there, that of a step takes twice as long,
    so an epoch with a search takes 1 + busy times its seconds.

    Args:
        work_s: Seconds with a device of its own.
        epoch_s: Seconds of an epoch without a search.
        busy: Share of a step in which the trainer's device works.
    """
    return work_s + busy * min(work_s, epoch_s)


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
    free = (rates.cores - threads) / threads
    by_priority = alone * weight / (1 + weight)
    share = min(max(free, by_priority), alone)
    if work_s <= share * epoch_s:
        return work_s / share
    return epoch_s + (work_s - share * epoch_s) / alone
