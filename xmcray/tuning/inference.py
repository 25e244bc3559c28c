"""Compares inference-time settings of a finished bundle, without training: seconds, not hours.

    memory.weight, .temperature, .keys, .joint        lambda, tau, b of a memory (RAE-XMC, Eq. 8)
    fusion.text_weight                                label texts in UniDEC's sum of two cosines
    index.factory, .nprobe, .candidates, .ef_search   speed and quality of an index of the bundle

The queries are those that the bundle's run held out for validation, never the test split. A memory
that holds these queries answers them without those entries; fusion and index settings are compared
on bundles without one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from xmcray import config as configs
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, RunError, readable
from xmcray.evaluation.evaluate import SEARCH_K
from xmcray.evaluation.metrics import Metrics
from xmcray.nn.heads import TwoHeads, load_head
from xmcray.retrieval import bundle as bundles
from xmcray.retrieval.fused import fixed_parts
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, answer_spec
from xmcray.retrieval.memory import Memory, rows_of_memory
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import VOTE_QUERIES, MemoryConfig, sweep
from xmcray.storage.artifact import open_artifact
from xmcray.storage.whole_files import read_json, write_json, write_text
from xmcray.storage.work_folder import FolderKind
from xmcray.training.export import sample_rows
from xmcray.training.held_out import held_out_by
from xmcray.training.outcome import check_fits
from xmcray.training.run_config import OPTIONAL_SECTIONS
from xmcray.tuning.proposals import RandomProposals
from xmcray.tuning.report import write_report
from xmcray.tuning.space import Space, Values, check_space, nested
from xmcray.tuning.sweep import Trial, Validation, mean_metric
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, spans

# An index may lose this much to the best one. Among those that do not lose more, speed decides.
TOLERATED_LOSS = 0.001

# Such a sweep starts anew each time. Its definition tells whether a folder's results are its own.
_DEFINITION = "bundle-sweep.json"
BUNDLE_SWEEP_FOLDER = FolderKind("sweep of a bundle", _DEFINITION)

FAMILIES: Mapping[str, type[Any]] = {**OPTIONAL_SECTIONS, "index": IndexSpec}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSweepConfig:
    """The definition of a sweep; two sweeps with equal definitions have equal results.

    Attributes:
        bundle_sha256: names the bundle's content.
        corpus_sha256: the same of the corpus.
        space: content of the space's file.
        trials: number of sampled settings.
        metric: the metric that decides.
        seed: seed of the sampled values.
    """

    bundle_sha256: str
    corpus_sha256: str
    space: Mapping[str, Any]
    trials: int
    metric: str
    seed: int

    def check_folder(self, folder: Path) -> None:
        """Raises RunError if a folder holds a sweep with another definition."""
        path = folder / _DEFINITION
        if not path.is_file():
            return
        remedy = "use the same settings or another --out"
        with readable(f"{path} is damaged", remedy, RunError):
            before = dict(read_json(path))
        now = json.loads(json.dumps(dataclasses.asdict(self)))
        difference = next(configs.differences(before, now), None)
        if difference:
            raise RunError(f"{folder} holds a sweep of a bundle with {difference}; {remedy}")

    def write(self, folder: Path) -> None:
        """Makes a folder that of this sweep."""
        write_json(folder / _DEFINITION, dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """One combination of settings and its metrics.

    Attributes:
        values: settings by dotted name.
        metrics: metrics on the validation split.
        queries_per_s: speed of the search alone; 0 unless the settings are those of an index.
    """

    values: Values
    metrics: Mapping[str, float]
    queries_per_s: float = 0.0

    def score(self, metric: str) -> float:
        """The metric, or the mean of metrics joined by "+"."""
        return mean_metric(self.metrics, metric)

    def plain(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {"values": self.values, "queries_per_s": self.queries_per_s, **self.metrics}


@dataclass(frozen=True, slots=True)
class BundleSweep:
    """The result of a sweep.

    Attributes:
        space: the settings that were searched.
        metric: the metric that decides, or several joined by "+", whose mean decides.
        settings: the measured settings, the best first.
        unchanged: metrics of the bundle with its own settings.
    """

    space: Space
    metric: str
    settings: Sequence[MeasuredSetting]
    unchanged: Mapping[str, float]

    @property
    def summary(self) -> str:
        """The best metric and that of the bundle as it is, in words."""
        best = self.settings[0].score(self.metric)
        before = mean_metric(self.unchanged, self.metric)
        return f"{self.metric} {best:.4f} on validation, {before:.4f} of the bundle as it is"

    def plain(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {
            "metric": self.metric,
            "bundle_as_it_is": self.unchanged,
            "settings": [setting.plain() for setting in self.settings],
        }

    def write(self, folder: Path, title: str) -> None:
        """Writes results.json, best.yaml and report.html.

        Args:
            folder: the folder of the files.
            title: heading of the report.
        """
        write_json(folder / "results.json", self.plain())
        best = yaml.safe_dump(nested(self.settings[0].values), sort_keys=False)
        write_text(folder / "best.yaml", f"# {self.summary}.\n{best}")
        trials = []
        for number, setting in enumerate(self.settings):
            curve = (Validation(epochs=0, score=setting.score(self.metric)),)
            trials.append(Trial(number, setting.values, "finished", curve=curve))
        notes = f"Best: {self.summary}."
        write_report(folder / "report.html", title, self.metric, self.space, trials, notes)


@dataclass(frozen=True)
class _HeldOut:
    """A bundle and the queries that its run held out for validation.

    Attributes:
        folder: folder of the bundle.
        retriever: the loaded bundle.
        data: the training split as the bundle's run saw it.
        query_BD: float32, vectors of the held-out queries.
        excluded: labels that must not answer a query (source ids), for each query.
        seed: seed of the run.
    """

    folder: Path
    retriever: Retriever
    data: TrainingData
    query_BD: Float32Array
    excluded: Ragged
    seed: int

    @property
    def k(self) -> int:
        """Answers per query."""
        return min(SEARCH_K, self.retriever.num_labels)

    def measure(self, top: TopLabels) -> Mapping[str, float]:
        """Metrics of answers to all of the queries."""
        return _metrics_of(self.data, top)


def family_of(space: Space, where: str) -> str:
    """The one family of settings that a space names: "memory", "fusion" or "index".

    Args:
        space: the space.
        where: name of its file, for error messages.

    Raises:
        ConfigError: another name, several families, or a range that a setting does not accept.
    """
    families = set()
    for name in space:
        family = name.partition(".")[0]
        if family not in FAMILIES:
            hint = configs.unknown("inference-time setting", name, _setting_names())
            raise ConfigError(
                f"{where}: {hint}; for settings of training name a method in place of --bundle"
            )
        families.add(family)
    if len(families) > 1:
        names = " and ".join(sorted(families))
        raise ConfigError(f"{where} names settings of {names}, expected one of them at a time")
    family = families.pop()
    check_space(space, functools.partial(_build, family), where)
    return family


def sweep_bundle(
    path: str,
    corpus: Corpus,
    space: Space,
    trials: int,
    seed: int,
    metric: str,
    where: str = "the space",
) -> BundleSweep:
    """Measures randomly sampled settings.

    Args:
        path: folder or URL of the bundle.
        corpus: the one that it was made from.
        space: the settings to search.
        trials: number of settings to compare; equal ones are measured once.
        seed: seed of the sampled values.
        metric: the metric that decides, or several joined by "+", whose mean decides; among indexes
            that lose at most 0.001 of it, speed decides.
        where: name of the space's file, for error messages.

    Raises:
        ConfigError: the bundle does not have these settings, or its run held nothing out.
        DataError: bundle and corpus do not belong together.
        BundleError: the bundle cannot be read.
    """
    family = family_of(space, where)
    held_out = _open(path, corpus, metric)
    proposals = RandomProposals(space, seed, functools.partial(_build, family))
    grid: list[Values] = []
    for number in range(trials):
        values = proposals.propose(number)
        if values not in grid:
            grid.append(values)
    measure_grid = {"memory": _sweep_memory, "fusion": _sweep_fusion, "index": _sweep_index}
    settings = measure_grid[family](held_out, grid)
    if family == "index":
        settings = _ranked_indexes(settings, metric)
    else:
        settings.sort(key=lambda setting: setting.score(metric), reverse=True)
    return BundleSweep(space, metric, settings, _unchanged_metrics(held_out))


def _ranked_indexes(settings: Sequence[MeasuredSetting], metric: str) -> list[MeasuredSetting]:
    """Settings of indexes: the fastest of those that lose little first, then the others."""
    best = max(setting.score(metric) for setting in settings)
    lowest = best - TOLERATED_LOSS
    by_speed = sorted(settings, key=lambda setting: setting.queries_per_s, reverse=True)
    good = [setting for setting in by_speed if setting.score(metric) >= lowest]
    bad = [setting for setting in by_speed if setting.score(metric) < lowest]
    return good + bad


def _open(path: str, corpus: Corpus, metric: str) -> _HeldOut:
    """Loads a bundle and the queries that its run held out, for which there must be the metric."""
    folder, manifest = open_artifact(path, bundles.KIND, contents=False)
    data = held_out_by(path, manifest.about, corpus)
    _check_metric(metric, data)
    run_settings = manifest.about.get("config", {})
    retriever = Retriever.load(path)
    check_fits(retriever, corpus)
    if retriever.fusion is not None:
        raise fixed_parts()
    train = corpus.split("train")
    return _HeldOut(
        folder=folder,
        retriever=retriever,
        data=data,
        query_BD=retriever.encode(train.tokens(data.validation_rows)),
        excluded=train.filters(data.validation_rows),
        seed=run_settings.get("optim", {}).get("seed", 0),
    )


def _metrics_of(data: TrainingData, top: TopLabels) -> Mapping[str, float]:
    """Metrics of answers to the held-out queries."""
    corpus = data.corpus
    positives = corpus.split("train").positives(data.validation_rows)
    metrics = Metrics.of_corpus(corpus)
    metrics.update(top, corpus.answerable(positives))
    return metrics.result()


def _check_metric(metric: str, data: TrainingData) -> None:
    """Raises ConfigError if a metric, or one of several joined by "+", does not exist."""
    # Which metrics there are depends on the queries alone, so no answers have them too.
    no_answers = TopLabels.empty(len(data.validation_rows), k=1)
    known = list(_metrics_of(data, no_answers))
    for name in metric.split("+"):
        if name not in known:
            raise ConfigError(configs.unknown("metric", name, known))


def _unchanged_metrics(held_out: _HeldOut) -> Mapping[str, float]:
    """Metrics of the bundle's own settings; a memory answers without the held-out queries."""
    retriever = held_out.retriever
    if retriever.memory is not None:
        settings = configs.dump(retriever.memory.config)
        values: Values = {f"memory.{name}": value for name, value in settings.items()}
        # Measured as a sweep of one setting, because only that leaves the held-out queries out.
        return _sweep_memory(held_out, [values])[0].metrics
    top = retriever.top_labels(held_out.query_BD, held_out.k, exclude=held_out.excluded)
    return held_out.measure(top)


