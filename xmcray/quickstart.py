"""From nothing to answers in minutes: the sample corpus, ASTRA on two Ray workers, five queries."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from xmcray import settings_files
from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.data.pipeline import prepare
from xmcray.data.sample import write_sample
from xmcray.evaluation.table import answer_table, metrics_table, segment_table
from xmcray.progress import watch_training
from xmcray.ray_adapter.session import ray_session
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import refuse_artifact
from xmcray.storage.manifest import MANIFEST
from xmcray.training.launch import train
from xmcray.training.outcome import finish, measure, nearest_queries
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

PRESET = "preset:astra/sample"
QUERIES = (
    "find peaks in a signal",
    "fill missing values in a column",
    "inverse of the normal cumulative distribution",
    "fast fourier transform of real input",
    "join two tables on a key column",
)
# Measured by others on another build of this sample (on which TF-IDF kNN had 0.47): for
# orientation, not for comparison.
QUOTED: dict[str, dict[str, Any]] = {"XR-Linear (quoted, not measured)": {"P@1": 0.56}}
NEXT_COMMANDS = (
    ('xmcray search {out}/run/bundle "smooth a curve" -k 5', "your own question"),
    ("xmcray serve {out}/run/bundle", "a page to search with, and an API"),
    (
        f"xmcray train astra --data {{out}}/corpus --out runs/b --config {PRESET} --set optim.epochs=5",
        "a variation",
    ),
    (
        "xmcray evaluate runs/b --data {out}/corpus --compare {out}/run",
        "is it worse? a paired test",
    ),
    ("xmcray prepare SRC --out CORPUS", "your own data"),
)


def quickstart(out: str) -> None:
    """Prepares the sample, trains and answers in the folder `out`; a finished run there is reused."""
    started = time.perf_counter()
    refuse_artifact(out, "--out")
    # Not on a terminal, rich would wrap the tables at 80 columns.
    width = None if Console().is_terminal else 160
    console = Console(highlight=False, markup=False, width=width)
    with ray_session():
        console.print("1/4 corpus: documentation of the installed numpy, scipy and pandas")
        corpus = sample_corpus(Path(out) / "corpus")
        card = corpus.card
        console.print(
            f"    {card.num_train:,} training and {card.num_test:,} test queries, {card.num_labels:,} labels"
        )
        run = _train(console, Path(out))
        _show_results(console, run, corpus)
    _show_answers(console, run)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Next:")
    for command, purpose in NEXT_COMMANDS:
        console.print(f"  {command.format(out=out)}   # {purpose}")
    console.print(f"The run on one page: {out}/run/report.html")


def _train(console: Console, folder: Path) -> Run:
    if (folder / "run" / "result.json").is_file():
        plan = "found the finished run"
    else:
        plan = "first to choose the number of epochs, then on all training queries"
    console.print(f"2/4 ASTRA on 2 Ray workers: {plan}")
    settings = RunConfig.resolve("astra", settings_files.load_yaml(PRESET), ["cluster.workers=2"])
    return train(folder / "corpus", folder / "run", settings, refit=True, watch=watch_training)


def _show_results(console: Console, run: Run, corpus: Corpus) -> None:
    console.print("3/4 the test queries, which took no part in any choice")
    result = finish(run, corpus)
    assert result is not None, "the sample has a test split"
    baseline = measure(nearest_queries(corpus, "test"), corpus, "test")
    rows = {"ASTRA": result.to_json(), "TF-IDF kNN": baseline.to_json(), **QUOTED}
    console.print(metrics_table(rows))
    console.print(segment_table(result.to_json()))


def _show_answers(console: Console, run: Run) -> None:
    console.print("4/4 five questions\n")
    answers = Retriever.load(run.path / "bundle").search(QUERIES, 3)
    for query, query_answers in zip(QUERIES, answers, strict=True):
        rows = []
        for answer in query_answers:
            # The text of a sample's label starts with its name, which has a column of its own.
            text = answer.text.removeprefix(f"{answer.uid} ")
            rows.append((answer.score, answer.uid, text))
        console.print(answer_table(query, rows))
        console.print()


def sample_corpus(path: Path) -> Corpus:
    """The embedded sample as a corpus; it is prepared if it is not there yet."""
    if (path / MANIFEST).is_file():
        return Corpus.open(path)
    with tempfile.TemporaryDirectory(prefix="xmcray-sample.") as folder:
        write_sample(Path(folder))
        return prepare(detect(folder), path, name="sample", licence="BSD-3-Clause", progress=False)
