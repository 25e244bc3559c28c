"""Recall@50 and time (build and search) of the index of hard negatives against a search of all rows, on one thread.

    python benchmarks/index_recall.py --rows 100000 1000000 --dim 64 256 --queries 100000
    python benchmarks/index_recall.py --file rows.safetensors     # tensors "rows" and, optionally, "queries"

Without a file the rows are those of a classifier that is trained on the spot, 40 positives per label on average, and
kept in the cache (at 10^6 rows the training takes a quarter of an hour). How many lists must be visited depends on the
rows: few once labels are well apart, half of them on random vectors, where nothing beats a full search. The index is
tuned on 256 queries that are not measured, as the negative pool tunes it.
Times are CPU seconds, which other processes on the machine disturb less than wall time. The full search is timed on a
part of the queries and scaled, and is FAISS's own, the faster of the two we have.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import data_sets
import faiss
import numpy as np
import torch
from common import cpu_timed, new_parser, recall_of, refuse_if_busy, write_table
from safetensors.numpy import load_file, save_file

from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, resolve_factory
from xmcray.retrieval.index_tuning import TUNE_QUERIES

K = 50
FLAT_QUERIES = 2000
HEADER = [
    "rows",
    "D",
    "queries",
    "index",
    "nprobe",
    "candidates",
    "recall@50",
    "build s",
    "search s",
    "flat s",
    "ratio",
]


def main() -> None:
    parser = new_parser(__doc__, out="index_recall.md", anyway=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--queries", type=int, default=100_000)
    parser.add_argument(
        "--positives", type=int, default=40, help="of the training, per label on average"
    )
    parser.add_argument("--file", type=Path, help="measure these rows instead")
    parser.add_argument("--factory", default="auto")
    parser.add_argument(
        "--stand-ins", action="store_true", help="tune on noisy rows, as an export does"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if arguments.file:
        tensors = load_file(arguments.file)
        rows = np.asarray(tensors["rows"], np.float32)
        queries = np.asarray(
            tensors.get("queries", rows[:: max(1, len(rows) // arguments.queries)]), np.float32
        )
        measured = [measure(rows, queries[: arguments.queries + TUNE_QUERIES], arguments)]
        origin = f"rows and queries of {arguments.file.name}"
    else:
        sizes = [(rows, dim) for rows in arguments.rows for dim in arguments.dim]
        measured = [
            measure(*kept(rows, dim, arguments.queries, arguments.positives), arguments)
            for rows, dim in sizes
        ]
        origin = (
            f"rows of a classifier, {arguments.positives} positives per label (see the program)"
        )
    tuned = "noisy rows" if arguments.stand_ins else f"{TUNE_QUERIES} other queries"
    notes = [
        f"{origin}; the index was tuned on {tuned}; one thread; CPU seconds",
        f"ratio: flat search over build and search together; flat timed on {FLAT_QUERIES} queries and scaled",
        load,
    ]
    write_table(arguments.out, "Recall and time of the index", HEADER, measured, notes)


def measure(rows: np.ndarray, queries: np.ndarray, arguments: argparse.Namespace) -> list[Any]:
    sample = queries[-TUNE_QUERIES:]
    queries = queries[:-TUNE_QUERIES]
    few = queries[:FLAT_QUERIES]
    exact_ids, flat_s = cpu_timed(lambda: full_search(rows, few))
    flat_s *= len(queries) / len(few)
    chosen_by = None if arguments.stand_ins else sample
    name = resolve_factory(arguments.factory, *rows.shape)
    spec = IndexSpec(factory=name)
    index, build_s = cpu_timed(lambda: build_index(rows, spec, queries=chosen_by))
    top, search_s = cpu_timed(lambda: index.search(queries, K))
    # The exact search answers the first queries alone.
    recall = recall_of(top.ids[: len(few)], exact_ids, K)
    ratio = f"{flat_s / (build_s + search_s):.1f} x"
    tuned = [name, index.nprobe, index.candidates]
    return [*rows.shape, len(queries), *tuned, recall, build_s, search_s, flat_s, ratio]


def full_search(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    flat = faiss.IndexFlatIP(rows.shape[1])
    flat.add(rows)
    return flat.search(queries, K)[1]


def kept(rows: int, dim: int, queries: int, positives: int) -> tuple[np.ndarray, np.ndarray]:
    """What `trained` gives, from the cache if it was trained before."""
    path = data_sets.CACHE / "index" / f"{rows}x{dim}-{queries}-{positives}.safetensors"
    if not path.is_file():
        made = trained(rows, dim, queries + TUNE_QUERIES, positives)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        save_file(dict(zip(("rows", "queries"), made, strict=True)), aside)
        aside.replace(path)
    arrays = load_file(path)
    return arrays["rows"], arrays["queries"]


def trained(
    num_labels: int, dim: int, num_queries: int, positives: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32 [L, D] of a one-vs-all classifier and queries float32 [Q, D] of the kind it was trained on.

    Labels lie around 100 times fewer topics and are drawn with frequencies rank^-0.6; a query is its label and noise.
    Binary cross-entropy with a pool of uniform negatives, row-wise Adagrad.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(number: int) -> torch.Tensor:
        return torch.randn(number, dim, generator=generator)

    topic = normal(max(50, num_labels // 100))
    label_LD = topic[torch.randint(len(topic), (num_labels,), generator=generator)] + 0.6 * normal(
        num_labels
    )
    label_LD = torch.nn.functional.normalize(label_LD, dim=1)
    rank = torch.randperm(num_labels, generator=generator) + 1
    mass_L = (rank.double() ** -0.6).cumsum(0)

    def draw(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        uniform = torch.rand(number, generator=generator, dtype=torch.float64) * mass_L[-1]
        ids = torch.searchsorted(mass_L, uniform).clamp_(max=num_labels - 1)
        return 4 * torch.nn.functional.normalize(
            label_LD[ids] + 0.6 * dim**-0.5 * normal(number), dim=1
        ), ids

    row_LD = torch.zeros(num_labels, dim)
    square_L1 = torch.full((num_labels, 1), 1e-3)
    batch = 8192 if num_labels > 200_000 else 1024
    for _ in range(positives * num_labels // batch):
        query_BD, label_B = draw(batch)
        pool_C = torch.randint(num_labels, (2048,), generator=generator)
        positive_B = torch.sigmoid((query_BD * row_LD[label_B]).sum(dim=1) - 6) - 1
        negative_BC = torch.sigmoid(query_BD @ row_LD[pool_C].T - 6).masked_fill_(
            pool_C == label_B[:, None], 0
        )
        for ids, gradient in (
            (label_B, positive_B[:, None] * query_BD),
            (pool_C, negative_BC.T @ query_BD),
        ):
            touched, place = torch.unique(ids, return_inverse=True)
            sum_UD = torch.zeros(len(touched), dim).index_add_(0, place, gradient)
            square_L1[touched] += sum_UD.square().mean(dim=1, keepdim=True)
            row_LD[touched] -= 0.2 * sum_UD / square_L1[touched].sqrt()
    return row_LD.numpy(), draw(num_queries)[0].numpy()


if __name__ == "__main__":
    main()
