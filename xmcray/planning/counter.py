"""Counts what a training step does: the code runs for real, but floating-point tensors have no values.

Inside a `Counter`, floating-point tensors on the device "meta" have a shape and no memory. Integers
and booleans always have values, on the CPU, because shapes depend on them: which labels a batch
meets decides how many rows are read.
"""

from __future__ import annotations

import time
import tracemalloc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

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
        self.operations.append(Operation(kind=kind, moved_bytes=moved_bytes, **sizes))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation; called by torch."""
        start = time.thread_time()
        result = self._run(func, args, dict(kwargs or {}))
        self.inside_s += time.thread_time() - start
        self.calls += 1
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        operands = _tensors((args, kwargs))
        if func.namespace == "c10d":
            self._count_collective(name, operands)
            return func(*args, **kwargs)
        if "coo" in name or any(tensor.is_sparse for tensor in operands):
            return self._run_sparse(func, name, args, kwargs)
        if name in _INDEXED:
            args = (args[0], _without_masks(args[1]), *args[2:])
        if _is_meta(kwargs.get("device")) and _makes_integers(args, kwargs):
            kwargs["device"] = torch.device("cpu")
        result = self._compute(func, name, args, kwargs)
        self._count(func, name, args, kwargs, result)
        for tensor in _tensors(result):
            self._track(tensor)
        return result

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation's result: sizes where an operand has only sizes, else values."""
        operands = _tensors((args, kwargs))
        if not any(tensor.is_meta for tensor in operands):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return 1.0
        device = kwargs.get("device")
        if name == "_to_copy" and device is not None and not _is_meta(device):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable and not operands[0].is_meta and "out" not in kwargs:
            return args[0]  # a tensor of the host takes in values that do not exist
        args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
        return tree_map_only(Tensor, _integers_with_values, func(*args, **kwargs))

    def _run_sparse(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Sparse gradients: one row of values for each index."""
        if "coo" in name:
            indices, values = _tensors(args)
            (shape,) = (arg for arg in args if isinstance(arg, (list, torch.Size)))
            self._sparse[torch.Size(shape)] = indices, values
            return func(*tree_map_only(Tensor, _to_meta, args), **kwargs)
        shape = args[0].shape
        indices, values = self._sparse[shape]
        if name in ("_indices", "indices"):
            return indices
        if name in ("_values", "values"):
            return values
        if name == "_coalesce":
            distinct = indices.unique()[None]
            summed = values.new_empty(distinct.shape[1], *values.shape[1:])
            self._add("sort", indices.nbytes, count=indices.numel())
            self._add("pass", values.nbytes + summed.nbytes)
            self._sparse[shape] = distinct, summed
            return args[0]
        if name == "clone":
            self._add("pass", 2 * values.nbytes)
            self._sparse[shape] = indices, torch.empty_like(values)
        return func(*args, **kwargs)

    # -- what it costs -----------------------------------------------------------------------------

    def _count(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        operands = _tensors((args, kwargs))
        results = _tensors(result)
        if "empty" in name or not (operands or results):
            return
        storages = {_storage(tensor) for tensor in operands}
        is_view = any(_storage(tensor) in storages for tensor in results)
        if is_view and not func._schema.is_mutable:
            return
        moved_bytes = sum(map(_read_bytes, operands + results))
        # The registry has addmm, but not addmm_.
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if packet in flop_registry:
            flop = flop_registry[packet](*args, **kwargs, out_val=result)
            is_half = results[0].dtype in (torch.bfloat16, torch.float16)
            kind = "half product" if is_half else "product"
            self._add(kind, moved_bytes, flop=flop)
        elif name in ROW_READS or name in ROW_WRITES:
            self._count_rows(name, operands, results)
        elif name in SORTS:
            share = _SELECTION_SHARE if name == "topk" else 1.0
            self._add("sort", moved_bytes, count=share * operands[0].numel())
        else:
            kind = "slow pass" if name in SLOW_PASSES else "pass"
            self._add(kind, moved_bytes, count=operands[0].numel() if operands else 0)

    def _count_rows(self, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """Rows of the first operand, at the places that the second one lists."""
        table = operands[0]
        if name in ("index_put", "index_copy"):  # without the underscore the table is copied first
            self._add("pass", 2 * table.nbytes)
        if name == "_embedding_bag":  # it reads more rows than it returns
            self._add("row read", operands[1].numel() * table[:1].nbytes)
        elif name in ROW_READS:
            self._add("row read", results[0].nbytes)
        elif name == "embedding_dense_backward":
            self._add("row write", operands[0].nbytes)
        else:
            self._add("row write", operands[-1].nbytes)

    def _count_collective(self, name: str, operands: list[Tensor]) -> None:
        """This rank sends its part to each of the others."""
        num_ranks = dist.get_world_size()
        own_bytes: float = min(tensor.nbytes for tensor in operands)
        rounds = 1
        if name == "allreduce_":
            # A ring reduces and gathers: each rank sends its share of the tensor to all others, twice.
            own_bytes /= num_ranks
            rounds = 2
        for _ in range(rounds):
            self._add("collective", (num_ranks - 1) * own_bytes)
        if name in _COPIED_BY_GLOO and not self._on_gpu:
            self._note_peak(more_bytes=max(tensor.nbytes for tensor in operands))

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


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among nested arguments or results."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _integers_with_values(tensor: Tensor) -> Tensor:
    """Integers computed from values that do not exist: 0, and True, which selects everything."""
    if tensor.is_floating_point() or not tensor.is_meta:
        return tensor
    return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)


def _makes_integers(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a result has no fractions: by its type, or by the operand or number it is made of."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    if isinstance(args[0], Tensor):
        return not args[0].is_floating_point()
    return isinstance(args[-1], int)


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
    return int(tensor.untyped_storage()._cdata)


def _read_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded tensor is read from few of them."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
