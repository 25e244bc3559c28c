"""A finished run becomes a bundle: encoder, tokenizer, label texts, and the vectors of its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, RunError, XmcrayError
from xmcray.methods.registry import method_entry
from xmcray.nn.encoder import ENCODERS
from xmcray.nn.label_side import LabelSide
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.calibration import Calibration
from xmcray.retrieval.index_spec import answer_spec
from xmcray.retrieval.memory import memory_writer
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.storage.artifact import refuse_existing
from xmcray.storage.manifest import MANIFEST, read_manifest
from xmcray.storage.remote import is_url
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Checkpoint
from xmcray.training.loop import Setup, assemble, build
from xmcray.training.probability_curves import FEW_QUERIES, fit_calibration, segments_of
from xmcray.training.run import SELECTION, Run
from xmcray.training.run_config import RunConfig
from xmcray.training.step import encode_queries
from xmcray.types import Float32Array, Int64Array, Ragged, id_blocks

logger = logging.getLogger(__name__)

_ROWS = 1_000_000  # labels whose vectors are made at once
_TUNE_QUERIES = 256  # training queries that the index is tuned by
# Probabilities are taken from the selection of a run if the refit has at least this share of its epochs.
LEAST_SHARE = 0.5
_SCORE_SECTIONS = ("method", "memory", "fusion")  # of a run's settings, which make its scores


def export_run(
    run: Run,
    out: str | Path,
    corpus: Corpus | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes the bundle of a finished run; nothing is left at `out` on failure.

    Args:
        run: Finished run.
        out: Folder or URL that does not exist yet.
        corpus: The verified corpus of the run; opened from where the run found it if not given.
        settings: Section `index`: fields of IndexSpec by name, for example from a sweep of indexes.

    Raises:
        ConfigError: `settings` has something else than settings of an index.
        RunError: the run is not finished, or the corpus is not the one it was trained on.
        StorageError: `out` exists, the disk is full, or checkpoint or corpus were altered.
    """
    refuse_existing(out)
    seed = run.config.optim.seed
    spec = answer_spec(settings or {}, seed=seed)
    last = last_checkpoint(run)
    if corpus is None:
        corpus = open_corpus(run)
    check_corpus(run, corpus)
    data = TrainingData(corpus, run.config.data)
    num_labels = corpus.card.num_labels
    # Each block of labels comes with the whole encoder. `_label_vectors` reads the other blocks one
    # after another.
    first_block = LabelPartition(num_labels, _num_blocks(num_labels), 0)
    setup = _trained(run, last, data, first_block)

    def encode(tokens: Ragged) -> Float32Array:
        query_BD = encode_queries(setup.stepper.encoder, setup.method, tokens)
        vectors: Float32Array = query_BD.float().cpu().numpy()
        return vectors

    predictor = None
    if run.config.memory is not None:
        predictor = memory_writer(corpus, encode, run.config.memory, spec, relevance=data.relevance)
    model = BundleModel(
        encoder=last.path / "encoder",
        head=setup.method.head,
        tokenizer=corpus.tokenizer(),
        label_side=_label_side(setup, last, num_labels),
        method=run.config.method_name,
    )
    labels = BundleLabels(
        uids=of_all_labels(corpus.label_uids, num_labels),
        texts=of_all_labels(corpus.label_texts, num_labels),
        order=corpus.label_order,
        vectors=_label_vectors(run, last, data, setup),
        removed=corpus.removed_labels,
    )
    sample = sample_rows(data.num_train, seed)
    shard_build = ShardBuild(
        spec=spec,
        queries=encode(data.tokens(sample)),
        threads=torch.get_num_threads(),
    )
    write_bundle(
        out,
        model,
        labels,
        shard_build,
        about=_origin(run, last, corpus),
        predictor=predictor,
        calibration=_calibrator(run, corpus, data),
        metrics=run.metrics(),
    )


