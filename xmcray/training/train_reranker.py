"""Trains a cross-encoder on a bundle's own mistakes: the best answers that are no positives.

Each training query gives a list of one positive and a few hard negatives, and the loss is the
cross-entropy of the positive among them. The weight of the bundle's own score is chosen on queries
that the bundle's run held out.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from xmcray import draws
from xmcray.config import check_range
from xmcray.data.corpus import Corpus, Split
from xmcray.errors import DataError
from xmcray.evaluation.metrics import precisions, relevant
from xmcray.nn.cross_encoder import CrossEncoder, Pair
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.memory import remembered_rows
from xmcray.retrieval.reranker import KIND, RerankConfig, Reranker
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import new_artifact, open_artifact, refuse_existing
from xmcray.training.export import selected_bundle
from xmcray.training.held_out import held_out_by, some_rows, without_voters
from xmcray.training.outcome import bundle_of, check_fits
from xmcray.training.run import Run
from xmcray.types import Int64Array, TopLabels, spans

logger = logging.getLogger(__name__)
CHUNK = 256  # queries whose answers are held at once
MOST_HELD_OUT = 1000
# Of the bundle's own score: none, and from much less to much more than the cross-encoder's.
WEIGHTS = (0.0, *(float(weight) for weight in np.geomspace(0.1, 300, 24)))


@dataclass(frozen=True, kw_only=True)
class RerankTraining:
    """How a reranker is trained.

    Attributes:
        model: folder or hub id of a transformer or a cross-encoder to start from.
        queries: training queries that are used at most.
        epochs: passes over them.
        batch_size: queries of a step.
        negatives: hard negatives of a query.
        candidates: answers of the bundle that negatives are drawn from, and that are read later.
        max_len: tokens of a query and a label together.
        lr: highest learning rate; it rises over the first tenth and falls to 0.
        seed: of the draws and of new weights.
    """

    model: str
    queries: int = 20_000
    epochs: int = 1
    batch_size: int = 16
    negatives: int = 7
    candidates: int = 30
    max_len: int = 96
    lr: float = 5e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "epochs", "batch_size", "negatives"):
            check_range(name, getattr(self, name), 1)
        check_range("lr", self.lr, 0)
        check_range("seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class RerankOutcome:
    """P@1 and P@5 on held-out queries, before and after, and the weight that was chosen."""

    before: tuple[float, float]
    after: tuple[float, float]
    weight: float


def train_reranker(
    path: str,
    corpus: Corpus,
    out: str | Path,
    config: RerankTraining,
    *,
    progress: Callable[[int], None] | None = None,
) -> RerankOutcome:
    """Writes a reranker for a bundle.

    Args:
        path: a run, or a bundle whose run held queries out.
        corpus: the one that it was trained on.
        out: folder or URL that does not exist yet.
        config: settings.
        progress: called with the number of queries trained so far.
    Raises:
        ConfigError: the bundle's run held nothing out, or a setting is out of range.
        BundleError: the model cannot be read.
        DataError: bundle and corpus do not belong together, or no training query has a negative.
        StorageError: `out` exists, or the disk is full.
    """
    refuse_existing(out)
    bundle = _held_out_bundle(path, corpus)
    _, manifest = open_artifact(bundle, BUNDLE, contents=False)
    held_out = held_out_by(bundle, manifest.about, corpus).validation_rows
    retriever = Retriever.load(bundle)
    check_fits(retriever, corpus)
    torch.manual_seed(draws.torch_seed(config.seed, "reranker"))
    encoder = CrossEncoder.load(config.model, config.max_len, new_head=True)
    settings = RerankConfig(candidates=config.candidates, max_len=encoder.max_len)
    rows = np.setdiff1d(remembered_rows(corpus), held_out)
    rows = draws.generator(config.seed, "reranker", 0).permutation(rows)[: config.queries]
    num_trained = _train(encoder, retriever, corpus, rows, config, progress)
    if not num_trained:
        raise DataError(
            f"all of the first {config.candidates} answers of {len(rows)} training queries are positives, expected"
            " some that are not; raise the number of candidates"
        )
    reranker = Reranker(encoder, settings)
    # Queries that are held out must not vote for themselves.
    judge = without_voters(retriever, corpus, held_out)
    measured = some_rows(held_out, MOST_HELD_OUT, config.seed)
    reranker, outcome = _with_best_weight(reranker, judge, corpus, measured)
    about = {
        "bundle": manifest.sha256,
        "corpus_sha256": corpus.sha256,
        "training": dataclasses.asdict(config),
    }
    with new_artifact(out, KIND, about) as folder:
        reranker.save(folder)
    return outcome


def _held_out_bundle(path: str, corpus: Corpus) -> str:
    """The bundle to learn from: of a run with --refit that of its selection."""
    if not (Path(path) / "run.json").is_file():
        return path
    run = Run.open(path)
    selected = selected_bundle(run, corpus)
    return bundle_of(run, corpus) if selected is None else str(selected)


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, num_steps: int
) -> torch.optim.lr_scheduler.OneCycleLR:
    """A rate that rises to `lr` for a tenth of the steps, or one of them, and then falls."""
    total_steps = num_steps + 1
    # torch divides by the steps of the rise less one.
    rise = max(0.1, 2 / total_steps)
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=total_steps, pct_start=rise
    )


def _train(
    encoder: CrossEncoder,
    retriever: Retriever,
    corpus: Corpus,
    rows: Int64Array,
    config: RerankTraining,
    progress: Callable[[int], None] | None,
) -> int:
    """Trains in place; returns how many lists were learned."""
    model = encoder.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01)
    steps_per_epoch = math.ceil(len(rows) / config.batch_size)
    num_steps = config.epochs * steps_per_epoch
    schedule = one_cycle(optimizer, config.lr, num_steps)
    num_done = 0
    for batch in _batches(retriever, corpus, rows, config):
        pairs: list[Pair] = []
        for pairs_of_query in batch:
            pairs += pairs_of_query
        score_BN = encoder.forward(pairs).view(len(batch), 1 + config.negatives)
        # The positive is the first of each list.
        target_B = torch.zeros(len(batch), dtype=torch.int64, device=score_BN.device)
        loss = F.cross_entropy(score_BN, target_B)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        num_done += len(batch)
        if progress is not None:
            progress(num_done)
    model.eval()
    return num_done


def _batches(
    retriever: Retriever, corpus: Corpus, rows: Int64Array, config: RerankTraining
) -> Iterator[list[list[Pair]]]:
    """Steps of pairs: for each query its positive and then its negatives."""
    split = corpus.split("train")
    for epoch in range(config.epochs):
        draw = draws.generator(config.seed, "reranker", 1 + epoch)
        shuffled = draw.permutation(rows)
        lists: list[list[Pair]] = []
        for span in spans(len(shuffled), CHUNK):
            chunk = shuffled[span]
            lists += _lists(retriever, corpus, split, chunk, config, draw)
            while len(lists) >= config.batch_size:
                yield lists[: config.batch_size]
                lists = lists[config.batch_size :]
        if lists:
            yield lists


def _lists(
    retriever: Retriever,
    corpus: Corpus,
    split: Split,
    rows: Int64Array,
    config: RerankTraining,
    draw: np.random.Generator,
) -> list[list[Pair]]:
    """A positive and hard negatives of each query, drawn anew for each epoch."""
    top = _answers(retriever, split, rows, config.candidates)
    positives = corpus.answerable(split.positives(rows))
    lists = []
    for place, query in enumerate(split.texts(rows)):
        own_positives = positives[place]
        answers = top.ids[place]
        negatives = np.setdiff1d(answers[answers >= 0], own_positives)
        if not len(negatives):
            continue
        label_ids = [draw.choice(own_positives)]
        # With repetition only where there are too few.
        repeats = len(negatives) < config.negatives
        label_ids += draw.choice(negatives, config.negatives, replace=repeats).tolist()
        texts = corpus.label_texts(np.array(label_ids, np.int64))
        lists.append([(query, text) for text in texts])
    return lists


def _answers(retriever: Retriever, split: Split, rows: Int64Array, count: int) -> TopLabels:
    count = min(count, retriever.num_labels)
    excluded = split.filters(rows)
    if not retriever.needs_texts:
        return retriever.top_labels(split.tokens(rows), count, exclude=excluded)
    vectors = split.side_vectors(rows)
    return retriever.top_labels(split.texts(rows), count, exclude=excluded, vectors=vectors)


def _with_best_weight(
    reranker: Reranker, retriever: Retriever, corpus: Corpus, rows: Int64Array
) -> tuple[Reranker, RerankOutcome]:
    """The reranker with the weight of the bundle's score that is best on held-out queries."""
    split = corpus.split("train")
    top = _answers(retriever, split, rows, reranker.config.candidates)
    truth = split.positives(rows)
    pair_scores = reranker.pair_scores(split.texts(rows), top.ids, retriever.labels)

    def measured(answers: TopLabels) -> tuple[float, float]:
        hit_BK = relevant(answers.ids, truth, corpus.card.num_labels)
        return precisions(hit_BK)

    best = reranker
    best_precisions = (-1.0, -1.0)
    for weight in WEIGHTS:
        config = dataclasses.replace(reranker.config, weight=weight)
        weighted = dataclasses.replace(reranker, config=config)
        reached = measured(weighted.with_scores(top, pair_scores))
        # The mean of both metrics; among equals the smaller weight, which comes first.
        if sum(reached) > sum(best_precisions):
            best = weighted
            best_precisions = reached
    return best, RerankOutcome(measured(top), best_precisions, best.config.weight)
