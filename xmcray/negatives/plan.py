"""What a method asks for: how many negatives of which kind, in which batches, and when they are refreshed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from xmcray.config import check_choices, check_range


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """Section `negatives`.

    Attributes:
        uniform: c, labels of the pool drawn uniformly for a whole global batch.
        uniform_epochs: first epochs that have the uniform pool; 0 is all of them. With `start_epoch` here, hard
            negatives take the place of uniform ones.
        hard: h, hard negatives of a query; 0 switches the index off.
        cluster_size: batches are made of whole clusters of at least so many alike queries (NGAME), so that in-batch
            negatives are hard; 0 draws batches at random. Clusters are refreshed with the hard negatives.
        cluster_doubles: epochs from which on the clusters are twice as large.
        start_epoch: e0, first epoch that uses hard negatives or clusters (>= 2: one to collect queries, one to build
            and search).
        refresh_every: epochs between refreshes.
        curriculum: epochs over which the number of hard negatives grows to `hard`; 0 uses all of them at once.
        index: FAISS factory string, or "auto" by size; "Flat" searches exactly.
        schedule: "scheduled" switches at the step the schedule names, so that runs can be repeated exactly; "eager"
            takes the newest complete version at any step and never waits.
        wait_s: seconds that "scheduled" waits for a version that is late.
        max_age: epochs after which negatives that could not be refreshed end the run.
        recall_queries: queries whose exact neighbours are also found, to report the recall of the index; 0 for none.
    """

    RENAMED: ClassVar = {"keep_recall": "recall_queries"}

    uniform: int = 2000
    uniform_epochs: int = 0
    hard: int = 50
    cluster_size: int = 0
    cluster_doubles: tuple[int, ...] = (10, 25, 50, 75, 100, 125, 150, 200)
    start_epoch: int = 5
    refresh_every: int = 5
    curriculum: int = 0
    index: str = "auto"
    schedule: Literal["scheduled", "eager"] = "scheduled"
    wait_s: float = 600.0
    max_age: int = 20
    recall_queries: int = 200

    def __post_init__(self) -> None:
        check_range("negatives.uniform", self.uniform, low=0)
        check_range("negatives.uniform_epochs", self.uniform_epochs, low=0)
        check_range("negatives.hard", self.hard, 0, 10_000)
        check_range("negatives.cluster_size", self.cluster_size, low=0)
        check_range("negatives.cluster_doubles", min(self.cluster_doubles, default=1), low=1)
        check_range("negatives.start_epoch", self.start_epoch, low=2)
        check_range("negatives.refresh_every", self.refresh_every, low=1)
        check_range("negatives.curriculum", self.curriculum, low=0)
        check_choices(self, "negatives")
        check_range("negatives.wait_s", self.wait_s, low=0)
        check_range("negatives.max_age", self.max_age, low=1)
        check_range("negatives.recall_queries", self.recall_queries, low=0)

    @property
    def refreshed(self) -> bool:
        """Whether there is anything to collect query vectors for."""
        return self.hard > 0 or self.cluster_size > 0

    @property
    def schedule_of(self) -> Schedule:
        """When versions are collected, built and used."""
        return Schedule(self.start_epoch, self.refresh_every)

    def uniform_at(self, epoch: int) -> int:
        """Labels of the uniform pool in an epoch."""
        return 0 if self.uniform_epochs and epoch >= self.uniform_epochs else self.uniform

    def hard_at(self, epoch: int) -> int:
        """Hard negatives per query in an epoch: the curriculum grows linearly from the first epoch that has any."""
        if epoch < self.start_epoch:
            return 0
        if not self.curriculum:
            return self.hard
        return min(self.hard, -(-self.hard * (epoch - self.start_epoch + 1) // self.curriculum))

    def num_clusters_at(self, epoch: int, num_queries: int) -> int:
        """Clusters of an epoch: the largest power of two that leaves each as many queries as the epoch asks for."""
        size = self.cluster_size << sum(epoch >= doubling for doubling in self.cluster_doubles)
        return 1 << max(0, (num_queries // size).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Version v collects queries in epoch use - 2, is built and searched in use - 1, and is used from epoch `use`.

    (ASTRA, Algorithm 1; use = start_epoch + v * refresh_every.)
    """

    start_epoch: int
    refresh_every: int

    def use_epoch(self, version: int) -> int:
        """First epoch that uses a version."""
        return self.start_epoch + version * self.refresh_every

    def collecting(self, epoch: int) -> int | None:
        """The version whose queries are collected in an epoch."""
        return self._version_at(epoch + 2)

    def using(self, epoch: int) -> int | None:
        """The version that an epoch uses when nothing is late; None before the first."""
        if epoch < self.start_epoch:
            return None
        return (epoch - self.start_epoch) // self.refresh_every

    def _version_at(self, use_epoch: int) -> int | None:
        version, rest = divmod(use_epoch - self.start_epoch, self.refresh_every)
        return version if version >= 0 and rest == 0 else None
