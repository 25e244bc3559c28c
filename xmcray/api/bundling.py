"""New bundles of finished ones: memory, fuse, calibrate, labels, distil, train_reranker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from xmcray import config as configs
from xmcray.api.settings_sources import Location, Settings, merged, text_of, texts_of
from xmcray.errors import ConfigError
from xmcray.paths import bundle_at

if TYPE_CHECKING:
    from xmcray.retrieval.calibration import Calibration
    from xmcray.training.distil import DistilOutcome
    from xmcray.training.part_weights import Choice
    from xmcray.training.train_reranker import RerankOutcome


def memory(
    encoder: Location,
    data: Location,
    out: Location,
    config: Settings = (),
    *,
    progress: bool = True,
) -> None:
    """Writes a bundle whose training queries vote, with any encoder and without training.

    Args:
        encoder: run, bundle, folder of an encoder, or hub id.
        data: corpus whose training queries vote.
        out: folder or URL to write.
        config: settings `memory.*`.
        progress: show the number of texts on stderr if that is a terminal.
    Raises:
        ConfigError: no such encoder, or a setting is unknown or out of range.
        DataError: the encoder needs other tokens than the corpus has, or labels have joined or left
            the bundle.
        StorageError: `out` exists, or the disk is full.
    """
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.retrieval.votes import changed_memory
    from xmcray.storage.artifact import refuse_existing
    from xmcray.training.memory import memory_bundle

    # Wrong settings and a taken folder are refused before the encoder runs.
    values = merged(config)
    settings = changed_memory(None, values) if values else None
    refuse_existing(os.fspath(out))
    corpus = Corpus.open(os.fspath(data))
    num_texts = corpus.card.num_train + corpus.card.num_labels
    with counting("training queries and labels", num_texts, progress) as count:
        memory_bundle(os.fspath(encoder), corpus, os.fspath(out), settings, progress=count)


def fuse(
    paths: Sequence[Location],
    data: Location | Sequence[Location],
    out: Location,
    *,
    metric: str = "P@1+P@5+PSP@5",
    progress: bool = True,
) -> Choice:
    """Writes a bundle that answers by the weighted sum of several parts.

    Args:
        paths: runs, or bundles whose runs held the same queries out.
        data: the corpus that they were trained on; if tokenizers differ, one prepared with each.
        out: folder or URL to write.
        metric: weights maximise the mean of these metrics, joined by "+", on held-out queries.
        progress: show the number of queries on stderr if that is a terminal.
    Returns:
        The weights, and what each part is worth.
    Raises:
        ConfigError: `paths` is no list, an unknown metric, or runs that held other queries out.
        DataError: bundles and corpus do not belong together.
        StorageError: `out` exists, or the disk is full.
    """
    members = texts_of("paths", paths)
    corpora = [data] if isinstance(data, str | os.PathLike) else data
    for name, items in (("paths", members), ("data", corpora)):
        if not items:
            raise ConfigError(f"{name} is an empty list, expected at least one; name them")
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.storage.artifact import refuse_existing
    from xmcray.training.fuse import fuse as write_fused

    refuse_existing(os.fspath(out))
    corpus, *retokenized = [Corpus.open(os.fspath(path)) for path in corpora]
    with counting("training queries", corpus.card.num_train, progress) as count:
        return write_fused(
            members,
            corpus,
            os.fspath(out),
            retokenized=retokenized,
            metrics=metric.split("+"),
            progress=count,
        )


def calibrate(path: Location, data: Location, out: Location | None = None) -> Calibration:
    """Gives the answers of a bundle probabilities, by queries that its run held out.

    Args:
        path: run, or bundle whose run held queries out; it changes at one moment.
        data: corpus.
        out: folder or URL of another bundle to write in its place.
    Raises:
        ConfigError: no query was held out, or the bundle is at a URL and there is no `out`.
        DataError: bundle and corpus do not belong together.
        StorageError: the bundle is damaged or being changed, or `out` exists.
    """
    from xmcray.data.corpus import Corpus
    from xmcray.training.calibrate import calibrate as fit

    corpus = Corpus.open(os.fspath(data))
    return fit(os.fspath(path), corpus, text_of(out))


def labels(
    change: Literal["add", "remove", "annotate"],
    path: Location,
    what: Sequence[Location],
    out: Location | None = None,
) -> int:
    """Adds labels to a bundle, removes some or sets their attributes, without training.

    Args:
        change: what to do.
        path: bundle, which changes at one moment.
        what: "add": files of uid, text and attributes; "annotate": files of uid and attributes;
            "remove": uids.
        out: folder or URL of another bundle to write in its place.
    Returns:
        The number of labels that the bundle then has.
    Raises:
        ConfigError: `what` is no list.
        DataError: a line is malformed, or a uid is unknown or there already.
        StorageError: the bundle is damaged or being changed, or `out` exists.
    """
    configs.check_choice("change", change, ("add", "remove", "annotate"))
    names = texts_of("what", what)
    from xmcray.retrieval import labels as changes

    bundle = os.fspath(path)
    target = text_of(out)
    if change == "add":
        return changes.add_labels(bundle, changes.read_new_labels(names), target)
    if change == "annotate":
        return changes.annotate_labels(bundle, changes.read_attribute_sets(names), target)
    return changes.remove_labels(bundle, names, target)


def distil(
    path: Location,
    data: Location,
    out: Location,
    config: Mapping[str, Any] | None = None,
    *,
    into: Literal["static"] = "static",
    progress: bool = True,
) -> DistilOutcome:
    """Writes a bundle that answers like another one, without its transformer.

    Args:
        path: bundle (folder or URL) or run, with a transformer.
        data: the corpus that it was made from.
        out: folder or URL to write.
        config: settings by name, see `training.distil.Distillation`.
        into: kind of the new encoder.
        progress: show the number of texts on stderr if that is a terminal.
    Returns:
        P@1 and P@5 of both on held-out queries.
    Raises:
        ConfigError: a setting is unknown or out of range, or the bundle has no transformer.
        DataError: bundle and corpus do not belong together.
        StorageError: `out` exists, or the disk is full.
    """
    configs.check_choice("into", into, ("static",))
    from xmcray.storage.artifact import refuse_existing
    from xmcray.training.distil import Distillation, distil

    settings = configs.build(Distillation, dict(config or {}))
    refuse_existing(os.fspath(out))
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting

    corpus = Corpus.open(os.fspath(data))
    bundle = bundle_at(os.fspath(path), os.fspath(data))
    with counting("texts", settings.num_texts(corpus), progress) as count:
        return distil(bundle, corpus, os.fspath(out), settings, progress=count)


def train_reranker(
    path: Location,
    data: Location,
    out: Location,
    model: str,
    config: Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
) -> RerankOutcome:
    """Trains a cross-encoder that reads a bundle's best answers again.

    Args:
        path: run, or bundle whose run held queries out.
        data: corpus.
        out: folder or URL to write.
        model: transformer to start from: folder or hub id.
        config: settings by name, see `training.train_reranker.RerankTraining`.
        progress: show the number of queries on stderr if that is a terminal.
    Returns:
        P@1 and P@5 on held-out queries with it and without.
    Raises:
        ConfigError: no query was held out, or a setting is unknown or out of range.
        BundleError: the model cannot be read.
        DataError: the answers of the training queries hold no wrong label to learn from.
        StorageError: `out` exists, or the disk is full.
    """
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training.train_reranker import RerankTraining
    from xmcray.training.train_reranker import train_reranker as run_training

    settings = configs.build(RerankTraining, {"model": model, **(config or {})})
    corpus = Corpus.open(os.fspath(data))
    num_queries = settings.epochs * min(settings.queries, corpus.card.num_train)
    with counting("queries", num_queries, progress) as count:
        return run_training(os.fspath(path), corpus, os.fspath(out), settings, progress=count)
