"""Vectors of length 1, and what a text without a token does to their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xmcray.nn.heads import unit_length


def test_a_vector_of_zeros_does_not_blow_up_the_gradient_of_a_bias() -> None:
    vectors = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    vectors[3] = 0
    weights = torch.arange(20.0).reshape(5, 4)
    gradients = []
    for normalise in (unit_length, lambda vector_BD: F.normalize(vector_BD, dim=-1)):
        leaf = vectors.clone().requires_grad_()
        normalised = normalise(leaf)
        assert torch.equal(normalised, F.normalize(vectors, dim=-1))
        (normalised * weights).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    others = [0, 1, 2, 4]
    assert torch.equal(gradients[0][others], gradients[1][others])
    assert torch.equal(gradients[0][3], weights[3])
