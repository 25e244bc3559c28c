"""ASTRA from 10^5 to 10^7 labels on one machine: time of a step, time of a refresh, memory; and what `plan` says.

    python benchmarks/scale.py --labels 1e5 1e6 --workers 1 2      # some minutes
    python benchmarks/scale.py --labels 1e7 --workers 1
    python benchmarks/scale.py --labels 1e7 --workers 2            # 24 GB of memory
    python benchmarks/scale.py --table                             # writes the table and the picture anew

Each configuration is measured once and kept in the cache, so that the work can be done in pieces; every command ends
with the table and the picture of all that is there. D = 64, float32 rows, SGD with momentum, 256 queries of 8 words in
a batch, 2,048 uniform and 50 hard negatives: the workload is the same for all sizes, and corpora are written by
synthetic.py.

A configuration is two measurements. The training is one of Ray Train with its pool of index actors, as `xmcray train`
starts it: queries are collected in the first epoch, the index is built and searched in the second, and the step time is
the median after that. Memory is the peak of each kind of process, and how much less memory the machine had available at
the worst moment than before: that counts pages that processes share once. The classifier's part is timed by itself, in
as many processes without Ray: what `Astra.loss`, its backward pass and the update of the rows take when the query
vectors are there, on rows whose every page has been touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import refresh
import synthetic
import torch
import torch.distributed as dist
from common import RESULTS, new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.parallel import collectives
from xmcray.planning import data_size
from xmcray.planning.devices import device_rates
from xmcray.planning.estimate import FIRST_REFRESH, Plan, estimate
from xmcray.planning.plan import plan
from xmcray.planning.probe import probe
from xmcray.planning.rates import Rates, load_rates
from xmcray.storage.whole_files import write_json
from xmcray.training.launch import train
from xmcray.training.loop import build
from xmcray.training.process import worker_environment
from xmcray.training.records import read_records
from xmcray.training.run_config import RunConfig
from xmcray.types import Shortlist

KEPT = data_sets.CACHE / "scale"
PROBE = data_sets.CACHE / "scale" / "probe.json"
QUERIES = 8192
TOKENS = 8
POSITIVES = 2
WARM = 8
STEPS = 48
LIMIT_RATIO = 2.5
LIMIT_BYTES = 24 << 30
LARGEST = 10**7
# By the name of a measure: title and factor of its column.
COLUMNS = {
    "classifier_s": ("classifier's part, ms", 1e3),
    "step_s": ("step, ms", 1e3),
    "refresh_s": ("refresh, s", 1.0),
    "worker_bytes": ("a worker, GB", 1e-9),
    "index_bytes": ("an index actor, GB", 1e-9),
}


def main() -> None:
    parser = new_parser(__doc__, out="scale.md", anyway=True)
    parser.add_argument("--labels", type=float, nargs="+", default=[1e5, 1e6])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="5,000 labels, one worker, kept and written nowhere"
    )
    parser.add_argument(
        "--rank", nargs=4, metavar=("RANK", "RANKS", "CORPUS", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.rank:
        rank, ranks, corpus, folder = arguments.rank
        classifier_rank(int(rank), int(ranks), corpus, Path(folder), arguments.dim)
        return
    if arguments.quick:
        print(json.dumps(measure(5000, arguments.dim, 1, "quick"), indent=1))
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    num_labels = [] if arguments.table else sorted(map(int, arguments.labels))
    for labels in num_labels:
        for workers in arguments.workers:
            path = KEPT / f"{labels}-{arguments.dim}-{workers}.json"
            if arguments.again or not path.is_file():
                load = refuse_if_busy(arguments.anyway)
                if not PROBE.is_file() or arguments.again:
                    measured_rates()
                write_json(path, measure(labels, arguments.dim, workers, load))
                print(
                    f"{labels:,} labels, {workers} workers: {path.read_text()}",
                    file=sys.stderr,
                    flush=True,
                )
    report(arguments.out, arguments.dim)


def settings(dim: int, workers: int) -> RunConfig:
    return RunConfig.resolve(
        "astra",
        {
            "data": {"augment_with_labels": False, "validation": 0.0},
            "encoder": {"dim": dim},
            "negatives": {
                "uniform": 2048,
                "hard": 50,
                "start_epoch": 2,
                "refresh_every": 4,
                "recall_queries": 0,
                "wait_s": 3600.0,
            },
            "method": {"classifier": {"kind": "sgd", "momentum": 0.9}},
            "optim": {"epochs": 4, "batch_size": 256},
            "cluster": {"workers": workers, "device": "cpu", "threads_per_process": 1},
            "log": {"every": 4, "validate_every": 0, "checkpoint_every": 10**9, "keep": 1},
        },
    )


def measured_rates() -> Rates:
    PROBE.parent.mkdir(parents=True, exist_ok=True)
    rates = probe()
    rates.save(PROBE)
    return rates


def measure(labels: int, dim: int, workers: int, load: str) -> dict[str, Any]:
    """One configuration."""
    corpus = synthetic.corpus(labels, QUERIES, TOKENS, POSITIVES)
    config = settings(dim, workers)
    size = data_size.from_corpus(corpus)
    state = estimate(config, size, device_rates("a100-80gb"), workers).checkpoint
    if shutil.disk_usage(data_sets.CACHE).free < 4 * state:
        raise SystemExit(
            f"error: {4 * state / 1e9:.0f} GB of disk are needed for {labels:,} labels; free some space"
        )
    row = {"labels": labels, "dim": dim, "workers": workers, "load": load}
    row["classifier_s"] = classifier_part(corpus, dim, workers)
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    watcher = refresh.Watcher()
    memory = MemoryWatch()
    try:
        memory.start()
        run = train(corpus.path, folder / "run", config, watch=watcher.watch)
        memory.stop()
        records = read_records(run.path / "metrics.jsonl")
        result = run.result() or {}
    finally:
        memory.stop()
        shutil.rmtree(folder, ignore_errors=True)
    # Until then an index is built on the same cores, and the first record may have a part of that.
    first_epoch = config.negatives.start_epoch
    settled_s = [record["step_s"] for record in records if record["epoch"] >= first_epoch]
    build_start, build_end = next(span for span in watcher.builds.values() if len(span) == 2)
    return row | {
        "step_s": float(np.median(settled_s[1:])),
        "refresh_s": build_end - build_start,
        "worker_bytes": result["peak_memory_mb"] * 2**20,
        "index_bytes": memory.peaks.get("IndexShard", 0),
        "machine_bytes": memory.most,
    }


class MemoryWatch:
    """Peaks of our processes by kind, and the most memory that the machine lacks compared with the start."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.most = 0
        self._before = _available()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.most = max(self.most, self._before - _available())
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (process / "cmdline").read_bytes()
                    if b"IndexShard" in command.split(b"\0")[0]:
                        peak = _memory_field(process / "status", "VmHWM:")
                        self.peaks["IndexShard"] = max(self.peaks.get("IndexShard", 0), peak)
                except (OSError, IndexError):  # it has ended
                    continue


