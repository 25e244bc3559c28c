"""The section `negatives`: how many of which kind, in which batches, and when refreshed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from xmcray.config import check_choices, check_range, check_ranges
from xmcray.errors import ConfigError
from xmcray.retrieval.ann_create import check_factory


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """Section `negatives`.

    Attributes:
        uniform: c, candidate labels drawn uniformly for a whole global batch.
        uniform_epochs: first epochs that have uniform candidates; 0 is all of them. If it equals
            `start_epoch`, hard negatives replace the uniform ones.
        hard: h, hard negatives of a query; 0 switches the index off, and so do settings of a method
            that takes none.
        cluster_size: batches are made of whole clusters of at least so many similar queries
            (NGAME), so that in-batch negatives are hard; 0 draws batches at random. Clusters are
            refreshed with the hard negatives.
        cluster_doubles: epochs at whose start the clusters become twice as large.
        start_epoch: e0, first epoch that uses hard negatives or clusters (>= 2: one to collect
            queries, one to build and search).
        refresh_every: epochs between refreshes.
        curriculum: epochs over which the number of hard negatives grows to `hard`; 0 uses all of
            them at once.
        index: FAISS factory string, or "auto" by size; "Flat" searches exactly.
        schedule: "scheduled" switches versions at fixed steps, so that runs can be repeated
            exactly; "eager" takes the newest complete version at any step and never waits.
        wait_s: seconds that "scheduled" waits for a version that is late.
        max_age: epochs, counted from when a version was due, after which a run without it ends.
        max_relative_score: hard negatives whose score exceeds this share of the score of the
            query's best positive are left out, because they are probably right answers that the
            data does not list; 0 keeps all.
        teacher: what gives these scores: a bundle of the same labels (folder or URL), or the folder
            of a cross-encoder; "" takes those of the training itself.
        recall_queries: queries whose exact neighbours are also found, to report the recall of the
            index; 0 for none.
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
    max_relative_score: float = 0.0
    teacher: str = ""
    recall_queries: int = 200

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "negatives",
            uniform=0,
            uniform_epochs=0,
            hard=(0, 10_000),
            cluster_size=0,
            start_epoch=2,
            refresh_every=1,
            curriculum=0,
            wait_s=0,
            max_age=1,
            max_relative_score=0,
            recall_queries=0,
        )
        check_range("negatives.cluster_doubles", min(self.cluster_doubles, default=1), low=1)
        check_choices(self, "negatives")
        if self.teacher and not self.max_relative_score:
            raise ConfigError(
                "negatives.teacher gives the scores for negatives.max_relative_score, which is 0; set"
                " it to 0.95, for example"
            )

    @property
    def refreshed(self) -> bool:
        """Whether query vectors have to be collected, for hard negatives or clusters."""
        return self.hard > 0 or self.cluster_size > 0

    @property
    def suits_gpu(self) -> bool:
        """Whether torch alone searches the index on a GPU; others need a FAISS for it."""
        return self.hard > 0 and self.index in ("auto", "Flat")

    def check_index(self, num_labels: int, num_shards: int) -> None:
        """Raises ConfigError for an index that could not be built; the first one is built epochs later."""
        if self.hard and self.index not in ("auto", "Flat"):
            check_factory("negatives.index", self.index, num_labels // num_shards)

    @property
    def schedule_of(self) -> Schedule:
        """The epochs in which versions are collected, built and used."""
        return Schedule(self.start_epoch, self.refresh_every)

    def uniform_at(self, epoch: int) -> int:
        """Returns the number of uniform candidates in an epoch."""
        if self.uniform_epochs and epoch >= self.uniform_epochs:
            return 0
        return self.uniform

    def hard_at(self, epoch: int) -> int:
        """Returns the hard negatives per query in an epoch; a curriculum grows linearly."""
        if epoch < self.start_epoch:
            return 0
        if not self.curriculum:
            return self.hard
        curriculum_epoch = epoch - self.start_epoch + 1
        return min(self.hard, math.ceil(self.hard * curriculum_epoch / self.curriculum))

    def num_epochs_without(self, num_epochs: int) -> int:
        """Returns how many of the first epochs have neither uniform nor hard negatives."""
        num_uniform = 0
        if self.uniform:
            num_uniform = self.uniform_epochs or num_epochs
        first_hard = self.start_epoch if self.hard else num_epochs
        return max(0, min(first_hard, num_epochs) - num_uniform)

    def num_clusters_at(self, epoch: int, num_queries: int) -> int:
        """Returns the clusters of an epoch: the largest power of two whose clusters are not too
        small.

        Args:
            epoch: counted from 0.
            num_queries: queries that are clustered.
        """
        size = self.cluster_size
        for doubling in self.cluster_doubles:
            if epoch >= doubling:
                size *= 2
        most = num_queries // size
        return 1 << max(0, most.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The epochs of each version of the negatives (ASTRA, Algorithm 1).

    Version v is used from epoch u = start_epoch + v * refresh_every on. Its queries are collected
    in epoch u - 2, and its index is built and searched in epoch u - 1.
    """

    start_epoch: int
    refresh_every: int

    def use_epoch(self, version: int) -> int:
        """Returns the first epoch that uses a version."""
        return self.start_epoch + version * self.refresh_every

    def num_versions(self, num_epochs: int) -> int:
        """Returns the versions that are made: those that some epoch of a run uses."""
        return len(range(self.start_epoch, num_epochs, self.refresh_every))

    def collecting(self, epoch: int) -> int | None:
        """Returns the version whose queries are collected in an epoch; None if there is none."""
        use_epoch = epoch + 2
        version, rest = divmod(use_epoch - self.start_epoch, self.refresh_every)
        return version if version >= 0 and rest == 0 else None

    def using(self, epoch: int) -> int | None:
        """Returns the version that an epoch uses when none is late; None before the first."""
        if epoch < self.start_epoch:
            return None
        return (epoch - self.start_epoch) // self.refresh_every
