"""Hard negatives as a GPU searches them, on this CPU: inverted lists of torch alone against a search of all rows.

    python benchmarks/device_lists.py

Rows lie around 2,000 centres, with lengths that differ, or point anywhere, where lists do not pay. Queries are rows with
noise; the index is tuned on 256 others. Times are CPU seconds of one thread. On a GPU products are faster than reading
and writing scores, so what counts there is the share of rows that are compared.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from common import cpu_timed, recall_of, refuse_if_busy, write_table

from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index_building import index_of_lists
from xmcray.retrieval.index_spec import IndexSpec, num_lists
from xmcray.retrieval.index_tuning import TUNE_QUERIES

K = 50
HEADER = ["rows", "lists", "visited", "recall@50", "build s", "search s", "all rows s", "ratio"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--out", default="device_lists.md")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(1)
    measured = [
        measure("around centres", 0.6, arguments),
        measure("wide around centres", 1.0, arguments),
        measure("anywhere", None, arguments),
    ]
    size = f"{arguments.rows:,} x {arguments.dim} rows, {arguments.queries:,} queries, one thread; no GPU was there"
    notes = [size, "ratio: comparing all rows over build and search together", load]
    write_table(arguments.out, "Inverted lists of torch", HEADER, measured, notes)


def measure(name: str, noise: float | None, arguments: argparse.Namespace) -> list[Any]:
    rows, queries = rows_and_queries(noise, arguments)
    sample = queries[-TUNE_QUERIES:]
    queries = queries[:-TUNE_QUERIES]
    exact, exact_s = cpu_timed(lambda: exact_search(rows, queries, K))
    cpu = torch.device("cpu")
    index, build_s = cpu_timed(lambda: index_of_lists(rows, IndexSpec(), cpu, sample))
    approximate, search_s = cpu_timed(lambda: index.search(queries, K))
    recall = recall_of(approximate.ids, exact.ids, K)
    visited: object = "all rows" if index.is_exact else index.nprobe
    lists = num_lists("auto", len(rows))
    ratio = f"{exact_s / (build_s + search_s):.1f} x"
    return [name, lists, visited, recall, build_s, search_s, exact_s, ratio]


def rows_and_queries(
    noise: float | None, arguments: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32 [L, D] and queries float32 [Q, D].

    Args:
        noise: how far rows lie from their centres; None for rows without centres.
        arguments: of the command line.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((arguments.rows, arguments.dim), np.float32)
    if noise is not None:
        centres = random.standard_normal((2000, arguments.dim), np.float32)
        centre_of_row = random.integers(len(centres), size=len(rows))
        rows = centres[centre_of_row] + np.float32(noise) * rows
        lengths = random.lognormal(0, 0.3, (len(rows), 1))
        rows *= lengths.astype(np.float32)
    row_of_query = random.integers(len(rows), size=arguments.queries + TUNE_QUERIES)
    queries = rows[row_of_query]
    queries += 0.5 * random.standard_normal(queries.shape, np.float32)
    return rows, queries


if __name__ == "__main__":
    main()
