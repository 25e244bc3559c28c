"""Batches of whole clusters: the order of an epoch, its refresh, and runs that are cut at any
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_corpus
from refreshers import HeldRefresher

from xmcray.data.batches import BatchSampler, QueryClusters, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ShortlistError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import (
    RefreshSpec,
    ThreadRefresher,
    complete_version,
    run_version,
    wait_published,
)
from xmcray.negatives.version_folder import QueryBlock, VersionFolder
from xmcray.training.loop import Loop, Setup, build
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch

SETTINGS = [
    "encoder.dim=8",
    "optim.batch_size=50",
    "optim.epochs=5",
    "optim.lr=0.01",
    "optim.warmup_steps=3",
    "method.columns=in_batch",
    "negatives.cluster_size=4",
    "negatives.cluster_doubles=[3, 4]",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "data.validation=0",
    "log.every=1",
    "log.checkpoint_every=1",
    "log.validate_every=0",
]
STEPS_PER_EPOCH = 5
ONLY_LAST_CHECKPOINT = "log.checkpoint_every=25"
VARIANTS = {"clusters alone": [], "and hard negatives": ["method.columns=hard", "negatives.hard=3"]}


class CutError(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("clusters"), num_queries=230, num_labels=40)


class Watched:
    """A run in this process, with the batches and negatives of its steps."""

    def __init__(
        self, folder: Path, corpus: Corpus, *extra: str, cut: int = 0, held: bool = False
    ) -> None:
        config = RunConfig.resolve("dexml", {}, [*SETTINGS, *extra])
        data = TrainingData(corpus, config.data)
        self.setup: Setup = build(config, data, torch.device("cpu"))
        self.spec = RefreshSpec(2, config.negatives, 0)
        folder.mkdir(exist_ok=True)
        refresher = HeldRefresher(data, self.spec) if held else ThreadRefresher(data, self.spec)
        run = Run(folder, "test", config, corpus.origin, corpus.sha256)
        self.loop = Loop(run, self.setup, refresher, self._on_step)
        assert self.loop.steps_per_epoch == STEPS_PER_EPOCH
        self.cut = cut
        self.then: dict[int, Any] = {}
        self.batches: dict[int, list[int]] = {}
        self.orders: dict[
            int, tuple[int, int] | None
        ] = {}  # version and number of clusters, by step
        self.versions: dict[int, int | None] = {}
        step = self.setup.stepper.step

        def recording(batch: Batch, shortlist: Any) -> Any:
            clusters = self.loop.feed.clusters
            self.batches[batch.step] = batch.query_ids.tolist()
            self.orders[batch.step] = (
                None if clusters is None else (clusters.version, clusters.num_clusters)
            )
            self.versions[batch.step] = None if shortlist is None else shortlist.version
            return step(batch, shortlist)

        self.setup.stepper.step = recording  # type: ignore[method-assign]

    def _on_step(self, step: int) -> None:
        if step in self.then:
            self.then[step]()
        if step == self.cut:
            raise CutError

    def train(self) -> Watched:
        self.loop.train()
        return self

    def epoch(self, number: int) -> list[int]:
        steps = range(number * STEPS_PER_EPOCH, (number + 1) * STEPS_PER_EPOCH)
        return [query for step in steps for query in self.batches[step]]


def sampler_of(corpus: Corpus) -> BatchSampler:
    return BatchSampler(
        TrainingData(corpus, RunConfig.resolve("dexml", {}, SETTINGS).data), 50, seed=3
    )


def order(sampler: BatchSampler, epoch: int, clusters: QueryClusters | None) -> np.ndarray:
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return np.concatenate([sampler.query_ids(step, clusters) for step in steps])


def test_an_epoch_goes_through_clusters_one_by_one_and_ends_with_queries_of_none(
    corpus: Corpus,
) -> None:
    sampler = sampler_of(corpus)
    cluster = np.random.default_rng(0).integers(-1, 16, sampler.data.num_query_ids).astype(np.int32)
    clusters = QueryClusters(0, 16, cluster)
    ids = order(sampler, 1, clusters)
    assert np.sort(ids).tolist() == np.sort(sampler.data.query_ids[:]).tolist()
    passed = cluster[ids]
    starts = np.flatnonzero(np.diff(passed, prepend=-2))
    assert len(starts) == 17, "each cluster once"
    assert passed[-1] == -1
    assert passed[starts].tolist() != sorted(passed[starts])
    assert ids.tolist() == order(sampler_of(corpus), 1, clusters).tolist(), (
        "a function of its arguments"
    )
    assert ids.tolist() != order(sampler, 2, clusters).tolist()
    assert order(sampler, 1, None).tolist() != ids.tolist(), (
        "what was kept for other clusters is not used"
    )
    assert ids.tolist() != order(sampler, 1, QueryClusters(1, 16, np.roll(cluster, 1))).tolist()


def test_clusters_grow_with_the_epochs_and_hold_what_is_asked_for() -> None:
    config = NegativesConfig(cluster_size=4)
    sizes = [
        1000 // config.num_clusters_at(epoch, 1000)
        for epoch in (0, 9, 10, 24, 25, 50, 75, 100, 125, 150, 200)
    ]
    assert sizes == [7, 7, 15, 15, 31, 62, 125, 250, 500, 1000, 1000]
    assert config.num_clusters_at(0, 4096) == 1024
    assert config.num_clusters_at(0, 3) == 1, "fewer queries than a cluster wants: all of them"


@pytest.fixture(scope="module")
def undisturbed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watched]:
    finished = {}
    for name, settings in VARIANTS.items():
        folder = tmp_path_factory.mktemp("undisturbed")
        watched = Watched(folder, corpus, *settings, ONLY_LAST_CHECKPOINT)
        finished[name] = watched.train()
    return finished


@pytest.mark.parametrize("variant", VARIANTS)
def test_clusters_come_with_each_version_and_hold_alike_queries(
    undisturbed: dict[str, Watched], variant: str
) -> None:
    watched = undisturbed[variant]
    assert [watched.orders[step] for step in range(0, 25, STEPS_PER_EPOCH)] == [
        None,
        None,
        (0, 32),
        (1, 16),
        (2, 8),
    ]
    for epoch in range(5):
        assert sorted(watched.epoch(epoch)) == watched.setup.data.query_ids[:].tolist()
    assert watched.versions[10] == 0
    clusters = watched.loop.feed.clusters
    assert clusters is not None
    sizes = np.bincount(clusters.cluster[watched.setup.data.query_ids[:]])
    assert sizes.max() - sizes.min() <= 1
    data, stepper = watched.setup.data, watched.setup.stepper
    unit = torch.nn.functional.normalize(stepper.encoder(data.tokens(data.query_ids[:]))).detach()
    group = torch.from_numpy(clusters.cluster[data.query_ids[:]])
    alike, similarity = group[:, None] == group, unit @ unit.T
    assert similarity[alike].mean() > similarity[~alike].mean() + 0.1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("every", "cut"), [(1, 7), (1, 12), (4, 3), (4, 5), (4, 10), (4, 15), (4, 18), (4, 24)]
)
def test_cut_and_resumed(
    corpus: Corpus,
    undisturbed: dict[str, Watched],
    tmp_path: Path,
    variant: str,
    every: int,
    cut: int,
) -> None:
    settings = [*VARIANTS[variant], f"log.checkpoint_every={every}"]
    with pytest.raises(CutError):
        Watched(tmp_path, corpus, *settings, cut=cut).train()
    resumed, whole = Watched(tmp_path, corpus, *settings).train(), undisturbed[variant]
    assert min(resumed.batches) == cut // every * every
    assert resumed.batches == {
        step: ids for step, ids in whole.batches.items() if step in resumed.batches
    }
    assert torch.equal(resumed.setup.method.answer_rows(), whole.setup.method.answer_rows())


def eager(folder: Path, corpus: Corpus, *extra: str, cut: int = 0) -> Watched:
    """Versions 0 and 1 are published at steps 5 and 10, finished at 6 and 11, and noticed at once
    and at step 16.
    """
    watched = Watched(folder, corpus, "negatives.schedule=eager", *extra, cut=cut, held=True)
    refresher: Any = watched.loop.feed.refresher
    watched.then = {6: refresher.finish, 11: refresher.finish}
    return watched


@pytest.fixture(scope="module")
def whole_eager(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return eager(tmp_path_factory.mktemp("eager"), corpus, ONLY_LAST_CHECKPOINT).train()


def test_eager_changes_the_order_only_where_an_epoch_starts(whole_eager: Watched) -> None:
    versions = whole_eager.versions
    assert [versions[step] for step in (5, 6, 15, 16)] == [None, 0, 0, 1]
    orders = [order and order[0] for order in whole_eager.orders.values()]
    assert orders == [None] * 10 + [0] * 10 + [1] * 5
    for epoch in range(5):
        assert sorted(whole_eager.epoch(epoch)) == whole_eager.setup.data.query_ids[:].tolist()


@pytest.mark.parametrize("cut", [8, 11, 17, 18])
def test_eager_goes_on_with_the_same_batches(
    corpus: Corpus, whole_eager: Watched, tmp_path: Path, cut: int
) -> None:
    with pytest.raises(CutError):
        eager(tmp_path, corpus, cut=cut).train()
    resumed = eager(tmp_path, corpus, ONLY_LAST_CHECKPOINT).train()
    rest = {step: ids for step, ids in whole_eager.batches.items() if step >= cut}
    assert resumed.batches == rest


def test_finished_clusters_are_not_made_twice(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that was killed between clusters and shortlist goes on with the clusters."""
    watched = Watched(tmp_path, corpus, held=True, cut=5)
    with pytest.raises(CutError):
        watched.train()
    folder = Ledger(tmp_path / "negatives").version(0)
    wait_published(folder)

    def killed(*_: object) -> None:
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr(VersionFolder, "finish", killed)
        with pytest.raises(CutError):
            complete_version(folder, watched.setup.data, watched.spec)
    assert folder.has_clusters
    assert not folder.complete
    made = (folder.path / "clusters.npy").stat()
    complete_version(folder, watched.setup.data, watched.spec)
    assert folder.complete
    again = (folder.path / "clusters.npy").stat()
    assert (made.st_ino, made.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)


