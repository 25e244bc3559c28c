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
import itertools
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
# Of the training of the rows.
POOL = 2048
LR = 0.2
OFFSET = -6.0  # of all logits
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
    measured = []
    if arguments.file:
        rows, queries = read_vectors(arguments.file, arguments.queries)
        measured.append(measure(rows, queries, arguments))
        origin = f"rows and queries of {arguments.file.name}"
    else:
        for num_rows, dim in itertools.product(arguments.rows, arguments.dim):
            rows, queries = cached(num_rows, dim, arguments.queries, arguments.positives)
            measured.append(measure(rows, queries, arguments))
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
    """One row of the table: the index against a search of all rows."""
    tuning = queries[-TUNE_QUERIES:]
    measured = queries[:-TUNE_QUERIES]
    # The full search answers the first queries alone, and the time of searching is scaled to all.
    first = measured[:FLAT_QUERIES]
    flat, add_s = cpu_timed(lambda: flat_index(rows))
    (_, exact_ids), first_s = cpu_timed(lambda: flat.search(first, K))
    flat_s = add_s + first_s * len(measured) / len(first)
    name = resolve_factory(arguments.factory, *rows.shape)
    spec = IndexSpec(factory=name)
    # Without queries the index is tuned on noisy rows.
    tuned_by = None if arguments.stand_ins else tuning
    index, build_s = cpu_timed(lambda: build_index(rows, spec, queries=tuned_by))
    top, search_s = cpu_timed(lambda: index.search(measured, K))
    recall = recall_of(top.ids[: len(first)], exact_ids, K)
    ratio = f"{flat_s / (build_s + search_s):.1f} x"
    settings = [name, index.nprobe, index.candidates]
    return [*rows.shape, len(measured), *settings, recall, build_s, search_s, flat_s, ratio]


def flat_index(rows: np.ndarray) -> faiss.IndexFlatIP:
    """FAISS's search of all rows."""
    flat = faiss.IndexFlatIP(rows.shape[1])
    flat.add(rows)
    return flat


def read_vectors(path: Path, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and queries of a file; without queries some of the rows are searched."""
    tensors = load_file(path)
    rows = np.asarray(tensors["rows"], np.float32)
    every = max(1, len(rows) // num_queries)
    queries = np.asarray(tensors.get("queries", rows[::every]), np.float32)
    return rows, queries[: num_queries + TUNE_QUERIES]


def cached(
    num_rows: int, dim: int, num_queries: int, positives: int
) -> tuple[np.ndarray, np.ndarray]:
    """The result of `trained`, from the cache if it was trained before."""
    path = data_sets.CACHE / "index" / f"{num_rows}x{dim}-{num_queries}-{positives}.safetensors"
    if not path.is_file():
        rows, queries = trained(num_rows, dim, num_queries + TUNE_QUERIES, positives)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        save_file({"rows": rows, "queries": queries}, unfinished)
        unfinished.replace(path)
    arrays = load_file(path)
    return arrays["rows"], arrays["queries"]


def trained(
    num_labels: int, dim: int, num_queries: int, positives: int
) -> tuple[np.ndarray, np.ndarray]:
    """Trains rows float32 [L, D] of a one-vs-all classifier on the spot.

    Labels lie around 100 times fewer topics and are drawn with frequencies rank^-0.6; a query is its label and noise.
    Binary cross-entropy with a pool of uniform negatives, row-wise Adagrad.

    Returns:
        The rows, and further queries float32 [Q, D] from the distribution of the training.
    """
    generator = torch.Generator().manual_seed(0)
    source = QuerySource(num_labels, dim, generator)
    row_LD = torch.zeros(num_labels, dim)
    square_L1 = torch.full((num_labels, 1), 1e-3)

    def update(ids: torch.Tensor, gradient: torch.Tensor) -> None:
        # A label may occur several times, and its gradients are added.
        unique_ids, place = torch.unique(ids, return_inverse=True)
        gradient_UD = torch.zeros(len(unique_ids), dim).index_add_(0, place, gradient)
        square_L1[unique_ids] += gradient_UD.square().mean(dim=1, keepdim=True)
        row_LD[unique_ids] -= LR * gradient_UD / square_L1[unique_ids].sqrt()

    batch = 8192 if num_labels > 200_000 else 1024
    for _ in range(positives * num_labels // batch):
        query_BD, label_B = source.draw(batch)
        pool_C = torch.randint(num_labels, (POOL,), generator=generator)
        # The gradients of binary cross-entropy with respect to the logits.
        positive_logit_B = (query_BD * row_LD[label_B]).sum(dim=1) + OFFSET
        positive_B = torch.sigmoid(positive_logit_B) - 1
        negative_BC = torch.sigmoid(query_BD @ row_LD[pool_C].T + OFFSET)
        is_positive_BC = pool_C == label_B[:, None]
        negative_BC.masked_fill_(is_positive_BC, 0)
        # The pool's gradient is computed before the positives' rows move.
        pool_gradient_CD = negative_BC.T @ query_BD
        update(label_B, positive_B[:, None] * query_BD)
        update(pool_C, pool_gradient_CD)
    queries, _ = source.draw(num_queries)
    return row_LD.numpy(), queries.numpy()


class QuerySource:
    """Labels around topics, and queries around labels.

    Args:
        num_labels: number of labels.
        dim: width of the vectors.
        generator: for the labels, and then for the queries.
    """

    def __init__(self, num_labels: int, dim: int, generator: torch.Generator) -> None:
        self.num_labels = num_labels
        self.dim = dim
        self.generator = generator
        topic_TD = self._normal(max(50, num_labels // 100))
        topic_of_label = torch.randint(len(topic_TD), (num_labels,), generator=generator)
        label_LD = topic_TD[topic_of_label] + 0.6 * self._normal(num_labels)
        self.label_LD = torch.nn.functional.normalize(label_LD, dim=1)
        rank = torch.randperm(num_labels, generator=generator) + 1
        self.cumulative_mass_L = (rank.double() ** -0.6).cumsum(0)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [count, D] and the label of each."""
        uniform = torch.rand(count, generator=self.generator, dtype=torch.float64)
        # A label is drawn with a probability that is its share of all mass.
        mass = uniform * self.cumulative_mass_L[-1]
        ids = torch.searchsorted(self.cumulative_mass_L, mass).clamp_(max=self.num_labels - 1)
        query_BD = self.label_LD[ids] + 0.6 * self.dim**-0.5 * self._normal(count)
        return 4 * torch.nn.functional.normalize(query_BD, dim=1), ids

    def _normal(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.dim, generator=self.generator)


if __name__ == "__main__":
    main()
