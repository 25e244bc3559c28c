"""Softmax losses where a shortcut of the numbers would show."""

from __future__ import annotations

import math

import torch

from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import decoupled_softmax


def test_the_gradient_of_a_hopeless_positive_keeps_its_digits() -> None:
    """The positive's score is 21 below the negative's: softplus is almost, but not quite, linear."""
    query_GD = torch.tensor([[1.0]], dtype=torch.float64)
    column_UD = torch.tensor([[0.0], [21.0]], dtype=torch.float64, requires_grad=True)
    positive = Pairs(torch.tensor([0]), torch.tensor([0]))

    loss = decoupled_softmax(query_GD, column_UD, positive, positive, scale=1.0)
    (grad_UD,) = torch.autograd.grad(loss, column_UD)

    # The loss is softplus(negative - positive), and the derivative of softplus is the sigmoid.
    negative_share = 1 / (1 + math.exp(-21.0))  # 1 - 8e-10
    assert abs(float(grad_UD[1]) - negative_share) < 1e-14
    assert abs(float(grad_UD[0]) + negative_share) < 1e-14


def test_undrawn_positives_are_left_out_of_the_denominator() -> None:
    query_GD = torch.tensor([[1.0]], dtype=torch.float64)
    column_UD = torch.tensor([[0.5], [3.0], [-1.0]], dtype=torch.float64)
    drawn = Pairs(torch.tensor([0]), torch.tensor([0]))
    all_positives = Pairs(torch.tensor([0, 0]), torch.tensor([0, 1]))

    loss = decoupled_softmax(query_GD, column_UD, drawn, all_positives, scale=2.0)

    # exp(2 * 0.5) against exp(2 * -1): their logits differ by 3. Column 1 is an undrawn positive.
    assert math.isclose(float(loss), math.log(1 + math.exp(-3.0)), rel_tol=1e-14)
