"""Prediction files: what goes in comes out, and what is no prediction file is refused in one line."""

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from dense_metrics import top_k
from scipy import sparse

from xmcray.errors import DataError, StorageError
from xmcray.evaluation import predictions
from xmcray.evaluation.predictions import (
    predictions_to_top_labels,
    read_predictions,
    write_predictions,
    writing_predictions,
)
from xmcray.types import Ragged, TopLabels

SCORES = np.array([[0.5, 0.0, -1.0, 0.5], [-np.inf, -2.0, -np.inf, 0.0], [-np.inf] * 4], np.float32)


def test_zeros_negatives_ties_and_empty_rows_survive(tmp_path: Path) -> None:
    top = top_k(SCORES, 3)
    parts = [TopLabels(top.ids[:1], top.scores[:1]), TopLabels(top.ids[1:], top.scores[1:])]
    path = write_predictions(tmp_path / "scores", parts, 4)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] == ["scores.npz"]
    matrix = read_predictions(path, 3, 4)
    assert matrix.nnz == 5
    again = predictions_to_top_labels(matrix, np.arange(3), 3)
    assert again.ids.tolist() == top.ids.tolist() == [[0, 3, 1], [3, 1, -1], [-1, -1, -1]]
    np.testing.assert_array_equal(again.scores, top.scores)
    assert predictions_to_top_labels(matrix, np.array([2, 0]), 9).ids.tolist() == [
        [-1] * 4,
        [0, 3, 1, -1],
    ]


def test_scipy_reads_our_file(tmp_path: Path) -> None:
    matrix = sparse.load_npz(write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4))
    assert matrix.format == "csr"
    assert matrix.has_canonical_format
    assert matrix.toarray()[0].tolist() == [0.5, 0.0, -1.0, 0.5]


def test_filter_pairs_are_masked_before_the_cut(tmp_path: Path) -> None:
    matrix = read_predictions(write_predictions(tmp_path / "s", [top_k(SCORES, 4)], 4), 3, 4)
    top = predictions_to_top_labels(matrix, np.array([0, 1]), 2, Ragged.from_rows([[0], [3]]))
    assert top.ids.tolist() == [[3, 1], [1, -1]]


def test_unusable_files_are_named(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4)
    with pytest.raises(DataError, match="is 3 x 4, expected 9 queries x 4 labels"):
        read_predictions(path, 9, 4)
    with pytest.raises(DataError, match="does not exist"):
        read_predictions(tmp_path / "none.npz", 3, 4)
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"scipy\.sparse\.save_npz"):
        read_predictions(path, 3, 4)
    np.savez(path, a=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"scipy\.sparse\.save_npz"):
        read_predictions(path, 3, 4)
    sparse.save_npz(
        path, sparse.csr_matrix((np.array([1.0, np.nan]), [0, 1], [0, 2, 2, 2]), shape=(3, 4))
    )
    with pytest.raises(DataError, match="not a number"):
        read_predictions(path, 3, 4)
    sparse.save_npz(
        path, sparse.csr_matrix((np.array([1.0, 2.0]), [1, 1], [0, 0, 2, 2]), shape=(3, 4))
    )
    with pytest.raises(DataError, match="twice in row 1"):
        read_predictions(path, 3, 4)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4)
    before = path.read_bytes()
    with pytest.raises(DataError, match="label 3, expected less than 2"):
        write_predictions(path, [top_k(SCORES, 4)], 2)

    def full_disk(file: BinaryIO, matrix: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sparse, "save_npz", full_disk)
    with pytest.raises(StorageError, match="no space left"):
        write_predictions(path, [top_k(SCORES, 4)], 4)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_no_changed_byte_of_a_file_is_a_traceback(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4)
    data = path.read_bytes()
    refusals = []
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            read_predictions(path, 3, 4)
        except DataError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not [refusal for refusal in refusals if "\n" in refusal]


def test_an_array_that_claims_more_than_its_file_holds_takes_no_memory(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    huge = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(huge, header)
    members["data.npy"] = huge.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    with pytest.raises(DataError, match="expected numbers that fit"):
        read_predictions(path, 3, 4)


def test_a_search_that_fails_is_no_fault_of_the_file_of_predictions(tmp_path: Path) -> None:
    """Such as one that reads a bundle from a disk that fails, or whose folder for copies is full."""
    for code in (errno.EIO, errno.ENOSPC, errno.EACCES):
        with (
            pytest.raises(OSError, match="elsewhere") as caught,
            writing_predictions(tmp_path / "p", 3),
        ):
            raise OSError(code, os.strerror(code), "/elsewhere/labels")
        assert not isinstance(caught.value, StorageError)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_answers_wait_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_file(**_: object) -> BinaryIO:
        return Path("/dev/full").open("w+b", buffering=4096)

    monkeypatch.setattr(predictions, "TemporaryFile", full_file)
    answers = TopLabels(np.zeros((5000, 1), np.int64), np.ones((5000, 1), np.float32))
    with (
        pytest.raises(StorageError, match=r"no space left while writing .*p\.npz"),
        writing_predictions(tmp_path / "p", 3) as write,
    ):
        write(answers)
    assert not list(tmp_path.iterdir())
