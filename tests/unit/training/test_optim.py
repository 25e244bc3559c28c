"""The schedule of the learning rates, and which parameters weight decay leaves alone."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from xmcray.training.optim import EncoderOptimizer, OptimConfig, lr_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 1.0, 1.0, 0.5, 0.1]),
        ("cosine", [0.25, 1.0, 1.0, 0.5, 0.5 * (1 + math.cos(0.9 * math.pi))]),
    ],
)
def test_rates_rise_during_the_warm_up_and_then_follow_the_schedule(
    schedule: str, expected: list[float]
) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=4)  # type: ignore[arg-type]
    # 14 steps: four of warm-up, and ten from the peak to nearly 0.
    found = [lr_factor(config, step, 14) for step in (0, 3, 4, 9, 13)]
    assert found == pytest.approx(expected)


def test_biases_and_normalisations_are_not_decayed() -> None:
    module = nn.ModuleDict({"linear": nn.Linear(3, 3), "norm": nn.LayerNorm([2, 3])})
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    optimizer = EncoderOptimizer({"encoder": module}, OptimConfig(lr=0.1, weight_decay=0.5), [])
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    for name, value in module.named_parameters():
        kept = 1 - 0.1 * 0.5 if name == "linear.weight" else 1.0
        torch.testing.assert_close(value.detach(), kept * before[name])


def test_a_step_does_not_import_the_compiler_of_torch() -> None:
    code = """
        import sys
        import torch
        from xmcray.training.optim import EncoderOptimizer, OptimConfig

        encoder = torch.nn.Linear(2, 2)
        optimizer = EncoderOptimizer({"encoder": encoder}, OptimConfig(), [])
        optimizer.zero_grad()
        encoder(torch.ones(1, 2)).sum().backward()
        optimizer.step(1.0)
        optimizer.load(optimizer.tensors(), 1)
        print("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
