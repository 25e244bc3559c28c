"""Batch prediction: the order of its files, and what becomes of finished chunks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from bundles import write_bundle_of

from xmcray import prediction
from xmcray.errors import DataError
from xmcray.retrieval.batch_predict import BadQueryError, PredictionWork, find_queries

CHUNK = pa.table({"uid": ["q0"]})


def test_chunks_that_a_killed_removal_left_are_not_those_of_the_next_job(tmp_path: Path) -> None:
    with PredictionWork.opened(tmp_path / "out", {"bundle": "a"}) as work:
        work.add(0, CHUNK)
        work.add(1, CHUNK)
    # A removal takes the files away in any order.
    (work.folder / "job.json").unlink()
    work.path(0).unlink()
    with PredictionWork.opened(tmp_path / "out", {"bundle": "b"}) as work:
        assert work.done == set()
        assert not work.path(1).exists()
        work.add(2, CHUNK)
    with PredictionWork.opened(tmp_path / "out", {"bundle": "b"}) as work:
        assert work.done == {2}


def test_numbers_in_the_names_of_files_count_by_value(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"part.{number}.jsonl").write_text('{"text": "a"}')
    names = [file.name for file in find_queries(tmp_path)]
    assert names == [f"part.{number}.jsonl" for number in range(12)]


@pytest.mark.parametrize(
    ("error", "are_kept"),
    [(DataError("the disk cannot be read"), True), (BadQueryError("row 3"), False)],
)
def test_only_a_malformed_row_takes_the_finished_chunks_away(
    error: DataError, are_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"text": "w1x1"}')
    folders = []

    def fail(work: PredictionWork, *_: object) -> None:
        work.add(0, CHUNK)
        folders.append(work.folder)
        raise error

    monkeypatch.setattr(prediction, "_answer_all", fail)
    bundle = write_bundle_of(tmp_path / "bundle", "texts")
    with pytest.raises(DataError, match=str(error)):
        prediction.predict(bundle, queries, tmp_path / "out", 3)
    assert folders[0].exists() == are_kept
