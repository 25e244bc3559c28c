"""What a compiled extension would save of a step: the update of its rows by torch, and by one pass in C++.

    python benchmarks/fused_update.py    # needs g++; a minute

The step is that of classifier_step.py at 10^5 labels and D = 256. Steps of both sides take turns, on tables of their
own, and must lead to the same rows.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from classifier_step import (
    ENVIRONMENT,
    LIMIT_DIM,
    LIMIT_LABELS,
    LR,
    MOMENTUM,
    PHASES,
    Case,
    MachineLimit,
)
from common import new_parser, refuse_if_busy, write_table

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = ("g++", "-O3", "-march=native", "-shared", "-fPIC")
HEADER = ["update of the rows", "update, ms", "step, ms", "step / limit of the machine"]


class CompiledCase(Case):
    """A case whose rows are updated by fused_update.cpp.

    Attributes:
        library: the compiled file.
    """

    library: ctypes.CDLL

    def read(self, row_ids: torch.Tensor) -> torch.Tensor:
        return self.table.weight_SD.index_select(0, row_ids).requires_grad_()

    def update(self, row_ids: torch.Tensor, row_UD: torch.Tensor) -> None:
        assert row_UD.grad is not None
        tensors = (
            self.table.weight_SD,
            self.table.state["momentum"],
            row_UD,
            row_UD.grad.contiguous(),
            row_ids,
        )
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        sizes = [ctypes.c_int64(size) for size in row_UD.shape]
        self.library.update(*pointers, *sizes, ctypes.c_float(MOMENTUM), ctypes.c_float(LR))


def main() -> None:
    parser = new_parser(__doc__, out="fused_update.md", anyway=True)
    parser.add_argument("--steps", type=int, default=100, help="of each side")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    if not ENVIRONMENT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)
    sides = {
        "torch": Case(LIMIT_LABELS, LIMIT_DIM),
        "one pass in C++": CompiledCase(LIMIT_LABELS, LIMIT_DIM),
    }
    CompiledCase.library = compiled()
    limit = MachineLimit(sides["torch"])
    for step in range(arguments.steps + 2):
        for case in sides.values():
            case.sampled(keep=step >= 2)
        limit.measure()
    rows_SD, compiled_rows_SD = (case.table.weight_SD for case in sides.values())
    torch.testing.assert_close(compiled_rows_SD, rows_SD)
    table = []
    for name, case in sides.items():
        update_ms = 1e3 * case.phase_medians[PHASES.index("update")]
        table.append([name, update_ms, 1e3 * case.median, f"{case.median / limit.seconds:.2f}"])
    notes = [
        limit.sentence(),
        f"medians of {arguments.steps} steps; {' '.join(COMPILER)}; SGD with momentum; 1 thread",
        load,
    ]
    write_table(arguments.out, "The update of a step's rows in C++", HEADER, table, notes)


def compiled() -> ctypes.CDLL:
    """The library of fused_update.cpp for this processor."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fused_update.so"
        subprocess.run([*COMPILER, "-o", str(library), str(SOURCE)], check=True)
        return ctypes.CDLL(str(library))


if __name__ == "__main__":
    main()
