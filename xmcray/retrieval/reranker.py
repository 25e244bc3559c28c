"""A second look at the best answers: a cross-encoder reads each of them together with the query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.nn.cross_encoder import CrossEncoder, Pair
from xmcray.nn.module_files import load_settings, reading, save_settings
from xmcray.retrieval.label_index import LabelIndex
from xmcray.storage.artifact import open_artifact
from xmcray.storage.remote import is_url
from xmcray.types import Float32Array, TopLabels

KIND = "reranker"
SETTINGS = "reranker.json"


@dataclass(frozen=True, kw_only=True)
class RerankConfig:
    """How answers are ordered again.

    Attributes:
        candidates: answers of the bundle that are read.
        weight: of the bundle's own score, which is added to the cross-encoder's; 0 for the
            cross-encoder alone.
        max_len: tokens of a query and a label together.
    """

    candidates: int = 30
    weight: float = 0.0
    max_len: int = 128

    def __post_init__(self) -> None:
        check_range("candidates", self.candidates, 2, 1000)
        check_range("weight", self.weight, 0)
        check_range("max_len", self.max_len, 4)


@dataclass(frozen=True, eq=False)
class Reranker:
    """Orders answers by a cross-encoder's scores.

    Attributes:
        encoder: scores pairs of query and label text; None if another process does.
        config: how many answers, and what their own scores count.
        sha256: names the content; "" of a model that xmcray did not write.
    """

    encoder: CrossEncoder | None
    config: RerankConfig
    sha256: str = ""

    @classmethod
    def load(cls, path: str, reads: bool = True) -> Reranker:
        """Opens what `xmcray train-reranker` wrote, or any cross-encoder by folder or hub id.

        Args:
            path: folder, URL or hub id.
            reads: whether pairs are scored in this process; otherwise no model is loaded.
        Raises:
            StorageError: a file is missing or altered.
            BundleError: it is no cross-encoder with one output.
        """
        # A hub id has no folder of its own.
        if not is_url(path) and not (Path(path) / SETTINGS).is_file():
            config = RerankConfig()
            return cls(CrossEncoder.load(path, config.max_len) if reads else None, config)
        folder, manifest = open_artifact(path, KIND)
        with reading(KIND, folder):
            config = configs.build(RerankConfig, load_settings(folder / SETTINGS))
        encoder = CrossEncoder.load(str(folder), config.max_len) if reads else None
        return cls(encoder, config, manifest.sha256)

    def save(self, folder: Path) -> None:
        """Writes the files of a folder that `load` reads once it has a manifest."""
        assert self.encoder is not None, "the model is in another process"
        self.encoder.save(folder)
        save_settings(folder / SETTINGS, configs.dump(self.config))

    def reordered(
        self,
        texts: Sequence[str],
        top: TopLabels,
        labels: LabelIndex,
        k: int,
        score_P: Float32Array | None = None,
    ) -> TopLabels:
        """The k best of some answers; those after the candidates keep their order behind them.

        Args:
            texts: B queries.
            top: their answers, best first, with the bundle's scores.
            labels: knows the texts of labels.
            k: answers that are wanted.
            score_P: float32, what another process gave the pairs that `pairs` names.
        """
        head_ids = top.ids[:, : self.config.candidates]
        pair_scores = self.pair_scores(texts, head_ids, labels, score_P)
        return self.with_scores(top, pair_scores).first(k)

    def pairs(self, texts: Sequence[str], top: TopLabels, labels: LabelIndex) -> list[Pair]:
        """The pairs of query and label text that the cross-encoder reads of some answers."""
        return _pairs(texts, top.ids[:, : self.config.candidates], labels)

    def pair_scores(
        self,
        texts: Sequence[str],
        ids: np.ndarray,
        labels: LabelIndex,
        score_P: Float32Array | None = None,
    ) -> Float32Array:
        """The cross-encoder's score of each query and label, float32 [B, C]; -inf for no label."""
        if score_P is None:
            assert self.encoder is not None, "the model is in another process"
            score_P = self.encoder.score(_pairs(texts, ids, labels))
        scores = np.full(ids.shape, -np.inf, np.float32)
        scores[ids >= 0] = score_P
        return scores

    def with_scores(self, top: TopLabels, pair_scores: Float32Array) -> TopLabels:
        """Answers ordered by the sum of both scores; `pair_scores` are of the first C of them."""
        num_read = pair_scores.shape[1]
        scores = top.scores.copy()
        # A missing answer has -inf, which times a weight of 0 would be no number.
        is_answer = top.ids[:, :num_read] >= 0
        own_scores = np.where(is_answer, top.scores[:, :num_read], 0)
        weight = np.float32(self.config.weight)
        scores[:, :num_read] = pair_scores + weight * own_scores
        # Labels that were not read follow those that were, below the lowest of them.
        rest = np.arange(scores.shape[1] - num_read, dtype=np.float32)
        lowest = np.where(np.isfinite(pair_scores), scores[:, :num_read], np.inf)
        floor_B = lowest.min(axis=1, initial=np.inf)
        is_rest = top.ids[:, num_read:] >= 0
        scores[:, num_read:] = np.where(is_rest, floor_B[:, None] - 1 - rest, -np.inf)
        # A stable sort keeps the order of equal scores.
        order = np.argsort(-scores, axis=1, kind="stable")
        probabilities = top.probabilities
        if probabilities is not None:
            probabilities = np.take_along_axis(probabilities, order, 1)
        ids = np.take_along_axis(top.ids, order, 1)
        return replace(
            top,
            ids=ids,
            scores=np.take_along_axis(scores, order, 1),
            probabilities=probabilities,
        )


def _pairs(texts: Sequence[str], ids: np.ndarray, labels: LabelIndex) -> list[Pair]:
    """Query and text of each label that is there, by query."""
    is_there = ids >= 0
    query_P = np.nonzero(is_there)[0].tolist()
    label_texts = labels.texts(ids[is_there])
    return [(texts[query], label) for query, label in zip(query_P, label_texts, strict=True)]
