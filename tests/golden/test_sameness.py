"""Two methods on the embedded sample end with the recorded bits; all methods: benchmarks/sameness.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import corpus_of

from xmcray.data.sample import write_sample

ROOT = Path(__file__).parents[2]
RECORDED = "benchmarks/results/sameness.json"


@pytest.mark.timeout(600)  # half a minute on an idle machine
def test_training_export_and_search_give_the_recorded_bits(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    write_sample(tmp_path / "raw")
    corpus = corpus_of(tmp_path / "raw", tmp_path / "corpus")
    command = [sys.executable, "benchmarks/sameness.py", "--corpus", str(corpus.path)]
    command += ["--methods", "astra", "dexml", "--workers", "0", "--compare", RECORDED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if "was recorded on" in result.stdout:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "2 fingerprints are equal" in result.stdout
