"""Training loops in this process, and the weights that a run has written."""

from __future__ import annotations

from pathlib import Path

import torch

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.parallel import collectives
from xmcray.storage.manifest import read_manifest
from xmcray.training.loop import Loop, Setup, build
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig


def loop_in(folder: Path, corpus: Corpus, config: RunConfig) -> tuple[Loop, Setup]:
    """The loop of a run in a folder, which goes on from its newest checkpoint if there is one."""
    folder.mkdir(exist_ok=True)
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    run = Run(folder, "test", config, corpus.origin, corpus.sha256)
    spec = RefreshSpec(collectives.num_ranks(), config.negatives, config.optim.seed)
    return Loop(run, setup, ThreadRefresher(data, spec)), setup


def trained(folder: Path, corpus: Corpus, config: RunConfig, stop: int | None = None) -> Setup:
    """Trains to the end, or up to a step."""
    loop, setup = loop_in(folder, corpus, config)
    if stop is not None:
        loop.last_step = stop
    loop.train()
    return setup


def trained_on_rank(corpus: Path, folder: Path, settings: list[str]) -> None:
    """What each rank does of a training with ASTRA."""
    config = RunConfig.resolve("astra", {}, settings)
    trained(folder, Corpus.open(corpus, verify=False), config)


def final_weights(run: Path) -> dict[str, str]:
    """Hashes of the tensor files of the newest checkpoint, and its name."""
    newest = max((run / "checkpoints").glob("step-*"))
    hashes = {"": newest.name}
    for name, entry in read_manifest(newest, "checkpoint").files.items():
        if name.endswith(".safetensors"):
            hashes[name] = entry.sha256
    return hashes
