"""Which version a step gets, when it is collected, and what happens when it is late; step by step, without training."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refreshers import few_queries

from xmcray.errors import ConfigError, ShortlistError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import (
    Refresher,
    RefreshSpec,
    ThreadRefresher,
    run_version,
    wait_published,
)
from xmcray.negatives.shortlists import ShortlistFeed, check_state
from xmcray.negatives.version_folder import VersionFolder
from xmcray.parallel import collectives
from xmcray.types import Batch, Ragged

STEPS_PER_EPOCH = 2
NUM_EPOCHS = 6
QUERIES = 3
NUM_LABELS = 4


class FakeRefresher:
    """Completes the first versions that are started.

    Args:
        num_completed: how many versions are completed at all.
    """

    def __init__(self, num_completed: int = 99) -> None:
        self.num_completed = num_completed
        self.config = NegativesConfig(hard=1, start_epoch=2, index="Flat", recall_queries=0)
        self.started: list[int] = []
        self.num_checks = 0

    def start(self, path: Path) -> None:
        folder = VersionFolder(path)
        self.started.append(folder.version)
        if folder.version < self.num_completed:
            wait_published(folder)
            run_version(folder, few_queries(QUERIES, NUM_LABELS), RefreshSpec(1, self.config, 0))

    def check(self) -> None:
        self.num_checks += 1

    def close(self) -> None: ...


def batch_of(step: int) -> Batch:
    ids = np.arange(QUERIES)
    positives = Ragged.from_rows([[1, 2], [], [3]])
    excluded = Ragged.from_rows([[4], [], []])
    epoch = step // STEPS_PER_EPOCH
    return Batch(epoch, step, ids, 0, QUERIES, Ragged.empty(QUERIES), positives, excluded)


def feed_in(
    folder: Path, refresher: Refresher, num_epochs: int = NUM_EPOCHS, **settings: object
) -> ShortlistFeed:
    fixed = {"hard": 1, "start_epoch": 2, "refresh_every": 1, "wait_s": 0.03}
    config = NegativesConfig(**{**fixed, **settings})  # type: ignore[arg-type]
    rows_SD = torch.zeros(NUM_LABELS, 2)
    return ShortlistFeed(
        Ledger(folder), config, refresher, STEPS_PER_EPOCH, num_epochs, lambda: rows_SD, 0
    )


def versions_of(feed: ShortlistFeed, num_steps: int = STEPS_PER_EPOCH * NUM_EPOCHS) -> list[object]:
    """The version that each step gets; vectors are collected after it."""
    versions: list[object] = []
    for step in range(num_steps):
        shortlist = feed.before_step(step)
        versions.append(None if shortlist is None else shortlist.version)
        feed.after_step(batch_of(step), torch.full((QUERIES, 2), float(step)))
    return versions


def test_each_epoch_gets_its_version(tmp_path: Path) -> None:
    refresher = FakeRefresher()
    feed = feed_in(tmp_path, refresher)
    assert versions_of(feed) == [None, None, None, None, 0, 0, 1, 1, 2, 2, 3, 3]
    assert refresher.started == [0, 1, 2, 3], "version 4 would never be used"
    # Version 3 was collected in epoch 3, whose last step is the eighth.
    assert feed.age(11) == 11 - 8
    assert 0 < feed.blocked_s < 600
    feed.close()


def test_a_step_does_not_wait_for_the_vectors_that_are_collected(tmp_path: Path) -> None:
    feed = feed_in(tmp_path, FakeRefresher())
    # On the device "meta" there are no values that could be read.
    feed.after_step(batch_of(0), torch.empty(QUERIES, 2, device="meta"))
    feed.close()


def test_a_block_says_how_many_labels_each_query_may_not_have(tmp_path: Path) -> None:
    feed = feed_in(tmp_path, FakeRefresher())
    versions_of(feed, STEPS_PER_EPOCH)
    feed.close()
    folder = feed.ledger.version(0)
    (name,) = folder.query_blocks
    block = folder.read_queries(name)
    assert block.ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert block.extra.tolist() == [3, 0, 1, 3, 0, 1]
    assert block.vectors[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_after_a_late_version_no_other_is_waited_for(tmp_path: Path) -> None:
    refresher = FakeRefresher(num_completed=1)
    feed = feed_in(tmp_path, refresher)
    assert versions_of(feed, 7) == [None, None, None, None, 0, 0, 0]
    assert feed.broken_at_step == 6
    assert refresher.num_checks > 0
    refresher.num_checks = 0
    for step in range(7, 12):
        feed.before_step(step)
    assert refresher.num_checks == 2, "once for each epoch"
    assert feed.broken_at_step == 6
    feed.close()


class LateRefresher(FakeRefresher):
    """Completes the first version when the trainer has begun to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[Path] = []

    def start(self, path: Path) -> None:
        self.paths.append(path)

    def check(self) -> None:
        super().start(self.paths[0])


