"""Tensors with real values on the CPU that say they are on a CUDA device, and count what they cost.

A dispatch mode unwraps the tensors of an operation, computes it on the CPU, and wraps the results.
It fails where an operation mixes devices, as CUDA would, and it counts host syncs (the host waits
for the device), copies and launches. `FakeTensorMode` of torch cannot do this: it has no values, and
stops where a step needs one.

Limits: there are no kernel times, ranks exchange by Gloo what NCCL would, and a copy from the host
inside a backward pass is not seen. Inference mode only switches gradients off. Launches are upper
bounds, because attention is computed by its parts.

Needs the library of stand_in.cpp, preloaded.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from xmcray.planning.nested_tensors import map_tensors, tensors_in

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")

# The host waits for these, because it needs a number or a shape that only the device knows.
_SYNCS = {
    "_local_scalar_dense",
    "_unique2",
    "_coalesce",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
# These start no kernel.
_VIEWS = {
    "_indices",
    "_reshape_alias",
    "_unsafe_view",
    "_values",
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_PRODUCTS = {"addbmm", "addmm", "baddbmm", "bmm", "mm", "scaled_dot_product_attention"}
# CUDA accepts indices on the host, and copies them.
_MAY_MIX = {"_to_copy", "copy_", *_INDEXING}


@dataclass(slots=True)
class Counts:
    """What happened on the pretended device so far.

    Attributes:
        launches: Kernels by operation.
        syncs: Host syncs by operation and line of the package. A copy from pageable memory is one.
        copies: Copies from host to device by line of the package.
        products: Matrix products by type of their numbers.
        exchanged: Bytes that collectives were given, by collective.
        live_bytes: Bytes of all tensors of the device.
        peak_bytes: The most at the same time.
    """

    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    exchanged: Counter[str] = field(default_factory=Counter)
    live_bytes: int = 0
    peak_bytes: int = 0

    def track(self, tensor: Tensor) -> None:
        """Counts the memory of a new tensor until it is freed."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in _tracked:
            return
        _tracked.add(key)
        num_bytes = storage.nbytes()
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key, num_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        self.live_bytes -= num_bytes
        _tracked.remove(key)


_tracked: set[int] = set()
counts = Counts()


class MixedDevicesError(RuntimeError):
    """An operation had tensors of the device and of the host."""


class PretendedTensor(Tensor):
    """A tensor that says it is on `cuda:0`; `on_host` has its values."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor) -> PretendedTensor:
        layout: dict[str, Any] = {}
        if on_host.layout == torch.strided:
            layout["strides"] = on_host.stride()
            layout["storage_offset"] = on_host.storage_offset()
        return Tensor._make_wrapper_subclass(
            cls, on_host.size(), dtype=on_host.dtype, device=_CUDA, **layout
        )

    def __init__(self, on_host: Tensor) -> None:
        self.on_host = on_host
        counts.track(on_host)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def storage(self) -> Any:
        return self.on_host.storage()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_host.untyped_storage()

    def tolist(self) -> Any:
        counts.syncs[f"tolist {_line()}"] += 1
        return self.on_host.tolist()

    def coalesce(self) -> Tensor:
        if not self.on_host.is_coalesced():
            counts.syncs[f"coalesce {_line()}"] += 1
        return _Coalesced(self.on_host.coalesce())


class _Coalesced(PretendedTensor):
    """A sparse tensor whose parts are read without dispatch."""

    def __init__(self, on_host: Tensor) -> None:
        super().__init__(on_host)

    def indices(self) -> Tensor:
        return PretendedTensor(self.on_host.indices().clone())

    def values(self) -> Tensor:
        return PretendedTensor(self.on_host.values())


class PretendedCuda(TorchDispatchMode):
    """Within it, tensors made on device `cuda` are pretended."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


def set_free_bytes(num_bytes: int) -> None:
    """Sets the memory of the device that no process has."""
    torch.cuda.mem_get_info = lambda device=None: (num_bytes, 1 << 40)


