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
from xmcray.storage.artifact import new_artifact, open_artifact
from xmcray.types import Ragged, TopLabels

NONE = -np.inf
SCORES = np.array(
    [[0.5, 0.0, -1.0, 0.5], [NONE, -2.0, NONE, 0.0], [NONE, NONE, NONE, NONE]], np.float32
)


def test_zeros_negatives_ties_and_empty_rows_survive(tmp_path: Path) -> None:
    top = top_k(SCORES, 3)
    assert top.ids.tolist() == [[0, 3, 1], [3, 1, -1], [-1, -1, -1]]
    first_row = TopLabels(top.ids[:1], top.scores[:1])
    other_rows = TopLabels(top.ids[1:], top.scores[1:])

    path = write_predictions(tmp_path / "scores", [first_row, other_rows], 4)
    matrix = read_predictions(path, 3, 4)
    read_back = predictions_to_top_labels(matrix, np.arange(3), 3)

    assert path.name == "scores.npz"
    assert list(tmp_path.iterdir()) == [path]
    assert matrix.nnz == 5
    np.testing.assert_array_equal(read_back.ids, top.ids)
    np.testing.assert_array_equal(read_back.scores, top.scores)


def test_chosen_rows_are_as_wide_as_there_are_labels(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "scores", [top_k(SCORES, 3)], 4)
    matrix = read_predictions(path, 3, 4)
    top = predictions_to_top_labels(matrix, np.array([2, 0]), 9)
    assert top.ids.tolist() == [[-1, -1, -1, -1], [0, 3, 1, -1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with all scores: 3 queries x 4 labels."""
    return write_predictions(tmp_path / "scores.npz", [top_k(SCORES, 4)], 4)


def test_scipy_reads_our_file(path: Path) -> None:
    matrix = sparse.load_npz(path)
    assert matrix.format == "csr"
    assert matrix.has_canonical_format
    assert matrix.toarray()[0].tolist() == [0.5, 0.0, -1.0, 0.5]


def test_filter_pairs_are_masked_before_the_cut(path: Path) -> None:
    matrix = read_predictions(path, 3, 4)
    filter_pairs = Ragged.from_rows([[0], [3]])
    top = predictions_to_top_labels(matrix, np.array([0, 1]), 2, filter_pairs)
    assert top.ids.tolist() == [[3, 1], [1, -1]]


def test_a_file_of_another_shape_is_refused(path: Path) -> None:
    with pytest.raises(DataError, match="is 3 x 4, expected 9 queries x 4 labels"):
        read_predictions(path, 9, 4)


def test_a_file_at_a_url_is_read(path: Path) -> None:
    matrix = read_predictions(path, 3, 4)
    at_url = read_predictions(f"file://{path}", 3, 4)
    np.testing.assert_array_equal(at_url.toarray(), matrix.toarray())

    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=f"file://{path} is not a complete npz file"):
        read_predictions(f"file://{path}", 3, 4)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.npz", f"file://{tmp_path}/none.npz"):
        with pytest.raises(DataError, match=f"{missing} does not exist"):
            read_predictions(missing, 3, 4)


def test_a_folder_of_predictions_is_no_bundle(tmp_path: Path) -> None:
    with new_artifact(tmp_path / "p", "predictions", {}):
        pass
    advice = (
        f"p holds predictions, expected a bundle; name {tmp_path}/p/predictions.npz to evaluate"
    )
    with pytest.raises(StorageError, match=advice):
        open_artifact(tmp_path / "p", "bundle")


def test_a_file_that_is_no_matrix_is_refused(path: Path) -> None:
    message = r"scipy\.sparse\.save_npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=message):
        read_predictions(path, 3, 4)

    np.savez(path, a=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=message):
        read_predictions(path, 3, 4)

    sparse.save_npz(path, sparse.csr_array(np.array([0.0, 1.0, 2.0])))
    with pytest.raises(DataError, match=r"the shape \(3,\), expected rows and columns"):
        read_predictions(path, 3, 4)


def test_a_score_that_is_not_a_number_is_refused(path: Path) -> None:
    values = np.array([1.0, np.nan])
    # Both values are in row 0.
    matrix = sparse.csr_matrix((values, [0, 1], [0, 2, 2, 2]), shape=(3, 4))
    sparse.save_npz(path, matrix)
    with pytest.raises(DataError, match="not a number"):
        read_predictions(path, 3, 4)


def test_a_label_that_comes_twice_in_a_row_is_refused(path: Path) -> None:
    values = np.array([1.0, 2.0])
    matrix = sparse.csr_matrix((values, [1, 1], [0, 0, 2, 2]), shape=(3, 4))
    sparse.save_npz(path, matrix)
    with pytest.raises(DataError, match="twice in row 1"):
        read_predictions(path, 3, 4)


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert list(path.parent.iterdir()) == [path]


def test_no_changed_byte_of_a_file_is_a_traceback(path: Path) -> None:
    content = path.read_bytes()
    refusals = []
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            read_predictions(path, 3, 4)
        except DataError as error:
            refusals.append(str(error))

    assert len(refusals) > 100
    assert not [refusal for refusal in refusals if "\n" in refusal]


def test_an_array_that_claims_more_than_its_file_holds_takes_no_memory(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    # The header of 2^50 numbers, and none of them.
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
