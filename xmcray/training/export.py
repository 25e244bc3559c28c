"""A finished run becomes a bundle: encoder, tokenizer, label texts, and the vectors of its last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from xmcray import storage
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import RunError
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
from xmcray.types import Float32Array, Ragged

_BLOCK = 65_536  # labels whose texts are read at once
_ROWS = 1_000_000  # labels whose vectors are made at once
_TUNE_QUERIES = 256  # training queries that the index is tuned by
_RECALL = 0.99  # of the index: answers are for users, hard negatives may miss more


def export_run(run: Run, out: str | Path, corpus: Corpus | None = None) -> None:
    """Writes the bundle of a finished run; nothing is left at `out` on failure.

    Args:
        out: folder or URL that does not exist yet.
        corpus: the verified corpus of the run; opened from where the run found it if not given.
    Raises:
        RunError: the run is not finished, or the corpus is not the one it was trained on.
        StorageError: `out` exists, the disk is full, or checkpoint or corpus were altered.
    """
    storage.refuse_existing(out)
    last = last_checkpoint(run)
    corpus = open_corpus(run) if corpus is None else corpus
    check_corpus(run, corpus)
    data = TrainingData(corpus, run.config.data)
    num_labels = corpus.card.num_labels
    first = _finished(run, last, data, LabelPartition(num_labels, _blocks(num_labels), 0))
    spec = IndexSpec(recall=_RECALL, seed=run.config.optim.seed)
    memory = first.method.bundle_spec.memory
    ids = [np.arange(start, min(start + _BLOCK, num_labels), dtype=np.int64) for start in range(0, num_labels, _BLOCK)]
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
        label_side=first.method.bundle_spec.label_side,
        queries=_sample_queries(first, data, run.config.optim.seed),
        predictor=remember(corpus.split("train"), lambda t: _query_vectors(first, t), memory, spec) if memory else None,
    )


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
        raise RunError(f"{run.path} was trained on {run.corpus}, which does not exist; name the corpus with --data")
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
    device = torch.device("cuda" if torch.cuda.is_available() and run.config.cluster.device != "cpu" else "cpu")
    setup = build(run.config, data, device, part)
    checkpoints.load_weights(last, setup.stepper, part)
    return setup


def _vectors(run: Run, last: Checkpoint, data: TrainingData) -> Iterator[Float32Array]:
    """Label vectors float32 [n, D] in internal order, whatever ranks trained them."""
    num_blocks = _blocks(data.num_labels)
    for block in range(num_blocks):
        setup = _finished(run, last, data, LabelPartition(data.num_labels, num_blocks, block))
        yield setup.method.answer_rows().detach().float().cpu().numpy()


def _sample_queries(setup: Setup, data: TrainingData, seed: int) -> Float32Array:
    """float32 [Q, D], vectors of a seeded sample of training queries."""
    rows = np.random.default_rng(seed).choice(data.num_train, min(_TUNE_QUERIES, data.num_train), replace=False)
    return _query_vectors(setup, data.tokens(np.sort(rows)))


def _query_vectors(setup: Setup, tokens: Ragged) -> Float32Array:
    vectors: Float32Array = answer_queries(setup.stepper.encoder, setup.method, tokens).float().cpu().numpy()
    return vectors
