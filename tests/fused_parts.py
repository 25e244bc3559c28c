"""What tests of fused bundles are made of: a corpus, two members and the weights of all parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bundles import write_memory_of
from corpora import planted_corpus

from xmcray.data.corpus import Corpus
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.retriever import Retriever

NUM_LABELS = 47
FIRST = MemberConfig(
    name="first",
    labels=1.0,
    memory=0.5,
    label_temperature=0.2,
)
SECOND = MemberConfig(
    name="second",
    labels=0.5,
    memory=0.25,
    memory_temperature=0.1,
)
CONFIG = PartsConfig(
    members=(FIRST, SECOND),
    words=0.75,
    texts=0.25,
    memory_keys=6,
    word_keys=4,
)
# The only member of a bundle has no name.
UNNAMED = dataclasses.replace(FIRST, name="")
ALONE = dataclasses.replace(CONFIG, members=(UNNAMED,))


def corpus_of_parts(folder: Path) -> Corpus:
    """The corpus of all members."""
    return planted_corpus(folder, num_queries=301, num_labels=NUM_LABELS)


def two_sources(corpus: Corpus, folder: Path) -> list[Path]:
    """Bundles of two untrained encoders."""
    first = write_memory_of(corpus, folder / "first", dim=24, seed=0)
    second = write_memory_of(corpus, folder / "second", dim=16, seed=1)
    return [first, second]


def config_of(retriever: Retriever) -> PartsConfig:
    assert retriever.fusion is not None
    return retriever.fusion.config
