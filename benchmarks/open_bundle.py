"""A server opens a bundle of 120 million labels in 120 shards, and searches one text at a time.

    python benchmarks/open_bundle.py                              # 6 GB of disk, 16 GB of memory
    python benchmarks/open_bundle.py --shards 4 --rows 60000      # a minute

One shard is made as `export` makes it: vectors of label texts, and the index that `auto` stands for,
tuned for export's recall. All shards are that one: its files have 120 names. Uids, texts and the
order of the labels are files of their own size. So sizes, files and mappings are those of such a
bundle, at a sixth of its bytes, and all of it fits into the page cache. The bundle is removed at
the end.

Each row of the table is measured in new processes, one after the other. Opening has two parts:
every file is compared with its hash, and then the bundle is read. Private memory is what a process
has written itself; what it maps from files is shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data_sets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from common import new_parser, refuse_if_busy, write_table
from large_corpus import Clock, mapped_files, private_bytes
from served_bundles import K, synthetic_bundle
from xmcray_serve import served

from xmcray.retrieval.bundle import (
    KIND,
    LABEL_BLOCK,
    LABEL_SCHEMA,
    new_bundle,
    read_settings,
    write_settings,
)
from xmcray.retrieval.index_spec import ANSWER_RECALL
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import FileEntry, read_manifest

DIM = 64
SEARCHES = 100
THREADS = (1, 2)
OF_EACH_SHARD = ("vectors/", "index/")
# By the name of a measure: its row of the table.
ROWS = {
    "hash_s": "all files compared with their hashes, s",
    "hash_cpu_s": "the same, s of CPU time",
    "read_s": "the bundle read after that, s",
    "read_cpu_s": "the same, s of CPU time",
    "first_ms": "first search of one text, ms",
    "search_ms": "a later one, median ms",
    "peak_gb": "peak resident memory, GB",
    "private_gb": "private memory that opening and searching took, GB",
    "mappings_before": "mappings before",
    "mappings": "mappings at the end",
    "bundle_mappings": "of which of the bundle",
    "open_files": "open files",
}


def main() -> None:
    parser = new_parser(__doc__, out="open_bundle.md", anyway=True)
    parser.add_argument("--shards", type=int, default=120)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a shard (default: 10^6)")
    parser.add_argument("--folder", type=Path, default=data_sets.CACHE, help="a disk with room")
    parser.add_argument("--read", nargs=2, metavar=("FOLDER", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        folder, threads = arguments.read
        print(json.dumps(read(Path(folder), int(threads))))
        return
    load = refuse_if_busy(arguments.anyway)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="open-", dir=arguments.folder))
    try:
        write_bundle(folder, arguments.shards, arguments.rows)
        sizes = [path.stat() for path in (folder / "bundle").rglob("*") if path.is_file()]
        settings = read_settings(folder / "bundle")
        index = (folder / "index.txt").read_text()
        readers = [reader(folder, threads) for threads in THREADS]
        servers = [server_ready_s(folder / "bundle", threads) for threads in THREADS]
    finally:
        shutil.rmtree(folder)
    rows: list[list[object]] = []
    for name, title in ROWS.items():
        rows.append([title, *(measured[name] for measured in readers)])
    rows.append(["`xmcray serve` started until it answers, s", *servers])
    write_table(
        arguments.out,
        f"A bundle of {settings.num_labels:,} labels in {len(settings.shards)} shards",
        ["", *(f"threads: {threads}" for threads in THREADS)],
        rows,
        [
            f"{len(sizes):,} files of {sum(size.st_size for size in sizes) / 1e9:.1f} GB;"
            f" D = {DIM}; {index}",
            f"the files were in the page cache, where the shards are one: on the disk they take"
            f" {disk_bytes(sizes) / 1e9:.1f} GB",
            f"single mode; {SEARCHES} searches for {K} labels",
            load,
        ],
    )


# --- Writing ---


def write_bundle(folder: Path, num_shards: int, rows: int) -> None:
    """Writes folder/bundle, folder/queries.json and folder/index.txt."""
    one = folder / "one"
    queries = synthetic_bundle(one, rows, DIM, ANSWER_RECALL)
    (folder / "queries.json").write_text(json.dumps(queries))
    (folder / "index.txt").write_text(about_index(one))
    settings = read_settings(one)
    (shard,) = settings.shards
    shards = []
    for number in range(num_shards):
        start = number * rows
        shards.append(dataclasses.replace(shard, start=start, stop=start + rows))
    num_labels = num_shards * rows
    texts = pq.read_table(one / "labels.parquet")["text"].combine_chunks()
    manifest = read_manifest(one, KIND)
    hashed_files: dict[str, FileEntry] = {}
    with new_bundle(folder / "bundle", {"made_by": "open_bundle.py"}, hashed_files) as target:
        for name, entry in manifest.files.items():
            names = []
            if name.startswith(OF_EACH_SHARD):
                names = [name.replace("00000", f"{number:05d}") for number in range(num_shards)]
            elif name.count("/"):
                # Encoder, head, label side and tokenizer.
                names = [name]
            for link in names:
                (target / link).parent.mkdir(parents=True, exist_ok=True)
                (target / link).hardlink_to(one / name)
                hashed_files[link] = entry
        np.save(target / "label_order.npy", np.random.default_rng(0).permutation(num_labels))
        write_names(target / "labels.parquet", texts, num_labels)
        write_settings(
            target, dataclasses.replace(settings, num_labels=num_labels, shards=tuple(shards))
        )


def write_names(path: Path, texts: pa.Array, num_labels: int) -> None:
    """Uids of all labels, and the texts of the labels of one shard over and over, as of an export."""
    with pq.ParquetWriter(path, LABEL_SCHEMA, compression="zstd") as writer:
        for start in range(0, num_labels, LABEL_BLOCK):
            label_ids = np.arange(start, min(start + LABEL_BLOCK, num_labels))
            numbers = pa.array(label_ids).cast(pa.string())
            uids = pc.binary_join_element_wise("l", numbers, "").cast(pa.large_string())
            block_texts = texts.take(pa.array(label_ids % len(texts)))
            writer.write_table(pa.table([uids, block_texts], schema=LABEL_SCHEMA))


def about_index(bundle: Path) -> str:
    """What the index of the bundle's one shard is, in words."""
    (index,) = Retriever.of_folder(bundle).labels.rows.indexes
    if index.is_exact:
        return "no index"
    return f"{index.num_lists} lists, of which {index.nprobe} are visited, {index.candidates} candidates an answer"


