"""Row-sparse updates equal a dense reference loop, and leave untouched rows alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xmcray.errors import ConfigError
from xmcray.nn import row_table
from xmcray.nn.row_table import RowOptimConfig, RowTable, sum_by_row
from xmcray.training.run_config import RunConfig

KINDS = ["sgd", "adagrad", "adam"]


def seeded_randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def step_towards_zero(
    table: RowTable,
    ids: list[int],
    lr: float,
) -> None:
    """One update of these rows, by the gradient of their squares."""
    rows = table.rows(torch.tensor(ids))
    rows.square().sum().backward()
    table.update(lr)


def dense_reference(
    weight: Tensor,
    grads: list[Tensor],
    config: RowOptimConfig,
) -> Tensor:
    """The same rules written for a dense table, one line each."""
    lr = config.lr
    w = weight.clone()
    m = torch.zeros_like(weight)
    s = torch.zeros_like(weight)
    for t, g in enumerate(grads, start=1):
        w = w * (1 - lr * config.weight_decay)
        if config.kind == "sgd":
            m = config.momentum * m + g
            w = w - lr * m
        elif config.kind == "adagrad":
            s = s + g * g
            w = w - lr * g / (s.sqrt() + config.eps)
        else:
            m = config.beta1 * m + (1 - config.beta1) * g
            s = config.beta2 * s + (1 - config.beta2) * g * g
            mean = m / (1 - config.beta1**t)
            square = s / (1 - config.beta2**t)
            w = w - lr * mean / (square.sqrt() + config.eps)
    return w


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listed", [True, False])
def test_all_rows_touched_is_the_dense_rule(kind: str, listed: bool) -> None:
    torch.manual_seed(0)
    config = RowOptimConfig(
        kind=kind,
        lr=0.1,
        weight_decay=0.05,
    )
    start = torch.randn(7, 3)
    grads = [torch.randn(7, 3) for _ in range(9)]
    table = RowTable(start.clone(), config)
    ids = torch.arange(7) if listed else None

    for grad in grads:
        rows = table.rows(ids)
        (rows * grad).sum().backward()
        table.update(config.lr)

    expected = dense_reference(start, grads, config)
    torch.testing.assert_close(
        table.weight_SD,
        expected,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_untouched_rows_keep_their_bits_without_decay(kind: str) -> None:
    config = RowOptimConfig(kind=kind, lr=0.1)
    start = torch.randn(50, 4)
    table = RowTable(start.clone(), config)

    for step in range(5):
        step_towards_zero(table, [step, 10 + step], lr=0.1)
    table.flush()

    # Rows 0 .. 4 and 10 .. 14 were touched.
    is_same = (table.weight_SD == start).all(dim=1)
    assert is_same[5:10].all()
    assert is_same[15:].all()
    assert not is_same[:5].any()


def test_decay_of_skipped_steps_is_exact_with_a_changing_rate() -> None:
    config = RowOptimConfig(
        kind="sgd",
        lr=0.1,
        weight_decay=0.3,
        momentum=0.0,
    )
    start = torch.ones(4, 2, dtype=torch.float64)
    table = RowTable(start, config)
    rates = [0.1, 0.2, 0.05, 0.3, 0.15]

    expected = 1.0
    for step, lr in enumerate(rates):
        ids = [0, 1] if step == 2 else [0]
        rows = table.rows(torch.tensor(ids))
        # The gradient is 0: only the decay changes a row.
        rows.sum().mul(0).backward()
        table.update(lr)
        expected *= 1 - lr * 0.3

    assert table.weight_SD[3, 0] == 1.0, "a row that is not read is brought up to date later"
    table.flush()
    torch.testing.assert_close(
        table.weight_SD,
        torch.full((4, 2), expected, dtype=torch.float64),
        rtol=1e-14,
        atol=0,
    )


def test_a_row_read_in_two_places_is_updated_once_with_the_sum() -> None:
    config = RowOptimConfig(
        kind="sgd",
        lr=1.0,
        momentum=0.0,
    )
    table = RowTable(torch.ones(3, 2), config)

    rows = table.rows(torch.tensor([1]))
    twice = rows[torch.tensor([0, 0])]
    # The one row of `rows` is added to both rows of `twice`.
    total = (2 * twice + rows[0]).sum()
    total.backward()
    table.update(1.0)

    # The gradient of row 1 is (2 + 1) + (2 + 1).
    assert table.weight_SD.tolist() == [
        [1, 1],
        [-5, -5],
        [1, 1],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_state_restored_continues_with_the_same_bits(kind: str) -> None:
    config = RowOptimConfig(
        kind=kind,
        lr=0.1,
        weight_decay=0.1,
    )

    def train(table: RowTable, steps: range) -> None:
        for step in steps:
            ids = [step % 5, 5 + step % 3]
            step_towards_zero(table, ids, lr=0.1 / (1 + step))

    whole = RowTable(torch.randn(9, 3), config)
    train(whole, range(4))
    whole.flush()
    # As two ranks would have saved it: rows 6 .. 8 and rows 0 .. 5.
    first_rows = {}
    last_rows = {}
    for name, tensor in whole.tensors().items():
        first_rows[name] = tensor[:6].clone()
        last_rows[name] = tensor[6:].clone()
    train(whole, range(4, 9))

    restored = RowTable(torch.zeros(9, 3), config)
    restored.load([(6, last_rows), (0, first_rows)], 4)
    train(restored, range(4, 9))

    whole.flush()
    restored.flush()
    assert torch.equal(whole.weight_SD, restored.weight_SD)


def train_in_one_way(
    way: str,
    kind: Any,
    storage: Any,
) -> dict[str, Tensor]:
    """All tensors of a table of ten rows after three updates of every row.

    Args:
        way: "all" reads the whole table, "ids" reads rows by their ids, and "unread" updates rows
            that were not read.
        kind: The optimizer.
        storage: The data type of the rows.
    """
    ids = torch.arange(10)
    start = seeded_randn(0, 10, 4)
    table = RowTable(start, RowOptimConfig(kind=kind, storage=storage))
    for step in range(3):
        # Rounded to the data type of the rows, so that each way gets the same gradient.
        gradient = seeded_randn(step, 10, 4).to(table.weight_SD.dtype)
        if way == "unread":
            table.update_rows(0.1, ids, gradient.float())
            continue
        rows = table.rows(None if way == "all" else ids)
        rows.grad = gradient.to(rows.dtype)
        table.update(0.1)
    return {
        **table.tensors(),
        "last": table.last_step_S,
    }


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_rows_are_updated_alike_in_blocks_and_in_every_way(
    kind: Any,
    storage: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = []
    # Blocks of 3 rows, then all rows at once.
    for block_floats in (12, 1 << 18):
        monkeypatch.setitem(row_table.BLOCK, "cpu", block_floats)
        tables += [
            train_in_one_way("all", kind, storage),
            train_in_one_way("ids", kind, storage),
            train_in_one_way("unread", kind, storage),
        ]

    first, *others = tables
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(other[name], tensor), name


@pytest.mark.parametrize("weighted", [False, True])
def test_entries_of_a_row_are_summed(weighted: bool) -> None:
    ids = torch.tensor([7, 2, 7, 9, 2, 7])
    source = torch.tensor([0, 1, 2, 0, 1, 1])
    vectors = torch.arange(6.0).view(3, 2)
    weights = torch.arange(1.0, 7.0) if weighted else None

    rows, sums = sum_by_row(ids, source, vectors, weights)

    entries = vectors[source]
    if weights is not None:
        entries = entries * weights[:, None]
    dense = torch.zeros(10, 2).index_add_(0, ids, entries)
    assert rows.tolist() == [2, 7, 9]
    torch.testing.assert_close(sums, dense[rows])

    nothing = torch.empty(0, dtype=torch.int64)
    no_rows, no_sums = sum_by_row(nothing, nothing, vectors)
    assert len(no_rows) == 0
    assert no_sums.shape == (0, 2)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_bfloat16_rows_keep_nan(bits: int) -> None:
    # The first is what a GPU computes as NaN.
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    table = RowTable(torch.ones(3, 4), RowOptimConfig(storage="bfloat16", momentum=0))
    rows = table.rows(torch.tensor([1]))
    rows.detach()[:] = nan
    rows.grad = torch.zeros(1, 4)
    table.update(0.1)
    assert table.weight_SD[1].isnan().all()
    assert not table.weight_SD[[0, 2]].isnan().any()


def test_bfloat16_rows_are_rounded_without_bias_and_alike_on_any_rank() -> None:
    start = seeded_randn(0, 64, 8).bfloat16().float()
    config = RowOptimConfig(
        kind="sgd",
        momentum=0.0,
        storage="bfloat16",
    )
    whole = RowTable(start.clone(), config)
    last_rows = RowTable(start[40:].clone(), config, first_row=40)
    # A step is far below what bfloat16 holds alongside a weight of about 1.
    gradient = torch.full((64, 8), 1e-3)
    ids_of_whole = torch.arange(64)
    ids_of_last_rows = torch.arange(24)

    for _ in range(400):
        whole.update_rows(0.1, ids_of_whole, gradient)
        last_rows.update_rows(0.1, ids_of_last_rows, gradient[40:])

    assert whole.weight_SD.dtype == torch.bfloat16
    assert torch.equal(whole.weight_SD[40:], last_rows.weight_SD)
    # 400 steps of 0.1 * 0.001, although each one alone is rounded away.
    change = start - whole.weight_SD.float()
    assert change.mean() == pytest.approx(0.04, rel=0.15)
    # A bias towards 0 would cancel out in the mean of all weights.
    assert change[start > 0].mean() == pytest.approx(0.04, rel=0.15)
    assert change[start < 0].mean() == pytest.approx(0.04, rel=0.15)


@pytest.mark.parametrize(
    ("lr", "weight_decay"),
    [
        (300.0, 0.01),
        (2.0, 0.5),
    ],
)
def test_a_weight_decay_that_leaves_nothing_of_a_row_is_refused(
    lr: float, weight_decay: float
) -> None:
    # The logarithm of what is left would be NaN or minus infinity, and so would be the rows.
    with pytest.raises(ConfigError, match=r"lr \* weight_decay is .* expected less than 1"):
        RowOptimConfig(lr=lr, weight_decay=weight_decay)

    # A schedule decides on the rate of a step after the settings were checked.
    config = RowOptimConfig(lr=0.1, weight_decay=weight_decay)
    table = RowTable(torch.ones(3, 2), config)
    with pytest.raises(ConfigError, match="expected less than 1"):
        table.update(lr)

    # A rate whose decay leaves half of each row is accepted.
    table.update(0.5 / weight_decay)
    table.flush()
    half = torch.full((3, 2), 0.5)
    torch.testing.assert_close(table.weight_SD, half)


def test_a_run_with_such_a_weight_decay_is_refused_before_it_starts() -> None:
    of_rows = [
        "method.classifier.lr=300",
        "method.classifier.weight_decay=0.01",
    ]
    with pytest.raises(ConfigError, match=r"300 \* 0.01") as error:
        RunConfig.resolve("astra", {}, of_rows)
    assert "\n" not in str(error.value)

    of_encoder = [
        "optim.lr=10",
        "optim.weight_decay=0.1",
    ]
    with pytest.raises(ConfigError, match=r"optim.lr \* optim.weight_decay is 10 \* 0.1"):
        RunConfig.resolve("dexml", {}, of_encoder)
