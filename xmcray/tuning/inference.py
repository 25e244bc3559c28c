"""Settings of a finished bundle, swept on its own vectors without training: seconds instead of hours.

    memory.weight, .temperature, .keys, .joint           lambda, tau, b of a memory (RAE-XMC, Eq. 8)
    fusion.text                                          share of the label texts in UniDEC's sum of two cosines
    index.factory, .nprobe, .candidates, .ef_search      how fast an index of the bundle would be, and how good

Queries are those that the bundle's run held out for validation, never the test split. A memory is asked as if it did
not remember them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray import storage
from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.evaluate import SEARCH_K
from xmcray.evaluation.metrics import Metrics
from xmcray.nn.heads import TwoHeads, load_head
from xmcray.retrieval import bundle as bundles
from xmcray.retrieval.index import Index, IndexSpec, build_index
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import VOTE_QUERIES, MemoryConfig, sweep
from xmcray.training.export import index_spec, sample_rows
from xmcray.training.outcome import check_fits
from xmcray.tuning.proposals import RandomProposals
from xmcray.tuning.space import Space, Values, check_space, nested
from xmcray.tuning.sweep import Trial
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

ENOUGH = 0.001  # an index that loses less of the metric than this is as good as the best; then the fastest wins


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """How UniDEC's two cosines are added: text * (cosine with the label text) + (1 - text) * (cosine with the row)."""

    text: float = 0.5

    def __post_init__(self) -> None:
        configs.check_range("fusion.text", self.text, 0, 1)


