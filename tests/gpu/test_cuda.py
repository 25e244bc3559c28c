"""The tests of the pretended device on a real one; they skip themselves where there is none.

Copies and kernels are counted on the pretended device alone. Weights of two trainings on a GPU are
not promised to be equal, so no run is interrupted here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of, planted_corpus
from gpu_cases import CASES, COMMON, NUM_LABELS, OF_A_RANK, SERVED, TRANSFORMERS
from models import write_bert
from planted import WORDS_PER_LABEL

from xmcray.data.corpus import Corpus
from xmcray.nn.static import StaticEncoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.data_size import from_numbers
from xmcray.planning.devices import device_rates
from xmcray.planning.estimate import BETWEEN_STEPS, INDEX, estimate
from xmcray.planning.stand_in import StandInData
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import exact_search, from_keys
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.list_scan import scan_lists
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train_here
from xmcray.training.loop import assemble
from xmcray.training.run import Run, open_or_create
from xmcray.training.run_config import RunConfig
from xmcray.training.step import Stepper
from xmcray.types import Int64Array

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALONE = [name for name, case in CASES.items() if case.ranks == 1]
A_RANK = [name for name, (_, _, num_labels, _) in OF_A_RANK.items() if num_labels <= 2_000_000]
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        run: The run.
        waits: Of the host for the device, in each step.
    """

    run: Run
    waits: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora with the tokens of words and with those of a tiny transformer."""
    folder = tmp_path_factory.mktemp("cuda")
    planted_corpus(folder, num_queries=120, num_labels=NUM_LABELS)
    numbers = range(WORDS_PER_LABEL)
    words = [f"w{label}x{number}" for label in range(NUM_LABELS) for number in numbers]
    corpus_of(
        folder / "raw", folder / "model-corpus", tokenizer=str(write_bert(folder / "model", words))
    )
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], Trained]:
    """Trains a case, once for all tests."""
    return functools.cache(functools.partial(train, folder))


def train(folder: Path, name: str) -> Trained:
    """Trains a case, and counts how often its steps wait."""
    case = CASES[name]
    corpus = Corpus.open(folder / case.corpus, verify=False)
    settings = [*COMMON, *case.settings]
    if name in TRANSFORMERS:
        settings.append(f"encoder.name={folder / 'model'}")
    run = open_or_create(
        folder / name, RunConfig.resolve(case.method, {}, settings), corpus, "auto"
    )
    waits: list[int] = []
    step = Stepper.step

    def watched_step(self: Stepper, *args: object) -> object:
        # Torch warns of each operation for which the host waits.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = step(self, *args)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", watched_step)
        train_here(run, corpus)
    return Trained(run, waits)


@pytest.mark.parametrize("name", ALONE)
def test_a_method_trains_on_the_device_to_the_end(
    trained: Callable[[str], Trained], name: str
) -> None:
    assert (trained(name).run.path / "result.json").is_file()


@pytest.mark.parametrize("name", ALONE)
def test_a_step_keeps_its_budget(trained: Callable[[str], Trained], name: str) -> None:
    # The first step makes the state of the optimiser.
    assert max(trained(name).waits[1:]) <= CASES[name].syncs


@pytest.mark.parametrize("name", [name for name in SERVED if name in ALONE])
def test_a_bundle_answers_on_the_device_as_on_the_host(
    trained: Callable[[str], Trained], tmp_path: Path, name: str
) -> None:
    bundle = tmp_path / "bundle"
    export_run(trained(name).run, bundle)
    queries = ["w3x0 w3x1", "w5x2"]
    on_device = Retriever.load(bundle, device="cuda").search(queries, 5)
    on_host = Retriever.load(bundle, device="cpu").search(queries, 5)
    for device_row, host_row in zip(on_device, on_host, strict=True):
        device_scores = sorted(label.score for label in device_row)
        host_scores = sorted(label.score for label in host_row)
        # A transformer answers in bfloat16 on the device.
        tolerance = 2e-2 if name in TRANSFORMERS else 1e-4
        assert device_scores == pytest.approx(host_scores, abs=tolerance)


@pytest.mark.parametrize("name", A_RANK)
def test_a_step_of_one_rank_takes_the_planned_memory(name: str) -> None:
    method, settings, num_labels, _ = OF_A_RANK[name]
    config = RunConfig.resolve(method, {}, list(settings))
    size = from_numbers(num_labels, num_labels, tokens_per_text=12, positives_per_query=5)
    data = StandInData(size, config.data.augment_with_labels)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    encoder = StaticEncoder(torch.ones(size.vocab_size), config.encoder.dim).to(CUDA)
    partition = LabelPartition(num_labels, 1, 0)
    setup = assemble(config, data, encoder, CUDA, partition)  # type: ignore[arg-type]
    setup.stepper.step(data.batch(config, 1, 1), data)  # type: ignore[arg-type]
    torch.cuda.reset_peak_memory_stats()
    setup.stepper.step(data.batch(config, 2, 1), data)  # type: ignore[arg-type]
    peak_bytes = torch.cuda.max_memory_allocated() - before
    plan = estimate(config, size, device_rates("h100-80gb"), workers=1)
    of_a_step = {**plan.device_bytes}
    for other in ("CUDA", INDEX, BETWEEN_STEPS):
        of_a_step.pop(other, None)
    planned_bytes = sum(of_a_step.values())
    assert peak_bytes == pytest.approx(planned_bytes, rel=0.15)


@pytest.mark.parametrize("num_lists", [0, 64])
def test_a_search_on_the_device_finds_what_one_on_the_host_finds(num_lists: int) -> None:
    """Of all rows, or of the rows in a third of the lists."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, 16), np.float32)
    rows = centres[random.integers(60, size=12_000)]
    rows += 0.4 * random.standard_normal(rows.shape, np.float32)
    queries = rows[random.integers(12_000, size=1000)]
    queries += 0.1 * random.standard_normal(queries.shape, np.float32)

    def labels_on(device: str) -> Int64Array:
        vectors = torch.from_numpy(rows).to(device)
        if not num_lists:
            return exact_search(vectors, queries, 10).ids
        lists = build_lists(vectors, np.empty(0, np.int64), num_lists, seed=0)
        all_rows = AnswerableRows.of(len(rows), len(queries), None, None)
        return from_keys(scan_lists(lists, queries, 10, num_lists // 3, all_rows)).ids

    hits = 0
    for on_host, on_device in zip(labels_on("cpu"), labels_on("cuda"), strict=True):
        hits += len(np.intersect1d(on_host, on_device))
    # Sums in another order round differently, which may decide between two rows or two lists.
    assert hits >= 0.99 * 10 * len(queries)
