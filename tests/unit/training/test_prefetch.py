"""Batches that are built ahead are the batches that the steps would have built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.batches import BatchSampler, DataConfig, QueryClusters, TrainingData
from xmcray.methods.registry import method_names
from xmcray.training.prefetch import BatchPrefetcher
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Shortlist

NUM_QUERIES = 40
NUM_LABELS = 10
BATCH_SIZE = 16
SETTINGS = [
    "encoder.dim=8",
    "optim.epochs=4",
    f"optim.batch_size={BATCH_SIZE}",
    "negatives.hard=3",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.cluster_size=2",
]


class InlineBatches:
    """Builds each batch when its step comes, and leaves the inputs of its loss to the step."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def batch(self, step: int, clusters: QueryClusters | None, _: Shortlist | None) -> Batch:
        return self.sampler.batch(step, 0, 1, clusters)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("corpus"), NUM_QUERIES, NUM_LABELS)
    return TrainingData(corpus, DataConfig(validation=0.0))


def clusters_of(version: int) -> QueryClusters:
    ids = np.arange(NUM_QUERIES + NUM_LABELS, dtype=np.int32)  # label texts are queries too
    cluster = ids % (version + 2)
    return QueryClusters(version, version + 2, cluster)


def test_batches_follow_clusters_that_change_between_epochs(data: TrainingData) -> None:
    clusters_of_epoch = [None, None, clusters_of(0), clusters_of(0), clusters_of(1)]
    sampler = BatchSampler(data, BATCH_SIZE, 7)
    last_step = len(clusters_of_epoch) * sampler.steps_per_epoch
    prefetcher = BatchPrefetcher(
        BatchSampler(data, BATCH_SIZE, 7), lambda batch, shortlist: batch.step, 1, 2, last_step
    )
    for step in range(last_step):
        clusters = clusters_of_epoch[step // sampler.steps_per_epoch]
        batch = prefetcher.batch(step, clusters, None)
        expected = sampler.batch(step, 1, 2, clusters)
        np.testing.assert_array_equal(batch.query_ids, expected.query_ids)
        np.testing.assert_array_equal(batch.tokens.values, expected.tokens.values)
        np.testing.assert_array_equal(batch.positives.values, expected.positives.values)
        assert batch.step == batch.inputs == step
    prefetcher.close()


def test_inputs_follow_hard_negatives_that_change_within_an_epoch(data: TrainingData) -> None:
    sampler = BatchSampler(data, BATCH_SIZE, 7)
    last_step = 3 * sampler.steps_per_epoch
    versions = [None if step < 2 else step // 3 for step in range(last_step)]
    built: list[tuple[int, int | None]] = []

    def prepare(batch: Batch, shortlist: Shortlist | None) -> int | None:
        version = None if shortlist is None else shortlist.version
        built.append((batch.step, version))
        return version

    prefetcher = BatchPrefetcher(sampler, prepare, 0, 1, last_step)
    for step, version in enumerate(versions):
        shortlist = None if version is None else Shortlist(version, 0, np.zeros((0, 0), np.int32))
        assert prefetcher.batch(step, None, shortlist).inputs == version
    prefetcher.close()
    assert len(built) == len(set(built)), "nothing is built twice"
    assert len(built) > last_step, "some batches were built ahead for other negatives"


@pytest.mark.parametrize("method", method_names())
def test_weights_are_the_same_without_prefetching(method: str, tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, NUM_QUERIES, NUM_LABELS)
    config = RunConfig.resolve(method, {}, SETTINGS)
    loops.trained(tmp_path / "ahead", corpus, config)
    assert any((tmp_path / "ahead" / "negatives").glob("v*"))
    loop, _ = loops.loop_in(tmp_path / "inline", corpus, config)
    inline: Any = InlineBatches(loop.setup.sampler)
    loop.batches = inline
    loop.train()
    assert loops.final_weights(tmp_path / "inline") == loops.final_weights(tmp_path / "ahead")
