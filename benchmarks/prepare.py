"""Memory and speed of `prepare` on N and 2 N synthetic rows of 32 tokens: memory must not grow with the rows.

Memory is the PSS of the driver and of every Ray process, summed every two seconds; the figure is its peak less what the
idle cluster and the freshly started driver hold. Speed is compared with the tokenizers library alone on the same cores,
which tokenizes every text as a whole; `prepare` looks up the words that it has met (data/token_cache.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import new_parser, refuse_if_busy, write_table
from tokenizers import Tokenizer

from xmcray.data.corpus import Corpus

TOKENS = 32
LABELS = 10_000
WORDS = 20_000


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument("--rows", type=int, default=1_000_000, help="N")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    load = refuse_if_busy(arguments.anyway)
    results = []
    for rows in (
        arguments.rows,
        2 * arguments.rows,
    ):  # a process each: memory freed by one run is kept by its allocator
        command = [sys.executable, __file__, "--one", str(rows)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
    growth = results[1]["pss_mib"] / results[0]["pss_mib"]
    write_table(
        "prepare.md",
        "prepare: memory and speed",
        [
            "rows",
            "peak PSS less idle, MiB",
            "idle PSS, MiB",
            "rows/s",
            "library alone, rows/s",
            "ratio",
            "total, s",
        ],
        [
            [
                f"{r['rows']:,}",
                r["pss_mib"],
                r["idle_mib"],
                r["rows_per_s"],
                r["alone"],
                r["ratio"],
                r["total_s"],
            ]
            for r in results
        ],
        [
            f"twice the rows take {growth:.2f} times the memory",
            f"{TOKENS} words per row, one token each; {LABELS:,} labels; JSON lines in, shards of 16,384 rows out",
            "rows/s: tokenising pass, from the first row read to the last shard written;"
            " total: also the sample, the vocabulary and the hashes of the manifest",
            load,
        ],
    )


def measure(rows: int) -> dict[str, float]:
    """One corpus of `rows` rows in this process and a new cluster."""
    from xmcray.data import pipeline
    from xmcray.data.formats import detect
    from xmcray.ray_adapter.session import start_ray

    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder, "raw"), rows)
        start_ray()
        idle = total_pss()
        peaks = [idle]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(2.0):  # a look takes 20 ms of a core that is being measured
                peaks.append(total_pss())

        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.perf_counter()
        corpus = pipeline.prepare(
            detect(f"{folder}/raw", None), f"{folder}/corpus", name="synthetic", max_len=TOKENS
        )
        total_s = time.perf_counter() - begin
        done.set()
        watcher.join()
        shards = [path.stat().st_mtime for path in (corpus.path / "train").glob("*.parquet")]
        started = (corpus.path / "labels" / "00000.parquet").stat().st_mtime
        rows_per_s = rows / (max(shards) - started)
        alone = library_alone(corpus)
    mib = 2**20
    return {
        "rows": rows,
        "pss_mib": (max(peaks) - idle) / mib,
        "idle_mib": idle / mib,
        "rows_per_s": rows_per_s,
        "alone": alone,
        "ratio": rows_per_s / alone,
        "total_s": total_s,
    }


def write_rows(folder: Path, rows: int) -> None:
    folder.mkdir()
    draw = random.Random(0)
    words = sorted(
        {
            "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
            for _ in range(WORDS)
        }
    )
    with (folder / "labels.jsonl").open("w") as file:
        file.writelines(
            f'{{"uid": "l{i}", "text": "{" ".join(draw.choices(words, k=4))}"}}\n'
            for i in range(LABELS)
        )
    with (folder / "train.jsonl").open("w") as file:
        for i in range(rows):
            text = " ".join(draw.choices(words, k=TOKENS))
            labels = draw.sample(range(LABELS), 3)
            file.write(f'{{"uid": "q{i}", "text": "{text}", "labels": {labels}}}\n')


def library_alone(corpus: Corpus) -> float:
    """Rows/s of the tokenizers library in one process that uses every core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    split = corpus.split("train")
    library = Tokenizer.from_str(corpus.tokenizer().to_files()["tokenizer.json"])
    library.enable_truncation(TOKENS)
    texts = split.texts(np.arange(min(len(split), 4 * 16_384)))
    library.encode_batch_fast(texts[:1000])
    begin = time.perf_counter()
    for start in range(0, len(texts), 16_384):
        library.encode_batch_fast(texts[start : start + 16_384])
    return len(texts) / (time.perf_counter() - begin)


def total_pss() -> int:
    """Bytes of this process and all its descendants, shared pages counted once; 0 for what ends meanwhile."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
            except OSError:
                continue
    family = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(pss(pid) for pid in family)


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
