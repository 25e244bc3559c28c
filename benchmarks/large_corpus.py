"""Opens a corpus with the shape of 370 million queries and 120 million labels, and draws batches of an epoch.

    python benchmarks/large_corpus.py                                  # 13 GB of disk, some minutes
    python benchmarks/large_corpus.py --queries 2e6 --labels 5e5       # seconds

Offsets, label orders and counts are real; token and label ids are files with holes, which read as
zeros, and the files of texts are one file under many names. So sizes, files and mappings are those
of such a corpus, at a tenth of its bytes. The corpus is removed at the end.

Each reader is a process of its own, as each rank of a training is; they run at the same time.
Private memory is what a process has written itself; what it maps from files is shared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import pyarrow as pa
from common import new_parser, refuse_if_busy, write_table
from synthetic import word_tokenizer

from xmcray.data.batches import BatchSampler, DataConfig, TrainingData
from xmcray.data.corpus import KIND, Card, Corpus
from xmcray.data.shards import pack, shard_stem
from xmcray.data.writer import PrepareConfig
from xmcray.storage.artifact import new_artifact
from xmcray.storage.manifest import FileEntry
from xmcray.types import Ragged

TOKENS = 12
POSITIVES = 5
VOCAB = 30_000
BATCH = 8192
TIMED_BATCHES = 20
RANKS = 8
UNHASHED = "0" * 64  # hashing holes would take longer than all else
LIMIT_OPEN_S = 5.0
LIMIT_MAPPINGS = 1000
LIMIT_ORDER_BYTES = 10**9
SETTINGS = PrepareConfig()


def main() -> None:
    parser = new_parser(__doc__, out="large_corpus.md", anyway=True)
    parser.add_argument("--queries", type=float, default=370e6)
    parser.add_argument("--labels", type=float, default=120e6)
    parser.add_argument("--readers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=data_sets.CACHE, help="a disk with room")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read)))
        return
    load = refuse_if_busy(arguments.anyway)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="large-", dir=arguments.folder))
    try:
        corpus = folder / "corpus"
        write_corpus(corpus, int(arguments.queries), int(arguments.labels))
        sizes = [path.stat() for path in corpus.rglob("*") if path.is_file()]
        readers = read_together(corpus, arguments.readers)
    finally:
        shutil.rmtree(folder)
    apparent_bytes = sum(size.st_size for size in sizes)
    worst = {name: max(reader[name] for reader in readers) for name in readers[0]}
    rows = [
        ["corpus opened, s", worst["open_s"], ""],
        ["queries to train on chosen, s", worst["choose_s"], ""],
        ["both, s", worst["open_s"] + worst["choose_s"], f"{LIMIT_OPEN_S:g}"],
        ["both, s of CPU time", worst["cpu_s"], ""],
        ["first batch, s", worst["first_s"], ""],
        ["last batch of the epoch, s", worst["last_s"], ""],
        [f"a batch of {BATCH:,} queries of {RANKS} ranks, median ms", worst["batch_ms"], ""],
        ["its query ids alone, median ms", worst["ids_ms"], ""],
        ["mappings of the corpus in a process", worst["corpus_mappings"], f"{LIMIT_MAPPINGS:,}"],
        ["all mappings of a process before it opens the corpus", worst["mappings_before"], ""],
        ["and at the end", worst["mappings"], ""],
        ["open files of a process", worst["open_files"], ""],
        [
            f"an epoch's order in {RANKS} processes, MB",
            RANKS * worst["order_bytes"] / 1e6,
            f"{LIMIT_ORDER_BYTES / 1e6:,.0f}",
        ],
        ["private memory that all of this took, MB", worst["private_bytes"] / 1e6, ""],
    ]
    write_table(
        arguments.out,
        f"A corpus of {int(arguments.queries):,} queries and {int(arguments.labels):,} labels",
        ["the slowest or largest process", "measured", "limit"],
        rows,
        [
            f"{len(sizes):,} files of {apparent_bytes / 1e9:.1f} GB, of which ids are holes;"
            f" {TOKENS} tokens and {POSITIVES} labels per query",
            f"{arguments.readers} processes read at the same time; label texts are queries too;"
            " a hundred-thousandth of the queries is held out",
            "the files had just been written, so the system's page cache held what fits into it",
            load,
        ],
    )


# --- Writing ---


def write_corpus(out: Path, num_queries: int, num_labels: int) -> None:
    """A corpus of this shape, as `prepare` lays it out."""
    hashed_files: dict[str, FileEntry] = {}
    with new_artifact(out, KIND, {"made_by": "large_corpus.py"}, hashed_files) as folder:
        for split, num_rows in (("labels", num_labels), ("train", num_queries), ("test", 1000)):
            (folder / split).mkdir()
            write_arrays(folder / split, "token", num_rows, TOKENS, np.uint16)
            if split != "labels":
                write_arrays(folder / split, "label", num_rows, POSITIVES, np.int32)
            write_texts(folder / split, num_rows)
        order = np.random.default_rng(0).permutation(num_labels)
        np.save(folder / "label_order.npy", order)
        rank = np.empty_like(order)
        rank[order] = np.arange(num_labels)
        np.save(folder / "label_rank.npy", rank)
        del order, rank
        counts = np.full(num_labels, num_queries * POSITIVES // num_labels, np.int64)
        np.save(folder / "train_counts.npy", counts)
        word_tokenizer(VOCAB, TOKENS).save(folder / "tokenizer")
        card(num_queries, num_labels).save(folder / "card.yaml")
        for path in folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                hashed_files[name] = FileEntry(path.stat().st_size, UNHASHED)


def write_arrays(folder: Path, kind: str, num_rows: int, width: int, dtype: Any) -> None:
    """Files of ids with holes, and their offsets: each row has `width` ids."""
    for number, start in enumerate(range(0, num_rows, SETTINGS.array_rows)):
        rows = min(SETTINGS.array_rows, num_rows - start)
        stem = f"{folder}/{shard_stem(number)}.{kind}"
        # A new file mapped for writing has the size of its array, and a hole where nothing is written.
        np.lib.format.open_memmap(f"{stem}s.npy", "w+", dtype, (rows * width,))
        np.save(f"{stem}_offsets.npy", np.arange(rows + 1, dtype=np.int64) * width)


def write_texts(folder: Path, num_rows: int) -> None:
    """Files of texts: those of full shards are one file under many names."""
    shards: dict[int, Path] = {}
    for number, start in enumerate(range(0, num_rows, SETTINGS.shard_rows)):
        rows = min(SETTINGS.shard_rows, num_rows - start)
        path = folder / f"{shard_stem(number)}.parquet"
        if rows in shards:
            path.hardlink_to(shards[rows])
            continue
        path.write_bytes(text_file(rows))
        shards[rows] = path


def text_file(rows: int) -> bytes:
    """A file of short texts."""
    texts = pa.table({"uid": ["q"] * rows, "text": ["w2 w3"] * rows})
    files = pack(0, texts, Ragged.empty(rows), VOCAB, None)
    return files[f"{shard_stem(0)}.parquet"]


def card(num_queries: int, num_labels: int) -> Card:
    """The card of the corpus."""
    return Card(
        name="large",
        source="large",
        format="synthetic",
        licence="none",
        num_train=num_queries,
        num_test=1000,
        num_labels=num_labels,
        propensity_a=0.55,
        propensity_b=1.5,
        max_len=4 * TOKENS,
        label_max_len=32,
        tokenizer="wordpiece",
        tokenizer_name="wordpiece",
        vocab_size=VOCAB,
        pad_id=0,
        seed=0,
        shard_rows=SETTINGS.shard_rows,
        array_rows=SETTINGS.shards_per_array_file * SETTINGS.shard_rows,
        averages={},
        frequency={},
        odd={},
        rejected={},
    )


# --- Reading ---


def read_together(corpus: Path, num_readers: int) -> list[dict[str, float]]:
    """What several processes measure that read the corpus at the same time."""
    command = [sys.executable, __file__, "--read", str(corpus)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_readers)
    ]
    results = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"error: a reader ended with {process.returncode}")
        results.append(json.loads(output.splitlines()[-1]))
    return results


def read(path: Path) -> dict[str, float]:
    """Opens the corpus as a rank of a training does and draws batches."""
    # A rank has loaded all of this before it opens a corpus.
    importlib.import_module("xmcray.training.loop")
    mappings_before = len(list(mapped_files()))
    private_before = private_bytes()
    cpu_before = time.process_time()
    clock = Clock()
    corpus = Corpus.open(path, verify=False)
    open_s = clock.lap()
    data = TrainingData(corpus, DataConfig(validation=1e-5))
    sampler = BatchSampler(data, BATCH, seed=0)
    choose_s = clock.lap()
    cpu_s = time.process_time() - cpu_before
    private_without_order = private_bytes()
    sampler.query_ids(0)
    order_bytes = private_bytes() - private_without_order
    clock.lap()
    first = sampler.batch(0, 0, RANKS)
    first_s = clock.lap()
    last = sampler.batch(sampler.steps_per_epoch - 1, RANKS - 1, RANKS)
    last_s = clock.lap()
    assert len(first.query_ids) == BATCH
    assert len(last.query_ids) == len(data.query_ids) - (sampler.steps_per_epoch - 1) * BATCH
    batch_s = []
    ids_s = []
    for step in np.linspace(1, sampler.steps_per_epoch - 2, TIMED_BATCHES).astype(int).tolist():
        clock.lap()
        sampler.query_ids(step)
        ids_s.append(clock.lap())
        sampler.batch(step, 0, RANKS)
        batch_s.append(clock.lap())
    mappings = list(mapped_files())
    return {
        "open_s": open_s,
        "choose_s": choose_s,
        "cpu_s": cpu_s,
        "first_s": first_s,
        "last_s": last_s,
        "batch_ms": 1e3 * float(np.median(batch_s)),
        "ids_ms": 1e3 * float(np.median(ids_s)),
        "mappings_before": mappings_before,
        "mappings": len(mappings),
        "corpus_mappings": sum(str(path) in line for line in mappings),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "order_bytes": order_bytes,
        "private_bytes": private_bytes() - private_before,
    }


class Clock:
    """Seconds between its laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """The seconds since the last lap."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds


def mapped_files() -> Iterator[str]:
    """The mappings of this process, a line each."""
    yield from Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()


def private_bytes() -> int:
    """Memory that this process has written itself."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not count anonymous memory")


if __name__ == "__main__":
    main()
