"""Trains runs on a pretended CUDA device, and counts what their steps cost.

    LD_PRELOAD=stand_in.so python train_pretended.py FOLDER

The folder has a corpus of planted data and cases.json: method, settings, number of ranks and corpus of
each run, by name. The results are written into results.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import multiprocessing
import sys
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pretended_cuda
import torch
import torch.distributed as dist
from corpora import corpus_of
from models import write_bert
from planted import WORDS_PER_LABEL
from pretended_cuda import PretendedCuda, counts
from torch.testing._internal.distributed.fake_pg import FakeStore

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher, run_version
from xmcray.negatives.version_folder import QueryBlock
from xmcray.nn.static import StaticEncoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.data_size import from_numbers
from xmcray.planning.device_search import DeviceSearch, Spread
from xmcray.planning.devices import device_rates
from xmcray.planning.estimate import BETWEEN_STEPS, INDEX, estimate
from xmcray.planning.stand_in import StandInData
from xmcray.retrieval import exact, inverted_lists
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.list_scan import scan_lists
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.manifest import read_manifest
from xmcray.training.checkpoint import newest
from xmcray.training.export import export_run
from xmcray.training.launch import train_here
from xmcray.training.loop import Loop, assemble, build
from xmcray.training.run import Run, open_or_create
from xmcray.training.run_config import RunConfig
from xmcray.training.step import Stepper

INTERRUPTED_AT = 7
KINDS = ("launches", "syncs", "copies", "products", "exchanged")
CUDA = torch.device("cuda")
_uncounted_step = Stepper.step


def transformer_corpus(folder: Path) -> None:
    """Writes the corpus once more, with the tokens of a tiny transformer in folder/model."""
    words = [f"w{label}x{number}" for label in range(40) for number in range(WORDS_PER_LABEL)]
    model = write_bert(folder / "model", words)
    corpus_of(folder / "raw", folder / "model-corpus", tokenizer=str(model))


def train(
    folder: Path, name: str, method: str, settings: list[str], ranks: int, corpus_name: str
) -> dict[str, Any]:
    """Trains one run; returns its steps, and the largest counts of any step but the first."""
    corpus = Corpus.open(folder / corpus_name, verify=False)
    config = RunConfig.resolve(method, {}, settings)
    run = open_or_create(folder / "runs" / name, config, corpus, "auto")
    if ranks == 1:
        return _counted(lambda: train_here(run, corpus))
    return _train_ranks(ranks, run, corpus)


def _train_ranks(
    ranks: int, run: Run, corpus: Corpus, on_step: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Trains all ranks; the result of one of them, or the first error."""
    (run.path / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    processes = []
    for rank in range(ranks):
        arguments = (rank, ranks, run, corpus, results, on_step)
        processes.append(context.Process(target=_train_rank, args=arguments, daemon=True))
    for process in processes:
        process.start()
    of_ranks = [results.get() for _ in processes]
    for process in processes:
        process.join()
    failed = [result for result in of_ranks if "error" in result]
    return failed[0] if failed else of_ranks[0]


def _train_rank(
    rank: int,
    ranks: int,
    run: Run,
    corpus: Corpus,
    results: Any,
    on_step: Callable[[int], None] | None,
) -> None:
    """Trains one rank of several, whose tensors Gloo exchanges in place of NCCL."""
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(run.path / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.barrier()

        def train_loop() -> dict[str, Any]:
            data = TrainingData(corpus, run.config.data)
            setup = build(run.config, data, CUDA)
            refresher = ThreadRefresher(data, RefreshSpec(ranks, run.config.negatives, 0))
            return Loop(run, setup, refresher, on_step).train()

        results.put(_counted(train_loop))
        dist.destroy_process_group()
    except BaseException:
        results.put({"error": traceback.format_exc()})


def _counted(train_run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Trains on the device, and counts what each step costs."""
    costs: list[dict[str, Counter[str]]] = []
    devices: set[str] = set()

    def counted_step(self: Stepper, *args: Any) -> Any:
        before = {kind: Counter(getattr(counts, kind)) for kind in KINDS}
        output = _uncounted_step(self, *args)
        costs.append({kind: getattr(counts, kind) - before[kind] for kind in KINDS})
        devices.add(str(output.total.device))
        devices.update(str(table.weight_SD.device) for table in self.method.tables.values())
        return output

    Stepper.step = counted_step  # type: ignore[method-assign]
    with PretendedCuda():
        result = train_run()
    most: dict[str, Any] = {}
    for kind in KINDS:
        # The first step also makes the state of the optimiser.
        most[kind] = max((cost[kind] for cost in costs[1:]), key=Counter.total)
    return {"steps": result["steps"], "devices": sorted(devices), **most}


def answers(folder: Path, name: str) -> dict[str, Any]:
    """Exports a run on the device, and answers some queries there and on the CPU."""
    bundle = folder / "bundles" / name
    queries = ["w3x0 w3x1", "w5x2", ""]
    with PretendedCuda():
        export_run(Run.open(folder / "runs" / name), bundle)
        on_device = Retriever.load(bundle, device="cuda:0")
        device = str(on_device.labels.rows.indexes[0].vectors.device)
        labels = [[label.uid for label in row] for row in on_device.search(queries, 5)]
    on_host = Retriever.load(bundle, device="cpu")
    expected = [[label.uid for label in row] for row in on_host.search(queries, 5)]
    return {"device": device, "labels": labels, "expected": expected}


def one_rank(method: str, settings: list[str], num_labels: int, ranks: int) -> dict[str, Any]:
    """Steps of the first of some ranks on random data; the others send what this one sends.

    Returns:
        Counts of the second step, the most bytes of the device during it, those by the plan, and
        the most bytes of the host's arrays.
    """
    config = RunConfig.resolve(method, {}, settings)
    size = from_numbers(num_labels, num_labels, tokens_per_text=12, positives_per_query=5)
    data: Any = StandInData(size, config.data.augment_with_labels)
    live_before = counts.live_bytes
    with _group(ranks), PretendedCuda():
        encoder = StaticEncoder(torch.ones(size.vocab_size), config.encoder.dim).to(CUDA)
        setup = assemble(config, data, encoder, CUDA, LabelPartition(num_labels, ranks, 0))
        setup.stepper.step(data.batch(config, 1, ranks), data)
        batch = data.batch(config, 2, ranks)
        before = {kind: Counter(getattr(counts, kind)) for kind in KINDS}
        counts.peak_bytes = counts.live_bytes
        # A collection in the middle of a step would lower the largest moment of some cases.
        gc.disable()
        tracemalloc.start()
        setup.stepper.step(batch, data)
        _, array_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.enable()
    plan = estimate(config, size, device_rates("a100-80gb"), workers=ranks)
    of_a_step = {**plan.device_bytes}
    for other in ("CUDA", INDEX, BETWEEN_STEPS):
        of_a_step.pop(other, None)
    planned_bytes = sum(of_a_step.values())
    cost = {kind: sum((getattr(counts, kind) - before[kind]).values()) for kind in KINDS}
    return {
        **cost,
        "peak_bytes": counts.peak_bytes - live_before,
        "planned_bytes": planned_bytes,
        "array_bytes": array_bytes,
    }


@contextlib.contextmanager
def _group(ranks: int) -> Iterator[None]:
    """Torch's fake group around the first of some ranks."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def hard_negatives(folder: Path) -> dict[str, Any]:
    """Searches a version on a device with room and without, and on the CPU."""
    data = TrainingData(Corpus.open(folder / "corpus", verify=False), DataConfig())
    ids = data.query_ids[:]
    random = np.random.default_rng(0)
    rows = random.standard_normal((data.num_labels, 8), np.float32)
    vectors = random.standard_normal((len(ids), 8), np.float32)
    extra = data.positives(ids).lengths
    on_cpu = RefreshSpec(2, NegativesConfig(hard=5), 0)
    on_device = dataclasses.replace(on_cpu, gpu=0, shares_gpu=True)
    results: dict[str, Any] = {}
    for name, spec, room in (
        ("cpu", on_cpu, 0),
        ("device", on_device, 1 << 40),
        ("no room", on_device, 1000),
    ):
        version = Ledger(folder / f"negatives of {name}").version(0)
        version.write_queries(1, 0, QueryBlock(ids, vectors, extra))
        version.write_rows(0, rows)
        version.publish(0, 1, 1)
        pretended_cuda.set_free_bytes(room)
        products = Counter(counts.products)
        with PretendedCuda():
            run_version(version, data, spec)
        results[name] = {
            "labels": version.shortlist().labels.tolist(),
            "products": (counts.products - products).total(),
        }
    return results


def exact_search_of_blocks() -> dict[str, float]:
    """An exact search on the device: operations for each block of scores, and bytes."""
    # Blocks of fewer queries and rows take as many operations.
    exact.GPU_BLOCK = (64, 1 << 12)
    num_queries, num_rows = exact.GPU_BLOCK
    random = np.random.default_rng(0)
    rows = random.standard_normal((8 * num_rows, 4), np.float32)
    queries = random.standard_normal((num_queries, 4), np.float32)
    launches = counts.launches.total()
    live_bytes = counts.live_bytes
    counts.peak_bytes = live_bytes
    with PretendedCuda():
        exact.exact_search(torch.from_numpy(rows).to(CUDA), queries, 20)
    return {
        "calls": (counts.launches.total() - launches) / 8,
        "peak_bytes": counts.peak_bytes - live_bytes,
        "planned_bytes": exact.exact_device_bytes(*rows.shape),
    }


def search_of_lists() -> dict[str, Any]:
    """Lists are made and searched on the device: answers, operations, host syncs and bytes."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, 8), np.float32)
    rows = centres[random.integers(60, size=12_000)]
    rows += 0.4 * random.standard_normal(rows.shape, np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[:600] *= 3
    queries = rows[random.integers(12_000, size=3000)]
    queries += 0.1 * random.standard_normal(queries.shape, np.float32)
    # What is computed at once shrinks with the rows, so that there are as many parts as of many.
    limits = inverted_lists.Limits(
        queries=1000, visits=1 << 16, scores=1 << 18, hits=1 << 16, keys=1 << 16
    )
    inverted_lists.gpu_limits = lambda num_rows, dim: limits
    long_ids = np.arange(600)
    all_rows = AnswerableRows.of(len(rows), len(queries), None, None)
    on_host = build_lists(torch.from_numpy(rows), long_ids, 64, 0)
    expected = scan_lists(on_host, queries, 20, 20, all_rows)
    live_bytes = counts.live_bytes
    counts.peak_bytes = live_bytes
    with PretendedCuda():
        lists = build_lists(torch.from_numpy(rows).to(CUDA), long_ids, 64, 0)
        launched = counts.launches.copy()
        waited = counts.syncs.copy()
        found = scan_lists(lists, queries, 20, 20, all_rows)
    plan = DeviceSearch(
        rates=device_rates("a100-80gb"), rows=len(rows), dim=8, queries=len(queries), lists=64
    )
    work = plan.list_work(Spread(visited=20 / 64, long=0.05))
    return {
        "same": torch.equal(found, expected),
        "calls": (counts.launches - launched).total(),
        "batches": (counts.launches - launched)["amax"],
        "rounds": (counts.launches - launched)["sort"],
        "syncs": counts.syncs - waited,
        "planned_calls": work.calls + work.products,
        "peak_bytes": counts.peak_bytes - live_bytes,
        "planned_bytes": inverted_lists.device_bytes(*rows.shape),
    }


def resumed(
    folder: Path, name: str, method: str, settings: list[str], ranks: int, corpus_name: str
) -> dict[str, Any]:
    """Interrupts a run on the device and goes on; the weights are to be those of a whole run."""
    corpus = Corpus.open(folder / corpus_name, verify=False)
    config = RunConfig.resolve(method, {}, [*settings, "log.checkpoint_every=4"])
    run = open_or_create(folder / "runs" / f"{name}, resumed", config, corpus, "auto")

    def interrupt(step: int) -> None:
        if step == INTERRUPTED_AT:
            raise KeyboardInterrupt

    if ranks == 1:
        with PretendedCuda(), contextlib.suppress(KeyboardInterrupt):
            train_here(run, corpus, interrupt)
    else:
        interrupted = _train_ranks(ranks, run, corpus, interrupt)
        assert "KeyboardInterrupt" in interrupted["error"], interrupted["error"]
    first = newest(run.checkpoints)
    assert first is not None
    if ranks == 1:
        with PretendedCuda():
            train_here(run, corpus)
    else:
        result = _train_ranks(ranks, run, corpus)
        assert "error" not in result, result["error"]
    undisturbed = Run.open(folder / "runs" / name)
    return {
        "from_step": first.step,
        "weights": _final_weights(run),
        "expected": _final_weights(undisturbed),
    }


def _final_weights(run: Run) -> dict[str, str]:
    """SHA-256 of every tensor file of the last checkpoint."""
    last = newest(run.checkpoints)
    assert last is not None
    files = read_manifest(last.path, "checkpoint").files
    hashes = {}
    for name, entry in files.items():
        if name.endswith(".safetensors"):
            hashes[name] = entry.sha256
    return hashes


def mixture() -> None:
    """Adds tensors of two devices, which has to fail."""
    with PretendedCuda():
        torch.ones(2, device="cuda") + torch.ones(2)


def main() -> None:
    """Runs all cases; one that fails does not stop the others."""
    folder = Path(sys.argv[1])
    pretended_cuda.install()
    cases = json.loads((folder / "cases.json").read_text())
    results: dict[str, Any] = {}

    def note(name: str, run_case: Callable[..., Any], *args: Any) -> None:
        try:
            results[name] = run_case(*args)
        except Exception:
            results[name] = {"error": traceback.format_exc()}

    note("mixture", mixture)
    transformer_corpus(folder)
    trained = cases["trained"].items()
    # Ranks are forks of this process, and torch cannot fork after a backward pass.
    for name, case in sorted(trained, key=lambda item: item[1][2], reverse=True):
        note(name, train, folder, name, *case)
        if name in cases["resumed"]:
            note(f"{name}, resumed", resumed, folder, name, *case)
    for name, case in cases["of a rank"].items():
        note(name, one_rank, *case)
    for name in cases["served"]:
        note(f"answers of {name}", answers, folder, name)
    note("hard negatives", hard_negatives, folder)
    note("blocks", exact_search_of_blocks)
    note("lists", search_of_lists)
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
