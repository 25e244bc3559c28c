"""From nothing to answers in minutes: the sample corpus, ASTRA on two Ray workers, a table, five queries."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from xmcray import config, storage
from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.data.pipeline import prepare
from xmcray.data.sample import write_sample
from xmcray.data.session import ray_session
from xmcray.evaluation.baselines import NearestQueries
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation
from xmcray.evaluation.table import answer_table, metrics_table, segment_table
from xmcray.progress import watch_training
from xmcray.retrieval.retriever import Retriever
from xmcray.training.launch import train
from xmcray.training.outcome import finish, measure
from xmcray.training.run import RunConfig
from xmcray.types import Int64Array, TopLabels

PRESET = "preset:astra/sample"
QUERIES = (
    "find peaks in a signal",
    "fill missing values in a column",
    "inverse of the normal cumulative distribution",
    "fast fourier transform of real input",
    "join two tables on a key column",
)
# Measured by others on another build of this sample (on which TF-IDF kNN had 0.47): an orientation, no comparison.
QUOTED: dict[str, dict[str, Any]] = {"XR-Linear (quoted, not measured)": {"P@1": 0.56}}


def quickstart(out: str) -> None:
    """Trains and answers in the folder `out`; a finished run found there is used again."""
    with ray_session():
        _quickstart(out)


def _quickstart(out: str) -> None:
    started, folder = time.perf_counter(), Path(out)
    console = (
        Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=160)
    )
    console.print(
        "1/4 corpus: documentation of the installed numpy, scipy and pandas", markup=False
    )
    corpus = sample_corpus(folder / "corpus")
    card = corpus.card
    console.print(
        f"    {card.num_train:,} training and {card.num_test:,} test queries, {card.num_labels:,} labels"
    )
    settings = RunConfig.resolve("astra", config.load_yaml(PRESET), ["cluster.workers=2"])
    finished = (folder / "run" / "result.json").is_file()
    how = (
        "found the finished run"
        if finished
        else "first to choose the number of epochs, then on all training queries"
    )
    console.print(f"2/4 ASTRA on 2 Ray workers: {how}", markup=False)
    run = train(folder / "corpus", folder / "run", settings, refit=True, watch=watch_training)
    console.print("3/4 the test queries, by which nothing was chosen", markup=False)
    found = finish(run, corpus)
    assert found is not None, "the sample has a test split"
    baseline = nearest_queries(corpus)
    console.print(
        metrics_table({"ASTRA": found.to_json(), "TF-IDF kNN": baseline.to_json(), **QUOTED})
    )
    console.print(segment_table(found.to_json()))
    console.print("4/4 five questions\n", markup=False)
    for query, answers in zip(
        QUERIES, Retriever.load(run.path / "bundle").search(QUERIES, 3), strict=True
    ):
        console.print(
            answer_table(
                query, [(a.score, a.uid, a.text.removeprefix(f"{a.uid} ")) for a in answers]
            )
        )
        console.print()
    console.print(f"{time.perf_counter() - started:.0f} s in all. Next:", markup=False)
    for command, why in (
        (f'xmcray search {out}/run/bundle "smooth a curve" -k 5', "your own question"),
        (f"xmcray serve {out}/run/bundle", "a page to search with, and an API"),
        (
            f"xmcray train astra --data {out}/corpus --out runs/b --config {PRESET} --set optim.epochs=5",
            "a variation",
        ),
        (
            f"xmcray evaluate runs/b --data {out}/corpus --compare {out}/run",
            "is it worse? a paired test",
        ),
        ("xmcray prepare SRC --out CORPUS", "your own data"),
    ):
        console.print(f"  {command}   # {why}", markup=False)
    console.print(f"The run on one page: {out}/run/report.html", markup=False)


def sample_corpus(path: Path) -> Corpus:
    """The embedded sample as a corpus; made if it is not there yet."""
    if (path / storage.MANIFEST).is_file():
        return Corpus.open(path)
    raw = Path(tempfile.mkdtemp(prefix="xmcray-sample."))
    try:
        write_sample(raw)
        return prepare(detect(raw), path, name="sample", licence="BSD-3-Clause", progress=False)
    finally:
        shutil.rmtree(raw, ignore_errors=True)


def nearest_queries(corpus: Corpus) -> Evaluation:
    """The kNN baseline on the test split, measured as everything else."""
    train_split, test, num_labels = (
        corpus.split("train"),
        corpus.split("test"),
        corpus.card.num_labels,
    )
    rows = np.arange(len(train_split), dtype=np.int64)
    baseline = NearestQueries(train_split.texts(rows), train_split.positives(rows), num_labels)

    def search(rows: Int64Array) -> TopLabels:
        return baseline.top_labels(test.texts(rows), min(SEARCH_K, num_labels), test.filters(rows))

    return measure(search, corpus, "test")
