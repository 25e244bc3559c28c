"""Batches that are built ahead are the batches that the steps would have built."""

from __future__ import annotations

import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.batches import BatchSampler, DataConfig, QueryClusters, TrainingData
from xmcray.training.prefetch import BatchPrefetcher

NUM_QUERIES = 40
NUM_LABELS = 10
BATCH_SIZE = 16


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
    prefetcher = BatchPrefetcher(BatchSampler(data, BATCH_SIZE, 7), 1, 2, last_step)
    for step in range(last_step):
        clusters = clusters_of_epoch[step // sampler.steps_per_epoch]
        batch = prefetcher.batch(step, clusters)
        expected = sampler.batch(step, 1, 2, clusters)
        np.testing.assert_array_equal(batch.query_ids, expected.query_ids)
        np.testing.assert_array_equal(batch.tokens.values, expected.tokens.values)
        np.testing.assert_array_equal(batch.positives.values, expected.positives.values)
        assert batch.step == step
    prefetcher.close()