def _label_side(setup: Setup, last: Checkpoint, num_labels: int) -> LabelSide:
    """What makes vectors of labels that join later."""
    spec = setup.method.bundle_spec
    if spec.cluster_state:
        # The method holds a block of the labels; a bundle needs the clusters of all of them.
        spec.label_side.cluster_L = checkpoints.read_state(last, spec.cluster_state, num_labels)
    return spec.label_side


def _calibrator(
    run: Run, corpus: Corpus, data: TrainingData
) -> Callable[[Path], Calibration | None]:
    """Returns a function that makes the probabilities of a bundle's answers, or None if it cannot.

    A refit held none out, so it gets the curves of RUN/selection, which are of the selection's last
    epoch. If the refit has far fewer epochs, its scores differ too much, and it gets no curves.

    A run that goes on from another one holds out new queries alone. If they are few, curves that are
    fitted to them would be chance, and those of the other run's bundle are taken if they fit.
    """

    def calibration_of(bundle: Path) -> Calibration | None:
        num_held_out = len(data.validation_rows)
        if run.start is not None and 0 < num_held_out < FEW_QUERIES:
            earlier = _earlier_calibration(run, run.start["run"], corpus, num_held_out)
            if earlier is not None:
                return earlier
        if num_held_out:
            return fit_calibration(Retriever.of_folder(bundle), corpus, data.validation_rows)
        try:
            selected = selected_bundle(run, corpus)
        except RunError:  # its checkpoint was removed
            return None
        if selected is None:
            return None
        try:
            check_refit(run)
        except ConfigError as problem:
            logger.warning("%s", problem)
            return None
        return Retriever.load(selected).calibration

    return calibration_of


def check_refit(run: Run) -> None:
    """Raises ConfigError if a refit ended so early that the curves of its selection do not fit it."""
    num_epochs = run.config.optim.num_epochs
    num_selected = Run.open(run.path / SELECTION).config.optim.num_epochs
    if num_epochs < LEAST_SHARE * num_selected:
        raise ConfigError(
            f"no probabilities: they would be those of {num_selected} epochs, but the best epoch was"
            f" {num_epochs}; train again with optim.epochs={num_epochs}"
        )


def _earlier_calibration(
    run: Run, earlier_run: str, corpus: Corpus, num_held_out: int
) -> Calibration | None:
    """The curves of the bundle of the run that another one goes on from, for the labels of a corpus.

    None if that bundle is gone or has none, if its scores are made with other settings, or if its
    curves were fitted on no more queries than this run has held out.
    """
    path = Path(earlier_run) / "bundle"
    try:
        retriever = Retriever.load(path)
        values = read_manifest(path, KIND).about["config"]
        earlier_config = RunConfig.resolve(run.config.method_name, values, is_stored=True)
    except (XmcrayError, KeyError):
        return None
    num_labels = retriever.num_labels
    if _score_settings(run.config, num_labels) != _score_settings(earlier_config, num_labels):
        return None
    earlier = retriever.calibration
    if earlier is None or earlier.curves.queries <= num_held_out:
        return None
    return Calibration(earlier.curves, segments_of(corpus.train_counts))


def _score_settings(config: RunConfig, num_labels: int) -> list[object]:
    """The settings that make scores, as they take effect with a number of labels."""
    in_force = method_entry(config.method_name).in_force
    method = in_force(config.method, num_labels)
    values = dataclasses.replace(config, method=method).to_dict()
    return [values.get(name) for name in _SCORE_SECTIONS]


def selected_bundle(run: Run, corpus: Corpus) -> Path | None:
    """The bundle of RUN/selection, written if it is not there yet; None without --refit.

    Raises:
        RunError: the selection has no bundle, and its checkpoint is gone.
    """
    folder = run.path / SELECTION
    if not (folder / "run.json").is_file():
        return None
    bundle = folder / "bundle"
    if not (bundle / MANIFEST).exists():
        export_run(Run.open(folder), bundle, corpus)
    return bundle


def _origin(run: Run, last: Checkpoint, corpus: Corpus) -> dict[str, Any]:
    """What the bundle says about where it comes from."""
    return {
        "run": run.id,
        "step": last.step,
        "corpus": corpus.card.name,
        "corpus_licence": corpus.card.licence,
        "corpus_sha256": run.corpus_sha256,
        "config": run.config.to_dict(),
    }


