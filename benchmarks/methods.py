"""All six methods with the static encoder and their committed presets on six sets, compared with simple methods.

    python benchmarks/methods.py                                  # everything; finished trainings are kept
    python benchmarks/methods.py --set cdnjs-keywords --method rae dexml
    python benchmarks/methods.py --minutes 30                     # starts none after 30 minutes
    python benchmarks/methods.py --set cdnjs-keywords --quick     # does it work?

A training is a refit (validation chooses the number of epochs, then all training queries are used), in one process. Its
bundle is measured on the test split. Then a memory is added: a weighed sum of the bundle's answers, of votes of the
nearest training queries, and of cosines of label texts, the latter two by the trained encoder and by an untrained bag
of tokens. The weights are chosen on the validation split alone, as is the best row of a set. A result is one JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import numpy.typing as npt
import torch
from accuracy import LIMITS, folder_of, trained
from common import refuse_if_busy, write_table
from floors import FLOORS, METRICS

from xmcray import config as configs
from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search
from xmcray.evaluation.metrics import Metrics
from xmcray.methods.registry import method_names
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index
from xmcray.retrieval.memory import Memory
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardedIndex, VectorShard
from xmcray.retrieval.votes import Float64Array, MemoryConfig, Votes, count_votes, rank_votes
from xmcray.training.memory import open_encoder
from xmcray.training.outcome import bundle_of, measure, measure_bundle
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run, RunConfig
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

SETS = (
    "sample",
    "cdnjs-keywords",
    "tate-subjects",
    "wordnet-hypernyms",
    "msdocs-seealso",
    "msdocs-links",
)
# What scores are divided by before a softmax makes shares of them: logits, sums of two cosines; cosines.
TEMPERATURES = {"astra": 1.0, "renee": 1.0, "unidec": 0.1}
COSINE = 0.08
UNTRAINED = EncoderConfig(dim=1024, residual=False, position_decay=1.0)
VOTES = MemoryConfig(
    weight=1.0, temperature=0.08, keys=100
)  # of training queries; labels have their cosines
PARTS = ("bundle", "queries", "label texts", "queries, untrained", "label texts, untrained")
FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)
K = 5  # answers that validation looks at
BLOCK = 128  # queries answered at once
Weights = tuple[float, ...]  # of PARTS
Pairs = tuple[Int64Array, Float64Array]  # query * L + label, and a value of each
Means = Mapping[str, float]


class Neighbourhood:
    """Training queries and label texts in the space of one encoder: what the answers of a bundle are added to.

    Args:
        encode: token ids -> vectors of length 1. rows: of the training split, the queries that are remembered.
    """

    def __init__(
        self, encode: Callable[[Ragged], Float32Array], corpus: Corpus, rows: Int64Array
    ) -> None:
        split = corpus.split("train")
        self.num_labels = corpus.card.num_labels
        self.encode = encode
        self.label_LD = encode(corpus.label_tokens(np.arange(self.num_labels)))
        index = Index(
            torch.from_numpy(encode(split.tokens(rows))), None, threads=torch.get_num_threads()
        )
        keys = ShardedIndex((VectorShard(0, len(rows), False, 1),), (index,))
        self.memory = Memory(VOTES, keys, split.positives(rows))

    def near(self, tokens: Ragged, hidden: Ragged, config: MemoryConfig) -> Neighbours:
        """The nearest queries and the nearest label texts, with their cosines."""
        query_BD = self.encode(tokens)
        width = min(SEARCH_K, self.num_labels)
        labels = exact_search(self.label_LD, query_BD, width, hidden=hidden)
        return Neighbours(self.memory.search(query_BD, config, exact=True), labels)

    def shares(self, tokens: Ragged, hidden: Ragged) -> list[Pairs]:
        """Votes of queries, and cosines of label texts."""
        near = self.near(tokens, hidden, VOTES)
        votes = count_votes(near, self.memory.positives, VOTES, self.num_labels, hidden)
        return [
            (votes.pairs, votes.of_queries),
            listed(near.labels, np.maximum(near.labels.scores, 0), self.num_labels),
        ]


@dataclass(frozen=True, slots=True)
class Shares:
    """What each of PARTS gives the labels of some queries.

    Attributes:
        pairs: int64 [P], query * L + label, ascending. of_parts: float64 [P, 5]. own: answers of the bundle.
    """

    pairs: Int64Array
    of_parts: Float64Array
    own: TopLabels

    def top(self, weights: Weights, k: int, num_labels: int) -> TopLabels:
        """The k labels of the largest sums."""
        sums = self.of_parts @ np.asarray(weights)
        return rank_votes(
            Votes(self.pairs, sums, np.zeros_like(sums)), 1.0, k, self.own, num_labels
        )


def collected(
    own: TopLabels, temperature: float, parts: Sequence[Pairs], num_labels: int
) -> Shares:
    """The shares of a bundle's answers and, in `parts`, those of neighbourhoods."""
    share = np.maximum(own.scores, 0.0)
    if temperature:
        share = np.exp((own.scores - own.scores[:, :1]).astype(np.float64) / temperature)
        share /= share.sum(axis=1, keepdims=True)
    parts = [listed(own, share, num_labels), *parts]
    pairs, entry = np.unique(np.concatenate([p for p, _ in parts]), return_inverse=True)
    of_parts = np.zeros((len(pairs), len(PARTS)))
    of_parts[entry, np.repeat(np.arange(len(parts)), [len(p) for p, _ in parts])] = np.concatenate(
        [v for _, v in parts]
    )
    return Shares(pairs, of_parts, own)