def _sweep_memory(held_out: _HeldOut, grid: list[Values]) -> list[MeasuredSetting]:
    memory = held_out.retriever.memory
    if memory is None:
        raise ConfigError(
            "the bundle has no memory of training queries; make one with `xmcray memory`"
        )
    configurations = [_build("memory", values, memory.config) for values in grid]
    answers = _memory_answers(held_out, memory, configurations)
    measured = []
    for values, config in zip(grid, configurations, strict=True):
        top = TopLabels.concatenate(answers[config], held_out.k)
        measured.append(MeasuredSetting(values, held_out.measure(top)))
    return measured


def _memory_answers(
    held_out: _HeldOut, memory: Memory, configurations: Sequence[MemoryConfig]
) -> dict[MemoryConfig, list[TopLabels]]:
    """Answers to the held-out queries by each configuration, in chunks.

    The queries are searched once for all configurations, with as many keys as any of them needs.
    """
    max_keys = max(config.keys for config in configurations)
    labels_only = dataclasses.replace(configurations[0], weight=0.0, keys=max_keys)
    names = _names_without(held_out, memory)
    num_entries = int((names >= 0).sum())
    width = min(max_keys, num_entries)
    answers: dict[MemoryConfig, list[TopLabels]] = {config: [] for config in configurations}
    for span in spans(len(held_out.query_BD), VOTE_QUERIES):
        query_BD = held_out.query_BD[span]
        excluded = held_out.excluded.slice(span.start, span.stop)
        near = held_out.retriever.find_neighbours(
            query_BD,
            held_out.k,
            scope=SearchScope(exclude=excluded),
            memory=labels_only,
        )
        queries = memory.rows.search(query_BD, width, names=names)
        # Removed labels still are keys of the memory, but they must not be answers.
        neighbours = Neighbours(queries, near.labels, fallback=near.fallback)
        results = sweep(
            neighbours,
            memory.positives,
            answers,
            held_out.k,
            held_out.data.num_labels,
            excluded,
            held_out.retriever.labels.hidden_labels,
        )
        for config, top in results:
            answers[config].append(top)
    return answers


