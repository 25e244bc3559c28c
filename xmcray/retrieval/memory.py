"""A memory of training queries: the nearest keys vote for labels (RAE-XMC, Eq. 8). Works with any encoder.

    paper                    here                     meaning
    K = [X_train ; Z]        Neighbours               keys: vectors of training queries, and of label texts
    V = [lam Y ; (1-lam) I]  votes, ranked            a query votes for its positives, a label for itself
    lam, tau, b              weight, temperature, keys
    Eq. 8                    joint=True               one softmax over the b nearest keys of both kinds
    Eq. 11, OvA + kNN        joint=False              two searches, two softmaxes, a convex sum

With weight 0 only labels are searched, with weight 1 only training queries. All three settings can be changed with
every request. What votes for a label is known, so an answer can name the training queries behind it. In a bundle:

    memory/vectors, memory/index     as in shards.py, one row per training query that has a positive
    memory/labels.npy                int32, their positives (source ids), one query after another
    memory/label_offsets.npy         int64 [N + 1], where each query's begin
    memory/queries.parquet           uid and text
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.corpus import Split
from xmcray.errors import BundleError, ConfigError, DataError
from xmcray.retrieval.index import Index, IndexSpec
from xmcray.retrieval.shards import (
    Shard,
    merge,
    open_shards,
    read_shards,
    search_shards,
    write_shards,
)
from xmcray.storage import Manifest
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

Float64Array = npt.NDArray[np.float64]
ROWS = 8192  # training queries that are encoded, written and read at once
VOTERS = 128  # queries whose votes are counted at once
_MAX_POWER = 700.0  # exp of more is no float64
_QUERIES = pa.schema([("uid", pa.large_string()), ("text", pa.large_string())])


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How neighbours vote.

    Attributes:
        weight: lambda, of the votes of training queries; that of label texts is 1 - weight.
        temperature: tau of the softmax over keys.
        keys: b, keys that vote.
        joint: training queries and labels compete for the b places in one softmax (Eq. 8), or each kind has its own
            search and softmax (Eq. 11, "OvA + kNN").
    """

    weight: float = 0.5
    temperature: float = 0.04
    keys: int = 200
    joint: bool = True

    def __post_init__(self) -> None:
        check_range("memory.weight", self.weight, 0, 1)
        check_range("memory.temperature", self.temperature, low=1e-3)
        check_range("memory.keys", self.keys, 1, 100_000)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest keys of B queries, best first; -1 and -inf where there are no more.

    Attributes:
        queries: rows of the memory. labels: source ids.
        joined: labels that joined after the export, source ids; no keys, see `joined_weights`. None: there are none.
        completing: labels that complete answers for which too few keys voted; those of `labels` if not given.
    """

    queries: TopLabels
    labels: TopLabels
    joined: TopLabels | None = None
    completing: TopLabels | None = None

    @staticmethod
    def combined(parts: Sequence[Neighbours]) -> Neighbours:
        """What parts of the shards found, as if one search had found it in all of them."""

        def merged(name: str) -> TopLabels | None:
            tops = [getattr(part, name) for part in parts]
            return None if tops[0] is None else merge(tops)

        queries, labels = (
            merge([part.queries for part in parts]),
            merge([part.labels for part in parts]),
        )
        return Neighbours(queries, labels, merged("joined"), merged("completing"))

    def slice(self, start: int, stop: int) -> Neighbours:
        """Those of queries start .. stop - 1."""
        joined, completing = self.joined and self.joined.slice(start, stop), self.completing
        completing = completing and completing.slice(start, stop)
        return Neighbours(
            self.queries.slice(start, stop), self.labels.slice(start, stop), joined, completing
        )


@dataclass(frozen=True, slots=True)
class Votes:
    """Entries of the B x L matrices softmax(q K^T / tau) [Y ; 0] and softmax(q K^T / tau) [0 ; I] that are not zero.

    Attributes:
        pairs: int64 [P], query * L + source label id, ascending.
        of_queries, of_labels: float64 [P], before lambda.
    """

    pairs: Int64Array
    of_queries: Float64Array
    of_labels: Float64Array

    def share(self, weight: float) -> Float64Array:
        """float64 [P], probability of each pair."""
        return weight * self.of_queries + (1 - weight) * self.of_labels


def key_weights(near: Neighbours, config: MemoryConfig) -> tuple[Float64Array, Float64Array]:
    """The softmax over keys: float64 [B, Kq] and [B, Kl], zero outside the b nearest (Eq. 8, Eq. 11)."""
    query_BK, label_BK = near.queries.scores, near.labels.scores
    if config.weight in (0, 1) or not config.joint:
        on = 1.0 if config.weight else 0.0, 1.0 if config.weight < 1 else 0.0
        return on[0] * _softmax(query_BK, config), on[1] * _softmax(label_BK, config)
    both = _softmax(np.concatenate([query_BK, label_BK], axis=1), config)
    return both[:, : query_BK.shape[1]], both[:, query_BK.shape[1] :]


def joined_weights(near: Neighbours, joined: TopLabels, config: MemoryConfig) -> Float64Array:
    """Weights [B, Kj] of labels that joined later, in the proportion to the keys that the softmax would give them.

    They are no part of its sum, and take no key's place among the b nearest, so that every other label keeps its
    probability. One that is farther than the b nearest keys does not vote, as no key does.
    """
    weights = key_weights(near, config)
    score_BK, weight_BK = near.labels.scores, weights[1]
    if config.joint and config.weight:
        score_BK, weight_BK = (
            np.concatenate([near.queries.scores, score_BK], axis=1),
            np.concatenate(weights, axis=1),
        )
    if config.weight == 1 or not score_BK.shape[1]:
        return np.zeros(joined.scores.shape)
    best_BK = -np.sort(-score_BK.astype(np.float64), axis=1)[:, : config.keys]
    best_B1, last_B1 = best_BK[:, :1], best_BK[:, -1:]
    if best_BK.shape[1] < config.keys:
        last_B1 = np.full_like(best_B1, -np.inf)  # all keys vote
    votes = (joined.scores >= last_B1) & (joined.scores > -np.inf) & (best_B1 > -np.inf)
    power = np.where(votes, joined.scores, 0) - np.where(votes, best_B1, 0)
    weight = weight_BK.max(axis=1, keepdims=True) * np.exp(
        np.minimum(power / config.temperature, _MAX_POWER)
    )
    return np.where(votes, weight, 0.0)


def count_votes(
    near: Neighbours,
    positives: Ragged,
    config: MemoryConfig,
    num_labels: int,
    exclude: Ragged | None = None,
    removed: npt.NDArray[np.bool_] | None = None,
) -> Votes:
    """softmax(q K^T / tau) V, the two halves of V apart (Eq. 8).

    Args:
        positives: source label ids of each row of the memory (Y).
        num_labels: L. exclude: B rows of source label ids that nobody can vote for.
        removed: bool [L], labels that are keys as ever, but no answers.
    """
    weight_QK, weight_LK = key_weights(near, config)
    label_LK = near.labels.ids
    if near.joined is not None:
        weight_LK = np.concatenate([weight_LK, joined_weights(near, near.joined, config)], axis=1)
        label_LK = np.concatenate([label_LK, near.joined.ids], axis=1)
    query, place = np.nonzero(weight_QK)
    voted = positives.take(near.queries.ids[query, place])
    voter = voted.row_ids
    own_query, own_place = np.nonzero(weight_LK)
    pair = np.concatenate(
        [
            query[voter] * num_labels + voted.values,
            own_query * num_labels + label_LK[own_query, own_place],
        ]
    )
    pairs, entry = np.unique(pair, return_inverse=True)
    split = len(voter)
    of_queries = np.bincount(entry[:split], weight_QK[query, place][voter], len(pairs)).astype(
        np.float64
    )
    of_labels = np.bincount(entry[split:], weight_LK[own_query, own_place], len(pairs)).astype(
        np.float64
    )
    kept = np.ones(len(pairs), bool) if removed is None else ~removed[pairs % num_labels]
    if exclude is not None and len(exclude.values):
        kept &= ~np.isin(pairs, exclude.row_ids * num_labels + exclude.values)
    return Votes(pairs[kept], of_queries[kept], of_labels[kept])


def ranked(votes: Votes, weight: float, k: int, labels: TopLabels, num_labels: int) -> TopLabels:
    """The k most probable labels, equal ones by lower source id; float32 probabilities.

    Fewer than k are completed by `labels` in their order. Nobody voted for those: their scores are inner products less
    2, thus negative. A weight above 1, of a label that joined later, is shown as 1 plus its logarithm.
    """
    share = votes.share(weight)
    share = np.where(share > 1, 1 + np.log(np.maximum(share, 1)), share)
    voted = np.flatnonzero(share)
    query, label = np.divmod(votes.pairs[voted], num_labels)
    order = np.lexsort((label, -share[voted], query))
    count_B = np.bincount(query, minlength=len(labels.ids))
    place = np.arange(len(order)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
    first = order[place < k]
    ids = np.full((len(labels.ids), k), -1, np.int64)
    scores = np.full(ids.shape, -np.inf, np.float32)
    ids[query[first], place[place < k]] = label[first]
    scores[query[first], place[place < k]] = share[voted][first]
    # the completion
    pair_BW = np.arange(len(labels.ids))[:, None] * num_labels + labels.ids
    fresh_BW = (labels.ids >= 0) & ~np.isin(pair_BW, votes.pairs[voted])
    rank_BW = np.cumsum(fresh_BW, axis=1, dtype=np.int64)
    place_BW = count_B[:, None] + rank_BW - 1
    row, column = np.nonzero(fresh_BW & (place_BW < k))
    ids[row, place_BW[row, column]] = labels.ids[row, column]
    scores[row, place_BW[row, column]] = labels.scores[row, column] - 2
    return TopLabels(ids, scores)


def sweep(
    near: Neighbours,
    positives: Ragged,
    grid: Iterable[MemoryConfig],
    k: int,
    num_labels: int,
    exclude: Ragged | None = None,
) -> Iterator[tuple[MemoryConfig, TopLabels]]:
    """The answers of many settings from one search of the widest of them.

    Lambda only weighs the two halves of the votes, which are counted once for all of its values between 0 and 1.
    """
    counted: dict[MemoryConfig, Votes] = {}
    for config in grid:
        inside = 0 < config.weight < 1
        same = dataclasses.replace(config, weight=0.5) if inside else config
        if same not in counted:
            counted[same] = count_votes(near, positives, same, num_labels, exclude)
        yield config, ranked(counted[same], config.weight, k, near.labels, num_labels)


class Memory:
    """Training queries that can be searched.

    Args:
        config: how they vote where a request does not say otherwise.
        shards, indexes: their vectors. positives: their source label ids. num_labels: L.
        texts: file of uids and texts, if there is one. removed: source ids of labels that are no answers any more.
    """

    def __init__(
        self,
        config: MemoryConfig,
        shards: Sequence[Shard],
        indexes: Sequence[Index],
        positives: Ragged,
        num_labels: int,
        texts: Path | None = None,
        removed: Int64Array | None = None,
    ) -> None:
        self.config, self.shards, self.indexes = config, shards, indexes
        self.positives, self.num_labels = positives, num_labels
        self._texts = texts
        self._removed = (
            np.isin(np.arange(num_labels), removed)
            if removed is not None and len(removed)
            else None
        )

    @classmethod
    def load(
        cls,
        bundle: Path,
        manifest: Manifest,
        predictor: Mapping[str, Any],
        num_labels: int,
        dim: int,
        threads: int,
        removed: Int64Array | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Memory:
        """The memory of a verified bundle; vectors and positives stay on disk.

        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        try:
            config = configs.build(MemoryConfig, predictor["config"], "memory.")
            rows = int(predictor["num_queries"])
            shards = read_shards(predictor["shards"], rows)
            labels = np.load(bundle / "memory" / "labels.npy", mmap_mode="r")
            offsets = np.load(bundle / "memory" / "label_offsets.npy", mmap_mode="r")
            fits = (
                shards is not None
                and offsets.shape == (rows + 1,)
                and int(offsets[-1]) == len(labels)
            )
            fits = (
                fits
                and labels.dtype == np.int32
                and offsets.dtype == np.int64
                and not np.any(np.diff(offsets) < 0)
            )
            fits = fits and (
                not len(labels) or 0 <= int(labels.min()) <= int(labels.max()) < num_labels
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise BundleError(
                f"{bundle}: its memory cannot be read ({type(error).__name__}); make it again"
            ) from None
        if not fits or shards is None:
            raise BundleError(
                f"{bundle}: the files of its memory do not fit settings.json; make it again"
            )
        indexes = list(open_shards(bundle, manifest, shards, dim, threads, "memory/", part))
        texts = bundle / "memory" / "queries.parquet"
        return cls(config, shards, indexes, Ragged(labels, offsets), num_labels, texts, removed)

    def search(
        self,
        query_BD: Float32Array,
        config: MemoryConfig,
        exact: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> TopLabels:
        """The training queries that may vote, by row of the memory; in part i of n: in shards i, i + n ... only."""
        width = min(config.keys, len(self.positives)) if config.weight > 0 else 0
        shards, indexes = self.shards[part[0] :: part[1]], self.indexes[part[0] :: part[1]]
        return search_shards(shards, indexes, query_BD, width, exact=exact)

    def width(self, k: int, config: MemoryConfig) -> int:
        """How many labels may vote for themselves or complete k answers."""
        return min(max(k, config.keys if config.weight < 1 else 0), self.num_labels)

    def with_labels(self, num_labels: int, removed: Int64Array) -> Memory:
        """The same keys where there are L labels, of which some (source ids) are no answers."""
        return Memory(
            self.config, self.shards, self.indexes, self.positives, num_labels, self._texts, removed
        )

    def without(self, labels: npt.NDArray[np.bool_]) -> Memory:
        """The same memory with fewer answers; bool [L]."""
        memory = copy.copy(self)
        memory._removed = labels if self._removed is None else labels | self._removed
        return memory

    def answer(
        self, near: Neighbours, k: int, config: MemoryConfig, exclude: Ragged | None = None
    ) -> TopLabels:
        """The k most probable labels (Eq. 8); see `ranked`."""
        parts = [TopLabels(np.empty((0, k), np.int64), np.empty((0, k), np.float32))]
        for start in range(0, len(near.labels.ids), VOTERS):
            part = near.slice(start, start + VOTERS)
            hide = None if exclude is None else exclude.slice(start, start + len(part.labels.ids))
            votes = count_votes(part, self.positives, config, self.num_labels, hide, self._removed)
            parts.append(
                ranked(votes, config.weight, k, part.completing or part.labels, self.num_labels)
            )
        return TopLabels(
            np.concatenate([p.ids for p in parts]), np.concatenate([p.scores for p in parts])
        )

    def voters(
        self, near: Neighbours, config: MemoryConfig
    ) -> list[dict[int, list[tuple[int, float]]]]:
        """Per query: label -> the rows of the memory that voted for it and their weights, the largest first."""
        weight_BK = config.weight * key_weights(near, config)[0]
        found: list[dict[int, list[tuple[int, float]]]] = []
        for rows, weights in zip(near.queries.ids, weight_BK, strict=True):
            of_label: dict[int, list[tuple[int, float]]] = {}
            for place in np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)].tolist():
                row = int(rows[place])
                for label in self.positives[row].tolist():
                    of_label.setdefault(label, []).append((row, float(weights[place])))
            found.append(of_label)
        return found

    def texts(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Uid and text of some rows; reads the blocks of the file that hold them."""
        assert self._texts is not None, "a memory that is not a bundle's has no texts"
        wanted = np.unique(np.fromiter(rows, np.int64))
        known: dict[int, tuple[str, str]] = {}
        try:
            with pq.ParquetFile(self._texts) as file:
                for block in np.unique(wanted // ROWS).tolist():
                    inside = wanted[wanted // ROWS == block]
                    values = (
                        file.read_row_group(block).take(pa.array(inside - block * ROWS)).to_pydict()
                    )
                    known.update(
                        zip(
                            inside.tolist(),
                            zip(values["uid"], values["text"], strict=True),
                            strict=True,
                        )
                    )
        except (OSError, KeyError, IndexError, pa.ArrowException) as error:
            raise BundleError(
                f"{self._texts} cannot be read ({type(error).__name__}); make it again"
            ) from None
        return known


def remember(
    split: Split,
    encode: Callable[[Ragged], Float32Array],
    config: MemoryConfig,
    spec: IndexSpec,
    threads: int = 1,
) -> Callable[[Path], Mapping[str, Any]]:
    """What writes a memory of the queries of a split into a bundle's folder: an argument of `bundle.write_bundle`.

    Queries without a positive are left out: they could only take places from keys that vote. Memory is bounded by one
    shard of vectors.

    Args:
        encode: token ids -> float32 [n, D], of length 1 and from the encoder that will encode the queries.
        spec: of the index.
    """
    rows = np.flatnonzero(split.num_positives())
    if not len(rows):
        raise DataError(
            f"no query of split {split.name} has a positive, expected some; there is nothing to remember"
        )
    blocks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]

    def write(bundle: Path) -> Mapping[str, Any]:
        folder = bundle / "memory"
        vectors = (encode(split.tokens(block)) for block in blocks)
        shards, _ = write_shards(folder, vectors, spec, threads=threads)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(split.num_positives()[rows])])
        np.save(folder / "label_offsets.npy", offsets)
        labels = np.lib.format.open_memmap(
            folder / "labels.npy", "w+", np.int32, (int(offsets[-1]),)
        )
        with pq.ParquetWriter(folder / "queries.parquet", _QUERIES, compression="zstd") as writer:
            for number, block in enumerate(blocks):
                first, last = number * ROWS, number * ROWS + len(block)
                labels[offsets[first] : offsets[last]] = split.positives(block).values
                texts = [
                    pa.array(c, pa.large_string()) for c in (split.uids(block), split.texts(block))
                ]
                writer.write_table(pa.table(texts, schema=_QUERIES), row_group_size=ROWS)
        labels.flush()
        plain = [dataclasses.asdict(shard) for shard in shards]
        return {
            "kind": "memory",
            "config": configs.dump(config),
            "num_queries": len(rows),
            "shards": plain,
        }

    return write


def _softmax(score_BK: npt.NDArray[np.floating[Any]], config: MemoryConfig) -> Float64Array:
    """softmax(score / tau) over the b largest of each row, of equal ones the first; zero elsewhere."""
    best_Bb = np.argsort(-score_BK, axis=1, kind="stable")[:, : config.keys]
    top_Bb = np.take_along_axis(score_BK, best_Bb, 1).astype(np.float64)
    found_Bb = top_Bb > -np.inf
    # the largest is the first; a row without any key has no softmax
    shift_Bb = np.where(found_Bb, top_Bb, 0) - np.where(found_Bb, top_Bb, 0)[:, :1]
    power_Bb = np.where(found_Bb, np.exp(shift_Bb / config.temperature), 0.0)
    power_Bb /= np.maximum(power_Bb.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    weight_BK = np.zeros(score_BK.shape)
    np.put_along_axis(weight_BK, best_Bb, power_Bb, 1)
    return weight_BK