def _available() -> int:
    return _memory_field(Path("/proc/meminfo"), "MemAvailable:")


def _memory_field(path: Path, name: str) -> int:
    """Bytes of a field of /proc, which has them in KiB."""
    after_name = path.read_text().split(name)[1]
    return 1024 * int(after_name.split()[0])


def classifier_part(corpus: Corpus, dim: int, workers: int) -> float:
    """Seconds of the classifier's part of a step, in processes without Ray."""
    environment = {**os.environ, **worker_environment(threads=1)}
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        command = [sys.executable, __file__, "--dim", str(dim), "--rank"]
        processes = []
        for rank in range(workers):
            words = [*command, str(rank), str(workers), str(corpus.path), folder]
            processes.append(subprocess.Popen(words, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(
                "error: a process that times the classifier failed, its message is above"
            )
        return float(Path(folder, "seconds.txt").read_text())


def classifier_rank(rank: int, ranks: int, corpus: str, folder: Path, dim: int) -> None:
    """One of the processes of `classifier_part`; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks
        )
    config = settings(dim, ranks)
    data = TrainingData(Corpus.open(corpus, verify=False), config.data)
    setup = build(config, data, torch.device("cpu"))
    method = setup.method
    (table,) = setup.method.tables.values()
    for state in table.state.values():
        state.fill_(1e-9)  # every page is there, as after the first epochs
    hard = np.random.default_rng(0).integers(
        data.num_labels, size=(data.num_query_ids, config.negatives.hard)
    )
    shortlist = Shortlist(0, 0, hard.astype(np.int32))
    first = 2 * setup.sampler.steps_per_epoch
    seconds = []
    for step in range(first, first + WARM + STEPS):
        batch = setup.sampler.batch(step, rank, ranks)
        query_BD = setup.stepper.encoder(batch.tokens).detach().requires_grad_()
        method.context = replace(method.context, encode=lambda tokens, vectors=query_BD: vectors)  # type: ignore[attr-defined]
        collectives.sum_over_ranks(torch.zeros(1))
        start = time.perf_counter()
        output = method.loss(batch, shortlist)
        (output.total / output.divisor).backward()
        table.update(1e-3)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        (folder / "seconds.txt").write_text(str(float(np.median(seconds[WARM:]))))


def report(out: Path, dim: int) -> None:
    """Table and picture of all configurations that were measured."""
    results = [json.loads(path.read_text()) for path in KEPT.glob(f"*-{dim}-*.json")]
    results.sort(key=lambda result: (result["workers"], result["labels"]))
    if not results:
        raise SystemExit("error: nothing was measured yet; run it with --labels")
    rates = load_rates(PROBE)
    plans = [planned(result, rates) for result in results]
    rows = []
    for result, its_plan in zip(results, plans, strict=True):
        row: list[object] = [f"{result['labels']:,}", result["workers"]]
        for name, (_, unit) in COLUMNS.items():
            row += [f"{unit * result[name]:.3g}", f"{unit * its_plan[name]:.3g}"]
        row.append(f"{result['machine_bytes'] / 1e9:.3g}")
        rows.append(row)
    header = ["labels", "workers"]
    for title, _ in COLUMNS.values():
        header += [title, "planned"]
    header.append("whole machine, GB")
    write_table(out, f"ASTRA by labels, D = {dim}", header, rows, claims(results))
    picture(results, plans, (RESULTS / out).with_suffix(".png"))


def planned(result: dict[str, Any], rates: Rates) -> dict[str, float]:
    """The measures of a configuration as `plan` foresees them."""
    config = settings(result["dim"], result["workers"])
    size = data_size.from_corpus(synthetic.corpus(result["labels"], QUERIES, TOKENS, POSITIVES))
    its_plan: Plan = plan(config, size, rates, result["workers"], memory_bytes=LIMIT_BYTES)
    return {
        # A plan does not tell the parts of a model apart.
        "classifier_s": float("nan"),
        "step_s": its_plan.step_seconds,
        "refresh_s": its_plan.run_s[FIRST_REFRESH],
        "worker_bytes": its_plan.worker_bytes,
        "index_bytes": its_plan.index_bytes,
    }


def claims(results: list[dict[str, Any]]) -> list[str]:
    """Sentences with the limits, the sizes and the load."""
    lines = []
    for workers in numbers_of_workers(results):
        by_labels = {result["labels"]: result for result in results if result["workers"] == workers}
        if {10**5, LARGEST} <= by_labels.keys():
            largest = by_labels[LARGEST]
            ratio = largest["classifier_s"] / by_labels[10**5]["classifier_s"]
            gib = largest["machine_bytes"] / 2**30
            lines.append(
                f"{workers} workers: the classifier's part of {LARGEST:,} labels takes {ratio:.2f} x that of 100,000"
                f" (limit {LIMIT_RATIO}); the machine held at most {gib:.1f} GiB (limit {LIMIT_BYTES >> 30})"
            )
    lines.append(
        f"{QUERIES:,} queries, 256 in a batch, 2,048 uniform and 50 hard negatives; medians of steps"
    )
    lines.append("a refresh is that of the first version, of rows near their random start")
    loads = {result["load"] for result in results}
    return lines + sorted(loads)


def numbers_of_workers(results: list[dict[str, Any]]) -> list[int]:
    return sorted({result["workers"] for result in results})


def picture(results: list[dict[str, Any]], plans: list[dict[str, float]], path: Path) -> None:
    """Measured as points, planned as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3.2 * len(COLUMNS), 3.2)
    figure, panels = pyplot.subplots(1, len(COLUMNS), figsize=size, layout="constrained")
    for panel, (name, (title, unit)) in zip(panels, COLUMNS.items(), strict=True):
        for number, workers in enumerate(numbers_of_workers(results)):
            labels = []
            measured_values = []
            planned_values = []
            for result, its_plan in zip(results, plans, strict=True):
                if result["workers"] == workers:
                    labels.append(result["labels"])
                    measured_values.append(unit * result[name])
                    planned_values.append(unit * its_plan[name])
            colour = f"C{number}"
            panel.plot(labels, measured_values, "o", color=colour, label=f"{workers} measured")
            panel.plot(labels, planned_values, "--", color=colour, label=f"{workers} planned")
        panel.set(title=title, xlabel="labels", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].legend(title="workers", fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
