"""Hard negatives that are probably right answers, which the data does not list.

A candidate is left out if its score exceeds a share of the score of the query's best positive, as in
NV-Retriever ("TopK-PercPos", Moreira et al., 2024). The scores are those of the version's vectors, or
those of a teacher: another bundle, or a cross-encoder.
"""

from __future__ import annotations

import abc
import threading
from pathlib import Path

import numpy as np
import torch

from xmcray.data.batches import TrainingData
from xmcray.errors import ConfigError
from xmcray.retrieval.exact import from_keys, to_keys
from xmcray.types import (
    BoolArray,
    Float32Array,
    Int64Array,
    Ragged,
    TopLabels,
    pairs_of,
    side_vectors_of,
)

NO_SCORE = np.float32(-np.inf)


class Teacher(abc.ABC):
    """Scores queries and labels of the training data.

    Args:
        data: the training data.
    """

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    @abc.abstractmethod
    def scores(self, query_ids: Int64Array, label_BC: Int64Array) -> Float32Array:
        """Scores of queries and labels, of which shares can be compared.

        Args:
            query_ids: int64 [B].
            label_BC: int64 [B, C], internal label ids; -1 for none.
        Returns:
            float32 [B, C]; -inf where there is no label.
        """

    def _texts(self, query_ids: Int64Array) -> list[str]:
        """Texts of queries; the id of a label's text follows those of the training queries."""
        corpus = self._data.corpus
        num_train = self._data.num_train
        is_label = query_ids >= num_train
        texts = np.empty(len(query_ids), object)
        texts[~is_label] = corpus.split("train").texts(query_ids[~is_label])
        # Corpora name labels by source ids, training by internal ones.
        internal_ids = query_ids[is_label] - num_train
        texts[is_label] = corpus.label_texts(corpus.label_order[internal_ids])
        return list(texts)


def open_teacher(path: str, data: TrainingData) -> Teacher:
    """Opens a bundle, by folder or URL, or the folder of a cross-encoder.

    Raises:
        ConfigError: the bundle has other labels, or adds up several parts.
        BundleError: the cross-encoder is damaged, or has several outputs.
    """
    # Every bundle has a manifest; so has a cross-encoder of `xmcray train-reranker`.
    has_manifest = (Path(path) / "manifest.json").is_file()
    is_model = (Path(path) / "config.json").is_file() and not has_manifest
    if is_model or (Path(path) / "reranker.json").is_file():
        return CrossEncoderTeacher(path, data)
    return BundleTeacher(path, data)


class BundleTeacher(Teacher):
    """Scores by inner products of a bundle's vectors."""

    def __init__(self, bundle: str, data: TrainingData) -> None:
        super().__init__(data)
        # Not at the top: importing it takes half a second in every process of a training, and few
        # trainings have a teacher.
        from xmcray.retrieval.retriever import Retriever

        self._retriever = Retriever.load(bundle)
        settings = self._retriever.settings
        removed = self._retriever.labels.removed
        has_joined = settings.first_added is not None
        is_of_corpus = np.array_equal(removed, data.corpus.removed_labels) and not has_joined
        if settings.num_labels != data.num_labels or not is_of_corpus:
            raise ConfigError(
                f"negatives.teacher {bundle} has {settings.num_labels:,} labels, expected the"
                f" {data.num_labels:,} of the corpus; name a bundle that was made from it"
            )
        if settings.is_fused:
            raise ConfigError(
                f"negatives.teacher {bundle} adds up several parts, expected the bundle of a run"
            )

    def scores(self, query_ids: Int64Array, label_BC: Int64Array) -> Float32Array:
        """Inner products of their vectors."""
        vectors = None
        width = self._retriever.side_width
        if width:
            vectors = side_vectors_of(self._data.tokens(query_ids), width)
        query_BD = self._retriever.encode(self._texts(query_ids), vectors)
        source_BC = np.where(label_BC >= 0, self._data.corpus.label_order[label_BC], -1)
        return self._retriever.labels.scores_of(query_BD, source_BC)


