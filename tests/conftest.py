"""How `make test` shares the tests out over processes, tests that are coroutines, and fixtures."""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
from shell import Shell
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xmcray.data.corpus import Corpus

OF_ONE_CLUSTER = "tests/on_ray/"
WITH_OWN_CLUSTERS = ("test_jobs.py", "test_placement.py", "test_seventh_method.py")


class _Shares(LoadScopeScheduling):
    """The tests of the one Ray cluster stay in one process, all others with those of their file.

    Files that start clusters of their own stay in one process, too: two cores are too few for
    several clusters that start at once.

    Marks for xdist's own groups do not reach it from pytest 9.2 on.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if not file.startswith(OF_ONE_CLUSTER):
            return file
        return "own clusters" if file.endswith(WITH_OWN_CLUSTERS) else OF_ONE_CLUSTER

    def remove_node(self, node: Any) -> str | None:
        """Takes the test that ended its process as done. It would end the next process, too."""
        units = self.assigned_work[node].values()
        pending = [(unit, test) for unit in units for test, done in unit.items() if not done]
        if not pending:
            return super().remove_node(node)
        unit, crashed = pending[0]
        unit[crashed] = True
        super().remove_node(node)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Leaves out a process that has just been started and knows of no tests yet."""
        if node in self.registered_collections:
            super()._reschedule(node)


@pytest.fixture(scope="session", autouse=True)
def _files_are_left_to_the_page_cache() -> Iterator[None]:
    """Replaces `os.fsync`, which takes milliseconds: tests kill processes, but cut no power.

    A descriptor that is not open is still an error.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A planted corpus, for modules that need no other."""
    from corpora import planted_corpus  # here, because torch is slow to import

    return planted_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine; pytest runs all others."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Called in the process that hands the tests out."""
    return _Shares(config, log)