def test_a_rank_on_a_gpu_waits_for_a_late_version_before_the_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the collective it would keep its device busy, and with it the search."""
    feed = feed_in(tmp_path, LateRefresher(), wait_s=60.0)
    versions_of(feed, 4)
    was_complete = []

    def broadcast(_: int) -> int:
        was_complete.append(feed.ledger.version(0).complete)
        return 0

    monkeypatch.setattr(collectives, "rank", lambda: 1)
    monkeypatch.setattr(collectives, "on_gpu", lambda: True)
    monkeypatch.setattr(collectives, "broadcast_int", broadcast)
    shortlist = feed.before_step(4)
    assert shortlist is not None
    assert was_complete == [True]
    feed.close()


def test_negatives_may_be_as_old_as_a_refresh_and_the_limit(tmp_path: Path) -> None:
    feed = feed_in(tmp_path, FakeRefresher(num_completed=1), wait_s=0.0, max_age=1)
    # Copied after 2 steps. It is used from 4 to 6; allowed is 1 epoch of 2 steps more.
    assert versions_of(feed, 9)[-1] == 0
    with pytest.raises(ShortlistError, match="7 steps old at step 9, allowed are 6"):
        feed.before_step(9)
    feed.close()


@pytest.mark.parametrize("schedule", ["eager", "scheduled"])
def test_negatives_may_be_missing_for_as_long_as_the_limit(tmp_path: Path, schedule: str) -> None:
    refresher = FakeRefresher(num_completed=0)
    feed = feed_in(tmp_path, refresher, wait_s=0.0, max_age=1, schedule=schedule)
    # Due at step 4; allowed is 1 epoch of 2 steps more.
    assert versions_of(feed, 7) == [None] * 7
    with pytest.raises(
        ShortlistError, match="missing at step 7, due at step 4, allowed until step 6"
    ):
        feed.before_step(7)
    feed.close()


@pytest.mark.parametrize("schedule", ["eager", "scheduled"])
def test_missing_negatives_are_said_once(
    tmp_path: Path, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    refresher = FakeRefresher(num_completed=0)
    feed = feed_in(tmp_path, refresher, wait_s=0.0, schedule=schedule)
    versions_of(feed, 4)
    assert not caplog.records, "they are not due yet"
    for step in range(4, 12):
        feed.before_step(step)
    (record,) = caplog.records
    assert "hard negatives of version 0 were not ready at step 4" in record.getMessage()
    feed.close()


def test_eager_looks_for_a_newer_version_every_eighth_step(tmp_path: Path) -> None:
    feed = feed_in(tmp_path, FakeRefresher(), schedule="eager")
    versions = versions_of(feed)
    # The first one as soon as it is there; versions 1 to 3, complete by then, at step 8.
    assert versions == [None, None, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3]
    feed.close()


def test_eager_takes_no_clusters_before_they_are_due(tmp_path: Path) -> None:
    refresher = FakeRefresher()
    refresher.config = replace(refresher.config, cluster_size=1)
    settings = {"schedule": "eager", "cluster_size": 1, "start_epoch": 3}
    feed = feed_in(tmp_path, refresher, **settings)
    has_clusters = []
    for step in range(STEPS_PER_EPOCH * NUM_EPOCHS):
        feed.before_step(step)
        has_clusters.append(feed.clusters is not None)
        feed.after_step(batch_of(step), torch.full((QUERIES, 2), float(step)))
    assert has_clusters == [False] * 6 + [True] * 6
    assert refresher.started[0] == 0
    feed.close()


def test_clusters_double_when_they_are_due(tmp_path: Path) -> None:
    refresher = FakeRefresher()
    settings = {"cluster_size": 1, "cluster_doubles": (4,)}
    refresher.config = replace(refresher.config, **settings)
    # One version serves to the end.
    feed = feed_in(tmp_path, refresher, refresh_every=4, **settings)
    num_clusters = []
    for step in range(STEPS_PER_EPOCH * NUM_EPOCHS):
        feed.before_step(step)
        if feed.clusters is not None:
            num_clusters.append(len(np.unique(feed.clusters.cluster)))
        feed.after_step(batch_of(step), torch.full((QUERIES, 2), float(step)))
    # Of three queries two clusters, of which there is one from epoch 4 on.
    assert num_clusters == [2] * 4 + [1] * 4
    feed.close()


def test_a_version_may_be_as_high_as_the_step() -> None:
    state = {"inputs": {}, "published": [3], "version": 3}
    state |= {"clusters_version": None, "broken_at_step": None}
    check_state(state, 3)
    with pytest.raises(ValueError, match="found 3, expected a number of at most 2"):
        check_state(state, 2)


class FailingRefresher(FakeRefresher):
    """Fails as soon as it has started a version."""

    def start(self, path: Path) -> None:
        self.started.append(VersionFolder(path).version)

    def check(self) -> None:
        if self.started:
            raise ConfigError("the index failed")


@pytest.mark.parametrize("settings", [{"schedule": "eager"}, {"wait_s": 0.0}])
def test_a_refresh_that_fails_ends_the_run_also_if_nothing_waits_for_it(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    feed = feed_in(tmp_path, FailingRefresher(), **settings)
    with pytest.raises(ConfigError, match="the index failed"):
        versions_of(feed, 5)
    feed.close()


def test_a_long_run_keeps_nothing_of_versions_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = list[int]()

    def gather(sent: object) -> list[object]:
        if isinstance(sent, dict):
            num_sent.append(len(sent))
        return [sent]

    monkeypatch.setattr(collectives, "gather_objects", gather)
    config = NegativesConfig(hard=1, index="Flat", recall_queries=0)
    refresher = ThreadRefresher(few_queries(QUERIES, NUM_LABELS), RefreshSpec(1, config, 0))
    num_epochs = 20
    feed = feed_in(tmp_path, refresher, num_epochs, wait_s=60.0)
    num_threads = count_threads()
    for step in range(num_epochs * STEPS_PER_EPOCH):
        feed.before_step(step)
        feed.after_step(batch_of(step), torch.zeros(QUERIES, 2))
        feed.state(step)
    # Of at most the four newest of 18 versions: three files, and two threads of each.
    assert len(num_sent) == num_epochs * STEPS_PER_EPOCH
    assert max(num_sent) <= 12, num_sent
    assert count_threads() - num_threads <= 9
    refresher.close()
    feed.close()


def count_threads() -> int:
    """Threads that are kept in memory, also those that have ended."""
    gc.collect()
    return sum(issubclass(type(thing), threading.Thread) for thing in gc.get_objects())


def test_a_trainer_that_ends_early_does_not_wait_for_versions_that_it_never_published(
    tmp_path: Path,
) -> None:
    config = NegativesConfig(hard=1, index="Flat", recall_queries=0)
    refresher = ThreadRefresher(few_queries(QUERIES, NUM_LABELS), RefreshSpec(1, config, 0))
    version = VersionFolder(tmp_path / "v00000-0000")
    version.path.mkdir()
    refresher.start(version.path)
    refresher.close()
    assert not version.complete
    refresher.check()
