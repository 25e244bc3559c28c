"""A weighted sum of a bundle's answers, votes of training queries and cosines of label texts.

The votes and cosines are computed twice: with the trained encoder and with an untrained bag of tokens. The weights are
chosen on the validation split. No command of xmcray produces this sum yet; `methods.py` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import data_sets
import numpy as np
import numpy.typing as npt
import torch
from floors import METRICS

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import SEARCH_K
from xmcray.evaluation.metrics import Metrics
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index
from xmcray.retrieval.memory import Memory
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope, ShardedIndex, VectorShard
from xmcray.retrieval.votes import Float64Array, MemoryConfig, Votes, count_votes, rank_votes
from xmcray.training.memory import open_encoder
from xmcray.training.outcome import bundle_of
from xmcray.training.run import Run
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

# Scores are divided by these before a softmax turns them into shares: logits, sums of two cosines, cosines.
TEMPERATURES = {"astra": 1.0, "renee": 1.0, "unidec": 0.1}
COSINE_TEMPERATURE = 0.08
UNTRAINED = EncoderConfig(dim=1024, residual=False, position_decay=1.0)
# Of training queries alone; label texts count by their cosines.
VOTES = MemoryConfig(weight=1.0, temperature=0.08, keys=100)
PARTS = ("bundle", "queries", "label texts", "queries, untrained", "label texts, untrained")
FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)  # by which the search for weights multiplies a weight
VALIDATION_K = 5
BLOCK = 128  # queries answered at once

Weights = tuple[float, ...]  # one per part
Pairs = tuple[Int64Array, Float64Array]  # query * L + label, and a value for each
Means = Mapping[str, float]  # by metric


class Neighbourhood:
    """Training queries and label texts in the space of one encoder.

    Args:
        encode: token ids to vectors of length 1.
        corpus: whose labels and training queries are remembered.
        rows: training queries that are remembered.
    """

    def __init__(
        self, encode: Callable[[Ragged], Float32Array], corpus: Corpus, rows: Int64Array
    ) -> None:
        split = corpus.split("train")
        self.encode = encode
        self.num_labels = corpus.card.num_labels
        self.label_LD = encode(corpus.label_tokens(np.arange(self.num_labels)))
        query_ND = torch.from_numpy(encode(split.tokens(rows)))
        index = Index(query_ND, None, threads=torch.get_num_threads())
        keys = ShardedIndex((VectorShard(0, len(rows), False, 1),), (index,))
        self.memory = Memory(VOTES, keys, split.positives(rows))

    def near(self, tokens: Ragged, hidden: Ragged, config: MemoryConfig) -> Neighbours:
        """The nearest training queries and label texts, with their cosines."""
        query_BD = self.encode(tokens)
        width = min(SEARCH_K, self.num_labels)
        labels = exact_search(self.label_LD, query_BD, width, hidden=hidden)
        queries = self.memory.search(query_BD, config, SearchScope(exact=True))
        return Neighbours(queries, labels)

    def shares(self, tokens: Ragged, hidden: Ragged) -> list[Pairs]:
        """Votes of training queries, and cosines of label texts."""
        near = self.near(tokens, hidden, VOTES)
        votes = count_votes(near, self.memory.positives, VOTES, self.num_labels, hidden)
        cosines = np.maximum(near.labels.scores, 0)
        return [(votes.pairs, votes.of_queries), as_pairs(near.labels, cosines, self.num_labels)]


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of each part in the labels of some queries.

    Attributes:
        pairs: int64 [P], query * L + label, ascending.
        of_parts: float64 [P, parts].
        own: answers of the bundle.
    """

    pairs: Int64Array
    of_parts: Float64Array
    own: TopLabels

    def top(self, weights: Weights, k: int, num_labels: int) -> TopLabels:
        """The k labels with the largest weighted sums."""
        sums = self.of_parts @ np.asarray(weights)
        votes = Votes(self.pairs, sums, np.zeros_like(sums))
        return rank_votes(votes, 1.0, k, self.own, num_labels)


def collect_shares(
    own: TopLabels, temperature: float, neighbourhoods: Sequence[Pairs], num_labels: int
) -> Shares:
    """Joins the answers of a bundle with the shares of neighbourhoods.

    Args:
        own: answers of the bundle.
        temperature: of the softmax over their scores; 0 if the scores are shares already.
        neighbourhoods: the other parts, in the order of PARTS.
        num_labels: L.
    """
    share = np.maximum(own.scores, 0.0)
    if temperature:
        relative = (own.scores - own.scores[:, :1]).astype(np.float64)
        share = np.exp(relative / temperature)
        share /= share.sum(axis=1, keepdims=True)
    parts = [as_pairs(own, share, num_labels), *neighbourhoods]
    all_pairs = np.concatenate([pairs for pairs, _ in parts])
    all_values = np.concatenate([values for _, values in parts])
    part_of_pair = np.repeat(np.arange(len(parts)), [len(pairs) for pairs, _ in parts])
    pairs, row = np.unique(all_pairs, return_inverse=True)
    of_parts = np.zeros((len(pairs), len(PARTS)))
    of_parts[row, part_of_pair] = all_values
    return Shares(pairs, of_parts, own)


