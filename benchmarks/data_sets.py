"""Corpora that several benchmarks train on, prepared once into a cache, and the presets they are trained with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from xmcray import config as configs
from xmcray.data import pipeline
from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.data.sample import write_sample
from xmcray.storage import MANIFEST
from xmcray.training.run import RunConfig

# Some benchmarks share helpers with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planted import write_planted

ROOT = Path(__file__).parents[1]
CACHE = Path(
    os.environ.get("XMCRAY_BENCHMARK_CACHE", ROOT / "runs" / "benchmarks")
)  # git ignores runs/
DATA = ROOT.parent / "shared" / "data"  # public sets that are too large for the repository


def corpus(name: str) -> Corpus | None:
    """A corpus by its folder, or by name: "sample", "planted" or a folder of ../shared/data.

    Returns:
        None, with a message, if there is no such data here.
    """
    if (Path(name) / MANIFEST).is_file():
        return Corpus.open(name)
    if name == "sample":
        return prepared(name, write_sample)
    if name == "planted":
        return prepared(
            name, lambda folder: write_planted(folder, num_queries=20_000, num_labels=4_000)
        )
    if not (DATA / name).is_dir():
        print(f"{name} left out: neither a corpus nor a folder of {os.path.relpath(DATA)}")
        return None
    return prepared(name, DATA / name)


def prepared(name: str, raw: Path | Callable[[Path], None], **settings: object) -> Corpus:
    """The corpus of raw files, or of what a function writes, with the defaults of `prepare`; made at the first call."""
    target = CACHE / "corpora" / name
    if target.is_dir():
        return Corpus.open(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one preparation at a time: each takes all cores
        if target.is_dir():
            return Corpus.open(target)
        folder = raw if isinstance(raw, Path) else CACHE / "raw" / name
        if not isinstance(raw, Path):
            raw(folder)
        pipeline.prepare(detect(str(folder), None), target, name=name, **settings)
        ray.shutdown()  # its processes would share the cores with what is measured
    return Corpus.open(target)


def preset(name: str, overrides: Sequence[str] = (), method: str = "astra") -> RunConfig:
    """The committed preset of a set; the method's defaults, with a message, where there is none.

    Args:
        overrides: dotted settings laid over it.
    """
    known = f"{method}/{name}" in configs.presets()
    if not known:
        print(f"no preset {method}/{name}: default settings")
    values = configs.load_yaml(f"preset:{method}/{name}") if known else {}
    return RunConfig.resolve(method, values, overrides)


def fingerprint(config: RunConfig, corpus: Corpus) -> str:
    """Names a training: equal for equal settings and data, wherever it runs, also when a release adds settings."""
    usual = RunConfig.resolve(config.method_name, {}).to_dict()
    settings = {
        key: value for key, value in config.to_dict().items() if key not in ("cluster", "log")
    }
    return hashlib.sha256(
        json.dumps([changed(settings, usual), corpus.sha256]).encode()
    ).hexdigest()[:12]


def changed(settings: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults."""
    kept = {
        k: changed(v, usual[k]) if isinstance(v, dict) else v
        for k, v in settings.items()
        if v != usual.get(k)
    }
    return dict(sorted(kept.items()))
