"""Claim 15 (ASTRA): at equal time it is ahead of exact training."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from claim import Claim, Comparison, main, mean
from data_sets import CACHE, preset
from data_sets import corpus as open_corpus
from variants import HELD_OUT, Measured, Result, choose_once, hits_by_query, present

from xmcray.data.batches import TrainingData
from xmcray.evaluation.charts import Series, line_chart
from xmcray.evaluation.metrics import Metrics
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.retrieval.exact import exact_search
from xmcray.training.loop import Loop, Setup, build
from xmcray.training.run import Run
from xmcray.training.step import encode_queries
from xmcray.training.validation import validate

BUDGETS = (15, 30, 60, 120)  # seconds
COMMON = (
    "optim.epochs=10000",  # the time ends a training
    "optim.warmup_steps=10",
    "encoder.dim=128",
    "data.augment_with_labels=false",
    "cluster.workers=0",
    "log.validate_every=0",
    "log.checkpoint_every=1000000000",
)
KINDS = {
    "sampled": (
        "negatives.hard=20",
        "negatives.start_epoch=2",
        "negatives.refresh_every=2",
    ),
    "exact": ("negatives.hard=0", "method.exact=true"),
}
# All labels push a row far oftener than sampled ones do, so each kind has a rate of its own for every budget.
RATES = {
    "sampled": (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    "exact": (100.0, 300.0, 1000.0, 3000.0),
}


def make(full: bool) -> Claim:
    corpus = (present("msdocs-links") or ["planted"])[0]
    variants = {}
    for kind in KINDS:
        for seconds in BUDGETS:
            variants[f"{kind}, {seconds} s"] = measured(corpus, kind, seconds, full)
    comparisons = []
    for seconds in BUDGETS:
        sampled = f"sampled, {seconds} s"
        exact = f"exact, {seconds} s"
        for metric in ("P@1", "P@5"):
            difference = Comparison(of=sampled, metric=metric, against=exact, low=0)
            comparisons.append(difference)
    rates = {kind: ", ".join(f"{rate:g}" for rate in RATES[kind]) for kind in KINDS}
    return Claim(
        number=15,
        title="ASTRA: ahead of exact training at equal time",
        statement="At every time the model trained with sampled labels is ahead of the one trained with all labels",
        source="ASTRA, Fig. 2",
        variants=variants,
        comparisons=comparisons,
        setup=f"{corpus}, static encoder, 128 dimensions, settings of `astra/{corpus}` without label texts as queries."
        f" Every budget of {'time' if full else 'CPU time on one core'} is a training of its own, whose learning rate"
        " falls to 0 as a cosine over that time; the rate of the rows is chosen on held-out training queries for each"
        f" of them, of sampled labels from {rates['sampled']}, of all labels from {rates['exact']}."
        " After 15 s all labels choose their lowest rate; lower ones are worse on held-out queries (P@1 of 26.7 at 100, 24.1"
        " at 30 and 20.9 at 10)."
        " Sampled: 2,000 uniform labels of a batch and 20"
        " hard negatives of a query, new every 2 epochs; the index is built within the same time.",
        metrics=("P@1", "P@5", "steps"),
        plot=curves,
    )


def measured(corpus: str, kind: str, seconds: int, full: bool) -> Measured:
    settings = {
        "corpus": corpus,
        "settings": [*COMMON, *KINDS[kind]],
        "seconds": seconds,
        "device": "cuda" if full else "cpu",
        "rates": RATES[kind],
    }
    return Measured(function=after_time, settings=settings)


def curves(results: Mapping[str, Mapping[int, Result]]) -> str:
    """P@1 against the budget, the mean of the seeds."""
    series = []
    for kind in KINDS:
        values = [mean(results.get(f"{kind}, {seconds} s", {}), "P@1") for seconds in BUDGETS]
        series.append(Series(kind, np.array(BUDGETS, float), np.array(values)))
    title = "ASTRA and exact training by time: P@1"
    return line_chart(
        title, series, y_title="percent", x_title="seconds of training", from_zero=False
    )


def after_time(
    seed: int,
    corpus: str,
    settings: Sequence[str],
    seconds: float,
    device: str,
    rates: Sequence[float],
) -> Result:
    """Metrics on the test split of a training of so many seconds, with the rate that validation chose."""
    described = json.dumps([corpus, list(settings), seconds, device, rates])
    key = f"{hashlib.sha256(described.encode()).hexdigest()[:12]}-rate"

    def validation(rate: str) -> float:
        held_out = [*settings, f"method.classifier.lr={rate}", f"data.validation={HELD_OUT}"]
        return trained_for(0, corpus, held_out, seconds, device)["P@1"]  # type: ignore[no-any-return]

    rate = choose_once(key, [f"{rate:g}" for rate in rates], validation)
    chosen = [*settings, f"method.classifier.lr={rate}", "data.validation=0"]
    return {**trained_for(seed, corpus, chosen, seconds, device), "chosen": f"rate {rate}"}


class _TimeIsUpError(Exception):
    """Ends a training from within."""


def trained_for(
    seed: int, corpus: str, settings: Sequence[str], seconds: float, device: str
) -> Result:
    """Trains for so many seconds of this process's CPU time; metrics on what is held out, or else on the test split.

    CPU time includes the index that is built during training, and excludes other processes.
    """
    opened = open_corpus(corpus)
    assert opened is not None
    config = preset(corpus, [f"optim.seed={seed}", *settings])
    folder = Path(tempfile.mkdtemp(dir=CACHE))
    data = TrainingData(opened, config.data)
    clock = time.process_time if device == "cpu" else time.perf_counter
    spec = RefreshSpec(1, config.negatives, seed, torch.get_num_threads())
    refresher = ThreadRefresher(data, spec)
    setup = build(config, data, torch.device(device))
    num_steps = 0

    def on_step(step: int) -> None:
        nonlocal num_steps
        num_steps = step
        elapsed = clock() - started
        if elapsed >= seconds:
            raise _TimeIsUpError
        # The cosine is one of steps: as many as the time is expected to have.
        setup.stepper.total_steps = max(step + 1, round(step * seconds / elapsed))

    run = Run.create(folder, config, opened)
    started = clock()
    try:
        Loop(run, setup, refresher, on_step).train()
    except _TimeIsUpError:
        pass
    finally:
        refresher.close()
        shutil.rmtree(folder)
    if len(data.validation_rows):
        return validate(setup.stepper.encoder, setup.method, data, setup.partition)
    return {**test_metrics(setup, data), "steps": num_steps}


def test_metrics(setup: Setup, data: TrainingData) -> Result:
    """Metrics on the test split by exact search, with the hits of each query."""
    corpus = data.corpus
    split = corpus.split("test")
    rows = np.arange(len(split))
    query_BD = encode_queries(setup.stepper.encoder, setup.method, split.tokens(rows))
    top = exact_search(
        setup.method.answer_rows(),
        query_BD.float().cpu().numpy(),
        5,
        corpus.label_order,
        # Rows of the answers are internal labels.
        data.to_internal(split.filters(rows)),
    )
    metrics = Metrics.of_corpus(corpus)
    metrics.update(top, split.positives(rows))
    return {**metrics.result(), "hits": hits_by_query(metrics.per_query())}


if __name__ == "__main__":
    main(make)
