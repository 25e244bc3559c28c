"""A training multiplies as `optim.matmul` says, and leaves the process as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import loop_in

from xmcray.data.corpus import Corpus
from xmcray.nn.matmul import TORCH_PRECISION, matmul_precision
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "encoder.dim=8",
    "optim.batch_size=64",
    "optim.epochs=1",
    "negatives.hard=0",
    "negatives.uniform=10",
]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("matmul", "before"), [("float32", "bf16"), ("bf16", "float32")])
def test_precision_lasts_as_long_as_the_training(
    corpus: Corpus, tmp_path: Path, matmul: str, before: str, fails: bool
) -> None:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, f"optim.matmul={matmul}"])
    loop, _ = loop_in(tmp_path / "run", corpus, config)
    found = []

    def on_step(step: int) -> None:
        found.append(torch.get_float32_matmul_precision())
        if fails and step == 2:
            raise ArithmeticError

    loop.on_step = on_step
    with matmul_precision(before):
        if fails:
            with pytest.raises(ArithmeticError):
                loop.train()
        else:
            loop.train()
        after = torch.get_float32_matmul_precision()

    assert len(found) >= 2
    assert set(found) == {TORCH_PRECISION[matmul]}
    assert after == TORCH_PRECISION[before]
