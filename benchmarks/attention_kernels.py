"""Torch's fused attention on a CPU, and the same from separate products, by precision and length of texts.

One attention layer of MiniLM's size, forward and backward; kernels alternate. What `nn/matmul.py` chooses comes from here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import cpu_timed, new_parser, refuse_if_busy, write_table
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = 12
HEAD_DIM = 32
TOKENS = 8192  # of all texts together, as in one micro-batch of a training
WIDTHS = (8, 16, 32, 64, 128, 256, 512)
KERNELS = {"fused": SDPBackend.FLASH_ATTENTION, "products": SDPBackend.MATH}
# What torch does with float32 products, and the type of the states.
PRECISIONS = {
    "float32": ("highest", torch.float32),
    "optim.matmul=bf16": ("medium", torch.float32),
    "encoder.autocast=bf16": ("highest", torch.bfloat16),
}


def main() -> None:
    parser = new_parser(__doc__, out="attention_kernels.md", threads=1, anyway=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    before = torch.get_float32_matmul_precision()
    rows: list[list[object]] = []
    for name, (precision, dtype) in PRECISIONS.items():
        torch.set_float32_matmul_precision(precision)
        for width in WIDTHS:
            fastest = dict.fromkeys(KERNELS, float("inf"))
            for _ in range(arguments.repeats):
                for kernel, backend in KERNELS.items():
                    fastest[kernel] = min(fastest[kernel], seconds(backend, dtype, width))
            ratio = fastest["fused"] / fastest["products"]
            times = [f"{1000 * fastest[kernel]:.0f}" for kernel in KERNELS]
            rows.append([name, width, *times, f"{ratio:.1f}"])
    torch.set_float32_matmul_precision(before)
    header = [
        "precision",
        "tokens per text",
        *(f"{kernel}, ms" for kernel in KERNELS),
        "fused / products",
    ]
    notes = [
        f"{HEADS} heads of {HEAD_DIM}; {TOKENS:,} tokens in all; the fastest of {arguments.repeats}, CPU milliseconds on"
        f" {arguments.threads} thread(s)",
        load,
    ]
    return write_table(arguments.out, "Attention kernels on a CPU", header, rows, notes)


def seconds(backend: SDPBackend, dtype: torch.dtype, width: int) -> float:
    """CPU seconds of one forward and backward pass with a kernel."""
    shape = (TOKENS // width, HEADS, width, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(query, key, value)
        output.sum().backward()

    _, taken_s = cpu_timed(attend)
    return taken_s


if __name__ == "__main__":
    main()
