"""Refuses requests that are beyond the limits, or that a model cannot answer."""

from __future__ import annotations

import re
import secrets

from xmcray.errors import ConfigError
from xmcray.retrieval.fused import fixed_parts
from xmcray.serving import schema
from xmcray.serving.problems import ProblemError
from xmcray.serving.search_batch import side_vectors_of
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

# Texts times keys of a request with `explain`: 64 texts and the default of 200 keys pass.
# Each key may be named with its text, and the only thread of searches builds all of them.
MAX_EXPLAINED_KEYS = 64 * 200


def request_id(given: str | None) -> str:
    """The id that a client gave its request, or a new one if that has other characters or is long."""
    if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        return given
    return secrets.token_hex(16)


def check_search(request: schema.SearchRequest, snapshot: Snapshot, config: ServeConfig) -> None:
    """Raises ProblemError unless a model can answer a request within the limits."""
    check_number(request.texts, config)
    _check_answers(request, config)
    _check_memory(request, snapshot)
    _check_filter(request, snapshot)


def check_number(texts: list[str], config: ServeConfig) -> None:
    """Raises ProblemError for more texts than one request may have."""
    if len(texts) > config.max_texts:
        raise ProblemError(
            "invalid",
            f"{len(texts)} texts in one request, expected at most {config.max_texts}",
        )


def check_truncated(truncated: list[bool], config: ServeConfig, name: str = "") -> None:
    """Raises ProblemError for texts that were not read to their end, if the settings say so."""
    if config.long_texts == "refuse" and any(truncated):
        name = name or f"text {truncated.index(True)}"
        raise ProblemError(
            "too-long", f"{name} has more tokens than the model reads; shorten or split it"
        )


def _check_answers(request: schema.SearchRequest, config: ServeConfig) -> None:
    """Raises ProblemError for more answers than one request may ask for."""
    if request.k > config.max_k:
        raise ProblemError("invalid", f"k is {request.k}, expected at most {config.max_k}")
    num_answers = len(request.texts) * request.k
    if num_answers > config.max_answers:
        raise ProblemError(
            "invalid",
            f"{len(request.texts)} texts times k {request.k} is {num_answers:,}, expected at most"
            f" {config.max_answers:,}; send fewer texts at once",
        )


def _check_memory(request: schema.SearchRequest, snapshot: Snapshot) -> None:
    """Raises ProblemError for what a model without memory, probabilities or a mixer lacks."""
    retriever = snapshot.retriever
    needs_memory = request.explain or request.memory is not None
    if needs_memory and not retriever.explains:
        raise ProblemError(
            "invalid",
            "this model has no memory of training queries; leave `explain` and `memory` out",
        )
    if request.memory is not None and retriever.fusion is not None:
        raise ProblemError("invalid", str(fixed_parts()))
    _check_explained(request, snapshot)
    try:
        memory = snapshot.memory_config(request.memory)
        retriever.check_min_probability(request.min_probability, memory)
        retriever.check_vectors(side_vectors_of(request), len(request.texts))
    except ConfigError as error:
        raise ProblemError("invalid", str(error)) from None


def _check_explained(request: schema.SearchRequest, snapshot: Snapshot) -> None:
    """Raises ProblemError for more voters than one request may have named."""
    retriever = snapshot.retriever
    # The keys of a fused bundle are few, and no request changes them.
    if not request.explain or retriever.memory is None or retriever.fusion is not None:
        return
    keys = retriever.memory.config.keys
    if request.memory is not None and request.memory.keys is not None:
        keys = request.memory.keys
    num_keys = len(request.texts) * keys
    if num_keys > MAX_EXPLAINED_KEYS:
        raise ProblemError(
            "invalid",
            f"{len(request.texts)} texts times {keys:,} keys of the memory is {num_keys:,},"
            f" expected at most {MAX_EXPLAINED_KEYS:,} with `explain`; send fewer texts at once",
        )


def _check_filter(request: schema.SearchRequest, snapshot: Snapshot) -> None:
    """Raises ProblemError for an attribute that no label has.

    Otherwise a typing error would look like a filter that no label passes.
    """
    if not request.filter:
        return
    names = snapshot.attributes.names
    unknown = request.filter.attributes.keys() - set(names)
    if unknown:
        present = ", ".join(names) or "none"
        raise ProblemError(
            "invalid", f"no label has an attribute {min(unknown)[:80]!r}; there are: {present}"
        )
