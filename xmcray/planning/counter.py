"""Counts what a training step does: the code runs for real, but floating-point tensors have no values.

Inside a `Counter`, floating-point tensors on the device "meta" have a shape and no memory. Integers and booleans always
have values, on the CPU, because shapes depend on them: which labels a batch meets decides how many rows are read. So
the step of a training that is too large for this machine runs here in a fraction of a second, and what it does is
written down: products, passes over memory, rows, kernel launches, copies, and the bytes that live at the same time.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Arguments = tuple[Any, ...]

# Which rate an operation is divided by. All others are passes over their operands.
ROW_READS = {"index_select", "index", "embedding", "_embedding_bag", "gather"}
ROW_WRITES = {"index_copy_", "index_copy", "index_add_", "index_put_", "index_put", "scatter_add_",
              "index_fill_", "embedding_dense_backward", "_index_put_impl_"}  # fmt: skip
SORTS = {"sort", "unique_consecutive", "_unique2", "topk"}
SLOW_PASSES = {"exp", "exp_", "log", "pow", "sigmoid", "sigmoid_", "logsumexp", "logaddexp", "gelu",
               "gelu_backward", "tanh", "_softmax", "_safe_softmax", "bernoulli_", "native_dropout",
               "softplus", "softplus_backward"}  # fmt: skip
_UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# The library's sort of many elements compares each some 20 times, its selection of the best few
# compares most of them a few times: measured, an eighth.
_SELECTION_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step.

    Attributes:
        kind: "product", "half product" (in bfloat16), "row read", "row write", "sort",
            "slow pass", "pass", "copy" between host and device, or "collective".
        moved_bytes: bytes read and written; of a collective, bytes that this rank contributes.
        flop: floating-point operations of a product.
        narrowest: the smallest of the three widths of a product.
        count: rows that are read or written, or elements that are sorted or computed.
        row_bytes: bytes of such a row.
        table_bytes: bytes of the table that the rows are in.
    """

    kind: str
    moved_bytes: float
    flop: float = 0.0
    narrowest: float = 0.0
    count: float = 0.0
    row_bytes: float = 0.0
    table_bytes: float = 0.0


