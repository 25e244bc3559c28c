"""Predictions in the format of the field: a CSR matrix of queries x labels in scipy's .npz layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from xmcray.data.formats.matrices import load_npz
from xmcray.errors import DataError
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.remote import local_file
from xmcray.storage.whole_files import whole_file
from xmcray.types import Int64Array, Ragged, TopLabels


def write_predictions(path: str | Path, parts: Iterable[TopLabels], num_labels: int) -> Path:
    """Writes ranked answers as CSR [queries, num_labels] of float32 scores, all or nothing.

    Args:
        path: the file; ".npz" is appended if it is missing.
        parts: answers of consecutive queries (source label ids). Every answer is stored, even with
            a score of zero.
        num_labels: L, the number of columns.
    Returns:
        The path written.
    Raises:
        DataError: an answer is not one of the L labels.
        StorageError: the disk is full.
    """
    with writing_predictions(path, num_labels) as write:
        for part in parts:
            write(part)
    return _npz_path(path)


@contextlib.contextmanager
def writing_predictions(path: str | Path, num_labels: int) -> Iterator[Callable[[TopLabels], None]]:
    """Writes predictions as `write_predictions`, part by part.

    The block gets a function that takes the next part. The file exists after the block has ended
    without an error.
    """
    path = _npz_path(path)
    # Answers per query, after a zero with which the offsets begin.
    lengths = [np.zeros(1, np.int64)]
    # Not around the block itself: what a search in it raises is no fault of this file.
    with contextlib.ExitStack() as files:
        # Answers of more queries than fit in memory wait in unnamed files next to the destination.
        with disk_errors(path):
            ids_file = _unnamed_file(path.parent, files)
            scores_file = _unnamed_file(path.parent, files)

        def write(part: TopLabels) -> None:
            # Column ids ascend within a row, as CSR readers expect; a row's ranking is its scores.
            order = np.argsort(part.ids, axis=1, kind="stable")
            ids = np.take_along_axis(part.ids, order, 1)
            scores = np.take_along_axis(part.scores, order, 1)
            largest = ids.max(initial=-1)
            if largest >= num_labels:
                raise DataError(
                    f"an answer is label {largest}, expected less than {num_labels}: bundle and corpus differ"
                )
            is_answer = ids >= 0
            ids_P = ids[is_answer].astype(np.int32)
            scores_P = scores[is_answer].astype(np.float32)
            with disk_errors(path):
                ids_file.write(ids_P.tobytes())
                scores_file.write(scores_P.tobytes())
            lengths.append(is_answer.sum(1))

        yield write
        offsets = np.cumsum(np.concatenate(lengths))
        with disk_errors(path):
            scores_P = _mapped(scores_file, np.float32)
            ids_P = _mapped(ids_file, np.int32)
        shape = (len(offsets) - 1, num_labels)
        matrix = sparse.csr_matrix((scores_P, ids_P, offsets), shape=shape)
        # The file takes its name when all of it is on the disk.
        with whole_file(path) as temporary, temporary.open("wb") as file:
            sparse.save_npz(file, matrix)


def _unnamed_file(folder: Path, files: contextlib.ExitStack) -> IO[bytes]:
    """A file that is gone when it is closed, as `files` does."""
    file = TemporaryFile(dir=folder)  # noqa: SIM115

    def close() -> None:
        # A full disk was reported by the write; closing would write the rest once more.
        with contextlib.suppress(OSError):
            file.close()

    files.callback(close)
    return file


def _npz_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix == ".npz":
        return path
    return path.with_name(path.name + ".npz")


def _mapped(file: IO[bytes], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Maps the content of a file into memory, so that it stays on disk."""
    file.flush()
    # An empty file cannot be mapped.
    if file.tell() == 0:
        return np.empty(0, kind)
    return np.memmap(file, kind, "r")


def read_predictions(path: str | Path, num_queries: int, num_labels: int) -> sparse.csr_matrix:
    """Reads a prediction file, ours or another evaluator's.

    Stored zeros and negative scores are answers.

    Args:
        path: file or URL.
        num_queries: Q, the number of rows.
        num_labels: L, the number of columns.
    Raises:
        DataError: no CSR or CSC in a .npz, another shape than [num_queries, num_labels], or a score that
            is not a number.
        StorageError: the URL cannot be used.
    """
    with local_file(path) as file:
        if not file.exists():
            raise DataError(
                f"{path} does not exist, expected a prediction file; write one with `xmcray predict`"
            )
        matrix: sparse.csr_matrix = load_npz(file, source=path)
    if matrix.shape != (num_queries, num_labels):
        raise DataError(
            f"{path} is {matrix.shape[0]} x {matrix.shape[1]}, expected {num_queries} queries x {num_labels} labels; "
            "name the corpus and split it was predicted on, and a bundle that no labels have joined"
        )
    if np.isnan(matrix.data).any():
        raise DataError(
            f"{path} holds a score that is not a number, expected finite scores; predict again"
        )
    # Not sum_duplicates(): two scores of one label are no score at all.
    matrix.sort_indices()
    lengths = np.diff(matrix.indptr)
    row_P = np.repeat(np.arange(num_queries), lengths)
    # After sorting, equal labels of a row are neighbours.
    is_same_row = np.diff(row_P) == 0
    is_same_label = np.diff(matrix.indices) == 0
    is_duplicate = is_same_row & is_same_label
    if is_duplicate.any():
        first_row = row_P[np.argmax(is_duplicate)]
        raise DataError(
            f"{path} names a label twice in row {first_row}, expected each label at most once"
        )
    return matrix


def without_labels(matrix: sparse.csr_matrix, label_ids: Int64Array) -> sparse.csr_matrix:
    """The same predictions without the answers that name some labels; stored zeros stay."""
    is_kept_P = ~np.isin(matrix.indices, label_ids)
    # Number of answers that are kept among the first 0, 1, 2 ... of all rows.
    num_kept = np.concatenate([[0], np.cumsum(is_kept_P)])
    offsets = num_kept[matrix.indptr]
    kept = (matrix.data[is_kept_P], matrix.indices[is_kept_P], offsets)
    return sparse.csr_matrix(kept, shape=matrix.shape)


def predictions_to_top_labels(
    matrix: sparse.csr_matrix,
    rows: Int64Array,
    k: int,
    exclude: Ragged | None = None,
) -> TopLabels:
    """The k best stored answers of some rows, ties by the lower label id.

    Args:
        matrix: CSR [queries, L] without duplicates.
        rows: int64 [B], the chosen queries.
        exclude: label ids of each chosen row that are masked before the top k are taken (filter
            pairs).
    Returns:
        ids and scores [B, min(k, L)], -1 and -inf where a row stores fewer answers.
    """
    num_labels = int(matrix.shape[1])
    # Only the answers of the chosen rows are read: this is called for one chunk of rows after another.
    chosen = matrix[rows]
    label_P = chosen.indices.astype(np.int64)
    score_P = chosen.data.astype(np.float64)
    query_P = Ragged(label_P, chosen.indptr.astype(np.int64)).row_ids
    if exclude is not None:
        pairs = query_P * num_labels + label_P
        is_kept = ~np.isin(pairs, exclude.pairs(num_labels))
        query_P = query_P[is_kept]
        label_P = label_P[is_kept]
        score_P = score_P[is_kept]
    return TopLabels.from_pairs(query_P, label_P, score_P, len(rows), min(k, num_labels))
