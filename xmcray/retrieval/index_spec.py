"""How to index vectors: the settings, and what "auto" stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.config import check_ranges
from xmcray.errors import ConfigError
from xmcray.retrieval import inverted_lists
from xmcray.retrieval.exact import exact_device_bytes

# Up to so many rows an exhaustive search costs no more than building, tuning and searching lists.
FLAT_ROWS = 50_000
# Of the index of a bundle: answers are for users, hard negatives may miss more.
ANSWER_RECALL = 0.99


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """How to index vectors.

    Attributes:
        factory: "auto", "Flat", or a FAISS factory string such as "IVF4096,PQ64x4fs" or "HNSW32".
        recall: recall@50 by which `nprobe`, `ef_search` and `candidates` are chosen if they are 0.
        nprobe: lists an IVF index visits; 0 chooses it when the index is built.
        candidates: candidates per answer whose exact score is computed; 0 chooses it when the
            index is built.
        ef_search: breadth of a search in an HNSW index; 0 chooses it when the index is built.
        seed: seed of the training sample and of k-means.
    """

    factory: str = "auto"
    recall: float = 0.95
    nprobe: int = 0
    candidates: int = 0
    ef_search: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, "index", recall=(0, 1), nprobe=0, candidates=0, ef_search=0)


def answer_spec(settings: Mapping[str, Any], *, seed: int = 0, factory: str = "auto") -> IndexSpec:
    """How a bundle's vectors are indexed: the defaults, with section `index` of `settings` over them.

    Args:
        settings: by section.
        seed: if `settings` has none.
        factory: if `settings` has none.
    Raises:
        ConfigError: `settings` has something else than settings of an index.
    """
    for name in settings:
        if name != "index":
            raise ConfigError(
                f"an export takes settings of the index alone, found {name!r};"
                " give it to `xmcray train`"
            )
    section = settings.get("index", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"index is {section!r}, expected a section with settings")
    defaults = configs.dump(IndexSpec(factory=factory, recall=ANSWER_RECALL, seed=seed))
    return configs.build(IndexSpec, {**defaults, **section}, "index.")


def resolve_factory(factory: str, rows: int, dim: int) -> str:
    """The factory string that "auto" stands for; any other is returned as it is.

    Many rows get inverted lists of short codes: 4 bits for each pair of numbers, which FAISS scans
    with look-ups in registers (André et al. 2015, "Cache locality is not enough"). They are built
    in a fraction of the time of a graph, and answer one text and many faster than one at the same
    recall (benchmarks/index_recall.py, benchmarks/one_query.py).

    Args:
        factory: a setting.
        rows: vectors of the index.
        dim: width of the vectors.
    """
    if factory != "auto":
        return factory
    lists = num_lists(factory, rows)
    if not lists:
        return "Flat"
    codes = f"PQ{dim // 2}x4fs" if dim % 2 == 0 else "SQfp16"
    return f"IVF{lists},{codes}"


def num_lists(factory: str, rows: int) -> int:
    """Inverted lists of an index, such as 4096 of "IVF4096,PQ64x4fs"; 0 without."""
    if factory == "auto":
        # The power of two next to 2 * sqrt(n).
        return 0 if rows <= FLAT_ROWS else 1 << round(np.log2(2 * rows**0.5))
    match = re.match(r"IVF(\d+)(,|$)", factory)
    return int(match[1]) if match else 0


def device_bytes(factory: str, rows: int, dim: int) -> int:
    """Bytes of a GPU that an index there takes at its largest, without CUDA's own.

    Args:
        factory: "auto" or "Flat".
        rows: rows of the index.
        dim: width of the vectors.
    """
    exact_bytes = exact_device_bytes(rows, dim)
    if not num_lists(factory, rows):
        return exact_bytes
    # If the lists do not find enough, all rows are compared.
    return max(exact_bytes, inverted_lists.device_bytes(rows, dim))
