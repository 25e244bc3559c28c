"""The start of a run that continues an earlier run, whose corpus had fewer queries and labels.

RUN/start/ is a checkpoint of step 0 whose rows are the labels of the new corpus. The driver writes it
before the run begins, so workers read it like any checkpoint, on any number of ranks:

    encoder, modules, optimiser   from the last checkpoint of the earlier run
    rows of known labels          from there too, matched by uid, with their optimiser state
    rows of new labels            from their texts, by the label side of the earlier run's bundle
    other state of new labels     the method's usual start, with the trained encoder

Hard negatives are not taken over. Their index is built anew.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmcray import config as configs
from xmcray.data.batches import TrainingData
from xmcray.data.chunks import rejected_uid
from xmcray.data.corpus import Corpus, Split
from xmcray.errors import ConfigError, DataError
from xmcray.methods.registry import method_entry
from xmcray.nn.encoder import Encoder
from xmcray.nn.label_side import load_label_side
from xmcray.nn.side import MixedEncoder, load_mixer
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.new_vectors import have_one_length, nearest_clusters, new_vectors
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import read_manifest
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint import Checkpoint
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.export import last_checkpoint, open_corpus
from xmcray.training.loop import Setup, build
from xmcray.training.outcome import bundle_of
from xmcray.training.run import SELECTION, START, Run
from xmcray.training.run_config import RunConfig
from xmcray.types import BoolArray, Float32Array, Int64Array, id_blocks

logger = logging.getLogger(__name__)

_SOME_LABELS = 1024
# Settings of the encoder that may differ from the earlier run. All others decide what its trained
# weights mean.
_FREE_SETTINGS = ("encoder.autocast", "encoder.dropout", "encoder.init_", "encoder.vectors_folder")
_Names = Callable[[Int64Array], list[str]]


def settings_from(source: Run, method_name: str, corpus: Corpus) -> dict[str, Any]:
    """The settings for a run that continues a finished run on a new corpus.

    Queries that the finished run was trained on are not held out. If it is a refit, the settings are
    those of the run that chose its number of epochs.

    Raises:
        ConfigError: the run was trained with another method.
        RunError: its corpus is gone.
    """
    if source.config.method_name != method_name:
        raise ConfigError(
            f"{source.path} was trained with {source.config.method_name}, which cannot go on as"
            f" {method_name}; name {source.config.method_name}, or train without --from"
        )
    config = _first_config(source)
    old = open_corpus(source)
    # Some defaults depend on the number of labels. They are computed for the old number, because other
    # values would change the shapes of modules.
    in_force = method_entry(config.method_name).in_force
    method = in_force(config.method, old.card.num_labels)
    encoder = dataclasses.replace(
        config.encoder, init_from="", init_vectors="distilled", init_share=1.0
    )
    values = dataclasses.replace(config, method=method, encoder=encoder).to_dict()
    num_old = old.card.num_train
    queries = corpus.split("train")
    old_queries = old.split("train")
    # Queries without uids in the raw files have the numbers of their rows as uids. Equal numbers do not
    # show that a query is the same, so the texts must agree too.
    same_uids = _begins_with(queries.uids, old_queries.uids, num_old, len(queries))
    if same_uids and _begins_with(queries.texts, old_queries.texts, num_old, len(queries)):
        values["data"]["validation_from"] = num_old
        return values
    num_known = _num_shared(queries, old_queries)
    if num_known:
        logger.warning(
            "%d of %d training queries were trained on by %s, and are not the first ones of %s, so"
            " they may be held out, and metrics of held-out queries too good; make the corpus with"
            " `xmcray prepare --append`",
            num_known,
            len(queries),
            source.path,
            corpus.path,
        )
    return values


def begun_from(path: Path, source: Path) -> tuple[Run, dict[str, Any]] | None:
    """What a restarted run needs of the run that it goes on from, which may be gone.

    Args:
        path: folder of the run.
        source: folder of the run that it goes on from.
    Returns:
        A stand-in for the other run, of which only path and id are right, and the settings that this
        run was started with; None if it has not begun, or goes on from elsewhere.
    """
    if not (path / "run.json").is_file():
        return None
    run = Run.open(path)
    if run.start is None or run.start["run"] != str(source.absolute()):
        return None
    named = dataclasses.replace(run, path=source.absolute(), id=run.start["id"])
    return named, _first_config(run).to_dict()


def _first_config(run: Run) -> RunConfig:
    """The settings that a run was started with: of a refit, those that chose its number of epochs."""
    selection = run.path / SELECTION
    return Run.open(selection).config if selection.is_dir() else run.config


def write_start(path: Path, source: Run, config: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """Writes the start of a run. The caller holds the run's lock.

    Args:
        path: folder of the new run.
        source: the finished run that it continues.
        config: settings of the new run.
        corpus: corpus of the new run, verified.
    Returns:
        The section of run.json about the start.
    Raises:
        ConfigError: trained weights cannot be used with a setting.
        DataError: the corpus has another vocabulary or no label of `source`, or its labels have no uids
            and are not those of `source`.
        RunError: `source` is not finished, or its corpus is gone.
    """
    last = last_checkpoint(source)
    old = open_corpus(source)
    _check_settings(source, config)
    _check_corpus(source, old, corpus)
    old_ids = _old_label_ids(source, old, corpus)
    if not np.any(old_ids >= 0):
        raise DataError(f"{corpus.path} has no label of {source.path}; train without --from")
    partition = LabelPartition(corpus.card.num_labels, 1, 0)
    use_gpu = torch.cuda.is_available() and config.cluster.device != "cpu"
    device = torch.device("cuda" if use_gpu else "cpu")
    setup = build(config, TrainingData(corpus, config.data), device, partition)
    _check_shapes(source, last, setup)
    _check_mixer(source, last, setup.stepper.encoder, corpus)
    checkpoints.load_shared(last, setup.stepper, 0)
    # First all labels get the method's usual start, with the trained encoder. Then trained rows replace
    # those of the known labels.
    setup.method.start()
    num_old = old.card.num_labels
    for name, table in setup.method.tables.items():
        _carry(source, last, name, table.tensors(), old_ids, num_old)
    state = setup.method.state_tensors()
    if state:
        _carry(source, last, checkpoints.STATE, state, old_ids, num_old)
    _start_new_labels(source, old, corpus, setup, old_ids < 0)
    folder = path / START
    # A process that was killed may have left an incomplete start.
    shutil.rmtree(folder, ignore_errors=True)
    writer = CheckpointWriter(folder, setup.stepper, partition, keep=1)
    writer.save(0, {"epoch": 0, "negatives": {}})
    writer.finish()
    return {
        "run": str(source.path),
        "id": source.id,
        "step": last.step,
        "checkpoint_sha256": read_manifest(last.path, checkpoints.KIND).sha256,
        "start_sha256": _start_sha256(folder),
    }


def check_start(run: Run) -> None:
    """Raises ConfigError unless RUN/start is the one that run.json names."""
    if run.start is None or run.result() is not None:
        return
    folder = run.path / START
    if _start_sha256(folder) != run.start["start_sha256"]:
        raise ConfigError(
            f"{folder} is not the start of {run.path}; train again with another --out"
        )


def _start_sha256(folder: Path) -> str:
    return read_manifest(checkpoints.step_folder(folder, 0), checkpoints.KIND).sha256


def _check_settings(source: Run, config: RunConfig) -> None:
    """Raises ConfigError if a setting changed that decides what the trained tensors mean."""
    for change in configs.differences(source.config.to_dict(), config.to_dict()):
        is_encoder = change.startswith("encoder.") and not change.startswith(_FREE_SETTINGS)
        if is_encoder or change.startswith("optim.precision"):
            raise ConfigError(
                f"{source.path} was trained with {change}, which cannot carry over;"
                " leave that setting out, or train without --from"
            )


def _check_corpus(source: Run, old: Corpus, corpus: Corpus) -> None:
    """Raises DataError unless both corpora have the same token ids."""
    if old.tokenizer().to_files() != corpus.tokenizer().to_files():
        raise DataError(
            f"{corpus.path} has another vocabulary than the corpus of {source.path};"
            " make it with `xmcray prepare --append`, or train without --from"
        )


def _check_shapes(source: Run, last: Checkpoint, setup: Setup) -> None:
    """Raises ConfigError if a module of the method has tensors of other shapes than before."""
    old_shapes = checkpoints.module_shapes(last)
    for module_name, module in checkpoints.other_modules(setup.stepper).items():
        for name, tensor in module.state_dict().items():
            key = f"{module_name}/{name}"
            shape = list(tensor.shape)
            if old_shapes.get(key) != shape:
                raise ConfigError(
                    f"{source.path} was trained with {key} of shape {old_shapes.get(key)}, now {shape};"
                    " use its settings method.*, or train without --from"
                )


def _check_mixer(source: Run, last: Checkpoint, encoder: Encoder, corpus: Corpus) -> None:
    """Raises ConfigError if side vectors would be left out that the trained weights count on."""
    if not isinstance(encoder, MixedEncoder) or not encoder.mixer.is_closed:
        return
    trained = load_mixer(last.path / "encoder", encoder.dim)
    if trained is not None and not trained.is_closed:
        raise ConfigError(
            f"{corpus.path} has side vectors that say nothing about its labels, and {source.path} was"
            " trained with ones that do; prepare it with vectors of the same kind, or train without"
            " --from"
        )


def _old_label_ids(source: Run, old: Corpus, corpus: Corpus) -> Int64Array:
    """int64 [L], the internal id of each label in the old corpus, by the new one; -1 for new labels."""
    old_source_ids = _old_source_ids(old, corpus)
    if _are_numbered(old):
        _check_texts(source, old, corpus, old_source_ids)
    by_internal_id = old_source_ids[corpus.label_order]
    # The look-up at place -1 gives some number, which `where` replaces.
    return np.where(by_internal_id >= 0, old.label_rank[by_internal_id], -1)


def _old_source_ids(old: Corpus, corpus: Corpus) -> Int64Array:
    """int64 [L], the source id of each label in the old corpus, by the new one; -1 for new labels."""
    num_old = old.card.num_labels
    num_labels = corpus.card.num_labels
    old_source_ids = np.full(num_labels, -1, np.int64)
    if _begins_with(corpus.label_uids, old.label_uids, num_old, num_labels):
        old_source_ids[:num_old] = np.arange(num_old)
        return old_source_ids
    id_of_uid: dict[str, int] = {}
    for ids in id_blocks(num_old):
        id_of_uid.update(zip(old.label_uids(ids), ids.tolist(), strict=True))
    for ids in id_blocks(num_labels):
        old_source_ids[ids] = [id_of_uid.get(uid, -1) for uid in corpus.label_uids(ids)]
    return old_source_ids


def _are_numbered(corpus: Corpus) -> bool:
    """Whether all uids of labels are the numbers of their rows: the raw files had no uids."""
    for ids in id_blocks(corpus.card.num_labels):
        for number, uid in zip(ids.tolist(), corpus.label_uids(ids), strict=True):
            if uid not in (str(number), rejected_uid(number)):
                return False
    return True


def _check_texts(source: Run, old: Corpus, corpus: Corpus, old_source_ids: Int64Array) -> None:
    """Raises DataError if most labels have another text than before; warns if some have.

    Row numbers alone do not show that a label is the same, so the texts must agree too.
    """
    num_known = 0
    num_changed = 0
    for ids in id_blocks(corpus.card.num_labels):
        known_ids = ids[old_source_ids[ids] >= 0]
        texts = corpus.label_texts(known_ids)
        old_texts = old.label_texts(old_source_ids[known_ids])
        num_known += len(known_ids)
        num_changed += sum(text != before for text, before in zip(texts, old_texts, strict=True))
    message = (
        f"{num_changed} of {num_known} labels of {corpus.path} have another text than in the corpus of"
        f" {source.path}, and no uid but the number of their row, so they may be other labels; make the"
        " corpus with `xmcray prepare --append`, or train without --from"
    )
    if num_changed > num_known / 2:
        raise DataError(message)
    if num_changed:
        logger.warning(message)


def _begins_with(names: _Names, old_names: _Names, num_old: int, num_rows: int) -> bool:
    """Whether the first rows have the names of all old rows, in the same order."""
    if num_rows < num_old:
        return False
    return all(names(ids) == old_names(ids) for ids in id_blocks(num_old))


def _num_shared(queries: Split, old: Split) -> int:
    """How many queries are among the old ones too, by uid; by text if uids are numbers of rows."""
    names = queries.uids
    names_in_old = old.uids
    if _are_all_digits(old.uids, len(old)):
        names = queries.texts
        names_in_old = old.texts
    old_names: set[str] = set()
    for ids in id_blocks(len(old)):
        old_names.update(names_in_old(ids))
    num_shared = 0
    for ids in id_blocks(len(queries)):
        num_shared += sum(name in old_names for name in names(ids))
    return num_shared


def _are_all_digits(names: _Names, num_rows: int) -> bool:
    """Whether the names of all rows are numbers."""
    for ids in id_blocks(num_rows):
        for name in names(ids):
            if not name.isdigit():
                return False
    return True


def _carry(
    source: Run,
    last: Checkpoint,
    name: str,
    own: Mapping[str, Tensor],
    old_ids: Int64Array,
    num_old: int,
) -> None:
    """Copies the trained rows of known labels from a checkpoint into tensors [L, ...].

    Args:
        source: the run of the checkpoint.
        last: its last checkpoint.
        name: of the table.
        own: the tensors by name, changed in place.
        old_ids: int64 [L], row of each label in the checkpoint; -1 for new labels.
        num_old: rows in the checkpoint.
    Raises:
        ConfigError: the source had no such table, or one of another kind.
    """
    if not checkpoints.has_rows(last.path, name):
        raise ConfigError(
            f"{source.path} was trained without {name} rows, which these settings of method.* need;"
            " use those of that run, or train without --from"
        )
    # Labels are sorted by their rows in the checkpoint, so that each of its files is read once.
    kept_ids = np.flatnonzero(old_ids >= 0)
    kept_ids = kept_ids[np.argsort(old_ids[kept_ids])]
    old_rows = old_ids[kept_ids]
    for first, tensors in checkpoints.row_blocks(last.path, name, 0, num_old):
        if _row_types(tensors) != _row_types(own):
            raise ConfigError(
                f"{source.path} was trained with other settings of its {name} rows (optimiser,"
                " storage or width), which cannot carry over; leave them out, or train without --from"
            )
        # All tensors have as many rows as the block has labels.
        any_tensor = next(iter(tensors.values()))
        num_rows = len(any_tensor)
        # The known labels whose rows are in this block.
        low, high = np.searchsorted(old_rows, [first, first + num_rows])
        label_ids = kept_ids[low:high]
        block_rows = old_rows[low:high] - first
        for key, tensor in own.items():
            tensor[label_ids] = tensors[key][block_rows].to(tensor.device)


def _row_types(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Of each tensor, the type and the shape of a row."""
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()}


