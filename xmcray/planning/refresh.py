"""Seconds of a version of the hard negatives, from published to complete: an index, its tuning, a search, a merge.

How much of an index a search visits depends on vectors that do not exist yet. Two cases are planned: rows that point
anywhere, as they do after a random start (the first version), and rows that training has moved apart.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from xmcray.planning import sizes
from xmcray.planning.model import StepTime
from xmcray.planning.rates import Rates
from xmcray.planning.step import VALUE
from xmcray.retrieval.ann import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import LONG_SHARE, TUNE_K, TUNE_QUERIES, resolve_factory

KMEANS_ROUNDS = 9  # eight, and one for the residuals that codes are made of
LIST_CALLS = 8  # a list with its queries: some 26 small operations without gradients take as long as so many with them
HIT_SORTS = 0.5  # what reaches the bar is gathered, and sorted by its query as a number of 16 bits
FOUND_MORE = 8  # candidates beside the hard negatives: positives are among them
POLL_S = 0.05  # between two looks for a published version


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How rows lie: `visited`, the share of lists that 95 % of the best rows are in; `long`, of rows in no list."""

    visited: float
    long: float


ANYWHERE = Spread(
    visited=0.4, long=0.0
)  # random directions and about one length: what the index itself chooses
APART = Spread(
    visited=0.04, long=LONG_SHARE
)  # rows of a trained classifier, by benchmarks/index_recall.py


def build(rates: Rates, factory: str, rows: int, dim: int) -> float:
    """k-means on a sample, then every row to its list; nothing for an exhaustive index."""
    lists = sizes.num_lists(resolve_factory(factory, rows))
    if not lists:
        return 0.0
    sample = min(rows, TRAIN_ROWS_PER_LIST * lists)
    copies = rates.move(
        (rows + sample) * dim * VALUE, 3
    )  # rows without the long ones, and the sample
    return 2.0 * dim * lists * (KMEANS_ROUNDS * sample + rows) / rates.build_flop_s + copies


def tune(rates: Rates, factory: str, rows: int, dim: int, spread: Spread) -> float:
    """Some queries against all rows, then against more and fewer lists until the recall is right."""
    lists = sizes.num_lists(resolve_factory(factory, rows))
    if not lists:
        return 0.0
    steps = [step for i in range(80) if (step := (4 + i % 4) << i // 4) <= max(4, lists // 2)]
    tried: list[int] = []

    def enough(number: int) -> bool:
        tried.append(number)
        return number >= spread.visited * lists

    chosen = steps[bisect.bisect_left(steps[:-1], True, key=enough)]
    all_rows = 2.0 * dim * rows * TUNE_QUERIES / rates.search_flop_s
    return all_rows + sum(
        _visits(rates, lists, n, rows, dim, TUNE_QUERIES, TUNE_K, spread) for n in [*tried, chosen]
    )


def search(
    rates: Rates, factory: str, rows: int, dim: int, queries: float, kept: int, spread: Spread
) -> float:
    """All queries of an epoch, in the lists they visit or among all rows."""
    lists = sizes.num_lists(resolve_factory(factory, rows))
    if not lists:
        return 2.0 * dim * rows * queries / rates.search_flop_s
    return _visits(rates, lists, max(1.0, spread.visited * lists), rows, dim, queries, kept, spread)


def _visits(
    rates: Rates,
    lists: int,
    number: float,
    rows: int,
    dim: int,
    queries: float,
    kept: int,
    spread: Spread,
) -> float:
    """`retrieval.inverted_lists`: the nearest lists of each query, then rounds of products, each with a merge of what it hit."""
    total = rates.product(queries, lists, dim) + rates.top(queries, lists, number)
    seen = 0.0
    for visited, met in rounds(lists, number, rows, spread):
        total += 2.0 * dim * met * queries / rates.search_flop_s
        total += (
            LIST_CALLS
            * rates.call_s
            * lists
            * -math.expm1(queries * math.log1p(-min(visited / lists, 0.999)))
        )
        hits = met * min(1.0, kept / seen) if seen else 0.0
        total += hits * queries * HIT_SORTS * rates.sort_s + rates.top(queries, kept + hits, kept)
        seen += met
    return total


def rounds(lists: int, number: float, rows: int, spread: Spread) -> Iterator[tuple[float, float]]:
    """Lists of each round of a search and the rows that a query meets in them; some of the long rows come between."""
    long, in_list = spread.long * rows, (1 - spread.long) * rows / lists
    edges = [0.0, *(edge for edge in (1.0, 8.0) if edge < number), number]
    between = [min(long, 512.0), min(max(long - 512.0, 0.0), 3584.0)]
    for i, (first, last) in enumerate(itertools.pairwise(edges)):
        yield last - first, (last - first) * in_list
        if i < len(edges) - 2:
            yield 0.0, between[i]
    yield 0.0, long - sum(between[: len(edges) - 2])


def refresh(step: StepTime, spread: Spread) -> float:
    """From published to complete: rows from disk, the index of a shard, its search for all queries, and the merge."""
    config, rates, shard = step.config, step.rates, step.shard
    if not config.negatives.refreshed:
        return 0.0
    dim, queries = step.shape.dim, step.load.steps_per_epoch * step.load.queries
    kept = config.negatives.hard + FOUND_MORE
    written = (
        queries * 4 * config.negatives.hard
    )  # the shortlist; rows and queries were written before
    if not config.negatives.hard:
        return POLL_S + written / rates.disk_bytes_s
    written += queries * kept * 12
    factory, rows = config.negatives.index, shard.labels
    read = rates.move(rows * dim * VALUE, 5)  # file, blocks, and all of them together
    work = build(rates, factory, rows, dim) + tune(rates, factory, rows, dim, spread)
    work += search(rates, factory, rows, dim, queries, kept, spread)
    merged = queries * kept * shard.workers
    work += read + written / rates.disk_bytes_s + 2 * merged * rates.sort_s
    return POLL_S + _beside(step, work)


def _beside(step: StepTime, work: float) -> float:
    """Seconds that work takes of index actors who have the cores that trainers leave, until those wait for them.

    With fewer cores than threads a trainer and an actor share one by their priorities.
    """
    cores, threads = step.rates.cores, step.shard.workers * step.rates.threads
    if not cores or step.rates.on_gpu:
        return work
    alone = min(1.0, cores / threads)
    yielded = 1.25**-step.config.cluster.index_nice  # weight of a process by its niceness
    share = (
        alone
        if cores >= 2 * threads
        else max((cores - threads) / threads, alone * yielded / (1 + yielded))
    )
    epoch_s = step.load.steps_per_epoch * step.seconds
    return work / share if work <= share * epoch_s else epoch_s + (work - share * epoch_s) / alone
