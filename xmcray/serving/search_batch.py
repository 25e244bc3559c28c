"""One search for a batch of requests that ask for the same but their texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.errors import ConfigError
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import ALL_SHARDS, SearchScope, ShardSubset
from xmcray.serving import schema
from xmcray.serving.snapshot import EncodedTexts, Snapshot
from xmcray.types import Float32Array

MAX_BATCH_TEXTS = 64  # of several requests that are searched at once


@dataclass(frozen=True, slots=True)
class SearchHits:
    """What a search of some texts found.

    Attributes:
        neighbours: the rows nearest to each text.
        truncated: for each text, whether it was too long to be read to its end.
    """

    neighbours: Neighbours
    truncated: list[bool]


@dataclass(frozen=True, slots=True)
class PendingSearch:
    """A search that waits for the thread of searches.

    Attributes:
        snapshot: where to search.
        request: the request.
        k: labels per text, at most as many as there are.
        query_BD: vectors of the texts; None if they are to be encoded with the search.
    """

    snapshot: Snapshot
    request: schema.SearchRequest
    k: int
    query_BD: Float32Array | None = None

    @property
    def batch_key(self) -> tuple[Snapshot, int, bool, str]:
        """Equal for searches that can be one batch: everything but the queries and the deadline."""
        options = self.request.model_dump_json(exclude={"texts", "vectors", "timeout_ms"})
        # In the composed mode, texts with side vectors are encoded with the search, others before.
        is_encoded = self.query_BD is not None
        return self.snapshot, self.k, is_encoded, options

    @property
    def num_answers(self) -> int:
        """Number of labels in the whole answer, at most."""
        return len(self.request.texts) * self.k


def find_hits(
    searches: Sequence[PendingSearch],
    max_tokens: int,
    subset: ShardSubset = ALL_SHARDS,
) -> list[SearchHits]:
    """Searches for a batch of requests with equal keys; texts without vectors are encoded here.

    Args:
        searches: the batch.
        max_tokens: tokens that are read of a text.
        subset: the shards to search.
    Returns:
        The hits of each request.
    """
    # All but the texts is equal in all of them.
    snapshot = searches[0].snapshot
    request = searches[0].request
    vectors = [search.query_BD for search in searches if search.query_BD is not None]
    if vectors:
        query_BD = np.concatenate(vectors)
        encoded = EncodedTexts(query_BD, [False] * len(query_BD))
    else:
        texts: list[str] = []
        for search in searches:
            texts += search.request.texts
        encoded = snapshot.encode(texts, max_tokens, _side_vectors(searches))
    # One search for the whole batch: most of its time does not depend on the number of texts.
    neighbours = snapshot.view(request.filter).find_neighbours(
        encoded.query_BD,
        searches[0].k,
        memory=snapshot.memory_config(request.memory),
        scope=SearchScope(subset=subset),
    )
    results = []
    start = 0
    for search in searches:
        # Each request gets back the rows of its own texts, in the order of the concatenation.
        stop = start + len(search.request.texts)
        truncated = encoded.truncated[start:stop]
        results.append(SearchHits(neighbours.slice(start, stop), truncated))
        start = stop
    return results


def _side_vectors(searches: Sequence[PendingSearch]) -> Float32Array | None:
    """float32 [texts, W] of a batch, zeros where a request has none; None if the model uses none."""
    width = searches[0].snapshot.retriever.side_width
    if not width:
        return None
    all_vectors = []
    for search in searches:
        vectors = side_vectors_of(search.request)
        if vectors is None:
            vectors = np.zeros((len(search.request.texts), width), np.float32)
        all_vectors.append(vectors)
    return np.concatenate(all_vectors)


def side_vectors_of(request: schema.SearchRequest) -> Float32Array | None:
    """float32 [texts, W], the side vectors of a request; None if it has none.

    Raises:
        ConfigError: they differ in width.
    """
    if request.vectors is None:
        return None
    widths = {len(vector) for vector in request.vectors}
    if len(widths) > 1:
        raise ConfigError(
            f"found side vectors of {min(widths)} and of {max(widths)} numbers, expected one width;"
            " send those that the model was trained with"
        )
    # What no float32 holds becomes infinity, which is refused where vectors are checked.
    with np.errstate(over="ignore"):
        vectors: Float32Array = np.array(request.vectors, np.float32)
    return vectors
