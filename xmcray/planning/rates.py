"""How fast a machine does what a step is made of: rates that are measured here, or published."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmcray.errors import ConfigError, StorageError
from xmcray.planning.counter import Operation
from xmcray.storage import write_json

VERSION = 3
SORTED = 30_000  # elements that the probe sorts
Points = tuple[tuple[float, float], ...]

# Kinds of operations under the names that a plan shows.
PARTS = {
    "product": "matrix products",
    "half product": "matrix products",
    "pass": "passes over memory",
    "exponential": "passes over memory",
    "softplus": "passes over memory",
    "row read": "rows of tables",
    "row write": "rows of tables",
    "sort": "sorting and selecting",
    "top": "sorting and selecting",
    "copy": "copies to and from the device",
    "collective": "exchange between workers",
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a step's time is computed from; nothing of it is measured with warm caches.

    Attributes:
        device: in words.
        source: "measured" or "published specs".
        memory_bytes: of the device.
        host_bytes: of the machine.
        threads: of each process.
        process_bytes: of a worker before it has a model; of one that uses transformers.
        products: (narrowest width, floating-point operations per second) of matrix products.
        half_flop_s: floating-point operations per second of products in bfloat16.
        passes: (bytes of an array, bytes per second) of adding two arrays; all bytes count.
        row_reads: by bytes of a row, (bytes of the table, seconds for a row) at random places.
        row_writes: the same of writing.
        exp_s: seconds for an element of an exponential.
        softplus_s: seconds for an element of a softplus.
        top_s: seconds for each element that the 100 best are selected from.
        sort_s: seconds for an element of a stable sort.
        call_s: seconds of one operation on little data.
        copy_s: seconds of a small copy between host and device, with the wait for it.
        host_entry_s: seconds of the host for a token or label of the batch; None: the host's
            share of a step is measured while the step is traced.
        exchange_s: seconds of one collective of a few bytes, right after another.
        meet_s: what it takes longer after work of each rank's own, which one ends first.
        exchange_bytes_s: bytes per second that one rank sends in a large collective.
        disk_bytes_s: bytes per second of writing, syncing and hashing.
        build_flop_s: floating-point operations per second of FAISS' k-means.
        search_flop_s: the same of a scan for the best of many queries.
        on_gpu: whether the device is a GPU.
        cores: of the machine that trainers and index actors share; 0 where each has its own.
    """

    device: str
    source: str
    memory_bytes: int
    host_bytes: int
    threads: int
    process_bytes: tuple[int, int]
    products: Points
    half_flop_s: float
    passes: Points
    row_reads: Mapping[str, Points]
    row_writes: Mapping[str, Points]
    exp_s: float
    softplus_s: float
    top_s: float
    sort_s: float
    call_s: float
    copy_s: float = 0.0
    host_entry_s: float | None = None
    exchange_s: float
    meet_s: float = 0.0
    exchange_bytes_s: float
    disk_bytes_s: float
    build_flop_s: float
    search_flop_s: float
    on_gpu: bool = False
    cores: int = 0
    version: int = VERSION

    def step_seconds(self, operations: Iterable[Operation], num_ranks: int = 1) -> dict[str, float]:
        """Seconds by part; operations run one after another."""
        seconds: dict[str, float] = defaultdict(float)
        for operation in operations:
            if operation.kind == "collective":
                part_s = self.exchange(operation.moved_bytes, num_ranks)
            else:
                part_s = self._seconds(operation)
                seconds["launches"] += self.call_s
            seconds[PARTS[operation.kind]] += part_s
        return dict(seconds)

    def exchange(self, own_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective in which every rank sends its part to all others."""
        if num_ranks == 1:
            return 0.0
        sent = (num_ranks - 1) * own_bytes
        return self.meet_s + self.exchange_s + sent / self.exchange_bytes_s

    def _seconds(self, operation: Operation) -> float:
        """One operation, without its launch."""
        moved_s = operation.moved_bytes / _between(self.passes, operation.moved_bytes / 3)
        if operation.kind == "product":
            flop_s = _between(self.products, operation.narrowest)
            return max(operation.flop / flop_s, moved_s)
        if operation.kind == "half product":
            return max(operation.flop / self.half_flop_s, moved_s)
        if operation.kind in ("row read", "row write"):
            rows = self.row_reads if operation.kind == "row read" else self.row_writes
            each_s = _row_s(rows, operation.row_bytes, operation.table_bytes)
            return moved_s * (operation.kind == "row write") + operation.count * each_s
        if operation.kind == "sort":
            # Sorting by comparisons: the probe's rate is that of SORTED elements.
            depth = math.log2(max(operation.count, 2.0)) / math.log2(SORTED)
            return self.sort_s * operation.count * depth
        if operation.kind == "copy":
            return self.copy_s
        element_s = {"top": self.top_s, "exponential": self.exp_s, "softplus": self.softplus_s}
        return max(moved_s, operation.count * element_s.get(operation.kind, 0.0))

    def save(self, path: Path) -> None:
        """Writes the rates, to be used again with --probe."""
        write_json(path, dataclasses.asdict(self))


def load_rates(path: Path) -> Rates:
    """What `save` wrote.

    Raises:
        StorageError: no such file.
        ConfigError: a file of something else, or of another release.
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
        for name in ("products", "passes"):
            body[name] = _points(body[name])
        for name in ("row_reads", "row_writes"):
            body[name] = {width: _points(points) for width, points in body[name].items()}
        body["process_bytes"] = tuple(body["process_bytes"])
        return Rates(**body)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"probe {path} was not measured by this release; leave out --probe to measure again"
        ) from None


def _between(points: Points, x: float) -> float:
    """The value at x, on straight lines between the points of a log-log plot, level at its ends."""
    xs, ys = np.log(np.array(points)).T
    return float(np.exp(np.interp(np.log(max(x, 1e-9)), xs, ys)))


def _row_s(tables: Mapping[str, Points], row_bytes: float, table_bytes: float) -> float:
    """Seconds for a row: linear in its bytes between and beyond the two widths of the probe."""
    narrow, wide = sorted(map(int, tables))
    narrow_s = _between(tables[str(narrow)], table_bytes)
    wide_s = _between(tables[str(wide)], table_bytes)
    slope = (wide_s - narrow_s) / (wide - narrow)
    # A row narrower than the narrowest of the probe takes its share of that one.
    return max(narrow_s + slope * (row_bytes - narrow), narrow_s * min(1.0, row_bytes / narrow))


def _points(values: list[list[float]]) -> Points:
    return tuple((float(x), float(y)) for x, y in values)