def test_altered_clusters_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    Watched(tmp_path, corpus, "optim.epochs=3").train()
    folder = Ledger(tmp_path / "negatives").newest_complete()
    assert folder is not None
    path = folder.path / "clusters.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(ShortlistError, match="altered"):
        folder.check()


def test_clusters_do_not_depend_on_how_the_blocks_were_cut(corpus: Corpus, tmp_path: Path) -> None:
    data = sampler_of(corpus).data
    config = RunConfig.resolve("dexml", {}, SETTINGS).negatives
    num_queries = len(data.query_ids[:])
    vectors = np.random.default_rng(0).standard_normal((num_queries, 4)).astype(np.float32)
    shuffled = np.random.default_rng(1).permutation(num_queries)
    blocks = {"one": [np.arange(num_queries)], "three": np.split(shuffled, [40, 90])}
    found = []
    for name, parts in blocks.items():
        folder = Ledger(tmp_path / name).version(0)
        for rank, some in enumerate(parts):
            extra = np.zeros(len(some), np.int64)
            block = QueryBlock(data.query_ids[some], vectors[some], extra)
            folder.write_queries(0, rank, block)
            folder.publish(rank, len(parts), 1)
        run_version(folder, data, RefreshSpec(2, config, 0))
        found.append(np.array(folder.clusters()))
    np.testing.assert_array_equal(*found)
    assert found[0].max() == 31