def _names_without(held_out: _HeldOut, memory: Memory) -> Int64Array:
    """The number of each entry of the memory; -1 for held-out queries, which are no neighbours.

    Raises:
        DataError: the memory does not hold the queries of this corpus.
    """
    entry_rows = rows_of_memory(memory.queries, held_out.data.corpus)
    is_held_out = np.isin(entry_rows, held_out.data.validation_rows)
    return np.where(is_held_out, -1, np.arange(len(entry_rows)))


def _sweep_fusion(held_out: _HeldOut, grid: list[Values]) -> list[MeasuredSetting]:
    head = load_head(held_out.folder / "head")
    if not isinstance(head, TwoHeads) or head.answer_by != "both":
        raise ConfigError(
            "fusion.text_weight weighs the two answers of UniDEC's answer_by=both;"
            " this bundle has one"
        )
    if head.text_share in (0.0, 1.0):
        raise ConfigError(
            f"the bundle's own fusion.text_weight is {head.text_share:g}, so its vectors hold only"
            " one of the two answers; train with a weight between 0 and 1"
        )
    if held_out.retriever.memory is not None:
        raise ConfigError(
            "fusion.text_weight is swept on bundles without a memory;"
            " name the bundle of its encoder's run"
        )
    measured = []
    for values in grid:
        text_weight = _build("fusion", values).text_weight
        # The vectors hold the bundle's own weights already, so these are factors.
        text_factor = text_weight / head.text_share
        row_factor = (1 - text_weight) / (1 - head.text_share)
        factors = np.array([text_factor, row_factor], np.float32)
        query_BD = held_out.query_BD * np.repeat(factors, head.head_dim)
        top = held_out.retriever.top_labels(
            query_BD,
            held_out.k,
            exclude=held_out.excluded,
            exact=True,
        )
        measured.append(MeasuredSetting(values, held_out.measure(top)))
    return measured


