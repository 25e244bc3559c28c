"""Writes what this version stores, for the tests of later versions: run it once for each release.

    python tests/releases/write.py

The folder tests/releases/VERSION gets a corpus, a bundle, the bundle's answers, and a run as a kill
in its last epoch leaves it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from corpora import planted_corpus  # noqa: E402  # a module of the tests

from xmcray import __version__, cli  # noqa: E402
from xmcray.retrieval.retriever import Retriever  # noqa: E402

SETTINGS = [
    "encoder.dim=8",
    "encoder.bigram_buckets=0",
    "optim.batch_size=16",
    "optim.epochs=3",
    "negatives.hard=2",
    "negatives.uniform=5",
    "negatives.start_epoch=2",
]
TEXTS = ["w0x0 w0x1", "w3x1 w4x2 w5x0", ""]
K = 5


def train_command(corpus: str, run: str) -> list[str]:
    """The command that trained the run, and continues it."""
    command = ["train", "astra", "--data", corpus, "--out", run, "--workers", "0"]
    for setting in SETTINGS:
        command += ["--set", setting]
    return command


def answers_of(bundle: Path) -> list[list[tuple[str, float]]]:
    """Label uids and scores of the best labels for each text."""
    results = Retriever.load(bundle).search(TEXTS, K)
    return [[(answer.uid, answer.score) for answer in answers] for answers in results]


def main() -> None:
    with TemporaryDirectory() as name:
        os.chdir(name)
        planted_corpus(Path(), num_queries=60, num_labels=20)
        if cli.main(train_command("corpus", "run")):
            raise SystemExit("the training failed")
        Path("run/bundle").rename("bundle")
        Path("answers.json").write_text(json.dumps(answers_of(Path("bundle")), indent=1))
        newest = max(Path("run/checkpoints").iterdir())
        shutil.rmtree(newest)
        for file in ("result.json", "metrics.json", "report.html"):
            Path("run", file).unlink()
        # A run remembers where its corpus was.
        remembered = Path("run/run.json")
        remembered.write_text(remembered.read_text().replace(str(Path.cwd()), "/corpora"))
        shutil.rmtree("raw")
        shutil.copytree(".", HERE / __version__)
    print(f"{HERE / __version__} is written")


if __name__ == "__main__":
    main()
