"""Rates of a machine, measured or published, and the seconds of a step's operations at them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmcray.errors import ConfigError, StorageError
from xmcray.planning.counter import Operation
from xmcray.storage import write_json

VERSION = 4
SORTED = 30_000  # elements that the probe sorts
NARROW_ROW = 256  # bytes of the rows that the probe reads and writes
WIDE_ROW = 1024
Points = tuple[tuple[float, float], ...]
_POINT_FIELDS = ("products", "passes", "narrow_row_s", "wide_row_s")

# Kinds of operations under the names that a plan shows.
PARTS = {
    "product": "matrix products",
    "half product": "matrix products",
    "pass": "passes over memory",
    "slow pass": "passes over memory",
    "row read": "rows of tables",
    "row write": "rows of tables",
    "sort": "sorting and selecting",
    "copy": "copies to and from the device",
    "collective": "exchange between workers",
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a step's time is computed from. Nothing is measured with warm caches.

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
        narrow_row_s: (bytes of the table, seconds) of reading a row of NARROW_ROW bytes.
        wide_row_s: the same for a row of WIDE_ROW bytes.
        row_write_factor: seconds of writing a row as a multiple of reading it.
        slow_s: seconds for an element of an exponential, logarithm or softplus.
        sort_s: seconds for an element of a stable sort.
        call_s: seconds of one operation on little data.
        copy_s: seconds of a small copy between host and device, including the wait for it.
        host_entry_s: seconds of the host for a token or label of the batch. None: the host's
            share of a step is measured while the step is traced.
        exchange_s: seconds of one collective of a few bytes, right after another.
        meet_s: how much longer it takes when each rank has worked before it.
        exchange_bytes_s: bytes per second that one rank sends in a large collective.
        disk_bytes_s: bytes per second of writing, syncing and hashing.
        build_flop_s: floating-point operations per second of FAISS' k-means.
        search_flop_s: the same of a scan for the best of many queries.
        on_gpu: whether the device is a GPU.
        cores: of the machine that trainers and index actors share; 0 if each has its own.
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
    narrow_row_s: Points
    wide_row_s: Points
    row_write_factor: float
    slow_s: float
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
                operation_s = self._exchange_s(operation.moved_bytes, num_ranks)
            else:
                operation_s = self._operation_s(operation)
                seconds["launches"] += self.call_s
            seconds[PARTS[operation.kind]] += operation_s
        return dict(seconds)

    def _exchange_s(self, own_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective in which every rank sends its part to all others."""
        sent_bytes = (num_ranks - 1) * own_bytes
        return self.meet_s + self.exchange_s + sent_bytes / self.exchange_bytes_s

    def _operation_s(self, operation: Operation) -> float:
        """Seconds of one operation without its launch."""
        # The probe adds two arrays into one: an operation moves the bytes of about three arrays.
        bytes_s = _between(self.passes, operation.moved_bytes / 3)
        moved_s = operation.moved_bytes / bytes_s
        match operation.kind:
            case "product":
                flop_s = _between(self.products, operation.narrowest)
                return max(operation.flop / flop_s, moved_s)
            case "half product":
                return max(operation.flop / self.half_flop_s, moved_s)
            case "row read":
                return operation.count * self._row_s(operation)
            case "row write":
                return moved_s + operation.count * self._row_s(operation) * self.row_write_factor
            case "sort":
                # Sorting compares n log n times, and the probe's rate is that of SORTED elements.
                depth = math.log2(max(operation.count, 2.0)) / math.log2(SORTED)
                return self.sort_s * operation.count * depth
            case "slow pass":
                return max(operation.count * self.slow_s, moved_s)
            case "copy":
                return self.copy_s
        return moved_s

    def _row_s(self, operation: Operation) -> float:
        """Seconds of reading a row: linear in its bytes between and beyond the probe's widths."""
        narrow_s = _between(self.narrow_row_s, operation.table_bytes)
        wide_s = _between(self.wide_row_s, operation.table_bytes)
        slope = (wide_s - narrow_s) / (WIDE_ROW - NARROW_ROW)
        linear_s = narrow_s + slope * (operation.row_bytes - NARROW_ROW)
        # A row narrower than the narrowest of the probe takes its share of that one.
        return max(linear_s, narrow_s * min(1.0, operation.row_bytes / NARROW_ROW))

    def save(self, path: Path) -> None:
        """Writes the rates, to be used again with --probe."""
        write_json(path, dataclasses.asdict(self))


def load_rates(path: Path) -> Rates:
    """Reads what `save` wrote.

    Raises:
        StorageError: no such file.
        ConfigError: a file of something else, or of another release.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(
            f"probe {path} cannot be read ({error.strerror}); leave out --probe to measure"
        ) from None
    except ValueError:
        raise ConfigError(f"probe {path} is not JSON; leave out --probe to measure") from None
    try:
        if values["version"] != VERSION:
            raise KeyError("version")
        for name in _POINT_FIELDS:
            # JSON knows lists only.
            values[name] = tuple((float(x), float(y)) for x, y in values[name])
        values["process_bytes"] = tuple(values["process_bytes"])
        return Rates(**values)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"probe {path} was not measured by this release; leave out --probe to measure again"
        ) from None


def _between(points: Points, x: float) -> float:
    """The value at x, on straight lines between the points of a log-log plot, level at its ends."""
    xs, ys = np.log(np.array(points)).T
    return float(np.exp(np.interp(np.log(max(x, 1e-9)), xs, ys)))
