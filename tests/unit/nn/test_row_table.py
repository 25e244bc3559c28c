"""Row-sparse updates equal a dense reference loop, and leave untouched rows alone."""

from typing import Any

import pytest
import torch

from xmcray.errors import ConfigError
from xmcray.nn import row_table
from xmcray.nn.row_table import RowOptimConfig, RowTable, sum_by_row
from xmcray.training.run import RunConfig

KINDS = ["sgd", "adagrad", "adam"]


def dense_reference(
    weight: torch.Tensor, grads: list[torch.Tensor], config: RowOptimConfig
) -> torch.Tensor:
    """The same rules written for a dense table, one line each."""
    w, m, s = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t, g in enumerate(grads, start=1):
        w = w * (1 - config.lr * config.weight_decay)
        if config.kind == "sgd":
            m = config.momentum * m + g
            w = w - config.lr * m
        elif config.kind == "adagrad":
            s = s + g * g
            w = w - config.lr * g / (s.sqrt() + config.eps)
        else:
            m = config.beta1 * m + (1 - config.beta1) * g
            s = config.beta2 * s + (1 - config.beta2) * g * g
            mean, square = m / (1 - config.beta1**t), s / (1 - config.beta2**t)
            w = w - config.lr * mean / (square.sqrt() + config.eps)
    return w


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listed", [True, False])
def test_all_rows_touched_is_the_dense_rule(kind: str, listed: bool) -> None:
    torch.manual_seed(0)
    config = RowOptimConfig(kind=kind, lr=0.1, weight_decay=0.05)
    start, grads = torch.randn(7, 3), [torch.randn(7, 3) for _ in range(9)]
    table = RowTable(start.clone(), config)
    for grad in grads:
        ids = torch.arange(7) if listed else None
        (table.rows(ids) * grad).sum().backward()
        table.update(config.lr)
    torch.testing.assert_close(
        table.weight_SD, dense_reference(start, grads, config), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_untouched_rows_keep_their_bits_without_decay(kind: str) -> None:
    start = torch.randn(50, 4)
    table = RowTable(start.clone(), RowOptimConfig(kind=kind, lr=0.1))
    for step in range(5):
        table.rows(torch.tensor([step, 10 + step])).square().sum().backward()
        table.update(0.1)
    table.flush()
    untouched = [i for i in range(50) if i not in {*range(5), *range(10, 15)}]
    assert torch.equal(table.weight_SD[untouched], start[untouched])
    assert not torch.equal(table.weight_SD[:5], start[:5])


def test_decay_of_skipped_steps_is_exact_with_a_changing_rate() -> None:
    config = RowOptimConfig(kind="sgd", lr=0.1, weight_decay=0.3, momentum=0.0)
    table = RowTable(torch.ones(4, 2, dtype=torch.float64), config)
    rates, expected = [0.1, 0.2, 0.05, 0.3, 0.15], 1.0
    for step, lr in enumerate(rates):
        expected *= 1 - lr * 0.3
        table.rows(torch.tensor([0] if step != 2 else [0, 1])).sum().mul(0).backward()
        table.update(lr)
    assert table.weight_SD[3, 0] == 1.0  # lazy: not yet brought up to date
    table.flush()
    torch.testing.assert_close(
        table.weight_SD, torch.full((4, 2), expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_a_row_read_in_two_places_is_updated_once_with_the_sum() -> None:
    table = RowTable(torch.ones(3, 2), RowOptimConfig(kind="sgd", lr=1.0, momentum=0.0))
    rows = table.rows(torch.tensor([1]))
    (2 * rows[torch.tensor([0, 0])] + rows[0]).sum().backward()
    table.update(1.0)
    assert table.weight_SD.tolist() == [[1, 1], [-5, -5], [1, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_state_restored_continues_with_the_same_bits(kind: str) -> None:
    config = RowOptimConfig(kind=kind, lr=0.1, weight_decay=0.1)

    def run(table: RowTable, steps: range) -> None:
        for step in steps:
            table.rows(torch.tensor([step % 5, 5 + step % 3])).square().sum().backward()
            table.update(0.1 / (1 + step))

    start = torch.randn(9, 3)
    whole = RowTable(start.clone(), config)
    run(whole, range(4))
    whole.flush()
    saved = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    run(whole, range(4, 9))
    again = RowTable(torch.zeros(9, 3), config)
    again.load(
        [(6, {k: t[6:] for k, t in saved.items()}), (0, {k: t[:6] for k, t in saved.items()})], 4
    )
    run(again, range(4, 9))
    whole.flush()
    again.flush()
    assert torch.equal(whole.weight_SD, again.weight_SD)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_rows_are_updated_alike_in_blocks_and_in_every_way(
    kind: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a table, all of its ids, and ids that nobody read; in blocks of 3 rows, and at once."""
    start = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    ids, found = torch.arange(10), []
    for width in (12, 1 << 18):
        monkeypatch.setitem(row_table.BLOCK, "cpu", width)
        for way in ("all", "ids", "unread"):
            table = RowTable(start.clone(), RowOptimConfig(kind=kind, storage=storage))
            for step in range(3):
                gradient = torch.randn(10, 4, generator=torch.Generator().manual_seed(step))
                gradient = gradient.to(table.weight_SD.dtype).float()
                if way == "unread":
                    table.update_rows(0.1, ids, gradient)
                    continue
                rows = table.rows(None if way == "all" else ids)
                rows.grad = gradient.to(rows.dtype)
                table.update(0.1)
            found.append({**table.tensors(), "last": table.last_step_S})
    for one in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(one[name], tensor), name


@pytest.mark.parametrize("weighted", [False, True])
def test_entries_of_a_row_are_summed(weighted: bool) -> None:
    ids, source = torch.tensor([7, 2, 7, 9, 2, 7]), torch.tensor([0, 1, 2, 0, 1, 1])
    vectors = torch.arange(6.0).view(3, 2)
    weight = torch.arange(1.0, 7.0) if weighted else torch.ones(6)
    dense = torch.zeros(10, 2).index_add_(0, ids, vectors[source] * weight[:, None])
    rows, sums = sum_by_row(ids, source, vectors, weight if weighted else None)
    assert rows.tolist() == [2, 7, 9]
    torch.testing.assert_close(sums, dense[rows])
    rows, sums = sum_by_row(ids[:0], source[:0], vectors)
    assert len(rows) == 0
    assert sums.shape == (0, 2)


def test_bfloat16_rows_are_rounded_without_bias_and_alike_on_any_rank() -> None:
    start = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    config = RowOptimConfig(kind="sgd", momentum=0.0, storage="bfloat16")
    whole, right = (
        RowTable(start.clone(), config),
        RowTable(start[40:].clone(), config, first_row=40),
    )
    gradient = torch.full((64, 8), 1e-3)  # far below what bfloat16 holds beside a weight of about 1
    for _ in range(400):
        whole.update_rows(0.1, torch.arange(64), gradient)
        right.update_rows(0.1, torch.arange(24), gradient[40:])
    assert whole.weight_SD.dtype == torch.bfloat16
    assert torch.equal(whole.weight_SD[40:], right.weight_SD)
    moved = (start - whole.weight_SD.float()).mean()
    assert moved == pytest.approx(0.04, rel=0.15)


@pytest.mark.parametrize(("lr", "weight_decay"), [(300.0, 0.01), (2.0, 0.5)])
def test_a_weight_decay_that_leaves_nothing_of_a_row_is_refused(
    lr: float, weight_decay: float
) -> None:
    # The logarithm of what is left would be NaN or minus infinity, and so would be the rows.
    with pytest.raises(ConfigError, match=r"lr \* weight_decay is .* expected less than 1"):
        RowOptimConfig(lr=lr, weight_decay=weight_decay)
    # A schedule decides on the rate of a step after the settings were checked.
    table = RowTable(torch.ones(3, 2), RowOptimConfig(lr=0.1, weight_decay=weight_decay))
    with pytest.raises(ConfigError, match="expected less than 1"):
        table.update(lr)
    table.update(0.5 * lr / (lr * weight_decay))
    table.flush()
    torch.testing.assert_close(table.weight_SD, torch.full((3, 2), 0.5))


def test_a_run_with_such_a_weight_decay_is_refused_before_it_starts() -> None:
    rows = ["method.classifier.lr=300", "method.classifier.weight_decay=0.01"]
    with pytest.raises(ConfigError, match=r"300 \* 0.01") as error:
        RunConfig.resolve("astra", {}, rows)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"optim.lr \* optim.weight_decay is 10 \* 0.1"):
        RunConfig.resolve("dexml", {}, ["optim.lr=10", "optim.weight_decay=0.1"])
