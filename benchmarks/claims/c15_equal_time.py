"""Claim 15 (ASTRA): at equal time it is ahead of exact training."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from claim import Claim, Comparison, Measured, Result, main, present
from data_sets import CACHE, preset
from data_sets import corpus as open_corpus

from xmcray.data.batches import TrainingData
from xmcray.evaluation.charts import Series, line_chart
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run
from xmcray.training.validation import validate

POINTS = 6  # of a curve
SECONDS = 45


def make(full: bool) -> Claim:
    corpus = (present("msdocs-links") or ["planted"])[0]
    seconds, device, dim = (600, "cuda", 256) if full else (SECONDS, "cpu", 128)
    # A constant rate, so that every point of a curve is a model that one would stop with.
    common = [
        "optim.schedule=constant",
        "optim.epochs=1000",
        "optim.warmup_steps=50",
        f"encoder.dim={dim}",
    ]
    sampled = [*common, "negatives.hard=20", "negatives.start_epoch=2", "negatives.refresh_every=2"]
    exact = [*common, "negatives.hard=0", "method.exact=true"]

    def measured(*settings: str) -> Measured:
        values = {
            "corpus": corpus,
            "settings": list(settings),
            "seconds": seconds,
            "device": device,
        }
        return Measured(function=over_time, settings=values)

    return Claim(
        number=15,
        title="ASTRA: ahead of exact training at equal time",
        statement="At every time the model trained with sampled labels is ahead of the one trained with all labels",
        source="ASTRA, Fig. 2",
        variants={
            "sampled": measured(*sampled),
            "exact": measured(*exact),
            # all labels push a row far oftener than sampled ones do
            "exact, rate / 10": measured(*exact, "method.classifier.lr=30"),
        },
        comparisons=[
            Comparison(of="sampled", metric=metric, against=other, low=0)
            for metric in ("P@1", "half-time P@1", "P@5")
            for other in ("exact", "exact, rate / 10")
        ],
        setup=f"{corpus}, static encoder, {dim} dimensions, settings of `astra/{corpus}` with a constant learning rate;"
        f" a model is measured on held-out training queries {POINTS} times within {seconds} s of"
        f" {'time' if full else 'CPU time on one core, measuring excluded'}. Sampled: 2,000 uniform labels of a batch"
        " and 20 hard negatives of a query, new every 2 epochs; the index is built within the same time.",
        metrics=("P@1", "P@5", "half-time P@1", "half-time P@5", "steps"),
        reason="the rate is one that should fall to 0. Held constant, it lets the sampled model swing in its last"
        " steps, by seed, while the exact one has done a fifth of the steps and is still climbing. P@5, the mean of"
        " five answers, is steadier and ahead.",
        plot=lambda results: curves(results, seconds),
    )


def curves(results: Mapping[str, Mapping[int, Result]], seconds: float) -> str:
    """P@1 over time, the mean of the seeds."""
    x = seconds * np.arange(1, POINTS + 1) / POINTS
    lines = {
        name: [found["P@1 curve"] for found in by_seed.values()]
        for name, by_seed in results.items()
        if by_seed
    }
    series = [Series(name, x, 100 * np.mean(points, axis=0)) for name, points in lines.items()]
    title = "ASTRA and exact training over time: P@1"
    return line_chart(
        title, series, y_title="percent", x_title="seconds of training", from_zero=False
    )


class _TimeIsUpError(Exception):
    """Ends a training from within."""


def over_time(
    seed: int, corpus: str, settings: Sequence[str], seconds: float, device: str
) -> Result:
    """P@1 and P@5 of held-out training queries at POINTS equal stretches of this process's CPU time.

    CPU time includes the index that is built during training, and excludes other processes.
    """
    opened = open_corpus(corpus)
    assert opened is not None
    common = [
        f"optim.seed={seed}",
        "data.validation=0.02",
        "cluster.workers=0",
        "log.validate_every=0",
    ]
    config = preset(corpus, [*common, f"log.checkpoint_every={10**9}", *settings])
    folder = Path(tempfile.mkdtemp(dir=CACHE))
    data = TrainingData(opened, config.data)
    clock = time.process_time if device == "cpu" else time.perf_counter
    found: dict[str, list[float]] = {"P@1": [], "P@5": []}
    threads = torch.get_num_threads()
    refresher = ThreadRefresher(data, RefreshSpec(1, config.negatives, seed, threads))
    setup = build(config, data, torch.device(device))
    measuring = 0.0

    def on_step(step: int) -> None:
        nonlocal measuring
        now = clock()
        if now - started - measuring < seconds * (len(found["P@1"]) + 1) / POINTS:
            return
        values = validate(setup.stepper.encoder, setup.method, setup.data, setup.partition)
        for metric, points in found.items():
            points.append(values[metric])
        measuring += clock() - now
        if len(found["P@1"]) == POINTS:
            steps.append(step)
            raise _TimeIsUpError

    steps: list[int] = []
    run = Run.create(folder, config, opened)
    started = clock()
    try:
        Loop(run, setup, refresher, on_step).train()
    except _TimeIsUpError:
        pass
    finally:
        refresher.close()
        shutil.rmtree(folder)
    measures: dict[str, float | list[float]] = {"steps": steps[0]}
    for metric, points in found.items():
        measures |= {
            metric: points[-1],
            f"half-time {metric}": points[POINTS // 2 - 1],
            f"{metric} curve": points,
        }
    return measures


if __name__ == "__main__":
    main(make)