class Counter(TorchDispatchMode):
    """Runs operations on tensors without values and records them.

    Attributes:
        operations: what ran since `restart`.
        live_bytes: of all tensors that exist.
        peak_bytes: the most that existed at the same time since `restart`.
        inside_s: seconds spent in this class since `restart`.
        calls: of this class since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.inside_s = 0.0
        self.calls = 0
        self._storages: dict[int, weakref.finalize[Any, Any]] = {}
        # Indices and values of sparse gradients by shape: a sparse tensor without values cannot keep them itself.
        self._sparse: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def restart(self) -> None:
        """Forgets what was counted, but not what lives."""
        self.operations = []
        self.peak_bytes = self.live_bytes
        self.inside_s = 0.0
        self.calls = 0

    def add(self, kind: str, moved_bytes: float, **sizes: float) -> None:
        """Records one operation."""
        self.operations.append(Operation(kind, moved_bytes, **sizes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation; called by torch."""
        start = time.thread_time()
        result = self._run(func, args, dict(kwargs or {}))
        self.inside_s += time.thread_time() - start
        self.calls += 1
        return result

    def _run(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        if "coo" in name or any(tensor.is_sparse for tensor in _tensors(args)):
            return self._run_sparse(func, name, args, kwargs)
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.add("copy", args[0].element_size())
            return 1.0
        device = kwargs.get("device")
        if name == "_to_copy" and device is not None and _is_meta(device) != args[0].is_meta:
            self.add("copy", args[0].nbytes)
        if name in _INDEXED:
            args = (args[0], _without_masks(args[1]), *args[2:])
        if _is_meta(device) and not _makes_floats(name, args, kwargs):
            kwargs["device"] = torch.device("cpu")
        result = self._compute(func, name, args, kwargs)
        self._count(func, name, args, kwargs, result)
        self._track(result)
        return result

    def _compute(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """The operation's result: sizes where an operand has only sizes, else values."""
        to_host = name == "_to_copy" and kwargs.get("device") is not None
        if to_host and args[0].is_meta and not _is_meta(kwargs["device"]):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if not any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        written = _tensors(args)[:1]
        if func._schema.is_mutable and not written[0].is_meta and "out" not in kwargs:
            return args[0]  # a tensor of the host takes in values that do not exist
        result = func(*_mapped(_to_meta, args), **_mapped(_to_meta, kwargs))
        return _mapped(_integers_with_values, result)

    def _run_sparse(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Sparse gradients: one row of `values` for each index."""
        if "coo" in name:
            indices, values = _tensors(args)[:2]
            shape = torch.Size(args[2] if "with_dims" in name else args[-1])
            if "with_dims" in name:
                indices, values = args[3], args[4]
                shape = torch.Size(args[2])
            self._sparse[shape] = indices, values
            return func(*_mapped(_to_meta, args), **kwargs)
        shape = args[0].shape
        indices, values = self._sparse[shape]
        if name in ("_indices", "indices"):
            return indices
        if name in ("_values", "values"):
            return values
        if name == "_coalesce":
            distinct = indices.unique()[None]
            summed = values.new_empty(distinct.shape[1], *values.shape[1:])
            self.add("sort", indices.nbytes, count=indices.numel())
            self.add("pass", values.nbytes + summed.nbytes)
            self._sparse[shape] = distinct, summed
            return args[0]
        if name == "clone":
            self.add("pass", 2 * values.nbytes)
            self._sparse[shape] = indices, torch.empty_like(values)
        return func(*args, **kwargs)

    # -- what it costs -----------------------------------------------------------------------------

    def _count(
        self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any], result: Any
    ) -> None:
        operands = _tensors((args, kwargs))
        results = _tensors(result)
        if name in _UNINITIALISED or (name == "_to_copy" and kwargs.get("device") is not None):
            return
        if not operands and not results:
            return  # torch's profiler
        storages = {_storage(tensor) for tensor in operands}
        is_view = any(_storage(tensor) in storages for tensor in results)
        if is_view and not func._schema.is_mutable:
            return
        moved = sum(map(_read_bytes, operands)) + sum(map(_read_bytes, results))
        # The registry has addmm, but not addmm_.
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if packet in flop_registry:
            flop = flop_registry[packet](*args, **kwargs, out_val=result)
            is_half = results[0].dtype in (torch.bfloat16, torch.float16)
            kind = "half product" if is_half else "product"
            self.add(kind, moved, flop=flop, narrowest=_narrowest(operands))
        elif name in ROW_READS or name in ROW_WRITES:
            self._count_rows(name, operands, results)
        elif name in SORTS:
            share = _SELECTION_SHARE if name == "topk" else 1.0
            self.add("sort", moved, count=share * operands[0].numel())
        elif name in SLOW_PASSES:
            self.add("slow pass", moved, count=operands[0].numel())
        else:
            self.add("pass", moved)

    def _count_rows(self, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """Rows at the places that the second operand lists."""
        count = max(operands[1].numel(), 1)
        table = operands[0]
        values = results[0]  # what is read, or what is written
        if name == "embedding_dense_backward":
            table, values = results[0], operands[0]
        elif name in ROW_WRITES:
            values = operands[-1]
        row_bytes: float = table[:1].nbytes if table.dim() > 1 else table.element_size()
        if name != "_embedding_bag":  # which reads more rows than it returns
            row_bytes = min(row_bytes, max(values.nbytes / count, values.element_size()))
        # Without the underscore the whole table is copied first.
        copied = 2 * table.nbytes if name in ("index_put", "index_copy") else 0
        kind = "row read" if name in ROW_READS else "row write"
        sizes = {"row_bytes": row_bytes, "table_bytes": _read_bytes(table)}
        self.add(kind, copied, count=count, **sizes)

    # -- what lives --------------------------------------------------------------------------------

    def _track(self, result: Any) -> None:
        """Counts the storages of new tensors until they are freed."""
        for tensor in _tensors(result):
            key = _storage(tensor)
            if tensor.is_sparse or key in self._storages:
                continue
            storage = tensor.untyped_storage()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            freed = weakref.finalize(storage, self._freed, key, storage.nbytes())
            self._storages[key] = freed

    def _freed(self, key: int, size: int) -> None:
        self.live_bytes -= size
        del self._storages[key]


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, which are nested in tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += _tensors(value)
    return found


def _mapped(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Nested arguments or results with other tensors."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_mapped(function, value) for value in values])
    if isinstance(values, dict):
        return {key: _mapped(function, value) for key, value in values.items()}
    return values


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _integers_with_values(tensor: Tensor) -> Tensor:
    """Integers that were computed from values that do not exist: 0, and True, which selects everything."""
    if tensor.is_floating_point() or not tensor.is_meta:
        return tensor
    if tensor.dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _makes_floats(name: str, args: Arguments, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return bool(dtype.is_floating_point)
    if args and isinstance(args[0], Tensor):
        return args[0].is_floating_point()
    if name == "arange":
        return any(isinstance(arg, float) for arg in args)
    if name in ("full", "scalar_tensor"):
        return isinstance(args[-1], float)
    return True


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Index lists in place of boolean masks: the shape of the result depends on the mask's values."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return places


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else int(tensor.untyped_storage()._cdata)


def _read_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded tensor is read from few of them."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _narrowest(operands: list[Tensor]) -> float:
    """The smallest width of a product of the last two operands."""
    sizes: Iterator[int] = (size for tensor in operands[-2:] for size in tensor.shape[-2:])
    return float(min(sizes, default=math.inf))
