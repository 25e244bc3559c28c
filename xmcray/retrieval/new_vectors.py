"""Vectors of labels that join a finished bundle, made from their texts.

Letters of axes here, in addition to those in types.py:

    U  labels that join
    M  a sample of the bundle's own labels, whose rows are known
    C  the columns of a vector that are a classifier's row: the last ones
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xmcray.errors import BundleError, DataError
from xmcray.nn.label_side import LabelSide
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.types import Float32Array

SAMPLE = 4096  # labels of the export to which the map from texts to rows is fitted
RIDGE = 0.3  # penalty of that map, in mean squares of the texts' coordinates
_TINY = 1e-12
_FITTING = threading.Lock()


def new_vectors(retriever: Retriever, side: LabelSide, texts: Sequence[str]) -> Float32Array:
    """Vectors of labels that join.

    Args:
        retriever: the bundle.
        side: how its method makes a label's vector.
        texts: texts of n labels.
    Returns:
        float32 [n, D].
    Raises:
        DataError: a text has no token.
        BundleError: the label side does not fit the bundle.
    """
    _check_side(retriever, side)
    vectors = _text_vectors(retriever, texts)
    if side.prototypes is not None:
        return _prototypes(retriever, side, vectors)
    if side.row_columns:
        # The last columns of a label's vector are its row of the classifier.
        columns = slice(-side.row_columns, None)
        text_vectors = vectors[:, columns]
        vectors[:, columns] = _row_map(retriever, side.row_columns).rows(text_vectors)
    return vectors


def is_prepared(retriever: Retriever, side: LabelSide) -> bool:
    """Whether `new_vectors` has all that it needs of a bundle."""
    needs_map = side.prototypes is None and side.row_columns > 0
    return not needs_map or side.row_columns in retriever.row_maps


def prepare(retriever: Retriever, side: LabelSide) -> None:
    """Computes once what `new_vectors` needs of a bundle.

    With classifier rows and a transformer this takes long: it encodes the texts of SAMPLE labels.

    Args:
        retriever: the bundle.
        side: how its method makes a label's vector.
    Raises:
        DataError: no label of the bundle has a text.
        BundleError: the label side does not fit the bundle.
    """
    _check_side(retriever, side)
    if not is_prepared(retriever, side):
        _row_map(retriever, side.row_columns)


def _check_side(retriever: Retriever, side: LabelSide) -> None:
    dim = retriever.settings.dim
    if not 0 <= side.row_columns <= dim:
        raise BundleError(
            f"label_side.json names {side.row_columns} columns of rows, expected 0 to {dim};"
            " export the bundle again"
        )


def nearest_clusters(retriever: Retriever, side: LabelSide, texts: Sequence[str]) -> torch.Tensor:
    """PRIME's clusters of labels that join, int64 [n].

    Raises:
        DataError: a text has no token.
    """
    return _nearest_clusters(retriever, side, _text_vectors(retriever, texts))


def _text_vectors(retriever: Retriever, texts: Sequence[str]) -> Float32Array:
    """What the encoder makes of the texts of labels, float32 [n, D]."""
    tokens = retriever.tokenizer.encode_labels(texts)
    has_tokens = retriever.tokenizer.has_tokens(tokens)
    if not has_tokens.all():
        place = int(has_tokens.argmin())
        raise DataError(
            f"text {place + 1} of {len(texts)}, {texts[place][:80]!r}, has no token; reword it"
        )
    return retriever.query_encoder.encode_labels(tokens)


def _nearest_clusters(retriever: Retriever, side: LabelSide, text_UD: Float32Array) -> torch.Tensor:
    """The cluster of the label whose prototype is nearest to each text, int64 [n]."""
    assert side.cluster_L is not None
    # Exact, because the processes of the composed mode have indexes of different shards.
    nearest = retriever.labels.search_exported(text_UD, 1, SearchScope(exact=True)).ids[:, 0]
    # Clusters are listed by row, not by source id.
    nearest_rows = retriever.labels.label_rows[nearest]
    if nearest_rows.max(initial=-1) >= len(side.cluster_L):
        raise BundleError(
            f"prototypes.safetensors has the clusters of {len(side.cluster_L)} labels, expected"
            f" {len(retriever.labels.label_rows)}; export the bundle again"
        )
    return side.cluster_L[torch.from_numpy(nearest_rows)]


def _prototypes(retriever: Retriever, side: LabelSide, text_UD: Float32Array) -> Float32Array:
    """PRIME's prototypes of new labels.

    The centroid of a label without queries is its text's vector, in training too. A new label joins
    the cluster, and so gets the free vector, of the label whose prototype is nearest to its text.
    """
    assert side.prototypes is not None
    cluster_U = _nearest_clusters(retriever, side, text_UD)
    texts = torch.from_numpy(text_UD).to(side.prototypes.bank.weight)
    with torch.inference_mode():
        prototypes: Float32Array = side.prototypes(texts, texts, cluster_U).float().numpy()
    return prototypes


@dataclass(frozen=True, eq=False)
class RowMap:
    """Makes rows of a classifier for labels it was not trained with.

    Attributes:
        mean_text_C: mean of the texts' vectors of known labels.
        mean_row_C: mean of their rows.
        map_CC: takes a text's deviation from the mean text to a row's deviation from the mean row.
        step_length: length of a row's deviation from the mean row.
        row_length: length of all rows; None if they differ in length.
    """

    mean_text_C: npt.NDArray[np.float64]
    mean_row_C: npt.NDArray[np.float64]
    map_CC: npt.NDArray[np.float64]
    step_length: float
    row_length: float | None

    def rows(self, text_UC: Float32Array) -> Float32Array:
        """Rows of labels that join, float32 [U, C], by what the encoder makes of their texts."""
        # Only the direction of the mapped text counts; its length says little about a row's.
        step_UC = (text_UC - self.mean_text_C) @ self.map_CC
        step_UC *= self.step_length / _lengths(step_UC)
        row_UC = self.mean_row_C + step_UC
        if self.row_length is not None:
            row_UC *= self.row_length / _lengths(row_UC)
        return np.asarray(row_UC, np.float32)


def _row_map(retriever: Retriever, columns: int) -> RowMap:
    """The map of a bundle, which is fitted once: a server adds labels again and again.

    Args:
        retriever: the bundle.
        columns: C.
    """
    row_maps = retriever.row_maps
    if columns not in row_maps:
        with _FITTING:
            # Another thread may have fitted it meanwhile.
            if columns not in row_maps:
                row_maps[columns] = _fit_rows(retriever, columns)
    return row_maps[columns]


def _fit_rows(retriever: Retriever, columns: int) -> RowMap:
    """Fits the map from texts to rows.

    A text's vector cannot serve as a row: all rows have a common part, which says how rare labels
    are, and training made them long. A text's vector of that length would answer almost every
    query. So a new row is the mean row plus a step, which is as long as the steps of known labels.
    The step's direction comes from a linear map fitted to known labels, which takes a text's
    deviation from the mean text to the row's deviation from the mean row. The fit is a ridge
    regression towards a multiple of the identity, and the map is close to that if few labels are
    known (benchmarks/added_labels.py compares).

    Args:
        retriever: the bundle.
        columns: C.
    """
    known_text_MC, known_row_MC = _known_labels(retriever, columns)
    mean_text_C = known_text_MC.mean(axis=0)
    mean_row_C = known_row_MC.mean(axis=0)
    row_lengths = np.linalg.norm(known_row_MC, axis=1)
    # X and Y of the regression: deviations from the mean text and from the mean row.
    text_MC = known_text_MC - mean_text_C
    row_MC = known_row_MC - mean_row_C
    # Medians, because few labels with many queries have much longer rows.
    step_length = float(np.median(np.linalg.norm(row_MC, axis=1)))
    text_length = np.median(np.linalg.norm(text_MC, axis=1))
    scale = step_length / max(text_length, _TINY)
    # Ridge regression towards scale * I: (X'X + R) map = X'Y + scale * R.
    gram_CC = text_MC.T @ text_MC
    penalty = RIDGE * np.trace(gram_CC) / columns + _TINY
    ridge_CC = penalty * np.eye(columns)
    target_CC = text_MC.T @ row_MC + scale * ridge_CC
    map_CC = np.linalg.solve(gram_CC + ridge_CC, target_CC)
    row_length = float(row_lengths.mean()) if have_one_length(row_lengths) else None
    return RowMap(mean_text_C, mean_row_C, map_CC, step_length, row_length)


def have_one_length(row_lengths: npt.NDArray[np.floating]) -> bool:
    """Whether the rows of a bundle were normalised, as UniDEC's are."""
    return bool(np.ptp(row_lengths) < 1e-3 * row_lengths.max())


def _known_labels(
    retriever: Retriever, columns: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the encoder makes of the texts of a sample of labels, and their rows, float64 [M, C]."""
    settings = retriever.settings
    exported = settings.first_added or settings.num_labels
    # A fixed seed, so that the same label gets the same vector every time.
    generator = np.random.default_rng(0)
    sample = generator.choice(exported, min(SAMPLE, exported), replace=False)
    texts = retriever.labels.texts(sample)
    tokens = retriever.tokenizer.encode_labels(texts)
    with_text = np.flatnonzero(retriever.tokenizer.has_tokens(tokens))
    if not len(with_text):
        raise DataError(
            "no label of the bundle has a text, expected some, by which the row of a new label is"
            " placed; export a bundle whose labels have texts"
        )
    text_MD = retriever.query_encoder.encode_labels(tokens.take(with_text))
    label_MD = retriever.labels.vectors_of(sample[with_text])
    text_MC = text_MD[:, -columns:].astype(np.float64)
    row_MC = label_MD[:, -columns:].astype(np.float64)
    return text_MC, row_MC


def _lengths(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """float64 [n, 1], at least a tiny number, to divide by."""
    lengths: npt.NDArray[np.float64] = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.maximum(lengths, _TINY)
