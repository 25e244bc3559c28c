"""What index actors do with the folder of a version, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmcray.data.batches import DataConfig
from xmcray.data.node_copy import CorpusSource
from xmcray.errors import StorageError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.pool import IndexShard
from xmcray.negatives.refresh import RefreshSpec


def index_shard() -> IndexShard:
    spec = RefreshSpec(1, NegativesConfig(hard=1, start_epoch=2), 0)
    return IndexShard(0, 4, CorpusSource("corpus", ""), DataConfig(), spec, nice=0)


def test_an_actor_on_a_node_without_the_run_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "negatives" / "v00000-0000"
    with pytest.raises(StorageError, match=r"negatives is not on .* folder that all nodes share"):
        index_shard().search(str(folder))


def test_an_actor_leaves_a_withdrawn_version_alone(tmp_path: Path) -> None:
    folder = Ledger(tmp_path).version(0)
    folder.path.rmdir()
    index_shard().search(str(folder.path))
    assert not folder.path.exists()