def _start_new_labels(
    source: Run, old: Corpus, corpus: Corpus, setup: Setup, is_new_L: BoolArray
) -> None:
    """Computes rows of new labels from their texts, by the label side of the earlier run's bundle.

    Labels without a text keep the method's usual start, and so do tables that are no classifier.

    Args:
        source: the run that is continued.
        old: its corpus.
        corpus: the new corpus.
        setup: the model of the new run.
        is_new_L: bool, whether a label is new, by internal id.
    """
    spec = setup.method.bundle_spec
    columns = spec.label_side.row_columns
    makes_rows = columns > 0 or bool(spec.cluster_state)
    without_tokens = corpus.label_rank[corpus.labels_without_tokens()]
    new_ids = np.setdiff1d(np.flatnonzero(is_new_L), without_tokens)
    old_have_texts = len(old.labels_without_tokens()) < old.card.num_labels
    if not makes_rows or not len(new_ids) or not old_have_texts:
        return
    bundle, _ = open_artifact(bundle_of(source, old), "bundle", contents=False)
    retriever = Retriever.load(bundle)
    side = load_label_side(bundle / "label_side")
    source_ids = corpus.label_order[new_ids]
    texts = corpus.label_texts(source_ids)
    if spec.cluster_state:
        clusters = setup.method.state_tensors()[spec.cluster_state]
        clusters[new_ids] = nearest_clusters(retriever, side, texts).to(clusters)
        return
    # The last columns of a label's vector in a bundle are its row of the classifier.
    vectors = new_vectors(retriever, side, texts)
    new_rows = torch.from_numpy(vectors[:, -columns:])
    old_rows = _some_vectors(retriever, old)[:, -columns:]
    bundle_lengths = np.linalg.norm(old_rows, axis=1)
    for table in setup.method.tables.values():
        if table.weight_SD.shape[1] != columns:
            continue
        if have_one_length(bundle_lengths):
            # The rows of the bundle have lost their lengths, so new rows get the mean length of trained
            # rows.
            trained_rows = table.weight_SD[np.flatnonzero(~is_new_L)].float()
            mean_length = float(trained_rows.norm(dim=1).mean())
            new_rows *= mean_length / bundle_lengths.mean()
        table.weight_SD[new_ids] = new_rows.to(table.weight_SD)


def _some_vectors(retriever: Retriever, old: Corpus) -> Float32Array:
    """Vectors of the first labels of a bundle, float32 [n, D]."""
    num_labels = min(old.card.num_labels, _SOME_LABELS)
    return retriever.labels.vectors_of(np.arange(num_labels))
