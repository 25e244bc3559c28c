"""The allocator of a process that trains without Ray."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
import torch
from xmcray.training.process import configure_this_process

if sys.argv[1] == "configured":
    configure_this_process(threads=1)

def step():
    return torch.ones(4_000_000).mul(2).sum()

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these limits")
def test_a_configured_process_does_not_fault_its_blocks_in_again_at_each_step() -> None:
    assert page_faults("configured") < page_faults("default") / 10
