"""Which attention runs, by device, precision and length of texts."""

from __future__ import annotations

import pytest
import torch

from xmcray.nn.matmul import attention_kernel, matmul_precision

LONG = 512


@pytest.mark.parametrize(
    ("matmul", "autocast", "width", "is_fused"),
    [
        ("float32", False, 32, True),
        ("bf16", False, 32, False),
        ("float32", True, 32, False),
        ("bf16", True, LONG, True),
    ],
)
def test_short_texts_are_not_fused_with_bfloat16_products(
    matmul: str, autocast: bool, width: int, is_fused: bool
) -> None:
    device = torch.device("cpu")
    rounds_states = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with matmul_precision(matmul), rounds_states, attention_kernel(device, width):
        assert torch.backends.cuda.flash_sdp_enabled() == is_fused


def test_other_devices_keep_their_kernels() -> None:
    with matmul_precision("bf16"), attention_kernel(torch.device("cuda"), 32):
        assert torch.backends.cuda.flash_sdp_enabled()


def test_the_kernel_lasts_as_long_as_the_call() -> None:
    with matmul_precision("bf16"), attention_kernel(torch.device("cpu"), 32):
        pass
    assert torch.backends.cuda.flash_sdp_enabled()
