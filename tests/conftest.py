"""How `make test` shares the tests out over two processes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

OF_ONE_CLUSTER, WITH_OWN_HEAD = "tests/on_ray/", "test_jobs.py"


class _Shares(LoadScopeScheduling):
    """The tests of the one Ray cluster stay in one process; others with those of their file, whose fixtures they share.

    Marks for xdist's own groups do not reach it from pytest 9.2 on.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return (
            OF_ONE_CLUSTER
            if file.startswith(OF_ONE_CLUSTER) and not file.endswith(WITH_OWN_HEAD)
            else file
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Called in the process that hands the tests out."""
    return _Shares(config, log)
