"""How fast a machine does what a step is made of: rates that are measured here, or derived from a specification."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xmcray.errors import ConfigError, StorageError
from xmcray.storage import write_json

VERSION = 2
SORTED, TOP_COLUMNS, TOP_KEPT = 30_000, 2048, 100  # what the probe sorts, and selects
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class EncoderRate:
    """Seconds of encoding: `call_s`, and so much for each text and each token; `plain`: without a backward pass."""

    call_s: float
    text_s: float
    token_s: float
    plain_text_s: float
    plain_token_s: float

    def train(self, texts: float, tokens: float, calls: int = 1) -> float:
        """Forward and backward."""
        return calls * self.call_s + texts * self.text_s + tokens * self.token_s

    def plain(self, texts: float, tokens: float) -> float:
        """Forward alone."""
        return texts * self.plain_text_s + tokens * self.plain_token_s


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a step's time is computed from; nothing of it is measured with warm caches.

    Attributes:
        device: in words. source: "measured" or "published specs".
        memory_bytes: of the device. host_bytes: of the machine. threads: that were measured with.
        process_bytes: of a worker before it has a model; of one that uses transformers.
        products: (inner width, floating-point operations per second) of matrix products with that inner width.
        passes: (bytes of an array, bytes per second) of adding two arrays: all that is read and written counts.
        row_reads, row_writes: by bytes of a row, (bytes of the table, seconds for a row): rows at ascending, otherwise
            random places.
        exp_s, softplus_s: seconds for an element. top_s: of selecting the 100 best, for each element looked at.
        sort_s: for an element of a stable sort on the host. random_s: for an element of a dropout mask.
        call_s: one operation on little data, with its share of the backward pass.
        exchange_s: one collective of a few bytes, right after another. meet_s: what it takes longer after work of each
            rank's own, which one of them ends first. exchange_bytes_s: what one rank sends in a large one.
        disk_bytes_s: writing, syncing and hashing. build_flop_s, search_flop_s: of FAISS' k-means and of a scan.
        cores: of the machine that trainers and index actors share; 0 where each has its own.
        transformer_flop_s: of a transformer that is not among `encoders`, which go by the key of their shape.
    """

    device: str
    source: str
    memory_bytes: int
    host_bytes: int
    threads: int
    process_bytes: tuple[int, int]
    products: Points
    passes: Points
    row_reads: Mapping[str, Points]
    row_writes: Mapping[str, Points]
    exp_s: float
    softplus_s: float
    top_s: float
    sort_s: float
    random_s: float
    call_s: float
    exchange_s: float
    exchange_bytes_s: float
    disk_bytes_s: float
    build_flop_s: float
    search_flop_s: float
    transformer_flop_s: float
    meet_s: float = 0.0
    on_gpu: bool = False
    cores: int = 0
    encoders: Mapping[str, EncoderRate] = field(default_factory=dict)
    version: int = VERSION

    def product(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] x [k, n]."""
        return 2.0 * m * n * k / between(self.products, k) if m * n * k else 0.0

    def move(self, array_bytes: float, arrays: float, among: float = 0.0) -> float:
        """Seconds of reading or writing so many arrays of this size, one after another.

        Args:
            among: bytes that are touched before an array's turn comes again, where they are more than its own.
        """
        return (
            array_bytes * arrays / between(self.passes, max(array_bytes, among))
            if array_bytes
            else 0.0
        )

    def order(self, count: float) -> float:
        """Seconds of sorting so many elements, by comparisons."""
        return self.sort_s * count * math.log2(max(count, 2.0)) / math.log2(SORTED)

    def top(self, rows: float, columns: float, kept: float) -> float:
        """Seconds of `topk`: a pass over each row, and the best of it in order."""
        if self.on_gpu:
            return rows * columns * self.top_s
        each_s = max(self.top_s - self.order(TOP_KEPT) / TOP_COLUMNS, 0.0)
        return rows * (columns * each_s + self.order(min(kept, columns)))

    def read_rows(self, count: float, row_bytes: float, table_bytes: float) -> float:
        """Seconds of copying rows out of a table."""
        return count * _row_s(self.row_reads, row_bytes, table_bytes)

    def write_rows(self, count: float, row_bytes: float, table_bytes: float) -> float:
        """Seconds of writing rows into a table."""
        return count * _row_s(self.row_writes, row_bytes, table_bytes)

    def exchange(self, own_bytes: float, ranks: int) -> float:
        """Seconds of a collective, after other work, in which every rank sends its part to all others."""
        return (
            0.0
            if ranks == 1
            else self.meet_s + self.exchange_s + (ranks - 1) * own_bytes / self.exchange_bytes_s
        )

    def save(self, path: Path) -> None:
        """Writes the rates, to be used again with --probe."""
        write_json(path, dataclasses.asdict(self))


def load_rates(path: Path) -> Rates:
    """What `save` wrote.

    Raises:
        StorageError: no such file. ConfigError: not one of ours, or of another release.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(
            f"probe {path} cannot be read ({error.strerror}); leave out --probe to measure"
        ) from None
    except ValueError:
        raise ConfigError(f"probe {path} is not JSON; leave out --probe to measure") from None
    try:
        if body["version"] != VERSION:
            raise KeyError("version")
        rows = {k: {b: _points(p) for b, p in body[k].items()} for k in ("row_reads", "row_writes")}
        lists = {k: _points(body[k]) for k in ("products", "passes")}
        encoders = {key: EncoderRate(**rate) for key, rate in body["encoders"].items()}
        changed = {
            **rows,
            **lists,
            "encoders": encoders,
            "process_bytes": tuple(body["process_bytes"]),
        }
        return Rates(**{**body, **changed})
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"probe {path} was not measured by this release; leave out --probe to measure again"
        ) from None


def between(points: Points, x: float) -> float:
    """The value at x, on straight lines between the points of a log-log plot; at the ends it stays what it is."""
    xs, ys = np.log(np.array(points)).T
    return float(np.exp(np.interp(np.log(max(x, 1e-9)), xs, ys)))


def _row_s(tables: Mapping[str, Points], row_bytes: float, table_bytes: float) -> float:
    """Seconds for a row: linear in its bytes between and beyond the two widths that were measured."""
    (narrow, low), (wide, high) = sorted(
        ((int(b), between(p, table_bytes)) for b, p in tables.items())
    )
    return max(
        low + (high - low) * (row_bytes - narrow) / (wide - narrow),
        low * min(1.0, row_bytes / narrow),
    )


def _points(values: list[list[float]]) -> Points:
    return tuple((float(x), float(y)) for x, y in values)
