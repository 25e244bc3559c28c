"""Compares the search of one vector with FAISS and hnswlib: same vectors, same thread, interleaved.

    python benchmarks/one_query.py [--rows 2200 32085 104969 1000000] [--peer-graphs 200000]
    python benchmarks/one_query.py --vectors 8 --peer-graphs 0 --out one_query_8.md

Rows are clustered in few dimensions and differ in length, as those of a classifier do; a query is
noise around a label. Rounds of all sides take turns, so that other processes and the frequency of
the processor disturb all of them alike. Times are CPU milliseconds of the searching thread.

Graphs are searched with the smallest breadth that reaches a recall@10 of 0.95 on other queries;
those of xmcray with the breadths that a recall@50 of 0.99 (as in an export), 0.96 and 0.95 take, at
most 1024, and so are its inverted lists. hnswlib is left out if it is not installed. Indexes of
xmcray are kept in the cache (a graph of 10^6 rows takes 5 CPU minutes). Those of the peers are built
each time, up to `--peer-graphs` rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import data_sets
import faiss
import numpy as np
import torch
from common import new_parser, recall_of, refuse_if_busy, write_table

from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import (
    ANSWER_RECALL,
    FLAT_ROWS,
    IndexSpec,
    num_lists,
    resolve_factory,
)
from xmcray.retrieval.index_tuning import tune

DIM = 256
LATENT_DIM = 64
K = 10
RECALL = 0.95
BREADTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MEASURED = 300  # queries
TUNING = 256  # further queries, by which indexes choose their settings
HEADER = ["rows", "side", "min ms", "median ms", "median / Flat's", "recall@10", "settings"]

Search = Callable[[np.ndarray], np.ndarray]  # from a query [1, D] to ids [1, K]


@dataclass(frozen=True)
class Side:
    """One way to search.

    Attributes:
        name: in the table.
        search: finds the ids of the K nearest rows of one query.
        settings: in the table.
        row_of_id: int64, the row of each id; None if ids are rows.
    """

    name: str
    search: Search
    settings: str = ""
    row_of_id: np.ndarray | None = None


def main() -> None:
    parser = new_parser(__doc__, out="one_query.md", anyway=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[2200, 32_085, 104_969, 10**6])
    parser.add_argument("--peer-graphs", type=int, default=200_000, help="at most so many rows")
    parser.add_argument("--rounds", type=int, default=1, help="through all queries")
    parser.add_argument("--vectors", type=int, default=1, help="of one search")
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    table = []
    for num_rows in options.rows:
        rows, queries = rows_and_queries(num_rows)
        table += measure(rows, queries, options)
    notes = [
        f"D = {DIM}, k = {K}, one thread; CPU time of a search of {options.vectors} vectors, over"
        f" {MEASURED} queries",
        f"peers' graphs are built up to {options.peer_graphs:,} rows",
        load,
    ]
    searched = "one query" if options.vectors == 1 else f"{options.vectors} queries"
    write_table(options.out, f"The search of {searched}", HEADER, table, notes)


def rows_and_queries(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32 [num_rows, DIM] and queries float32 [800, DIM]."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32)

    num_topics = max(50, num_rows // 100)
    spread = normal(LATENT_DIM, DIM) / LATENT_DIM**0.5
    # Few topics have many labels.
    mass = generator.pareto(1.2, num_topics) + 0.1
    topics = normal(num_topics, LATENT_DIM)
    topic_of_row = generator.choice(num_topics, size=num_rows, p=mass / mass.sum())
    latent = topics[topic_of_row] + 0.6 * normal(num_rows, LATENT_DIM)
    rows = np.empty((num_rows, DIM), np.float32)
    block = 100_000
    for start in range(0, num_rows, block):
        block_latent = latent[start : start + block]
        block_rows = block_latent @ spread + 0.3 * normal(len(block_latent), DIM)
        block_rows /= np.linalg.norm(block_rows, axis=1, keepdims=True)
        lengths = generator.lognormal(0, 0.15, (len(block_rows), 1))
        rows[start : start + block] = block_rows * lengths.astype(np.float32)
    num_queries = 800
    labels = generator.integers(num_rows, size=num_queries)
    query_latent = latent[labels] + 0.6 * normal(num_queries, LATENT_DIM)
    queries = query_latent @ spread + 0.3 * normal(num_queries, DIM)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    return rows, queries.astype(np.float32)


def measure(rows: np.ndarray, queries: np.ndarray, options: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table for one set of vectors."""
    measured = queries[:MEASURED]
    tuning = queries[-TUNING:]
    exact_ids = exact_search(rows, measured, K).ids
    sides = [*flat_sides(rows), *index_sides(rows, tuning)]
    if len(rows) <= options.peer_graphs:
        sides += peer_graphs(rows, tuning)
    starts = options.rounds * list(range(0, MEASURED - options.vectors + 1, options.vectors))
    times = np.empty((len(sides), len(starts)))
    recall = np.zeros(len(sides))
    for turn, start in enumerate(starts):
        chunk = slice(start, start + options.vectors)
        for number, side in enumerate(sides):
            started = time.thread_time()
            ids = side.search(measured[chunk])
            times[number, turn] = time.thread_time() - started
            found_rows = ids if side.row_of_id is None else side.row_of_id[ids]
            recall[number] += recall_of(found_rows, exact_ids[chunk], K) / len(starts)
    medians = np.median(times, axis=1)
    table = []
    for number, side in enumerate(sides):
        least_ms = 1000 * times[number].min()
        median_ms = 1000 * medians[number]
        ratio = f"{medians[number] / medians[0]:.2f}"
        row = [len(rows), side.name, least_ms, median_ms, ratio, recall[number], side.settings]
        table.append(row)
        print(*table[-1], flush=True)
    return table


