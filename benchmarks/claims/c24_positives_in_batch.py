"""Claim 24 (UniDEC): a batch of clusters holds more positives of its queries than a random one."""

from __future__ import annotations

import numpy as np
from claim import Claim, Comparison, main
from variants import Result, Training, present

from xmcray.data.batches import BatchSampler, QueryClusters, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.clusters import balanced_clusters
from xmcray.nn.encoder import load_encoder
from xmcray.training.run import Run
from xmcray.training.step import encode_without_graph

CORPORA = ("tate-subjects", "wordnet-hypernyms")
BATCH = 512
DRAWN = 3  # beta, positives of a query that enter the pool
CLUSTER_SIZE = 4
BATCHES = 50  # that are counted


def make(full: bool) -> Claim:
    corpora = present(*CORPORA)
    return Claim(
        number=24,
        title="UniDEC: positives in a batch, with and without clusters",
        statement="With batches of clusters a query meets more of its positives in the pool of the batch than with"
        " random batches",
        source="UniDEC, Fig. 2",
        variants={corpus: training(full, corpus) for corpus in corpora},
        comparisons=[
            Comparison(
                of=corpus,
                metric="in clusters",
                against_metric="in random batches",
                ratio=True,
                low=1,
            )
            for corpus in corpora
        ],
        setup=f"{' and '.join(corpora)}: positives of a query among the labels that the {BATCH} queries of a batch draw,"
        f" {DRAWN} each; the mean over {BATCHES} batches. The clusters, of {CLUSTER_SIZE} queries and more, are those of"
        " the vectors of DEXML's encoder after 3 epochs in random batches.",
        metrics=("in random batches", "in clusters"),
    )


def training(full: bool, corpus: str) -> Training:
    """An encoder whose vectors are clustered."""
    return Training(
        method="dexml",
        corpus=corpus,
        preset=f"dexml/{corpus}",
        settings=["optim.epochs=3"],
        measure_run=positives_in_batch,
        full=full,
    )


def positives_in_batch(run: Run, corpus: Corpus) -> Result:
    """The mean number of positives of a query in the pool of its batch."""
    data = TrainingData(corpus, run.config.data)
    seed = run.config.optim.seed
    sampler = BatchSampler(data, BATCH, seed)
    clusters = query_clusters(run, data, seed)
    return {
        "in random batches": mean_in_pool(sampler, None),
        "in clusters": mean_in_pool(sampler, clusters),
    }


def query_clusters(run: Run, data: TrainingData, seed: int) -> QueryClusters:
    """Clusters of the training queries by the vectors of the run's encoder."""
    last_checkpoint = max(run.checkpoints.glob("step-*"))
    encoder = load_encoder(last_checkpoint / "encoder")
    query_ND = encode_without_graph(encoder, data.tokens(data.query_ids[:])).float().numpy()
    # The largest power of two with clusters of at least so many queries.
    num_clusters = 2 ** int(np.log2(len(query_ND) // CLUSTER_SIZE))
    cluster = np.full(data.num_query_ids, -1, np.int32)
    cluster[data.query_ids[:]] = balanced_clusters(query_ND, num_clusters, seed)
    return QueryClusters(0, num_clusters, cluster)


def mean_in_pool(sampler: BatchSampler, clusters: QueryClusters | None) -> float:
    """The mean over the queries of some batches of the first epoch."""
    generator = np.random.default_rng(sampler.seed)
    num_positives = 0
    num_queries = 0
    for step in range(min(BATCHES, sampler.steps_per_epoch)):
        query_ids = sampler.query_ids(step, clusters)
        positives = sampler.data.positives(query_ids)
        pool = set()
        for row in range(len(query_ids)):
            labels = positives.slice(row, row + 1).values
            drawn = generator.permutation(labels)[:DRAWN]
            pool.update(drawn.tolist())
        num_positives += int(np.isin(positives.values, list(pool)).sum())
        num_queries += len(query_ids)
    return num_positives / num_queries


if __name__ == "__main__":
    main(make)
