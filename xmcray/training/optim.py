"""Learning rates over time, and the optimiser of the encoder and other data-parallel modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xmcray.config import check_choices, check_range
from xmcray.nn.row_table import RowOptimConfig, RowTable, sum_by_row
from xmcray.parallel import collectives

_BUCKET = 8_000_000  # elements reduced together
_BELOW_ONE, _ABOVE_ZERO = (
    0.999_999,
    1e-30,
)  # Adam divides by 1 - beta and by eps where a gradient is 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Section `optim`; all numbers are those of the global batch.

    Attributes:
        epochs: passes over the training queries. batch_size: queries of a global batch.
        stop_epoch: end after so many epochs of the same schedule; 0 is all of them.
        lr: peak learning rate of the encoder. token_lr: of a static encoder's token table and of PRIME's free
            vectors; 0 means lr.
        weight_decay: of the encoder, except biases, normalisations and token tables.
        schedule: "cosine", "linear" or "constant" after the warm-up, for all parameters.
        warmup_steps: steps from 0 to the peak.
        beta1, beta2, eps: of the Adam that trains the encoder.
        micro_batch: texts encoded at once by a worker; 0 is all. Bounds memory, never changes results.
        seed: of the initial weights and every draw of the run.
        precision: of all parameters; float64 is for tests of invariance.
        matmul: "bf16" lets products of float32 matrices round their factors to bfloat16, with sums in float32: several
            times faster on processors with AMX and on GPUs, and nearly as good.
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
        check_range("optim.epochs", self.epochs, low=1)
        check_range("optim.stop_epoch", self.stop_epoch, low=0)
        check_range("optim.batch_size", self.batch_size, low=1)
        check_range("optim.lr", self.lr, low=0)
        check_range("optim.token_lr", self.token_lr, low=0)
        check_range("optim.weight_decay", self.weight_decay, low=0)
        check_range("optim.warmup_steps", self.warmup_steps, low=0)
        check_range("optim.beta1", self.beta1, 0, _BELOW_ONE)
        check_range("optim.beta2", self.beta2, 0, _BELOW_ONE)
        check_range("optim.eps", self.eps, low=_ABOVE_ZERO)
        check_range("optim.micro_batch", self.micro_batch, low=0)
        check_range("optim.seed", self.seed, low=0)
        check_choices(self, "optim")

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return torch.float64 if self.precision == "float64" else torch.float32


def lr_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at a step (0-based): linear warm-up, then the schedule down to 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return (
        0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        if config.schedule == "cosine"
        else max(0.0, 1.0 - done)
    )


def sparse_parameters(module: nn.Module) -> list[str]:
    """Names of a module's parameters of which a step touches few rows: what its method of this name returns, if any."""
    named: Callable[[], list[str]] | None = getattr(module, "sparse_parameters", None)
    return named() if named else []


class EncoderOptimizer:
    """AdamW over the dense parameters, row-sparse Adam over token tables; gradients are summed over ranks here.

    Args:
        modules: modules by name, the same values on every rank.
        config: section `optim`.
        sparse: names of parameters of which a step touches few rows, as "module.parameter".
        lr_factors: learning rate of a module as a multiple of `config.lr`, by name; 1 where not given.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: OptimConfig,
        sparse: Iterable[str],
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        named = {
            f"{m}.{n}": p
            for m, module in modules.items()
            for n, p in module.named_parameters()
            if p.requires_grad
        }
        rows = RowOptimConfig(
            kind="adam",
            lr=config.token_lr or config.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
        )
        self.sparse = {
            name: (named[name], RowTable(named.pop(name).detach(), rows)) for name in sparse
        }
        self.named = named
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named.items():
            decayed = parameter.ndim > 1 and "norm" not in name.lower()
            factor = (lr_factors or {}).get(name.split(".", 1)[0], 1.0)
            groups.setdefault((factor, config.weight_decay if decayed else 0.0), []).append(
                parameter
            )
        self.config = config
        self.adam = torch.optim.AdamW(
            [
                {"params": params, "lr_factor": f, "weight_decay": wd}
                for (f, wd), params in groups.items()
            ]
            or [{"params": [nn.Parameter(torch.zeros(1))], "lr_factor": 1.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def zero_grad(self) -> None:
        """Forgets gradients."""
        for parameter in [*self.named.values(), *(p for p, _ in self.sparse.values())]:
            parameter.grad = None

    def step(self, factor: float) -> None:
        """One update with the gradients summed over ranks; `factor` is the share of the peak learning rates."""
        self._sum_dense()
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * factor * group["lr_factor"]
        self.adam.step()
        for parameter, table in self.sparse.values():
            rows, grad = _sum_rows(parameter)
            table.update_rows(table.config.lr * factor, rows, grad)

    def tensors(self) -> dict[str, Tensor]:
        """Optimiser state by name."""
        state = self.adam.state
        kept = {
            f"{n}/{k}": v
            for n, p in self.named.items()
            for k, v in state[p].items()
            if isinstance(v, Tensor)
        }
        for name, (_, table) in self.sparse.items():
            kept |= {
                f"{name}/{key}": tensor
                for key, tensor in table.tensors().items()
                if key != "weight"
            }
        return kept

    def load(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `tensors` gave after `num_steps` steps; parameters are restored with their modules."""
        for name, parameter in self.named.items():
            prefix = f"{name}/"
            mine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if mine:
                on_cpu = mine.pop("step")  # where AdamW keeps it
                moved = {k: v.to(parameter.device, copy=True) for k, v in mine.items()}
                self.adam.state[parameter] = {"step": on_cpu.clone(), **moved}
        for name, (_, table) in self.sparse.items():
            kept: dict[str, Any] = {"weight": table.weight_SD}
            kept |= {k: tensors[f"{name}/{k}"] for k in table.tensors() if k != "weight"}
            table.load([(0, kept)], num_steps)

    def _sum_dense(self) -> None:
        parameters = list(self.named.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if collectives.num_ranks() == 1:
            return
        bucket: list[Tensor] = []
        for i, parameter in enumerate(parameters):
            assert parameter.grad is not None
            bucket.append(parameter.grad)
            if i + 1 == len(parameters) or sum(g.numel() for g in bucket) > _BUCKET:
                flat = collectives.sum_over_ranks(torch.cat([g.reshape(-1) for g in bucket]))
                parts = flat.split([g.numel() for g in bucket])
                for grad, part in zip(bucket, parts, strict=True):
                    grad.copy_(part.view_as(grad))
                bucket = []


def _sum_rows(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Distinct rows in any rank's gradient, ascending, and their gradients summed in rank order."""
    grad = parameter.grad
    if grad is None:
        rows, values = (
            torch.empty(0, dtype=torch.int64, device=parameter.device),
            parameter.new_empty(0, *parameter.shape[1:]),
        )
    else:
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
    if collectives.num_ranks() == 1:
        return rows, values
    places, all_rows, all_values = collectives.gather_placed(rows, values)
    return sum_by_row(all_rows[places], places, all_values)
