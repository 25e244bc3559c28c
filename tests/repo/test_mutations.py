"""The list of mutations fits the package: a changed line takes its mutation along."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_listed_mutation_finds_its_line() -> None:
    command = [sys.executable, "benchmarks/mutations.py", "--list", "--drawn", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    count = int(result.stdout.splitlines()[-1].split()[0])
    assert count >= 60
