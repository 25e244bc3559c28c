"""A table of vectors of which a step reads and updates few rows: classifier rows, token embeddings.

Lazy semantics: momentum, Adagrad and Adam state of a row advance only at steps that touch it.
Weight decay is decoupled and exact all the same. A row that was not touched between steps a and b
is multiplied by the product of (1 - lr_t * wd) over those steps when it is read next. The product
comes from one running sum of log(1 - lr_t * wd) and one int32 per row. `flush` brings every row up
to date. Rows read twice within a step are one row: their gradients are summed before the one
update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.config import check_choices, check_decay, check_ranges

# Multipliers of splitmix64 as signed 64-bit integers; products wrap around.
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
# Names in a checkpoint that was written between two flushes.
_LAST_STEP = "last_step"
_DECAY_SUMS = "decay_sums"
BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # numbers that are updated at a time
Where = Tensor | slice  # distinct row ids, or a range of rows
_STATE_NAMES = {"sgd": ("momentum",), "adagrad": ("square_sum",), "adam": ("mean", "square")}


@dataclass(frozen=True, kw_only=True)
class RowOptimConfig:
    """How rows are updated.

    Attributes:
        kind: "sgd" (with momentum), "adagrad" or "adam".
        lr: peak learning rate of the global batch.
        weight_decay: decoupled, per step times lr.
        momentum: of SGD; 0 keeps no state.
        beta1: decay of Adam's mean.
        beta2: decay of Adam's mean square.
        eps: of Adam and Adagrad.
        storage: "bfloat16" halves the rows' memory: updates are computed in float32 and rounded up
            or down with probabilities that keep them unbiased (ELMO, Zhang et al.); the optimiser's
            state stays float32.
    """

    kind: Literal["sgd", "adagrad", "adam"] = "sgd"
    lr: float = 0.05
    weight_decay: float = 0.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    storage: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(
            self,
            lr=0,
            weight_decay=0,
            momentum=(0, 0.9999),
            beta1=(0, 0.999_999),
            beta2=(0, 0.999_999),
            eps=1e-30,
        )
        check_decay("lr", self.lr, "weight_decay", self.weight_decay)


def copy_rows(block: Tensor, rows: Tensor, first: int) -> None:
    """Writes restored rows into a tensor.

    Args:
        block: [n, ...].
        rows: [S, ...], changed in place.
        first: row of `rows` that the block begins with.

    Raises:
        ValueError: the block has another shape than the rows, which would fill them with repetitions
            of it, or leave some as they are.
    """
    height = block.shape[0] if block.ndim else 0
    target = rows[first : first + height]
    if target.shape != block.shape:
        raise ValueError(f"found rows {list(block.shape)}, expected {list(target.shape)}")
    target.copy_(block)


class RowTable:
    """Vectors with their optimiser state.

    Args:
        weight_SD: the rows; kept, not copied, unless the configured storage is another type.
        config: update rule.
        first_row: number of the first row among those of all ranks; keys the rounding of bfloat16.
    """

    def __init__(self, weight_SD: Tensor, config: RowOptimConfig, first_row: int = 0) -> None:
        self.config = config
        self.first_row = first_row
        self.rounded = config.storage == "bfloat16"
        self.weight_SD = weight_SD.bfloat16() if self.rounded else weight_SD
        self.state: dict[str, Tensor] = {}
        if config.kind != "sgd" or config.momentum != 0:
            for name in _STATE_NAMES[config.kind]:
                # As wide as the rows are computed with, also if they are stored in bfloat16.
                self.state[name] = torch.zeros_like(weight_SD)
        num_rows = len(weight_SD)
        device = weight_SD.device
        self.last_step_S = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # Adam's bias correction needs the number of updates of each row.
        num_touched = num_rows if config.kind == "adam" else 0
        self.touches_S = torch.zeros(num_touched, dtype=torch.int32, device=device)
        self.num_steps = 0  # updates so far
        # All rows were up to date after this update.
        self._all_current_step = 0
        self._decay = _DecaySums(device)
        self._open: tuple[Tensor | None, Tensor] | None = None

    def rows(self, ids_U: Tensor | None) -> Tensor:
        """The rows of distinct ids, up to date, as a leaf that collects a gradient until `update`.

        Until then, only the same rows can be read again.

        Args:
            ids_U: int64 [U], distinct; None for all rows.

        Returns:
            [U, D], a copy (all rows: the table itself, so that no second copy exists).
        """
        if self._open is not None:
            # A step with several losses reads its rows once for all of them.
            open_ids_U, leaf = self._open
            is_same = ids_U is open_ids_U or (
                ids_U is not None and open_ids_U is not None and torch.equal(ids_U, open_ids_U)
            )
            assert is_same, "rows() of other ids without update()"
            return leaf
        if ids_U is None:
            self.flush()
            leaf = self.weight_SD.detach()
        else:
            leaf = self._read(ids_U)
        self._open = (ids_U, leaf.requires_grad_())
        return leaf

    def update(self, lr: float) -> None:
        """One optimiser step on the rows last read, with their collected gradient.

        It counts as a step for all rows, read or not.
        """
        decay = self._count_step(lr)
        if self._open is None:
            return
        ids_U, leaf = self._open
        self._open = None
        if leaf.grad is None:
            return
        for block in self._blocks(len(leaf)):
            where = block if ids_U is None else ids_U[block]
            rows_BD = self._wide(leaf.detach()[block])
            self._step(where, rows_BD, leaf.grad[block], lr, decay)
        if ids_U is None:
            self._all_current_step = self.num_steps

    def update_rows(self, lr: float, ids_U: Tensor, grad_UD: Tensor) -> None:
        """One optimiser step on rows that were not read; it counts as a step for all rows.

        Args:
            ids_U: int64 [U], distinct.
            grad_UD: their gradient, in the precision that the rows are computed with.
        """
        self._count_step(lr)
        for block in self._blocks(len(ids_U)):
            # `_read` applies the decay of this step too, because it is counted already.
            rows_BD = self._read(ids_U[block])
            self._step(ids_U[block], rows_BD, grad_UD[block], lr)

    def flush(self) -> None:
        """Brings every row up to date with the weight decay of the steps that did not touch it."""
        # A step on all rows leaves none behind; then the device is not asked which rows are.
        if self.config.weight_decay and self._all_current_step != self.num_steps:
            stale = (self.last_step_S < self.num_steps).nonzero().squeeze(1)
            # In blocks, so that the copies stay small.
            for ids in stale.split(1 << 16):
                self.weight_SD[ids] = self._stored(ids, self._read(ids))
        self._mark_up_to_date(self.num_steps)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps per row, first axis = rows.

        After a `flush` that is all. Without one, as at a checkpoint that an undisturbed run would
        not have, the decay that rows still lack is among it. To apply it would round once more.
        """
        tensors = {"weight": self.weight_SD, **self.state}
        if len(self.touches_S):
            tensors["touches"] = self.touches_S
        if self.config.weight_decay and self._all_current_step != self.num_steps:
            tensors[_LAST_STEP] = self.last_step_S
            tensors[_DECAY_SUMS] = self._decay.of_rows(self.last_step_S)
        return tensors

    def load(self, blocks: Iterable[tuple[int, Mapping[str, Tensor]]], num_steps: int) -> None:
        """Restores what `tensors` gave.

        Args:
            blocks: the first row of each block, and its tensors.
            num_steps: updates before the checkpoint. Decay that was pending then is in the blocks.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a tensor has another shape.
        """
        self._mark_up_to_date(num_steps)
        own = self.tensors()
        for first, tensors in blocks:
            for name, tensor in own.items():
                copy_rows(tensors[name], tensor, first)
            if _LAST_STEP in tensors:
                last_step_U = tensors[_LAST_STEP].to(self.last_step_S.device)
                copy_rows(last_step_U, self.last_step_S, first)
                self._decay.restore(tensors[_DECAY_SUMS], last_step_U, num_steps)
                self._all_current_step = self._decay.first_step

    def _mark_up_to_date(self, num_steps: int) -> None:
        """Records that no row has pending decay.

        The sums start anew, so that a run that was restored here rounds as one that went on.
        """
        self.num_steps = num_steps
        self._all_current_step = num_steps
        self._decay.restart(num_steps)
        self.last_step_S.fill_(num_steps)

    def _pending_decay(self, last_step_U: Tensor) -> Tensor:
        """[U, 1], what the weight decay since each row's last step leaves of it."""
        dtype = torch.float32 if self.rounded else self.weight_SD.dtype
        return self._decay.factors(last_step_U).to(dtype).unsqueeze(1)

    def _count_step(self, lr: float) -> float:
        """Counts a step; returns what its weight decay leaves of a row.

        Raises:
            ConfigError: Nothing would be left. The settings are checked for their own rate, but the
                rate of a step comes from a schedule.
        """
        check_decay("lr", lr, "weight_decay", self.config.weight_decay)
        decay = 1.0 - lr * self.config.weight_decay
        self.num_steps += 1
        if self.config.weight_decay:
            self._decay.append(decay)
        return decay

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        """Ranges of rows that are updated together.

        A step reads and writes a row some twenty times, so a block should fit into a cache.
        """
        dim = max(1, self.weight_SD.shape[1])
        size = max(1, BLOCK[self.weight_SD.device.type] // dim)
        for first in range(0, num_rows, size):
            yield slice(first, first + size)

    def _read(self, ids_U: Tensor) -> Tensor:
        """A copy of rows, with the decay of the steps that did not touch them."""
        rows_UD = self._wide(self.weight_SD.index_select(0, ids_U))
        if self.config.weight_decay:
            rows_UD *= self._pending_decay(self.last_step_S.index_select(0, ids_U))
        return rows_UD

    def _wide(self, rows: Tensor) -> Tensor:
        """Rows in the precision that they are computed with."""
        return rows.float() if self.rounded else rows

    def _stored(self, where: Where, rows_BD: Tensor) -> Tensor:
        """Rows in the precision that they are stored in.

        Rounding to bfloat16 is stochastic. The noise is a function of step, row and column, so it
        does not depend on which rank owns the row.
        """
        if not self.rounded:
            return rows_BD
        if isinstance(where, slice):
            last = where.start + len(rows_BD)
            ids = torch.arange(where.start, last, device=rows_BD.device)
        else:
            ids = where
        dim = rows_BD.shape[1]
        columns = torch.arange(dim, device=rows_BD.device)
        # Number of each value in the table of all ranks.
        row_B1 = (ids + self.first_row)[:, None]
        cell_BD = row_B1 * dim + columns
        # The product is cut to 62 bits, because a Python integer does not wrap as a tensor does.
        step_key = self.num_steps * _MIX[1] & (1 << 62) - 1
        key_BD = cell_BD * _MIX[0] + step_key
        key_BD = (key_BD ^ (key_BD >> 30)) * _MIX[2]
        # bfloat16 is the upper half of float32. A random number of 16 bits is added to the lower
        # half, which is then cut off: the value is rounded up with probability lower half / 2^16.
        noise_BD = ((key_BD >> 40) & 0xFFFF).to(torch.int32)
        bits_BD = rows_BD.contiguous().view(torch.int32) + noise_BD
        bits_BD = bits_BD & ~0xFFFF
        rounded_BD = bits_BD.view(torch.float32).bfloat16()
        # A GPU's NaN has all bits but the sign, so the sum above turns it into zero.
        return rounded_BD.masked_fill_(rows_BD.isnan(), torch.nan)

    def _step(
        self,
        where: Where,
        rows_BD: Tensor,
        grad_BD: Tensor,
        lr: float,
        decay: float = 1.0,
    ) -> None:
        """The update of a block of rows, and of their state; in place if `where` is a slice.

        Args:
            where: the rows.
            rows_BD: their values, up to date; changed in place.
            grad_BD: their gradient.
            lr: learning rate of the step.
            decay: factor of weight decay that `rows_BD` does not have yet.
        """
        config = self.config
        grad_BD = self._wide(grad_BD)
        if decay != 1.0:
            rows_BD.mul_(decay)
        state = {name: _taken(tensor, where) for name, tensor in self.state.items()}
        if config.kind == "sgd":
            if state:
                grad_BD = state["momentum"].mul_(config.momentum).add_(grad_BD)
            rows_BD.add_(grad_BD, alpha=-lr)
        elif config.kind == "adagrad":
            square_sum = state["square_sum"].addcmul_(grad_BD, grad_BD)
            rows_BD.addcdiv_(grad_BD, square_sum.sqrt().add_(config.eps), value=-lr)
        else:
            self._adam(where, rows_BD, grad_BD, lr, state)
        for name, tensor in state.items():
            _put(self.state[name], where, tensor)
        _put(self.weight_SD, where, self._stored(where, rows_BD))
        if isinstance(where, slice):
            self.last_step_S[where] = self.num_steps
        else:
            self.last_step_S.index_fill_(0, where, self.num_steps)

    def _adam(
        self,
        where: Where,
        rows_BD: Tensor,
        grad_BD: Tensor,
        lr: float,
        state: Mapping[str, Tensor],
    ) -> None:
        """Adam with the bias correction of each row's own number of touches."""
        config = self.config
        touches = _taken(self.touches_S, where)
        touches += 1
        _put(self.touches_S, where, touches)
        dtype = rows_BD.dtype
        age_B1 = touches.double().unsqueeze(1)  # 1 - beta^age loses all its digits in float32
        mean_share_B1 = 1 - config.beta1**age_B1
        square_share_B1 = 1 - config.beta2**age_B1
        step_size_B1 = (-lr / mean_share_B1).to(dtype)
        correction_B1 = square_share_B1.rsqrt().to(dtype)
        # In place: the state is a view of the table, or is written back by the caller.
        mean_BD = state["mean"].lerp_(grad_BD, 1 - config.beta1)
        square_BD = state["square"].mul_(config.beta2)
        square_BD.addcmul_(grad_BD, grad_BD, value=1 - config.beta2)
        # sqrt makes a new tensor, so what follows leaves the state as it is.
        denominator_BD = square_BD.sqrt().mul_(correction_B1).add_(config.eps)
        rows_BD.addcdiv_(step_size_B1 * mean_BD, denominator_BD)


class _DecaySums:
    """Sums of log(1 - lr * wd) over the updates since a first one, kept where the rows are.

    Args:
        device: Of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart(0)

    def restart(self, num_steps: int) -> None:
        """Forgets all updates; the sums start after `num_steps` of them."""
        self.first_step = num_steps
        self._length = 1
        self._sum = 0.0
        # sums[t] is the sum over t updates. The buffer is longer than that, and doubles when it is
        # full: each update fills in one number, and none copies the history.
        self._sums = torch.zeros(256, dtype=torch.float64, device=self._device)

    def append(self, decay: float) -> None:
        """Adds an update that leaves `decay` of a row."""
        # The logarithm of the host's torch, which runs were recorded with.
        self._sum += float(torch.log(torch.tensor(decay, dtype=torch.float64)))
        if self._length == len(self._sums):
            self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._sums[self._length].fill_(self._sum)
        self._length += 1

    def factors(self, last_step_U: Tensor) -> Tensor:
        """float64 [U], what the updates after each row's last step leave of it."""
        # A difference of sums of logarithms is the logarithm of the product of the steps between.
        newest = self._sums[self._length - 1]
        at_last_step_U = self._sums[last_step_U.long() - self.first_step]
        return torch.exp(newest - at_last_step_U)

    def of_rows(self, last_step_U: Tensor) -> Tensor:
        """float64 [U, 3] for a checkpoint: the sum up to each row's last step, and, the same for
        all rows, the newest sum and the first step.
        """
        at_last_step_U = self._sums[last_step_U.long() - self.first_step]
        newest_U = torch.full_like(at_last_step_U, self._sum)
        first_step_U = torch.full_like(at_last_step_U, self.first_step)
        return torch.stack([at_last_step_U, newest_U, first_step_U], dim=1)

    def restore(self, columns_U3: Tensor, last_step_U: Tensor, num_steps: int) -> None:
        """Restores what `of_rows` gave, for these rows and all that were restored before.

        Args:
            columns_U3: result of `of_rows`.
            last_step_U: last step of each row.
            num_steps: updates until then.
        """
        if not len(columns_U3):
            return
        first_step = int(columns_U3[0, 2])
        if first_step != self.first_step or self._length == 1:
            self.restart(first_step)
            self._length = num_steps - first_step + 1
            size = max(len(self._sums), self._length)
            self._sums = torch.zeros(size, dtype=torch.float64, device=self._device)
            self._sum = float(columns_U3[0, 1])
            self._sums[self._length - 1] = self._sum
        # Steps that no row had last are never looked up again.
        self._sums[last_step_U.long() - first_step] = columns_U3[:, 0].to(self._device)


def _taken(tensor: Tensor, where: Where) -> Tensor:
    """Rows of a table: a view if `where` is a slice, else a copy."""
    if isinstance(where, slice):
        return tensor[where]
    return tensor.index_select(0, where)


def _put(tensor: Tensor, where: Where, rows: Tensor) -> None:
    """Writes rows from `_taken` back into the table; a view of the table is in place already."""
    if not isinstance(where, slice):
        tensor.index_copy_(0, where, rows)
    elif rows.data_ptr() != tensor[where].data_ptr():
        tensor[where] = rows


def sum_by_row(
    ids_T: Tensor,
    source_T: Tensor,
    dense_BD: Tensor,
    weight_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds up the vectors of each row in the order of the entries: equal bits on every call.

    Args:
        ids_T: int64, row of each entry.
        source_T: int64, place of each entry's vector in `dense_BD`.
        dense_BD: the vectors.
        weight_T: factor of each entry; None is 1.

    Returns:
        int64 [U], distinct rows, ascending, and [U, D], their sums of weight_T *
        dense_BD[source_T].
    """
    # A stable sort keeps the entries of a row in their order.
    sorted_T, order_T = torch.sort(ids_T, stable=True)
    ids_U, count_U = torch.unique_consecutive(sorted_T, return_counts=True)
    # Where each row's entries begin, and the end of the last.
    offsets = F.pad(count_U.cumsum(0), (1, 0))
    if weight_T is not None:
        weight_T = weight_T[order_T]
    # A bag of embeddings adds up in the order of its entries, which index_add_ does not promise.
    sum_UD = F.embedding_bag(
        source_T[order_T],
        dense_BD,
        offsets,
        mode="sum",
        per_sample_weights=weight_T,
        include_last_offset=True,
    )
    return ids_U, sum_UD