def as_pairs(top: TopLabels, values: npt.NDArray[np.floating[Any]], num_labels: int) -> Pairs:
    """Answers [Q, k] as pairs and values, without the padding of short rows."""
    is_answer = top.ids >= 0
    pairs = np.arange(len(top.ids))[:, None] * num_labels + top.ids
    return pairs[is_answer], values[is_answer].astype(np.float64)


def answers(run: Run, data: TrainingData, rows: Int64Array, split_name: str) -> Iterator[Shares]:
    """Shares for queries of a split, in blocks; the neighbours are the queries the run was trained on."""
    corpus = data.corpus
    num_labels = data.num_labels
    split = corpus.split(split_name)
    width = min(SEARCH_K, num_labels)
    train_rows = data.query_ids[data.query_ids < data.num_train]
    spaces = []
    for path in (str(run.path), untrained_encoder(corpus)):
        encoder = normalised_encoder(path, corpus)
        spaces.append(Neighbourhood(encoder.encode, corpus, train_rows))
    memory = run.config.memory
    retriever = None if memory else Retriever.load(bundle_of(run, corpus))
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        tokens = split.tokens(block)
        hidden = split.filters(block)
        if memory:
            # The memory of the bundle would contain the validation queries.
            near = spaces[0].near(tokens, hidden, memory)
            votes = count_votes(near, spaces[0].memory.positives, memory, num_labels, hidden)
            own = rank_votes(votes, memory.weight, width, near.labels, num_labels)
            temperature = 0.0
        else:
            assert retriever is not None
            own = retriever.top_labels(tokens, width, exclude=hidden)
            temperature = TEMPERATURES.get(run.config.method_name, COSINE_TEMPERATURE)
        neighbourhoods = []
        for space in spaces:
            neighbourhoods += space.shares(tokens, hidden)
        yield collect_shares(own, temperature, neighbourhoods, num_labels)


def choose_weights(
    blocks: Sequence[Shares], truth: Ragged, corpus: Corpus
) -> tuple[Means, Weights, Means]:
    """Chooses the weights of the sum by two rounds of coordinate ascent on the mean of the metrics.

    Args:
        blocks: shares of the validation queries.
        truth: their labels.
        corpus: for the constants of the metrics.

    Returns:
        Metrics of the bundle alone, the best weights, and their metrics.
    """
    measured: dict[Weights, Means] = {}

    def total(weights: Weights) -> float:
        if weights not in measured:
            measured[weights] = validation(blocks, truth, corpus, weights)
        return sum(measured[weights].values())

    alone: Weights = tuple(float(part == "bundle") for part in PARTS)
    best = max([alone, (1.0,) * len(PARTS)], key=total)
    for place in [*range(len(PARTS))] * 2:
        for factor in FACTORS:
            weight = best[place] * factor if best[place] else factor
            weights = (*best[:place], weight, *best[place + 1 :])
            if any(weights):
                total(weights)
        best = max(measured, key=total)
    return measured[alone], best, measured[best]


def validation(blocks: Sequence[Shares], truth: Ragged, corpus: Corpus, weights: Weights) -> Means:
    """Metrics of one choice of weights."""
    card = corpus.card
    metrics = Metrics(
        corpus.train_counts,
        card.num_train,
        card.propensity_a,
        card.propensity_b,
        card.num_labels,
    )
    start = 0
    for shares in blocks:
        stop = start + len(shares.own.ids)
        top = shares.top(weights, VALIDATION_K, card.num_labels)
        metrics.update(top, truth.slice(start, stop))
        start = stop
    result = metrics.result()
    return {metric: float(result[metric]) for metric in METRICS}


def normalised_encoder(path: str, corpus: Corpus) -> QueryEncoder:
    """The encoder of a run or a folder; its vectors have length 1."""
    encoder, head = open_encoder(path, corpus)
    return QueryEncoder(encoder, head, corpus.tokenizer(), normalised=True)


def untrained_encoder(corpus: Corpus) -> str:
    """Folder of a bag of random token vectors, weighted by inverse document frequency.

    Its cosines are close to those of TF-IDF.
    """
    folder = data_sets.CACHE / "methods" / corpus.card.name / "untrained"
    if not folder.is_dir():
        data = TrainingData(corpus, DataConfig(validation=0))
        counts = data.token_counts(corpus.card.vocab_size)
        build_encoder(UNTRAINED, corpus.tokenizer(), counts, 0).save(folder)
    return str(folder)
