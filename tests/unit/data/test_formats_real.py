"""The LF reader on real sets, where a checkout has them beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmcray.data.formats import BadRow, detect

DATA = Path(__file__).parents[3] / "../shared/data"


@pytest.mark.skipif(
    not DATA.is_dir(), reason="the real data sets are not beside this checkout (../shared/data)"
)
@pytest.mark.parametrize(
    ("name", "labels", "test", "pairs"),
    [("cdnjs-keywords", 2320, 819, 0), ("wordnet-hypernyms", 19032, 17101, 3768)],
)
def test_real_set_has_the_published_counts(name: str, labels: int, test: int, pairs: int) -> None:
    bad: list[BadRow] = []
    source = detect(DATA / name)
    assert (source.format, source.splits) == ("lf", ("train", "test"))
    assert sum(1 for _ in source.labels(bad.append)) == labels
    assert sum(1 for _ in source.queries("test", labels, bad.append)) == test
    assert len(source.filters("test")) == pairs
    assert bad == []