def flat_sides(rows: np.ndarray) -> Iterator[Side]:
    """Searches of all rows; FAISS's comes first."""
    flat = faiss.IndexFlatIP(rows.shape[1])
    flat.add(rows)

    def faiss_search(query: np.ndarray) -> np.ndarray:
        _, ids = flat.search(query, K)
        return ids

    yield Side("FAISS Flat", faiss_search)
    index = Index(torch.from_numpy(rows), None)
    # Answers have the ids of labels, which are in random order.
    label_ids = np.random.default_rng(0).permutation(len(rows))
    yield Side(
        "xmcray, exact",
        lambda query: index.search(query, K, label_ids).ids,
        row_of_id=np.argsort(label_ids),
    )


def index_sides(rows: np.ndarray, tuning: np.ndarray) -> Iterator[Side]:
    """A graph, lists of 16-bit numbers and those of "auto", with an export's recall and lower ones."""
    if len(rows) <= FLAT_ROWS:
        return
    former = f"IVF{num_lists('auto', len(rows))},SQfp16"
    for factory in ("HNSW32", former, resolve_factory("auto", *rows.shape)):
        path = data_sets.CACHE / "one_query" / f"{len(rows)}-{factory}.faiss"
        if not path.is_file():
            index = build_index(rows, IndexSpec(factory=factory), queries=tuning)
            path.parent.mkdir(parents=True, exist_ok=True)
            index.save(path)
        for recall in (ANSWER_RECALL, 0.96, RECALL):
            index = Index.load(path, torch.from_numpy(rows))
            tune(index, tuning, IndexSpec(recall=recall))
            effort = f"nprobe {index.nprobe}" if index.nprobe else f"breadth {index.breadth}"
            settings = f"{effort} by recall@50 {recall}"
            yield Side(f"xmcray, {factory}", searches_in(index), settings)


def searches_in(index: Index) -> Search:
    """The search of an index, for a loop that makes several."""
    return lambda query: index.search(query, K).ids


def peer_graphs(rows: np.ndarray, tuning: np.ndarray) -> Iterator[Side]:
    """HNSW of FAISS and of hnswlib, as these libraries build it."""
    exact_ids = exact_search(rows, tuning, K).ids
    graph = faiss.IndexHNSWFlat(rows.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    graph.add(rows)

    def faiss_search(query: np.ndarray, breadth: int) -> np.ndarray:
        graph.hnsw.efSearch = breadth
        _, ids = graph.search(query, K)
        return ids

    yield with_breadth("FAISS HNSW32", faiss_search, tuning, exact_ids)
    if importlib.util.find_spec("hnswlib") is None:
        return
    import hnswlib

    other = hnswlib.Index("ip", rows.shape[1])
    other.init_index(len(rows), M=32, ef_construction=40)
    other.add_items(rows, num_threads=1)

    def hnswlib_search(query: np.ndarray, breadth: int) -> np.ndarray:
        other.set_ef(breadth)
        ids, _ = other.knn_query(query, K, num_threads=1)
        return ids.astype(np.int64)

    yield with_breadth("hnswlib, M 32", hnswlib_search, tuning, exact_ids)


def with_breadth(
    name: str,
    search: Callable[[np.ndarray, int], np.ndarray],
    tuning: np.ndarray,
    exact_ids: Sequence[np.ndarray],
) -> Side:
    """The side with the smallest breadth that reaches RECALL."""
    for breadth in BREADTHS:
        ids = search(tuning, breadth)
        if recall_of(ids, exact_ids, K) >= RECALL:
            break
    return Side(name, lambda query: search(query, breadth), f"ef {breadth}")


if __name__ == "__main__":
    main()
