"""Two bundles to swap between, for the tests of coordinators and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundles import write_bundle_of

from xmcray.retrieval.labels import remove_labels


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("bundles") / "b", "texts")


@pytest.fixture(scope="module")
def other(bundle: Path) -> Path:
    """The same without one label."""
    path = bundle.with_name("other")
    remove_labels(bundle, ["u3"], path)
    return path
