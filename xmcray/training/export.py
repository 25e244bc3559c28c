"""A finished run becomes a bundle: encoder, tokenizer, label texts, and the vectors of its last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmcray import config as configs
from xmcray import storage
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, RunError
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.bundle import write_bundle
from xmcray.retrieval.index import IndexSpec
from xmcray.retrieval.memory import remember
from xmcray.storage import is_url
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Checkpoint
from xmcray.training.loop import Setup, build
from xmcray.training.run import Run
from xmcray.training.step import answer_queries
from xmcray.types import Float32Array, Int64Array, Ragged

_BLOCK = 65_536  # labels whose texts are read at once
_ROWS = 1_000_000  # labels whose vectors are made at once
_TUNE_QUERIES = 256  # training queries that the index is tuned by
_RECALL = 0.99  # of the index: answers are for users, hard negatives may miss more


def export_run(
    run: Run,
    out: str | Path,
    corpus: Corpus | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes the bundle of a finished run; nothing is left at `out` on failure.

    Args:
        out: folder or URL that does not exist yet.
        corpus: the verified corpus of the run; opened from where the run found it if not given.
        settings: section `index`, the fields of IndexSpec by name, such as a sweep of indexes found them.
    Raises:
        ConfigError: settings that an index does not take, or of something else.
        RunError: the run is not finished, or the corpus is not the one it was trained on.
        StorageError: `out` exists, the disk is full, or checkpoint or corpus were altered.
    """
    storage.refuse_existing(out)
    spec = index_spec(run.config.optim.seed, settings or {})
    last = last_checkpoint(run)
    corpus = open_corpus(run) if corpus is None else corpus
    check_corpus(run, corpus)
    data = TrainingData(corpus, run.config.data)
    num_labels = corpus.card.num_labels
    first = _finished(run, last, data, LabelPartition(num_labels, _blocks(num_labels), 0))
    memory = run.config.memory
    label_side = first.method.bundle_spec.label_side
    cluster_state = first.method.bundle_spec.cluster_state
    if cluster_state:
        # The method holds a block of the labels; a bundle needs the clusters of all of them.
        label_side.cluster_L = checkpoints.read_state(last, cluster_state, num_labels)
    ids = [
        np.arange(start, min(start + _BLOCK, num_labels), dtype=np.int64)
        for start in range(0, num_labels, _BLOCK)
    ]
    write_bundle(
        out,
        last.path / "encoder",
        first.method.head,
        corpus.tokenizer(),
        (uid for block in ids for uid in corpus.label_uids(block)),
        (text for block in ids for text in corpus.label_texts(block)),
        corpus.label_order,
        _vectors(run, last, data),
        spec,
        about={
            "run": run.id,
            "step": last.step,
            "corpus": corpus.card.name,
            "corpus_sha256": run.corpus_sha256,
            "config": run.config.to_dict(),
        },
        method=run.config.method_name,
        label_side=label_side,
        queries=_query_vectors(
            first, data.tokens(sample_rows(data.num_train, run.config.optim.seed))
        ),
        predictor=remember(corpus.split("train"), lambda t: _query_vectors(first, t), memory, spec)
        if memory
        else None,
    )


def index_spec(seed: int, settings: Mapping[str, Any]) -> IndexSpec:
    """How a bundle's vectors are indexed: the usual way, but for the section `index` of `settings`.

    Raises:
        ConfigError: as for `export_run`.
    """
    if other := [name for name in settings if name != "index"]:
        raise ConfigError(
            f"an export takes settings of the index alone, found {other[0]!r}; give it to `xmcray train`"
        )
    section = settings.get("index", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"index is {section!r}, expected a section with settings")
    usual = configs.dump(IndexSpec(recall=_RECALL, seed=seed))
    return configs.build(IndexSpec, {**usual, **section}, "index.")


def last_checkpoint(run: Run) -> Checkpoint:
    """The verified checkpoint a finished run ended with.

    Raises:
        RunError: the run is not finished, or that checkpoint is gone or altered.
    """
    result = run.result()
    if result is None:
        raise RunError(f"{run.path} is not finished; resume it with the same train command")
    found = checkpoints.newest(run.checkpoints)
    if found is None or found.step != result["steps"]:
        raise RunError(
            f"{run.path} has no intact checkpoint of its last step {result['steps']:,}; train again with another --out"
        )
    return found


def open_corpus(run: Run) -> Corpus:
    """The corpus where the run found it, every file verified.

    Raises:
        RunError: it is no longer there.
        StorageError: it was altered.
    """
    if not is_url(run.corpus) and not Path(run.corpus).exists():
        raise RunError(
            f"{run.path} was trained on {run.corpus}, which does not exist; name the corpus with --data"
        )
    return Corpus.open(run.corpus)


def check_corpus(run: Run, corpus: Corpus) -> None:
    """Raises RunError unless `corpus` is the one the run was trained on."""
    if corpus.sha256 != run.corpus_sha256:
        raise RunError(
            f"{corpus.path} is not the corpus {run.path} was trained on (corpus {corpus.sha256[:12]}, expected"
            f" {run.corpus_sha256[:12]}); name that one with --data"
        )


def _blocks(num_labels: int) -> int:
    return -(-num_labels // _ROWS)


def _finished(run: Run, last: Checkpoint, data: TrainingData, part: LabelPartition) -> Setup:
    """The trained method with a block of the labels, as one of many ranks would hold it."""
    device = torch.device(
        "cuda" if torch.cuda.is_available() and run.config.cluster.device != "cpu" else "cpu"
    )
    setup = build(run.config, data, device, part)
    checkpoints.load_weights(last, setup.stepper, part)
    return setup


def _vectors(run: Run, last: Checkpoint, data: TrainingData) -> Iterator[Float32Array]:
    """Label vectors float32 [n, D] in internal order, whatever ranks trained them."""
    num_blocks = _blocks(data.num_labels)
    for block in range(num_blocks):
        setup = _finished(run, last, data, LabelPartition(data.num_labels, num_blocks, block))
        yield setup.method.answer_rows().detach().float().cpu().numpy()


def sample_rows(num_train: int, seed: int) -> Int64Array:
    """Training queries by which an index is tuned: a seeded sample, ascending."""
    return np.sort(
        np.random.default_rng(seed).choice(num_train, min(_TUNE_QUERIES, num_train), replace=False)
    )


def _query_vectors(setup: Setup, tokens: Ragged) -> Float32Array:
    vectors: Float32Array = (
        answer_queries(setup.stepper.encoder, setup.method, tokens).float().cpu().numpy()
    )
    return vectors
