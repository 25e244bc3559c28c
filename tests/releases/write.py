"""Writes what this version stores, for the tests of later versions: run it once for each release.

    python tests/releases/write.py

The folder tests/releases/VERSION gets a corpus, a bundle, a run as a kill in its last epoch leaves
it, a memory, a fused bundle, the state folder of a server that has changed labels and swapped its
bundle, and the answers of all of them. What is there already stays as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

# Modules of the tests.
from bundles import write_fused  # noqa: E402
from corpora import planted_corpus  # noqa: E402
from served import ADMIN, Served, served  # noqa: E402

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
    "method.classifier.lr=0.05",  # the default of 0.1.0
]
TEXTS = ["w0x0 w0x1", "w3x1 w4x2 w5x0", ""]
K = 5
BUNDLES = ("bundle", "memory", "fused")
SERVED = "served"  # the name of the server's answers
Answers = list[list[tuple[str, float]]]


def train_command(corpus: str, run: str) -> list[str]:
    """The command that trained the run, and continues it."""
    command = ["train", "astra", "--data", corpus, "--out", run, "--workers", "0"]
    for setting in SETTINGS:
        command += ["--set", setting]
    return command


def answers_of(bundle: Path) -> Answers:
    """Label uids and scores of the best labels for each text."""
    results = Retriever.load(bundle).search(TEXTS, K)
    return [[(answer.uid, answer.score) for answer in answers] for answers in results]


async def served_answers(server: Served) -> Answers:
    """As `answers_of`, from a server; it takes no empty text."""
    found = await server.search(TEXTS[:2], k=K)
    return [
        [(answer["uid"], answer["score"]) for answer in result["answers"]]
        for result in found["results"]
    ]


async def add_one(server: Served, uid: str, text: str) -> int:
    """Adds a label, waits until answers have it, and returns the number of this operation."""
    answer = await server.change({"op": "add", "uid": uid, "text": text})
    assert answer.status_code == 200, answer.text
    number = int(answer.json()["label_log"])
    await server.reached(number)
    return number


def write_corpus_and_run() -> None:
    planted_corpus(Path(), num_queries=60, num_labels=20)
    if cli.main(train_command("corpus", "run")):
        raise SystemExit("the training failed")
    Path("run/bundle").rename("bundle")
    newest = max(Path("run/checkpoints").iterdir())
    shutil.rmtree(newest)
    for file in ("result.json", "metrics.json", "report.html"):
        Path("run", file).unlink()
    # A run remembers where its corpus was.
    remembered = Path("run/run.json")
    remembered.write_text(remembered.read_text().replace(str(Path.cwd()), "/corpora"))
    shutil.rmtree("raw")


def write_votes() -> None:
    """A memory, and a fused bundle of it and a second one."""
    if cli.main(["memory", "bundle", "--data", "corpus", "--out", "memory"]):
        raise SystemExit("the memory failed")
    write_fused(Path("memory"))
    for folder in Path().glob("second*"):
        shutil.rmtree(folder)


async def write_state() -> Answers:
    """A state folder with operations before and after a swap to a compacted bundle."""
    async with served(Path(), {"default": Path("bundle")}) as server:
        new = {"op": "add", "uid": "before", "text": "w0x0 w0x1 w1x0"}
        for path, body in {
            "labels": {"operations": [new, {"op": "delete", "uid": "label14"}]},
            "compact": {"out": "compacted"},
            "swap": {"bundle": "compacted"},
        }.items():
            answer = await server.ask(f"/admin/v1/{path}", body, ADMIN)
            assert answer.status_code == 200, answer.text
        await add_one(server, "after", "w3x1 w4x2")
        answers = await served_answers(server)
    # A server that starts makes tokens of its own.
    for token in Path("state").glob("*token"):
        token.unlink()
    return answers


def main() -> None:
    kept = HERE / __version__
    with TemporaryDirectory() as name:
        if kept.is_dir():
            shutil.copytree(kept, name, dirs_exist_ok=True)
        os.chdir(name)
        if not Path("run").exists():
            write_corpus_and_run()
        if not Path("memory").exists():
            write_votes()
        answers = {}
        if Path("answers.json").exists():
            answers = json.loads(Path("answers.json").read_text())
        if not Path("state").exists():
            answers[SERVED] = asyncio.run(write_state())
        for bundle in BUNDLES:
            if bundle not in answers:
                answers[bundle] = answers_of(Path(bundle))
        Path("answers.json").write_text(json.dumps(answers, indent=1))
        shutil.copytree(".", kept, dirs_exist_ok=True)
    print(f"{kept} is written")


if __name__ == "__main__":
    main()
