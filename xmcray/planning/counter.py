"""Counts what a training step does: the code runs for real, but floating-point tensors have no values.

Inside a `Counter`, floating-point tensors on the device "meta" have a shape and no memory. Integers
and booleans always have values, on the CPU, because shapes depend on them: which labels a batch
meets decides how many rows are read.
"""

from __future__ import annotations

import functools
import time
import tracemalloc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from xmcray.planning.nested_tensors import map_tensors, tensors_in

# Which rate an operation is divided by. All others are passes over their operands.
ROW_READS = {"index_select", "index", "embedding", "_embedding_bag", "gather"}
ROW_WRITES = {"index_copy_", "index_copy", "index_add_", "index_put_", "index_put", "scatter_add_",
              "index_fill_", "embedding_dense_backward", "_index_put_impl_"}  # fmt: skip
SORTS = {"sort", "unique_consecutive", "_unique2", "topk"}
SLOW_PASSES = {"exp", "exp_", "log", "pow", "sigmoid", "sigmoid_", "logsumexp", "logaddexp", "gelu",
               "gelu_backward", "tanh", "_softmax", "_safe_softmax", "bernoulli_", "native_dropout",
               "softplus", "softplus_backward"}  # fmt: skip
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Collectives that Gloo runs on a copy of the larger tensor.
_COPIED_BY_GLOO = {"_allgather_base_", "_reduce_scatter_base_"}
# Measured: selecting the best few takes an eighth of sorting all.
_SELECTION_SHARE = 1 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a step.

    Attributes:
        kind: "product", "half product" (in bfloat16), "row read", "row write", "sort",
            "slow pass", "pass" or "collective".
        moved_bytes: Bytes read and written; of a collective, bytes that this rank sends.
        flop: Floating-point operations of a product.
        count: Elements that are sorted or computed.
    """

    kind: str
    moved_bytes: float
    flop: float = 0.0
    count: float = 0.0


@dataclass
class _Call:
    """A call of an operation, as torch hands it over.

    Attributes:
        func: The overload that is called.
        args: Its positional arguments.
        kwargs: Its arguments by name.
    """

    func: Any
    args: Any
    kwargs: dict[str, Any]

    @functools.cached_property
    def name(self) -> str:
        """Name of the operation without its overload: "add" of "add.Tensor"."""
        return str(self.func._overloadpacket.__name__)

    @functools.cached_property
    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def device(self) -> torch.device | None:
        """The device that the result is asked for on; None if no argument names one."""
        device = self.kwargs.get("device")
        return None if device is None else torch.device(device)

    def run(self) -> Any:
        """The operation's own result."""
        return self.func(*self.args, **self.kwargs)