class CrossEncoderTeacher(Teacher):
    """Scores by the odds of a cross-encoder, which reads the texts of a query and a label together."""

    def __init__(self, folder: str, data: TrainingData) -> None:
        super().__init__(data)
        from xmcray.retrieval.reranker import Reranker

        encoder = Reranker.load(folder).encoder
        assert encoder is not None, "it was loaded in this process"
        self._encoder = encoder
        # Blocks of queries are merged by several threads, and a tokenizer is for one at a time.
        self._lock = threading.Lock()

    def scores(self, query_ids: Int64Array, label_BC: Int64Array) -> Float32Array:
        """Exponentials of the outputs for their texts."""
        texts = self._texts(query_ids)
        is_label_BC = label_BC >= 0
        corpus = self._data.corpus
        label_texts = corpus.label_texts(corpus.label_order[label_BC[is_label_BC]])
        row_P = np.nonzero(is_label_BC)[0]
        query_texts = [texts[row] for row in row_P.tolist()]
        pairs = list(zip(query_texts, label_texts, strict=True))
        with self._lock:
            logit_P = self._encoder.score(pairs)
        scores = np.full(label_BC.shape, NO_SCORE)
        # Only differences of its outputs have a meaning, so their exponentials are what has shares.
        # No model comes near the bound, above which float32 would be infinite.
        scores[is_label_BC] = np.exp(np.minimum(logit_P, 80))
        return scores


def best_candidates(
    candidate_BC: Int64Array, score_BC: Float32Array, reach_B: Int64Array
) -> TopLabels:
    """The best candidates of each query, the same from any number of index shards.

    Args:
        candidate_BC: int64 label ids, -1 for none.
        score_BC: float32.
        reach_B: int64, candidates of each query; fewer are padded.
    """
    score_BC = np.where(candidate_BC >= 0, score_BC, NO_SCORE)
    # A missing candidate borrows the id 0; its score says that it is none.
    id_BC = np.maximum(candidate_BC, 0)
    key_BC = to_keys(torch.from_numpy(score_BC), torch.from_numpy(id_BC))
    widest = min(int(reach_B.max(initial=0)), candidate_BC.shape[1])
    best = from_keys(key_BC.topk(widest, dim=1).values)
    is_reached = np.arange(widest) < reach_B[:, None]
    is_kept = is_reached & np.isfinite(best.scores)
    ids = np.where(is_kept, best.ids, -1)
    scores = np.where(is_kept, best.scores, NO_SCORE)
    return TopLabels(ids, scores)


def false_negatives(
    query_ids: Int64Array,
    best: TopLabels,
    positives: Ragged,
    excluded: Ragged,
    share: float,
    num_labels: int,
    teacher: Teacher | None,
) -> BoolArray:
    """Which candidates score above a share of the query's best positive.

    Without a teacher, only positives among the candidates have a score. A query without such a one
    keeps all its candidates: it is not learned yet, so its scores say nothing.

    Args:
        query_ids: int64 [B].
        best: candidates [B, C].
        positives: internal label ids of the queries.
        excluded: labels that are the query itself; they are no negatives anyway.
        share: candidates with more than this share are left out.
        num_labels: L.
        teacher: gives the scores, if there is one.
    Returns:
        bool [B, C], false for positives and excluded labels.
    """
    pair_BC = pairs_of(best.ids, num_labels)
    is_label_BC = best.ids >= 0
    is_positive_BC = np.isin(pair_BC, positives.pairs(num_labels)) & is_label_BC
    is_excluded_BC = np.isin(pair_BC, excluded.pairs(num_labels))
    may_be_negative_BC = is_label_BC & ~is_positive_BC & ~is_excluded_BC
    if teacher is None:
        score_BC = best.scores
        positive_score_BP = np.where(is_positive_BC, score_BC, NO_SCORE)
    else:
        score_BC = teacher.scores(query_ids, best.ids)
        positive_score_BP = teacher.scores(query_ids, positives.padded())
    best_positive_B = positive_score_BP.max(axis=1, initial=NO_SCORE)
    # A share of a score means nothing unless the score is above 0.
    limit_B = np.where(best_positive_B > 0, share * best_positive_B, np.inf)
    is_false: BoolArray = (score_BC > limit_B[:, None]) & may_be_negative_BC
    return is_false