def _sweep_index(held_out: _HeldOut, grid: list[Values]) -> list[MeasuredSetting]:
    retriever = held_out.retriever
    if retriever.memory is not None:
        raise ConfigError(
            "index settings are swept on bundles without a memory;"
            " name the bundle of its encoder's run"
        )
    labels = retriever.labels
    num_shards = len(retriever.settings.shards)
    vectors = np.concatenate([labels.rows.vectors(number) for number in range(num_shards)])
    # An index counts labels by row, in the order of the shards.
    excluded = held_out.excluded
    excluded_rows = Ragged(labels.label_rows[excluded.values], excluded.offsets)
    rows = sample_rows(held_out.data.num_train, held_out.seed)
    train = held_out.data.corpus.split("train")
    sample = retriever.encode(train.tokens(rows))
    default = answer_spec({}, seed=held_out.seed)

    # Settings of the search alone share an index.
    @functools.cache
    def built(spec: IndexSpec) -> Index:
        return build_index(vectors, spec, queries=sample)

    measured = []
    for values in grid:
        index = built(_build("index", values, default))
        # Only the search is timed: an index is built once and searched often.
        started = time.perf_counter()
        top = index.search(held_out.query_BD, held_out.k, labels.answer_labels, excluded_rows)
        seconds = time.perf_counter() - started
        queries_per_s = len(top.ids) / seconds
        measured.append(MeasuredSetting(values, held_out.measure(top), queries_per_s))
    return measured


def _build(family: str, values: Values, base: Any = None) -> Any:
    """The settings of a family: `values` in place of those of `base`, or of the defaults."""
    settings = {} if base is None else configs.dump(base)
    settings.update(nested(values).get(family, {}))
    return configs.build(FAMILIES[family], settings, f"{family}.")


def _setting_names() -> list[str]:
    """Dotted names of all settings that a sweep of a bundle can search."""
    names = []
    for family, settings_type in FAMILIES.items():
        names += [f"{family}.{field.name}" for field in dataclasses.fields(settings_type)]
    return names
