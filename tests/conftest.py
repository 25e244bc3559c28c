"""How the tests are shared out over the processes of `make test`."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the one Ray cluster stay together, others with those of their file, whose fixtures they share."""
    for item in items:
        with_cluster = "cluster" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("cluster" if with_cluster else str(item.path)))