def disk_bytes(sizes: list) -> int:
    """Bytes of files, each counted once however many names it has."""
    return sum({size.st_ino: size.st_size for size in sizes}.values())


# --- Reading ---


def reader(folder: Path, threads: int) -> dict[str, float]:
    """What a new process measures that opens the bundle, whose files are in the page cache."""
    for path in (folder / "bundle").glob("*.*"):
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
    command = [sys.executable, __file__, "--read", str(folder), str(threads)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    print(measured, file=sys.stderr)
    return measured


def read(folder: Path, threads: int) -> dict[str, float]:
    """Opens the bundle as a server does and searches it."""
    # A server has loaded all of this before it opens a bundle.
    importlib.import_module("faiss")
    importlib.import_module("xmcray.serving.local")
    queries = json.loads((folder / "queries.json").read_text())
    texts = random.Random(0).choices(queries, k=SEARCHES + 1)
    mappings_before = len(list(mapped_files()))
    private_before = private_bytes()
    cpu_before = time.process_time()
    clock = Clock()
    bundle, manifest = open_artifact(folder / "bundle", KIND)
    hash_s = clock.lap()
    cpu_hashed = time.process_time()
    clock.lap()
    retriever = Retriever.of_folder(bundle, threads, sha256=manifest.sha256)
    read_s = clock.lap()
    cpu_read = time.process_time()
    search_s = []
    for text in texts:
        clock.lap()
        (answers,) = retriever.search([text], K)
        search_s.append(clock.lap())
        assert len(answers) == K
    mappings = list(mapped_files())
    return {
        "hash_s": hash_s,
        "hash_cpu_s": cpu_hashed - cpu_before,
        "read_s": read_s,
        "read_cpu_s": cpu_read - cpu_hashed,
        "first_ms": 1e3 * search_s[0],
        "search_ms": 1e3 * float(np.median(search_s[1:])),
        "peak_gb": peak_bytes() / 1e9,
        "private_gb": (private_bytes() - private_before) / 1e9,
        "mappings_before": mappings_before,
        "mappings": len(mappings),
        "bundle_mappings": sum(str(folder) in line for line in mappings),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
    }


def peak_bytes() -> int:
    """The most resident memory of this process so far, with pages of files that it maps."""
    after_name = Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1]
    return 1024 * int(after_name.split()[0])


def server_ready_s(bundle: Path, threads: int) -> float:
    """Seconds from the start of a server's process until it answers."""
    command = [sys.executable, "-m", "xmcray", "serve"]
    clock = Clock()
    with served(command, bundle, "single", threads):
        return clock.lap()


if __name__ == "__main__":
    main()
