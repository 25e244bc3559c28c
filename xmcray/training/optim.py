"""Learning rates over time, and the optimiser of the encoder and other data-parallel modules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xmcray.config import check_choices, check_decay, check_ranges
from xmcray.nn.row_table import RowOptimConfig, RowTable, sum_by_row
from xmcray.parallel import collectives
from xmcray.training.gradients import GradientSum

# Adam divides by 1 - beta, and by eps where a gradient is 0.
_BELOW_ONE = 0.999_999
_ABOVE_ZERO = 1e-30


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Section `optim`; all numbers are those of the global batch.

    Attributes:
        epochs: passes over the training queries.
        stop_epoch: end after so many epochs of the same schedule, at most `epochs`; 0 is all of
            them.
        batch_size: queries of a global batch.
        lr: peak learning rate of the encoder.
        token_lr: of a static encoder's token table and of PRIME's free vectors; 0 means lr.
        weight_decay: of the encoder, except biases, normalisations and token tables.
        schedule: "cosine", "linear" or "constant" after the warm-up, for all parameters.
        warmup_steps: steps from 0 to the peak.
        beta1: of the Adam that trains the encoder.
        beta2: of the Adam that trains the encoder.
        eps: of the Adam that trains the encoder.
        micro_batch: texts encoded at once by a worker; 0 is all. Bounds memory. Changes no
            result, but for the dropout masks inside a transformer.
        seed: of the initial weights and every draw of the run.
        precision: of all parameters; float64 is for tests of invariance.
        matmul: "bf16" lets products of float32 matrices round their factors to bfloat16, with sums
            in float32: several times faster on processors with AMX, and nearly as good. On a GPU
            torch rounds them to TF32 instead.
    """

    epochs: int = 15
    stop_epoch: int = 0
    batch_size: int = 256
    lr: float = 1e-3
    token_lr: float = 0.0
    weight_decay: float = 0.01
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    micro_batch: int = 0
    seed: int = 0
    precision: Literal["float32", "float64"] = "float32"
    matmul: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "optim",
            epochs=1,
            stop_epoch=0,
            batch_size=1,
            lr=0,
            token_lr=0,
            weight_decay=0,
            warmup_steps=0,
            beta1=(0, _BELOW_ONE),
            beta2=(0, _BELOW_ONE),
            eps=_ABOVE_ZERO,
            micro_batch=0,
            seed=0,
        )
        check_decay("optim.lr", self.lr, "optim.weight_decay", self.weight_decay)
        check_choices(self, "optim")

    @property
    def num_epochs(self) -> int:
        """Epochs that are trained: `stop_epoch`, or all."""
        return self.stop_epoch or self.epochs

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return torch.float64 if self.precision == "float64" else torch.float32


def lr_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at a step (0-based): linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    # A run shorter than its warm-up must not divide by 0.
    steps_after_warmup = max(1, total_steps - config.warmup_steps)
    progress = (step - config.warmup_steps) / steps_after_warmup
    if config.schedule == "cosine":
        angle = math.pi * min(progress, 1.0)
        return 0.5 * (1 + math.cos(angle))
    return max(0.0, 1.0 - progress)


