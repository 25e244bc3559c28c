"""The training queries that the run of a bundle held out, by which its answers are tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray import draws
from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.relevance import Relevance
from xmcray.errors import ConfigError, DataError
from xmcray.retrieval.memory import RememberedQueries, rows_of_memory
from xmcray.retrieval.retriever import Retriever
from xmcray.types import Int64Array, find_sorted


def held_out_by(bundle: str, about: Mapping[str, Any], corpus: Corpus) -> TrainingData:
    """The training split as the run of a bundle saw it, with the same queries held out.

    Args:
        bundle: its path, for messages.
        about: `about` of its manifest.
        corpus: the one that it was made from.
    Returns:
        Of a bundle with several members: the queries that all their runs held out.
    Raises:
        ConfigError: its run held nothing out.
        DataError: the bundle was made from another corpus.
    """
    members = about.get("members", {})
    # Members may have tokenizers of their own. `fuse` has compared the texts of their corpora.
    corpora = {each.get("corpus_sha256", corpus.sha256) for each in (about, *members.values())}
    if corpus.sha256 not in corpora:
        raise DataError(
            f"bundle {bundle} was made from another corpus than {corpus.path};"
            " name that one with --data"
        )
    data = _held_out_by_run(bundle, about, corpus)
    for name, member in members.items():
        other = _held_out_by_run(f"{bundle}, member {name}", member, corpus)
        both = np.intersect1d(data.validation_rows, other.validation_rows)
        data = data.with_validation_rows(both)
    if not len(data.validation_rows):
        raise ConfigError(
            f"no query with a positive is held out of {corpus.path} by bundle {bundle}; raise"
            " data.validation, and train all members of a bundle with the same data.seed"
        )
    return data


def _held_out_by_run(bundle: str, about: Mapping[str, Any], corpus: Corpus) -> TrainingData:
    """As `held_out_by`, of one run; there may be no rows."""
    run_settings = about.get("config", {})
    config = configs.build(DataConfig, run_settings.get("data") or {}, "data.")
    if not config.validation:
        raise ConfigError(
            f"bundle {bundle} was trained on all training queries (data.validation=0), or its encoder"
            " on another corpus, so none is left to choose by; name RUN/selection of its run if that"
            " was made with --refit, or train with data.validation=0.05"
        )
    return TrainingData(corpus, config)


def some_rows(rows: Int64Array, count: int, seed: int) -> Int64Array:
    """At most `count` of some rows, ascending: a random subset, because a file may be sorted.

    Args:
        rows: ascending.
        count: largest number of them.
        seed: of the draw.
    """
    places = draws.generator(seed, "measured", 0).permutation(len(rows))[:count]
    return rows[np.sort(places)]


def relevance_of(about: Mapping[str, Any], corpus: Corpus) -> Relevance | None:
    """The relevance by which the training queries of a bundle vote; None if it is ignored.

    Args:
        about: `about` of its manifest.
        corpus: the one whose training queries vote.
    Raises:
        DataError: the corpus has numbers that cannot be weights.
    """
    data = about.get("config", {}).get("data") or {}
    if data.get("relevance", "ignore") == "ignore":
        return None
    relevance = Relevance.read(corpus.split("train"))
    if relevance is not None and not relevance.is_graded:
        raise DataError(
            f"{corpus.path} has relevance below 0, or 0 alone, by which no query can vote: correct the"
            " raw files, or use an encoder that was trained with data.relevance=ignore"
        )
    return relevance


def without_voters(retriever: Retriever, corpus: Corpus, rows: Int64Array) -> Retriever:
    """A view in which some training queries do not vote.

    Args:
        retriever: any bundle.
        corpus: its corpus.
        rows: rows of the training split, each of which the memory holds.
    Raises:
        DataError: the memory was made of another corpus.
    """
    fusion = retriever.fusion
    queries: RememberedQueries | None = None
    if fusion is not None:
        queries = fusion.queries
    elif retriever.memory is not None:
        queries = retriever.memory.queries
    if queries is None:
        return retriever
    memory_rows = rows_of_memory(queries, corpus)
    hidden, is_remembered = find_sorted(memory_rows, rows)
    assert is_remembered.all()
    queries = dataclasses.replace(queries, hidden=hidden)
    members: list[Retriever] = []
    for member in (retriever, *retriever.others):
        if member.memory is not None:
            memory = dataclasses.replace(member.memory, queries=queries)
            member = dataclasses.replace(member, memory=memory)
        members.append(member)
    if fusion is not None:
        fusion = dataclasses.replace(fusion, queries=queries)
    return dataclasses.replace(members[0], fusion=fusion, others=tuple(members[1:]))
