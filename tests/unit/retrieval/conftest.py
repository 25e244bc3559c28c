"""Bundles of each kind, for the tests of labels that join and leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bundles import write_bundle_of, write_fused, write_memory


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bundles by kind, each made once."""
    folder = tmp_path_factory.mktemp("labels")
    made: dict[str, Path] = {}

    def bundle(kind: str) -> Path:
        if kind not in made:
            if kind == "memory":
                made[kind] = write_memory(folder)
            elif kind == "fused":
                made[kind] = write_fused(bundle("memory"))
            else:
                made[kind] = write_bundle_of(folder / kind, kind)
        return made[kind]

    return bundle