def listed(top: TopLabels, values: npt.NDArray[np.floating[Any]], num_labels: int) -> Pairs:
    """Answers as pairs and values."""
    known = top.ids >= 0
    pair = np.arange(len(top.ids))[:, None] * num_labels + top.ids
    return pair[known], values[known].astype(np.float64)


def normalised_encoder(path: str, corpus: Corpus) -> QueryEncoder:
    """The encoder of a run or a folder; its vectors have length 1."""
    encoder, head = open_encoder(path, corpus)
    return QueryEncoder(encoder, head, corpus.tokenizer(), normalised=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--method", nargs="+", choices=method_names(), default=method_names())
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the presets"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training after so many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-memory", action="store_true", help="the bundles alone")
    parser.add_argument(
        "--keep", action="store_true", help="leave the runs in the cache, not only their measures"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    parser.add_argument("--out", type=Path, default=Path("methods.md"))
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes: list[str] = []
    for name in SETS:
        here = name == "sample" or (data_sets.DATA / name).is_dir()
        corpus = data_sets.corpus(name) if here else None
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        found: dict[str, dict[str, Any]] = {}
        for method in method_names():
            wanted = (
                name in arguments.sets
                and method in arguments.method
                and time.monotonic() < deadline
            )
            if f"{method}/{name}" not in configs.presets():
                continue
            result = kept(corpus, settings(name, method, arguments), wanted, arguments)
            if result is not None:
                found[method] = result
        rows += table(name, found)
        notes += comments(name, corpus, found)
    notes += [
        "percent; validation: of the run with held-out queries; test: after refit, with 95 % bootstrap intervals over"
        " queries; in bold the row that validation prefers (mean of the three metrics)",
        "with memory: a weighed sum; bundle: softmax of its scores (RAE-XMC: its votes); queries: votes of the"
        f" {VOTES.keys} nearest training queries, softmax of cosines / {VOTES.temperature:g}; label texts: cosines;"
        f" untrained: a bag of random token vectors of {UNTRAINED.dim} dimensions, weighed as in TF-IDF",
        "floor: the best simple method of benchmarks/floors.py in each metric",
        "minutes: wall time of both trainings of a refit, whatever else the machine did (finished runs of accuracy.py,"
        " on both cores, are used where there are any); a memory trains nothing",
        load,
    ]
    header = [
        "set",
        "method",
        "validation P@1 / P@5 / PSP@5",
        *METRICS,
        "above the floor",
        "minutes",
    ]
    write_table(arguments.out, "Six methods on six sets", header, rows, notes)


def settings(name: str, method: str, arguments: argparse.Namespace) -> RunConfig:
    here = ["cluster.workers=0", f"cluster.threads_per_process={arguments.threads}", "log.keep=1"]
    return data_sets.preset(name, [*here, *arguments.override], method)


def kept(
    corpus: Corpus, config: RunConfig, wanted: bool, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """The result of a training; made if it is wanted and there is none, None if not. An interrupted one goes on."""
    name = f"{config.method_name}-{data_sets.fingerprint(config, corpus)}.json"
    target = data_sets.CACHE / "methods" / corpus.card.name / name
    result: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {}
    if wanted and not (result and ("weights" in result or arguments.no_memory)):
        before = folder_of(corpus, config).exists()
        run, seconds = trained(corpus, config)
        retriever = Retriever.load(bundle_of(run, corpus))
        test = measures(measure_bundle(retriever, corpus, "test"))
        result |= {
            "seconds": seconds,
            "epochs": run.config.optim.stop_epoch,
            "alone": {"test": test},
        }
        if config.method_name == "unidec" and config.method.answers == "both":
            for half, what in enumerate(("texts alone", "rows alone")):
                result[what] = {
                    "test": measures(measure(one_half(retriever, corpus, half), corpus, "test"))
                }
        if arguments.no_memory:
            result["alone"]["validation"] = validation_record(run)
        else:
            remember(result, run, corpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result))
        print(f"{corpus.card.name}, {config.method_name}: {json.dumps(result)}", flush=True)
        if not (arguments.keep or before):
            shutil.rmtree(run.path)
    return result or None


def validation_record(run: Run) -> dict[str, float]:
    """Validation at the end of the training that chose the number of epochs."""
    records = [r for r in read_records(run.path / SELECTION / "metrics.jsonl") if METRICS[0] in r]
    return {metric: float(records[-1][metric]) for metric in METRICS}


def remember(result: dict[str, Any], run: Run, corpus: Corpus) -> None:
    """Adds the weights of the best sum with a memory to a result, and what the sum reaches."""
    selection = Run.open(run.path / SELECTION)
    data = TrainingData(corpus, selection.config.data)
    split = corpus.split("test")
    num_labels = corpus.card.num_labels
    truth = corpus.split("train").positives(data.validation_rows)
    alone, weights, best = chosen(
        list(answers(selection, data, data.validation_rows, "train")), truth, corpus
    )
    result["alone"]["validation"] = alone
    result["weights"] = weights
    if any(weights[1:]):
        blocks = answers(run, TrainingData(corpus, run.config.data), np.arange(len(split)), "test")
        tops = [shares.top(weights, min(SEARCH_K, num_labels), num_labels) for shares in blocks]
        ids, scores = (
            np.concatenate(parts) for parts in ([t.ids for t in tops], [t.scores for t in tops])
        )
        test = measures(measure(lambda rows: TopLabels(ids[rows], scores[rows]), corpus, "test"))
        result["with memory"] = {"validation": best, "test": test}


def answers(run: Run, data: TrainingData, rows: Int64Array, split_name: str) -> Iterator[Shares]:
    """Shares of queries of a split, in blocks; the neighbours are the queries that the run was trained on."""
    corpus = data.corpus
    num_labels = data.num_labels
    split = corpus.split(split_name)
    width = min(SEARCH_K, num_labels)
    known = data.query_ids[data.query_ids < data.num_train]
    encoders = str(run.path), untrained(corpus)
    spaces = [
        Neighbourhood(normalised_encoder(path, corpus).encode, corpus, known) for path in encoders
    ]
    memory: MemoryConfig | None = getattr(run.config.method, "memory", None)
    retriever = None if memory else Retriever.load(bundle_of(run, corpus))
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        tokens = split.tokens(block)
        hidden = split.filters(block)
        if memory:  # that of the bundle would hold the validation queries
            near = spaces[0].near(tokens, hidden, memory)
            votes = count_votes(near, spaces[0].memory.positives, memory, num_labels, hidden)
            own = rank_votes(votes, memory.weight, width, near.labels, num_labels)
            temperature = 0.0
        else:
            assert retriever is not None
            own = retriever.top_labels(tokens, width, exclude=hidden)
            temperature = TEMPERATURES.get(run.config.method_name, COSINE)
        yield collected(
            own,
            temperature,
            [p for space in spaces for p in space.shares(tokens, hidden)],
            num_labels,
        )


def chosen(blocks: Sequence[Shares], truth: Ragged, corpus: Corpus) -> tuple[Means, Weights, Means]:
    """Validation of the bundle alone, the best weights of a sum by coordinate ascent, and their validation."""
    card = corpus.card

    def means(weights: Weights) -> Means:
        found = Metrics(
            corpus.train_counts,
            card.num_train,
            card.propensity_a,
            card.propensity_b,
            card.num_labels,
        )
        done = 0
        for shares in blocks:
            stop = done + len(shares.own.ids)
            found.update(shares.top(weights, K, card.num_labels), truth.slice(done, stop))
            done = stop
        result = found.result()
        return {metric: float(result[metric]) for metric in METRICS}

    alone: Weights = tuple(float(part == "bundle") for part in PARTS)
    tried = {start: means(start) for start in [alone, (1.0,) * len(PARTS)]}
    best = max(tried, key=lambda weights: sum(tried[weights].values()))
    for place in [*range(len(PARTS))] * 2:
        for factor in FACTORS:
            weight = best[place] * factor if best[place] else factor
            weights = (*best[:place], weight, *best[place + 1 :])
            if any(weights) and weights not in tried:
                tried[weights] = means(weights)
        best = max(tried, key=lambda weights: sum(tried[weights].values()))
    return tried[alone], best, tried[best]


def untrained(corpus: Corpus) -> str:
    """Folder of a bag of random token vectors weighed by inverse document frequency: cosines much like TF-IDF's."""
    folder = data_sets.CACHE / "methods" / corpus.card.name / "untrained"
    if not folder.is_dir():
        counts = TrainingData(corpus, DataConfig(validation=0)).token_counts(corpus.card.vocab_size)
        build_encoder(UNTRAINED, corpus.tokenizer(), counts, 0).save(folder)
    return str(folder)


def one_half(retriever: Retriever, corpus: Corpus, half: int) -> Search:
    """A search by one half of the vectors alone: the other half of a query is zero."""
    split = corpus.split("test")
    width = min(SEARCH_K, corpus.card.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        query_BD: Float32Array = retriever.encode(split.tokens(rows))
        np.split(query_BD, 2, axis=1)[1 - half][:] = 0
        return retriever.top_labels(query_BD, width, exclude=split.filters(rows), exact=True)

    return search


def measures(found: Evaluation) -> dict[str, list[float]]:
    return {metric: [found.metrics[metric], *found.intervals[metric]] for metric in METRICS}


def table(name: str, found: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    floor = best_floor(name)
    rows: list[list[object]] = [
        [name, "floor", "-", *("-" if math.isnan(low) else f"{low:.1f}" for low in floor), "-", "-"]
    ]
    preferred = max(validated(found), key=lambda row: sum(row[2].values()), default=None)
    for method, result in found.items():
        for what, values in entries(result):
            bold = "**" if preferred and preferred[:2] == (method, what) else ""
            validation = (
                " / ".join(f"{100 * v:.1f}" for v in values.get("validation", {}).values()) or "-"
            )
            cells = [
                f"{100 * m:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
                for m, low, high in values["test"].values()
            ]
            label = method if what == "alone" else f"{method}, {what}"
            minutes = f"{result['seconds'] / 60:.1f}" if what == "alone" else "-"
            rows.append(
                [
                    name,
                    f"{bold}{label}{bold}",
                    validation,
                    *cells,
                    above(values["test"], floor),
                    minutes,
                ]
            )
    return rows


def comments(name: str, corpus: Corpus, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    card = corpus.card
    about = f"{name}: {card.num_labels:,} labels, {card.num_train:,} training queries"
    missing = [method for method in method_names() if method not in found]
    if missing:
        about += f"; not trained yet: {', '.join(missing)}"
    epochs = ", ".join(f"{method} {result['epochs']}" for method, result in found.items())
    lines = [f"{about}; epochs of the refit: {epochs}"] if found else [about]
    for method, result in found.items():
        if "with memory" in result:
            weights = zip(PARTS, result["weights"], strict=True)
            lines.append(
                f"{name}, {method} with memory: "
                + ", ".join(f"{part} {w:g}" for part, w in weights if w)
            )
    if name == "sample":
        reached = [
            m
            for m, result in found.items()
            if 100 * result["alone"]["test"]["P@1"][0] >= LIMITS[name][0]
        ]
        lines.append(
            f"sample: P@1 of {LIMITS[name][0]:g}, of the bundle alone: reached by {', '.join(reached) or 'none'}"
        )
    elif found:
        method, what, _ = max(validated(found), key=lambda row: sum(row[2].values()))
        difference = above(found[method][what]["test"], best_floor(name))
        short = [
            f"{m} {d}"
            for m, d in zip(METRICS, difference.split(" / "), strict=True)
            if d.startswith("-")
        ]
        verdict = f"below the floor in {', '.join(short)}" if short else "at or above every floor"
        lines.append(f"{name}: validation prefers {method} {what}, {verdict}")
        good = [
            method if what == "alone" else f"{method} {what}"
            for method, result in found.items()
            for what, values in entries(result)
            if "-" not in above(values["test"], best_floor(name))
        ]
        lines.append(f"{name}: at or above every floor: {', '.join(good) or 'none'}")
    return lines


def entries(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(what, values) for what, values in result.items() if isinstance(values, dict)]


def validated(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Mapping[str, float]]]:
    """Method, what and validation of every row that can be chosen."""
    rows = (
        (method, what, values)
        for method, result in found.items()
        for what, values in entries(result)
    )
    return [
        (method, what, values["validation"])
        for method, what, values in rows
        if "validation" in values
    ]


def best_floor(name: str) -> list[float]:
    metrics = zip(*FLOORS[name].values(), strict=True)
    return [
        max((value for value in values if value is not None), default=math.nan)
        for values in metrics
    ]


def above(test: Mapping[str, Sequence[float]], floor: Sequence[float]) -> str:
    more = [100 * test[m][0] - low for m, low in zip(METRICS, floor, strict=True)]
    return " / ".join("." if math.isnan(value) else f"{value:+.1f}" for value in more)


if __name__ == "__main__":
    main()