def of_all_labels(read: Callable[[Int64Array], Iterable[str]], num_labels: int) -> Iterator[str]:
    """Strings of all labels, read in blocks."""
    for label_ids in id_blocks(num_labels):
        yield from read(label_ids)


def last_checkpoint(run: Run) -> Checkpoint:
    """The verified checkpoint a finished run ended with.

    Raises:
        RunError: the run is not finished, or that checkpoint is gone or altered.
    """
    result = run.result()
    if result is None:
        raise RunError(f"{run.path} is not finished; resume it with the same train command")
    newest = checkpoints.newest(run.checkpoints)
    if newest is None or newest.step != result["steps"]:
        raise RunError(
            f"{run.path} has no intact checkpoint of its last step {result['steps']:,};"
            " train again with another --out"
        )
    return newest


def open_corpus(run: Run) -> Corpus:
    """The corpus where the run found it, every file verified.

    Raises:
        RunError: it is no longer there.
        StorageError: it was altered.
    """
    if not is_url(run.corpus) and not Path(run.corpus).exists():
        raise RunError(
            f"{run.path} was trained on {run.corpus}, which does not exist;"
            " name the corpus with --data"
        )
    return Corpus.open(run.corpus)


def check_corpus(run: Run, corpus: Corpus) -> None:
    """Raises RunError unless `corpus` is the one the run was trained on."""
    if corpus.sha256 != run.corpus_sha256:
        raise RunError(
            f"{corpus.path} is not the corpus {run.path} was trained on (corpus {corpus.sha256[:12]}, expected"
            f" {run.corpus_sha256[:12]}); name that one with --data"
        )


def sample_rows(num_train: int, seed: int) -> Int64Array:
    """Training queries that an index is tuned by: a seeded sample, ascending."""
    count = min(_TUNE_QUERIES, num_train)
    return np.sort(np.random.default_rng(seed).choice(num_train, count, replace=False))


def _num_blocks(num_labels: int) -> int:
    return math.ceil(num_labels / _ROWS)


def _trained(run: Run, last: Checkpoint, data: TrainingData, partition: LabelPartition) -> Setup:
    """Encoder and method with a block of the labels, as one of many ranks would hold it."""
    # The checkpoint's weights replace those that training started from: the model that gave them is
    # no longer needed, and may be gone. Adapters are merged into them.
    name = run.config.encoder.name
    encoder = dataclasses.replace(
        run.config.encoder,
        name=name if name in ENCODERS else str(last.path / "encoder"),
        init_from="",
        init_vectors="distilled",
        init_share=1.0,
        lora_rank=0,
        lora_alpha=16,
        lora_targets=(),
    )
    config = dataclasses.replace(run.config, encoder=encoder)
    use_gpu = torch.cuda.is_available() and config.cluster.device != "cpu"
    setup = build(config, data, torch.device("cuda" if use_gpu else "cpu"), partition)
    checkpoints.load_encoder_weights(last, setup.stepper)
    checkpoints.load_method(last, setup.stepper, partition)
    return setup


def _label_vectors(
    run: Run, last: Checkpoint, data: TrainingData, first: Setup
) -> Iterator[Float32Array]:
    """Label vectors float32 [n, D] in internal order, on however many ranks they were trained.

    Args:
        run: The run.
        last: Its last checkpoint.
        data: Its corpus.
        first: The method with the first block of labels.
    """
    num_blocks = _num_blocks(data.num_labels)
    encoder = first.stepper.encoder
    device = next(encoder.parameters()).device
    for block in range(num_blocks):
        setup = first
        if block > 0:
            partition = LabelPartition(data.num_labels, num_blocks, block)
            setup = assemble(run.config, data, encoder, device, partition)
            checkpoints.load_method(last, setup.stepper, partition)
        yield setup.method.answer_rows().detach().float().cpu().numpy()