def install() -> None:
    """Makes torch believe in the device, for the rest of the process."""
    stand_ins: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        # So a run in one process searches its hard negatives on the CPU, unless a test gives it room.
        "mem_get_info": lambda device=None: (0, 1 << 40),
        "get_device_capability": lambda device=None: (8, 0),
        "synchronize": lambda device=None: None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    dist.get_backend = lambda group=None: dist.Backend("nccl")
    torch._C._set_only_lift_cpu_tensors(True)
    # A view of a pretended tensor cannot be made in inference mode.
    torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc]
    torch.__future__.set_swap_module_params_on_conversion(True)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    namespace, name = func._schema.name.split("::")
    tensors = tensors_in((args, kwargs))
    pretended = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
    if name == "is_pinned":
        return hasattr(args[0], "pretended_pinned")
    if name in ("pin_memory", "_pin_memory"):
        copy = args[0].clone()
        copy.pretended_pinned = True
        return copy
    if namespace == "c10d":
        _count_collective(name, tensors)
    goes_to_device = bool(pretended)
    if kwargs.get("device") is not None:
        goes_to_device = torch.device(kwargs["device"]).type == "cuda"
    if pretended or goes_to_device:
        _refuse_mixed(name, tensors, args)
        _count(name, args, kwargs, goes_to_device)
    host_kwargs = map_tensors(_unwrapped, dict(kwargs))
    if host_kwargs.get("device") is not None:
        host_kwargs["device"] = _CPU
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = False
    result = func(*map_tensors(_unwrapped, tuple(args)), **host_kwargs)
    if not goes_to_device or name == "_local_scalar_dense":
        return result
    wrapped = map_tensors(_wrapped, result)
    # What comes from the host is a copy, whatever an operation says of views.
    if namespace != "aten" or not pretended:
        return wrapped
    # An operation in place returns the tensor that it was given.
    if func._schema.is_mutable and name.endswith("_") and isinstance(result, Tensor):
        return args[0]
    return return_and_correct_aliasing(func, tuple(args), dict(kwargs), wrapped)


def _unwrapped(tensor: Tensor) -> Tensor:
    return tensor.on_host if isinstance(tensor, PretendedTensor) else tensor


def _wrapped(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, PretendedTensor) else PretendedTensor(tensor)


def _refuse_mixed(name: str, tensors: list[Tensor], args: Sequence[Any]) -> None:
    if name in _MAY_MIX:
        return
    on_host = [tensor for tensor in tensors if not isinstance(tensor, PretendedTensor)]
    # A tensor without axes is a number, which CUDA takes from the host.
    on_host = [tensor for tensor in on_host if tensor.dim() > 0]
    if on_host and len(on_host) < len(tensors):
        raise MixedDevicesError(f"{name} at {_line()} has tensors on cuda:0 and on the CPU")


def _count_collective(name: str, tensors: Sequence[Tensor]) -> None:
    """NCCL, which the ranks of a GPU run use, moves the memory of devices only."""
    for tensor in tensors:
        if not isinstance(tensor, PretendedTensor):
            raise MixedDevicesError(f"{name} at {_line()} exchanges a tensor of the CPU")
        counts.exchanged[name] += tensor.nbytes


def _count(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], to_device: bool) -> None:
    if name in _PRODUCTS:
        counts.products[str(args[0].dtype)] += 1
    if name in ("_to_copy", "copy_"):
        _count_copy(name, args, kwargs, to_device)
    elif name in _SYNCS and kwargs.get("output_size") is None:
        counts.syncs[f"{name} {_line()}"] += 1
        counts.launches[name] += 1
    elif name not in _VIEWS:
        counts.launches[name] += 1
    if name in _INDEXING:
        for index in args[1]:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                counts.syncs[f"mask {_line()}"] += 1
            elif not isinstance(index, PretendedTensor):
                counts.copies[f"index {_line()}"] += 1
                counts.syncs[f"pageable index {_line()}"] += 1


def _count_copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], to_device: bool) -> None:
    if name == "_to_copy":
        source = args[0]
        waits = not kwargs.get("non_blocking", False)
    else:
        source = args[1]
        to_device = isinstance(args[0], PretendedTensor)
        waits = not (len(args) > 2 and args[2])
    from_device = isinstance(source, PretendedTensor)
    if from_device and to_device:
        counts.launches[name] += 1
    elif from_device:
        counts.syncs[f"to the host {_line()}"] += 1
    elif to_device and source.numel():
        counts.copies[_line()] += 1
        if waits or not hasattr(source, "pretended_pinned"):
            counts.syncs[f"pageable copy {_line()}"] += 1


def _line() -> str:
    """The innermost line of the package on the stack."""
    frame = inspect.currentframe()
    # `traceback` would read the text of every line and ask for the date of every file.
    while frame is not None:
        _, is_inside, path = frame.f_code.co_filename.rpartition("/xmcray/")
        if is_inside and "/tests/" not in frame.f_code.co_filename:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
