"""Rates of a machine, measured or published, and the seconds of a step's operations at them."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.errors import ConfigError, StorageError, one_line
from xmcray.planning.counter import Operation
from xmcray.storage.whole_files import write_json

# Times that are too small to count, and cores that are not shared; the other rates are divided by.
_MAY_BE_0 = ("slow_s", "sort_s", "call_s", "host_entry_s", "merge_s", "exchange_s", "cores")
_WRITTEN_ROW = 2.0  # times a row that is read, because a write also reads what it replaces

# Kinds of operations under the names that a plan shows.
PARTS = {
    "product": "matrix products",
    "half product": "matrix products",
    "pass": "passes over memory",
    "slow pass": "passes over memory",
    "row read": "rows of tables",
    "row write": "rows of tables",
    "sort": "sorting and selecting",
    "collective": "exchange between workers",
}

# Those in which a GPU works.
DEVICE_PARTS = (
    "matrix products",
    "passes over memory",
    "rows of tables",
    "sorting and selecting",
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a step's time is computed from. Nothing is measured with warm caches.

    Attributes:
        device: Name of the device.
        source: "measured" or "published specs".
        memory_bytes: Memory of the device.
        host_bytes: Memory of the machine.
        threads: Threads of each process.
        process_bytes: Bytes of a worker before it has a model; of one that uses transformers.
        product_flop_s: Floating-point operations per second of products in float32.
        half_flop_s: Floating-point operations per second of products in bfloat16.
        pass_bytes_s: Bytes per second of passes over arrays.
        row_bytes_s: Bytes per second of reading rows at random places of a table.
        slow_s: Seconds for an element of an exponential, logarithm or softplus.
        sort_s: Seconds for an element of a stable sort.
        call_s: Seconds of one operation on little data.
        host_entry_s: Seconds of the host for a token or label of the batch. None: the host's
            share of a step is measured while the step is traced.
        merge_s: Seconds of the host to merge a label that an index shard has found for a query.
        exchange_s: Seconds of a collective of a few bytes when each rank has worked before it.
        exchange_bytes_s: Bytes per second that one rank sends in a large collective.
        disk_bytes_s: Bytes per second of writing, syncing and hashing.
        build_flop_s: Floating-point operations per second of FAISS' k-means.
        search_flop_s: Floating-point operations per second of a scan for the best of many queries.
        on_gpu: Whether the device is a GPU.
        cores: Cores of the machine that trainers and index actors share; 0 if each has its own.
    """

    device: str
    source: str
    memory_bytes: int
    host_bytes: int
    threads: int
    process_bytes: tuple[int, int]
    product_flop_s: float
    half_flop_s: float
    pass_bytes_s: float
    row_bytes_s: float
    slow_s: float
    sort_s: float
    call_s: float
    host_entry_s: float | None = None
    merge_s: float
    exchange_s: float
    exchange_bytes_s: float
    disk_bytes_s: float
    build_flop_s: float
    search_flop_s: float
    on_gpu: bool = False
    cores: int = 0

    def step_seconds(self, operations: Iterable[Operation]) -> dict[str, float]:
        """Seconds by part; operations run one after another."""
        seconds: dict[str, float] = defaultdict(float)
        for operation in operations:
            if operation.kind != "collective":
                seconds["launches"] += self.call_s
            seconds[PARTS[operation.kind]] += self._operation_s(operation)
        return dict(seconds)

    def _operation_s(self, operation: Operation) -> float:
        """Seconds of one operation without its launch."""
        moved_s = operation.moved_bytes / self.pass_bytes_s
        row_s = operation.moved_bytes / self.row_bytes_s
        match operation.kind:
            case "product":
                return max(operation.flop / self.product_flop_s, moved_s)
            case "half product":
                return max(operation.flop / self.half_flop_s, moved_s)
            case "row read":
                return row_s
            case "row write":
                return _WRITTEN_ROW * row_s
            case "sort":
                return operation.count * self.sort_s
            case "slow pass":
                return max(operation.count * self.slow_s, moved_s)
            case "collective":
                return self.exchange_s + operation.moved_bytes / self.exchange_bytes_s
        return moved_s

    def save(self, path: Path) -> None:
        """Writes the rates, to be used again with --probe."""
        write_json(path, dataclasses.asdict(self))


def load_rates(path: Path) -> Rates:
    """Reads what `save` wrote.

    Raises:
        StorageError: no such file.
        ConfigError: a file of something else, of another release, or with rates that none is.
    """
    try:
        rates = configs.build(Rates, json.loads(path.read_text(encoding="utf-8")))
        _check(rates)
        return rates
    except OSError as error:
        raise StorageError(
            f"probe {path} cannot be read ({error.strerror}); leave out --probe to measure"
        ) from None
    except (TypeError, ValueError, AttributeError, RecursionError, ConfigError) as error:
        raise ConfigError(
            f"probe {path} was not measured by this release ({one_line(error)});"
            " leave out --probe to measure again"
        ) from None


def _check(rates: Rates) -> None:
    """Raises ConfigError if a rate is not above 0, or a time below it."""
    if len(rates.process_bytes) != 2:
        raise ConfigError(f"process_bytes has {len(rates.process_bytes)} numbers, expected 2")
    for field in dataclasses.fields(rates):
        value = getattr(rates, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, str | bool | None):
                continue
            check_range(field.name, number, low=0)
            if not number and field.name not in _MAY_BE_0:
                raise ConfigError(f"{field.name} is 0, expected more than 0")