KINDS: Mapping[str, type[Any]] = {
    "memory": MemoryConfig,
    "fusion": FusionConfig,
    "index": IndexSpec,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting.

    Attributes:
        values: by dotted name. metrics: on the validation split. queries_per_s: of an index, for the search alone.
    """

    values: Values
    metrics: Mapping[str, float]
    queries_per_s: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {"values": self.values, "queries_per_s": self.queries_per_s, **self.metrics}


@dataclass(frozen=True)
class Held:
    """The validation queries of a bundle.

    Attributes:
        data: the training split as the bundle's run saw it. query_BD: float32, their vectors. seed: of the run.
    """

    retriever: Retriever
    data: TrainingData
    query_BD: Float32Array
    seed: int

    @property
    def rows(self) -> Int64Array:
        """Their rows in the training split."""
        return self.data.validation_rows

    @property
    def k(self) -> int:
        """Answers per query."""
        return min(SEARCH_K, self.data.num_labels)

    def excluded(self) -> Ragged:
        """Labels that are no answers to a query, source ids."""
        return self.data.corpus.split("train").filters(self.rows)

    def measure(self, top: TopLabels) -> Mapping[str, float]:
        """Metrics of the answers to all of them."""
        corpus, card = self.data.corpus, self.data.corpus.card
        metrics = Metrics(
            corpus.train_counts,
            card.num_train,
            card.propensity_a,
            card.propensity_b,
            card.num_labels,
        )
        metrics.update(top, corpus.split("train").positives(self.rows))
        return metrics.result()


def kind_of(space: Space, where: str) -> str:
    """The one family of settings that a space names: "memory", "fusion" or "index".

    Raises:
        ConfigError: another name, several families, or a range that a setting does not take.
    """
    kinds = {name.partition(".")[0] for name in space}
    if unknown := sorted(kinds - KINDS.keys()):
        known = [
            f"{kind}.{f.name}" for kind, body in KINDS.items() for f in dataclasses.fields(body)
        ]
        name = next(name for name in space if name.partition(".")[0] in unknown)
        hint = configs.unknown("inference-time setting", name, known)
        raise ConfigError(
            f"{where}: {hint}; for settings of training name a method in place of --bundle"
        )
    if len(kinds) > 1:
        raise ConfigError(
            f"{where} names settings of {' and '.join(sorted(kinds))}, expected one of them at a time"
        )
    kind = kinds.pop()
    check_space(space, lambda values: _build(kind, values), where)
    return kind


def sweep_bundle(
    path: str,
    corpus: Corpus,
    space: Space,
    trials: int,
    seed: int,
    metric: str,
    where: str = "the space",
) -> tuple[list[Measured], Mapping[str, float]]:
    """Metrics of randomly drawn settings, the best first, and those of the bundle as it is.

    Args:
        path: folder or URL of the bundle. corpus: the one it was made from. trials: settings to compare.
        metric: what decides; of indexes that lose less than 0.001 of it, speed.
    Raises:
        ConfigError: the settings are not ones that the bundle has, or its run held nothing out.
        DataError: bundle and corpus do not belong together. BundleError: it cannot be read.
    """
    kind = kind_of(space, where)
    held = _open(path, corpus)
    drawn = RandomProposals(space, seed, lambda values: _build(kind, values))
    grid = _distinct(drawn.propose(number) for number in range(trials))
    if kind == "memory":
        found = _sweep_memory(held, grid)
    else:
        found = _sweep_fusion(path, held, grid) if kind == "fusion" else _sweep_index(held, grid)
    if metric not in found[0].metrics:
        raise ConfigError(configs.unknown("metric", metric, list(found[0].metrics)))
    best = max(one.metrics[metric] for one in found)
    if kind == "index":
        found.sort(key=lambda one: (one.metrics[metric] < best - ENOUGH, -one.queries_per_s))
    else:
        found.sort(key=lambda one: -one.metrics[metric])
    return found, _as_it_is(held)


def as_trials(found: Sequence[Measured], metric: str) -> list[Trial]:
    """For the report of a sweep."""
    return [
        Trial(i, one.values, "finished", "", ((0, one.metrics[metric]),))
        for i, one in enumerate(found)
    ]


def _open(path: str, corpus: Corpus) -> Held:
    """The bundle, and what its run held out."""
    _, manifest = storage.open_artifact(path, bundles.KIND, contents=False)
    about = manifest.about
    if about.get("corpus_sha256", corpus.sha256) != corpus.sha256:
        raise DataError(
            f"bundle {path} was made from another corpus than {corpus.path}; name that one with --data"
        )
    trained = about.get("config", {})
    section = trained.get("data")
    config = DataConfig() if section is None else configs.build(DataConfig, section, "data.")
    if not config.validation:
        raise ConfigError(
            f"bundle {path} was trained on all training queries (data.validation=0), so none is left to choose by; name"
            " RUN/selection of its run if that was made with --refit, or train with data.validation=0.05"
        )
    retriever = Retriever.load(path)
    check_fits(retriever, corpus)
    data = TrainingData(corpus, config)
    if not len(data.validation_rows):
        raise ConfigError(
            f"no query with a positive is held out of {corpus.path}; raise data.validation"
        )
    query_BD = retriever.encode(corpus.split("train").tokens(data.validation_rows))
    return Held(retriever, data, query_BD, trained.get("optim", {}).get("seed", 0))


def _as_it_is(held: Held) -> Mapping[str, float]:
    """The bundle's own settings, for comparison; a memory without the held-out queries."""
    if held.retriever.memory is not None:
        config = held.retriever.memory.config
        values: Values = {f"memory.{name}": value for name, value in configs.dump(config).items()}
        return _sweep_memory(held, [values])[0].metrics
    return held.measure(held.retriever.top_labels(held.query_BD, held.k, exclude=held.excluded()))


def _sweep_memory(held: Held, grid: list[Values]) -> list[Measured]:
    memory, rows = held.retriever.memory, held.rows
    if memory is None:
        raise ConfigError(
            "the bundle has no memory of training queries; make one with `xmcray memory`"
        )
    settings = [_build("memory", values, memory.config) for values in grid]
    remembered = np.flatnonzero(held.data.corpus.split("train").num_positives())
    if len(remembered) != len(memory.positives):
        counts = (
            f"the memory holds {len(memory.positives):,} queries, the corpus {len(remembered):,}"
        )
        raise DataError(f"{counts}; make the bundle of this corpus anew")
    names = np.where(np.isin(remembered, rows), -1, np.arange(len(remembered)))
    widest = dataclasses.replace(
        settings[0], weight=0.5, keys=max(config.keys for config in settings)
    )
    width = min(widest.keys, int((names >= 0).sum()))
    by_label = dataclasses.replace(widest, weight=0.0)
    excluded, answers = held.excluded(), {config: [TopLabels.empty(0)] for config in settings}
    for start in range(0, len(rows), VOTE_QUERIES):
        query_BD, hide = (
            held.query_BD[start : start + VOTE_QUERIES],
            excluded.slice(start, min(start + VOTE_QUERIES, len(rows))),
        )
        near = Neighbours(
            memory.rows.search(query_BD, width, names=names),
            held.retriever.find_neighbours(query_BD, held.k, memory=by_label, exclude=hide).labels,
        )
        for config, top in sweep(
            near, memory.positives, answers, held.k, held.data.num_labels, hide
        ):
            answers[config].append(top)
    found = {config: held.measure(_joined(parts[1:])) for config, parts in answers.items()}
    return [Measured(values, found[config]) for values, config in zip(grid, settings, strict=True)]


def _sweep_fusion(path: str, held: Held, grid: list[Values]) -> list[Measured]:
    folder, _ = storage.open_artifact(path, bundles.KIND, contents=False)
    head = load_head(folder / "head")
    if not isinstance(head, TwoHeads) or head.answer_by != "both":
        raise ConfigError(
            "fusion.text weighs the two answers of UniDEC's answer_by=both; this bundle has one"
        )
    found = []
    for values in grid:
        share = _build("fusion", values).text
        # The bundle's own share is in its query vectors already.
        weights = share / head.text_share, (1 - share) / (1 - head.text_share)
        weight_D = np.repeat(np.array(weights, np.float32), head.head_dim)
        top = held.retriever.top_labels(
            held.query_BD * weight_D, held.k, exclude=held.excluded(), exact=True
        )
        found.append(Measured(values, held.measure(top)))
    return found


def _sweep_index(held: Held, grid: list[Values]) -> list[Measured]:
    retriever = held.retriever
    if retriever.memory is not None:
        raise ConfigError(
            "index settings are swept on bundles without a memory; name the bundle of its encoder's run"
        )
    vectors = np.concatenate(
        [retriever.labels.rows.vectors(number) for number in range(len(retriever.settings.shards))]
    )
    source, train = retriever.labels.row_labels, held.data.corpus.split("train")
    hidden = Ragged(retriever.labels.label_rows[held.excluded().values], held.excluded().offsets)
    sample = retriever.encode(train.tokens(sample_rows(held.data.num_train, held.seed)))
    usual = index_spec(held.seed, {})

    @functools.cache
    def built(spec: IndexSpec) -> Index:
        return build_index(vectors, spec.factory, spec.seed, spec=spec, queries=sample)

    found = []
    for values in grid:
        index = built(_build("index", values, usual))
        started = time.perf_counter()
        top = index.search(held.query_BD, held.k, source, hidden)
        seconds = time.perf_counter() - started
        found.append(Measured(values, held.measure(top), len(top.ids) / seconds))
    return found


def _build(kind: str, values: Values, base: Any = None) -> Any:
    """The settings of one family, those not named as in `base` or by default."""
    known = configs.dump(base) if base is not None else {}
    return configs.build(KINDS[kind], {**known, **nested(values).get(kind, {})}, f"{kind}.")


def _distinct(grid: Iterator[Values]) -> list[Values]:
    kept: list[Values] = []
    for values in grid:
        if values not in kept:
            kept.append(values)
    return kept


def _joined(parts: Sequence[TopLabels]) -> TopLabels:
    return TopLabels(
        np.concatenate([p.ids for p in parts]), np.concatenate([p.scores for p in parts])
    )