def sparse_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters of which a step touches few rows.

    A module has them if it has a method `sparse_parameters`.
    """
    names: Callable[[], list[str]] | None = getattr(module, "sparse_parameters", None)
    return names() if names else []


class _AdamW(torch.optim.AdamW):
    """AdamW that does not import torch's compiler.

    torch wraps such methods to keep its compiler away from them, and imports it for that. Nothing is
    compiled here, and the import takes each worker 1.5 CPU seconds and 70 MB.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    # The wrapper of this one also turns gradients off.
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class EncoderOptimizer:
    """AdamW over dense parameters, row-sparse Adam over token tables; sums gradients over ranks.

    Args:
        modules: Modules by name, with the same values on every rank.
        config: Section `optim`.
        sparse: Parameters of which a step touches few rows, as "module.parameter".
        lr_factors: Learning rate of a module as a multiple of `config.lr`, by name; 1 if absent.

    Attributes:
        dense: Parameters of AdamW, by name.
        tables: Token tables and other parameters of which a step touches few rows, by name.
        sums: Sums the gradients of `dense`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: OptimConfig,
        sparse: Iterable[str],
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.dense: dict[str, nn.Parameter] = {}
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    self.dense[f"{module_name}.{name}"] = parameter

        row_config = RowOptimConfig(
            kind="adam",
            lr=config.token_lr or config.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
        )
        self._sparse: dict[str, nn.Parameter] = {}
        self.tables: dict[str, RowTable] = {}
        for name in sparse:
            parameter = self.dense.pop(name)
            self._sparse[name] = parameter
            self.tables[name] = RowTable(parameter.detach(), row_config)
        self.sums = GradientSum(list(self.dense.values()))
        self._adam = _AdamW(
            self._groups(lr_factors or {}),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            # One kernel for many parameters. CPUs keep the loop, whose bits runs were recorded with.
            fused=self._is_on_gpu() or None,
        )

    def _is_on_gpu(self) -> bool:
        """Whether there is something for AdamW to train, and all of it is on a GPU."""
        parameters = self.dense.values()
        return bool(parameters) and all(parameter.is_cuda for parameter in parameters)

    def _groups(self, lr_factors: Mapping[str, float]) -> list[dict[str, Any]]:
        """Parameters of equal learning rate and weight decay, as AdamW takes them."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.dense.items():
            # Biases and normalisations are not decayed.
            is_decayed = parameter.ndim > 1 and "norm" not in name.lower()
            weight_decay = self.config.weight_decay if is_decayed else 0.0
            module_name, _, _ = name.partition(".")
            factor = lr_factors.get(module_name, 1.0)
            groups.setdefault((factor, weight_decay), []).append(parameter)
        if not groups:  # AdamW refuses to have nothing to do
            groups[1.0, 0.0] = [nn.Parameter(torch.zeros(1))]
        return [
            {"params": parameters, "lr_factor": factor, "weight_decay": weight_decay}
            for (factor, weight_decay), parameters in groups.items()
        ]

    def update_together(self) -> None:
        """Updates many dense parameters in one launch, as AdamW does by default on a GPU."""
        for group in self._adam.param_groups:
            group["foreach"] = True

    def zero_grad(self) -> None:
        """Removes all gradients."""
        for parameter in [*self.dense.values(), *self._sparse.values()]:
            parameter.grad = None

    def step(self, factor: float) -> None:
        """One update with the gradients summed over ranks; collective.

        Args:
            factor: Share of the peak learning rates.
        """
        self.sums.finish()
        for group in self._adam.param_groups:
            group["lr"] = self.config.lr * factor * group["lr_factor"]
        self._adam.step()
        for name, table in self.tables.items():
            rows, gradient = _sum_rows(self._sparse[name])
            table.update_rows(table.config.lr * factor, rows, gradient)

    def tensors(self) -> dict[str, Tensor]:
        """Optimiser state, as "module.parameter/state"."""
        tensors = {}
        for name, parameter in self.dense.items():
            for key, value in self._adam.state[parameter].items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
        for name, table in self.tables.items():
            for key, value in table.tensors().items():
                if key != "weight":
                    tensors[f"{name}/{key}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `tensors` gave; parameters are restored with their modules.

        Args:
            tensors: Optimiser state by name.
            num_steps: Steps done until then.

        Raises:
            KeyError, ValueError: The state is not that of these parameters.
        """
        for name, parameter in self.dense.items():
            state = _with_prefix(tensors, f"{name}/")
            if not state:
                continue
            _check_adam_state(name, state, parameter)
            moved = {key: value.to(parameter.device, copy=True) for key, value in state.items()}
            # AdamW keeps its counter on the CPU, unless it is fused.
            if not self._is_on_gpu():
                moved["step"] = state["step"].clone()
            self._adam.state[parameter] = moved
        for name, table in self.tables.items():
            # The weights came with the module; the table only gets its state, as one block of rows.
            state = _with_prefix(tensors, f"{name}/")
            state["weight"] = table.weight_SD
            table.load([(0, state)], num_steps)
        # Otherwise the state of parameters that are not trained here would be dropped in silence.
        unknown = tensors.keys() - self.tensors().keys()
        if unknown:
            raise ValueError(f"found {min(unknown)}, which no parameter has")


def _check_adam_state(name: str, state: Mapping[str, Tensor], parameter: Tensor) -> None:
    """Raises ValueError if AdamW could not go on with a state."""
    shapes = {key: value.shape for key, value in state.items()}
    expected = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    if shapes != expected:
        shape_lists = {key: list(shape) for key, shape in shapes.items()}
        raise ValueError(f"found {shape_lists} of {name} {list(parameter.shape)}")


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names start with a prefix, by the rest of their names."""
    matches = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            matches[name.removeprefix(prefix)] = tensor
    return matches


def _sum_rows(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Distinct rows in any rank's sparse gradient, ascending, and their summed gradients.

    Gradients are summed in the order of the ranks.
    """
    if parameter.grad is None:
        # A rank whose texts touched no row still takes part in the exchange below.
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
    else:
        # Coalescing sums repeated rows and sorts them.
        gradient = parameter.grad.coalesce()
        rows = gradient.indices()[0]
        values = gradient.values()
    if collectives.num_ranks() == 1:
        return rows, values
    places, all_rows, all_values = collectives.gather_placed(rows, values)
    return sum_by_row(all_rows[places], places, all_values)
