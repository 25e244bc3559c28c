"""What a rank publishes is what it had at that step, however late it is written."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from refreshers import few_queries

from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.publisher import Publisher
from xmcray.negatives.refresh import RefreshSpec, run_version
from xmcray.negatives.version_folder import QueryBlock


def block_of(ids: list[int]) -> QueryBlock:
    vectors = np.array(ids, np.float32)[:, None] * [1.0, 2.0]
    return QueryBlock(np.array(ids), vectors.astype(np.float32), np.zeros(len(ids), np.int64))


def test_later_steps_do_not_change_what_was_published(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    rows = torch.arange(6.0).view(3, 2)
    publisher = Publisher(ledger, lambda: rows, first_label=5)
    ledger.version(0).write_rows(0, np.zeros((5, 2), np.float32))  # of another rank
    written = threading.Event()

    def wait() -> list[Path]:
        written.wait()
        return []

    publisher.writer.put(wait)
    publisher.restore(block_of([4, 2]))
    publisher.publish(0, step=9)
    rows += 100
    assert not ledger.version(0).published
    written.set()
    publisher.writer.drain()
    folder = ledger.version(0)
    assert folder.published
    assert folder.read_rows(5, 8).tolist() == [[0, 1], [2, 3], [4, 5]]
    (name,) = folder.query_blocks
    assert folder.read_queries(name).ids.tolist() == [4, 2]
    assert publisher.pending is None
    config = NegativesConfig(hard=1, start_epoch=2, index="Flat", recall_queries=0)
    run_version(folder, few_queries(5, num_labels=8), RefreshSpec(1, config, 0))
    assert folder.shortlist().snapshot_step == 10, "steps 0 to 9 are ten steps"
    publisher.writer.close()


def test_an_error_of_the_writer_reaches_the_trainer(tmp_path: Path) -> None:
    publisher = Publisher(Ledger(tmp_path), None, 0)

    def fail() -> list[Path]:
        raise OSError("disk full")

    publisher.writer.put(fail)
    with pytest.raises(OSError, match="disk full"):
        publisher.writer.drain()
    with pytest.raises(OSError, match="disk full"):
        publisher.writer.put(list)
    publisher.writer.close()
