"""A finished run becomes a bundle: encoder, tokenizer, label texts and the label vectors of its last checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xmcray import storage
from xmcray.data.corpus import Corpus
from xmcray.errors import RunError
from xmcray.methods.base import methods
from xmcray.nn.encoder import load_encoder
from xmcray.retrieval.bundle import write_bundle
from xmcray.retrieval.index import IndexSpec
from xmcray.storage import is_url
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Checkpoint
from xmcray.training.run import Run
from xmcray.training.step import encode_plain
from xmcray.types import Float32Array, Int64Array

_BLOCK = 65_536  # labels read at once
_TUNE_QUERIES = 256  # training queries that the index is tuned by


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
    spec = methods()[run.config.method_name].bundle_spec
    labels = range(0, corpus.card.num_labels, _BLOCK)
    ids = [np.arange(start, min(start + _BLOCK, corpus.card.num_labels), dtype=np.int64) for start in labels]
    write_bundle(
        out,
        last.path / "encoder",
        corpus.tokenizer(),
        (uid for block in ids for uid in corpus.label_uids(block)),
        (text for block in ids for text in corpus.label_texts(block)),
        corpus.label_order,
        _vectors(last, spec.table, ids),
        IndexSpec(seed=run.config.optim.seed),
        about={
            "run": run.id,
            "step": last.step,
            "corpus": corpus.card.name,
            "corpus_sha256": run.corpus_sha256,
            "config": run.config.to_dict(),
        },
        method=run.config.method_name,
        normalise=spec.normalise_queries,
        queries=_sample_queries(last, corpus, run.config.optim.seed),
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


def _vectors(last: Checkpoint, table: str, blocks: list[Int64Array]) -> Iterator[Float32Array]:
    """Label vectors float32 [n, D] in internal order, whatever ranks wrote them."""
    for block in blocks:
        rows = checkpoints.read_rows(last.path, table, int(block[0]), int(block[-1]) + 1, only="weight")
        yield rows["weight"].float().numpy()


def _sample_queries(last: Checkpoint, corpus: Corpus, seed: int) -> Float32Array:
    """float32 [Q, D], vectors of a seeded sample of training queries."""
    train = corpus.split("train")
    chosen = np.random.default_rng(seed).choice(len(train), min(_TUNE_QUERIES, len(train)), replace=False)
    query_QD = encode_plain(load_encoder(last.path / "encoder"), train.tokens(np.sort(chosen)))
    return query_QD.float().cpu().numpy()
