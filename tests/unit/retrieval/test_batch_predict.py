"""Finished chunks of a batch prediction are used by their own job alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from xmcray.retrieval.batch_predict import PredictionWork

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