class Counter(TorchDispatchMode):
    """Runs operations on tensors without values and records them.

    Args:
        on_gpu: Ranks exchange tensors by NCCL, and not by Gloo.

    Attributes:
        operations: What ran since `restart`.
        live_bytes: Bytes of all tensors that exist.
        peak_bytes: The most that existed at the same time since `restart`; with the arrays of the
            host while tracemalloc is tracing.
        inside_s: Seconds spent in this class since `restart`.
        calls: Calls of this class since `restart`.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self.live_bytes = 0
        self._on_gpu = on_gpu
        self._tracked: set[int] = set()
        self._results: dict[Any, Tensor] = {}
        # Indices and values of sparse gradients by shape, which a sparse meta tensor cannot keep.
        self._sparse: dict[torch.Size, tuple[Tensor, Tensor]] = {}
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted, but not what lives."""
        self.operations: list[Operation] = []
        self.peak_bytes = self.live_bytes
        self.inside_s = 0.0
        self.calls = 0

    def _add(self, kind: str, moved_bytes: float, **sizes: float) -> None:
        operation = Operation(kind=kind, moved_bytes=moved_bytes, **sizes)
        self.operations.append(operation)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation; called by torch."""
        start = time.thread_time()
        call = _Call(func, args, dict(kwargs or {}))
        result = self._run(call)
        self.inside_s += time.thread_time() - start
        self.calls += 1
        return result

    def _run(self, call: _Call) -> Any:
        """Runs an operation, records it, and follows the tensors that it returns."""
        if call.func.namespace == "c10d":
            self._count_collective(call)
            return call.run()
        if "coo" in call.name or any(tensor.is_sparse for tensor in call.operands):
            return self._run_sparse(call)
        if call.name in _INDEXED:
            table, indices, *others = call.args
            call = _Call(call.func, (table, _without_masks(indices), *others), call.kwargs)
        if _is_meta(call.device) and _makes_integers(call):
            call.kwargs["device"] = torch.device("cpu")
        result = self._compute(call)
        self._count(call, result)
        for tensor in tensors_in(result):
            self._track(tensor)
        return result

    def _run_sparse(self, call: _Call) -> Any:
        """Sparse gradients: one row of values for each index."""
        if "coo" in call.name:
            indices, values = tensors_in(call.args)
            # The one argument that is no tensor.
            (shape,) = (arg for arg in call.args if isinstance(arg, (list, torch.Size)))
            self._sparse[torch.Size(shape)] = indices, values
            return _on_meta(call).run()
        shape = call.args[0].shape
        indices, values = self._sparse[shape]
        match call.name:
            case "_indices" | "indices":
                return indices
            case "_values" | "values":
                return values
            case "_coalesce":
                # Rows of equal indices are added up, which takes a sort of the indices.
                distinct = indices.unique()[None]
                summed = values.new_empty(distinct.shape[1], *values.shape[1:])
                self._add("sort", indices.nbytes, count=indices.numel())
                self._add("pass", values.nbytes + summed.nbytes)
                self._sparse[shape] = distinct, summed
                return call.args[0]
            case "clone":
                self._add("pass", 2 * values.nbytes)
                self._sparse[shape] = indices, torch.empty_like(values)
        return call.run()

    def _compute(self, call: _Call) -> Any:
        """The operation's result: sizes where an operand has only sizes, else values."""
        operands = call.operands
        if not any(tensor.is_meta for tensor in operands):
            return call.run()
        if call.name == "_local_scalar_dense":
            return 1.0
        if call.name == "_to_copy" and call.device is not None and not _is_meta(call.device):
            # Values that do not exist are copied to the host: zeros stand for them.
            dtype = call.kwargs.get("dtype") or operands[0].dtype
            return torch.zeros(operands[0].shape, dtype=dtype)
        is_mutable = call.func._schema.is_mutable
        if is_mutable and not operands[0].is_meta and "out" not in call.kwargs:
            return call.args[0]  # a tensor of the host takes in values that do not exist
        result = self._sizes_of_result(_on_meta(call))
        return map_tensors(_integers_with_values, result)

    def _sizes_of_result(self, call: _Call) -> Any:
        """The result of a call whose tensors have only sizes.

        torch takes up to a millisecond to find a result's sizes, and a step has each call many
        times. A result with memory of its own depends on nothing but what is in the key.
        """
        key = (call.func, _sizes(call.args), _sizes(call.kwargs))
        if key in self._results:
            return _like(self._results[key])
        result = call.run()
        if _has_own_memory(call, result):
            # A copy: the result itself would count as memory that is never freed.
            self._results[key] = _like(result)
        return result

    # -- what it costs -----------------------------------------------------------------------------

    def _count(self, call: _Call, result: Any) -> None:
        """Records an operation under the rate that bounds it."""
        name = call.name
        operands = call.operands
        results = tensors_in(result)
        if "empty" in name or not (operands or results):
            return
        storages = {_storage(tensor) for tensor in operands}
        is_view = any(_storage(tensor) in storages for tensor in results)
        if is_view and not call.func._schema.is_mutable:
            return
        moved_bytes = sum(map(_read_bytes, operands + results))
        num_elements = operands[0].numel() if operands else 0
        # The registry has addmm, but not addmm_.
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if packet in flop_registry:
            flop = flop_registry[packet](*call.args, **call.kwargs, out_val=result)
            is_half = results[0].dtype in (torch.bfloat16, torch.float16)
            kind = "half product" if is_half else "product"
            self._add(kind, moved_bytes, flop=flop)
        elif name in ROW_READS or name in ROW_WRITES:
            self._count_rows(name, operands, results)
        elif name in SORTS:
            share = _SELECTION_SHARE if name == "topk" else 1.0
            self._add("sort", moved_bytes, count=share * num_elements)
        else:
            kind = "slow pass" if name in SLOW_PASSES else "pass"
            self._add(kind, moved_bytes, count=num_elements)

    def _count_rows(self, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """Rows of the first operand, at the places that the second one lists."""
        table = operands[0]
        if name in ("index_put", "index_copy"):
            # Without the underscore the table is copied first.
            self._add("pass", 2 * table.nbytes)
        if name == "_embedding_bag":
            # It reads more rows than it returns: the sum of those of a bag.
            places = operands[1]
            self._add("row read", places.numel() * table[:1].nbytes)
        elif name in ROW_READS:
            self._add("row read", results[0].nbytes)
        elif name == "embedding_dense_backward":
            # Its first operand is no table, but the gradients of the rows.
            self._add("row write", table.nbytes)
        else:
            new_rows = operands[-1]
            self._add("row write", new_rows.nbytes)

    def _count_collective(self, call: _Call) -> None:
        """This rank sends its part to each of the others."""
        num_ranks = dist.get_world_size()
        num_others = num_ranks - 1
        sizes = [tensor.nbytes for tensor in call.operands]
        own_bytes: float = min(sizes)
        rounds = 1
        if call.name == "allreduce_":
            # A ring reduces and gathers: each rank sends its share of the tensor to all others, twice.
            own_bytes /= num_ranks
            rounds = 2
        for _ in range(rounds):
            self._add("collective", num_others * own_bytes)
        if call.name in _COPIED_BY_GLOO and not self._on_gpu:
            self._note_peak(more_bytes=max(sizes))

    # -- what lives --------------------------------------------------------------------------------

    def _track(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor until it is freed."""
        key = _storage(tensor)
        if key in self._tracked:
            return
        storage = tensor.untyped_storage()
        self._tracked.add(key)
        self._note_peak()
        self.live_bytes += storage.nbytes()
        self._note_peak()
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, num_bytes: int) -> None:
        self._note_peak()
        self.live_bytes -= num_bytes
        self._tracked.remove(key)

    def _note_peak(self, more_bytes: int = 0) -> None:
        """Compares what lives with the peak, before and after it changes.

        Args:
            more_bytes: Of buffers inside the operation that runs.
        """
        array_bytes = 0
        if tracemalloc.is_tracing():
            # The most since the last call, while the tensors were those that live now.
            _, array_bytes = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + array_bytes + more_bytes)


def _sizes(values: Any) -> Any:
    """What the sizes of a result depend on, in a form that can be a key."""
    if isinstance(values, Tensor):
        return "tensor", values.shape, values.stride(), values.dtype
    if isinstance(values, (list, tuple)):
        return tuple(map(_sizes, values))
    if isinstance(values, dict):
        return tuple((name, _sizes(value)) for name, value in values.items())
    return type(values), values  # 1, 1.0 and True are equal, but make results of other types


def _has_own_memory(call: _Call, result: Any) -> bool:
    """Whether a result is one tensor that shares no memory and has no more than it needs."""
    if call.func._schema.is_mutable or not isinstance(result, Tensor) or not result.is_meta:
        return False
    if _storage(result) in map(_storage, call.operands):
        return False
    return result.untyped_storage().nbytes() == _like(result).untyped_storage().nbytes()


def _like(tensor: Tensor) -> Tensor:
    """Another tensor with the same sizes."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(call: _Call) -> _Call:
    """The same call with tensors that have only sizes."""
    args = map_tensors(_to_meta, call.args)
    kwargs = map_tensors(_to_meta, call.kwargs)
    return _Call(call.func, args, kwargs)


def _is_meta(device: torch.device | None) -> bool:
    return device is not None and device.type == "meta"


def _to_meta(tensor: Tensor) -> Tensor:
    """The shape, strides and type of a tensor, without its values."""
    if tensor.is_meta:
        return tensor
    return _like(tensor)


def _integers_with_values(tensor: Tensor) -> Tensor:
    """Integers computed from values that do not exist: 0, and True, which selects everything."""
    if tensor.is_floating_point() or not tensor.is_meta:
        return tensor
    value = tensor.dtype == torch.bool
    return torch.full(tensor.shape, value, dtype=tensor.dtype)


def _makes_integers(call: _Call) -> bool:
    """Whether a result has no fractions: by its type, or by the operand or number it is made of."""
    dtype = call.kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    first = call.args[0]
    if isinstance(first, Tensor):
        return not first.is_floating_point()
    return isinstance(call.args[-1], int)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Index lists in place of boolean masks, whose values decide the shape of the result."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return places


def _storage(tensor: Tensor) -> int:
    """A number that all views of the same memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _read_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded tensor is read from few of them."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
