"""All methods train on a pretended CUDA device, and their steps keep budgets of syncs and copies.

The device is pretended by pretended_cuda.py, in a process of its own. What needs a real one is
marked `gpu`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import planted_corpus

from xmcray.planning import device_search

HERE = Path(__file__).parent
COMMON = [
    "encoder.dim=16",
    "optim.epochs=3",
    "optim.batch_size=32",
    "optim.warmup_steps=2",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "data.validation=0.1",
    "log.validate_every=1",
    "log.every=2",
]
NUM_LABELS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """A run and what one of its steps may cost.

    Attributes:
        method: Name of the method.
        syncs: How often the host may wait for the device. All cases have one in the gradient of the
            token table, whose distinct rows are counted.
        copies: Copies from the host. The tokens are one, each dropout mask is one, and the listed
            pairs are one for each loss.
        settings: After those of all cases.
        ranks: How many train together.
        exchanged: Bytes that collectives of a rank may get.
        corpus: Name of the corpus.
    """

    method: str
    syncs: int
    copies: int
    settings: tuple[str, ...] = ()
    ranks: int = 1
    exchanged: int = 0
    corpus: str = "corpus"


CASES = {
    "astra": Case("astra", 1, 4),
    "astra, all labels": Case("astra", 1, 4, ("method.exact=true",)),
    "astra, weight decay": Case(
        "astra",
        1,
        4,
        ("method.classifier.weight_decay=0.01", "method.classifier.storage=bfloat16"),
    ),
    "renee": Case("renee", 1, 4),
    # Five chunks of labels instead of one. Decay makes each step bring all rows up to date.
    "renee, chunks": Case(
        "renee", 1, 4, ("method.chunk_labels=8", "method.classifier.weight_decay=0.01")
    ),
    "dexml": Case("dexml", 1, 4),
    "dexml, soft top k": Case("dexml", 1, 4, ("method.loss=soft_top_k",)),
    # Mining sends the labels with the largest gradients to the host, and encodes twice.
    "dexml, cache": Case("dexml", 4, 12, ("method.columns=cache", "method.cache_hard=8")),
    # Two losses in two directions, and dropout of three kinds of vectors.
    "unidec": Case("unidec", 1, 15),
    # The regulariser takes a mean over terms whose number depends on the scores.
    "prime": Case("prime", 6, 8),
    "rae": Case("rae", 1, 4),
    # Ranks also count the rows of their token tables, and those that all of them touch.
    "astra, ranks": Case("astra", 3, 4, ranks=3, exchanged=32_000),
    "dexml, ranks": Case("dexml", 3, 4, ranks=3, exchanged=64_000),
    "renee, ranks": Case("renee", 3, 4, ranks=3, exchanged=32_000),
    "unidec, ranks": Case("unidec", 3, 15, ranks=3, exchanged=52_000),
    "rae, ranks": Case("rae", 3, 4, ranks=3, exchanged=44_000),
    "prime, ranks": Case("prime", 11, 8, ranks=3, exchanged=200_000),
    # All rows of a transformer's token table are updated, so nothing is counted.
    "transformer": Case("astra", 0, 5, corpus="model-corpus"),
    "transformer, ranks": Case("astra", 0, 5, ranks=3, exchanged=64_000, corpus="model-corpus"),
}
TRANSFORMERS = [name for name, case in CASES.items() if case.corpus == "model-corpus"]
SERVED = ["astra", "transformer", "unidec", "prime", "rae", "astra, ranks"]
RESUMED = ["astra", "transformer"]
RANK_OF_EIGHT = (
    "optim.batch_size=1024",
    "negatives.hard=10",
    "negatives.uniform=1000",
    "data.augment_with_labels=false",
    "method.init=zeros",
)
# The same step with as many labels as public data sets have, and with a hundred times more.
OF_EIGHT = {
    "1.3 million labels": ("encoder.dim=64", 1_305_265),
    "120 million labels": ("encoder.dim=2", 120_000_000),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of each case, by name."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler compiles the stand-in for CUDA")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA, so nothing is pretended")
    folder = tmp_path_factory.mktemp("pretended")
    planted_corpus(folder, num_queries=120, num_labels=NUM_LABELS)
    trained = {}
    for name, case in CASES.items():
        settings = [*COMMON, *case.settings]
        if name in TRANSFORMERS:
            settings.append(f"encoder.name={folder / 'model'}")
        trained[name] = (case.method, settings, case.ranks, case.corpus)
    of_a_rank = {}
    for name, (dim, num_labels) in OF_EIGHT.items():
        of_a_rank[name] = ("astra", [*RANK_OF_EIGHT, dim], num_labels)
    cases = {"trained": trained, "of a rank": of_a_rank, "served": SERVED, "resumed": RESUMED}
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {
        **os.environ,
        "LD_PRELOAD": str(stand_in(compiler, folder)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run(
        [sys.executable, str(HERE / "train_pretended.py"), str(folder)],
        env=environment,
        check=True,
        timeout=600,
    )
    return json.loads((folder / "results.json").read_text())


def stand_in(compiler: str, folder: Path) -> Path:
    """Compiles the library that a CPU-only torch needs to record graphs of CUDA tensors."""
    torch_folder = Path(torch.__file__).parent
    library = folder / "stand_in.so"
    include = torch_folder / "include"
    arguments = [
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        f"-L{torch_folder / 'lib'}",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    source = str(HERE / "stand_in.cpp")
    # Libraries come after the source that needs them.
    subprocess.run([compiler, source, "-o", str(library), *arguments], check=True, timeout=120)
    return library


@pytest.mark.parametrize("name", CASES)
def test_a_method_trains_on_the_device_to_the_end(results: Any, name: str) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["steps"] >= 12
    assert result["devices"] == ["cuda:0"]


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_its_budget_of_syncs_and_copies(results: Any, name: str) -> None:
    case = CASES[name]
    syncs = results[name]["syncs"]
    copies = results[name]["copies"]
    assert sum(syncs.values()) <= case.syncs, syncs
    assert sum(copies.values()) <= case.copies, copies
    assert sum(results[name]["exchanged"].values()) <= case.exchanged, results[name]["exchanged"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_computes_in_bfloat16_and_is_updated_by_one_kernel(
    results: Any, name: str
) -> None:
    # Six linear maps of its layer, and two gradients of each. The rest of a step is in float32.
    assert results[name]["products"]["torch.bfloat16"] == 6 * 3
    # Parameters with and without weight decay.
    assert results[name]["launches"]["_fused_adamw_"] == 2


@pytest.mark.parametrize("name", SERVED)
def test_a_bundle_answers_on_the_device_as_on_the_host(results: Any, name: str) -> None:
    answers = results[f"answers of {name}"]
    assert "error" not in answers, answers["error"]
    assert answers["device"] == "cuda:0"
    assert answers["labels"] == answers["expected"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_interrupted_on_the_device_ends_byte_equal(results: Any, name: str) -> None:
    resumed = results[f"{name}, resumed"]
    assert "error" not in resumed, resumed["error"]
    assert 0 < resumed["from_step"] < 8
    assert resumed["weights"] == resumed["expected"]


def test_an_index_searches_on_a_device_that_has_room_and_finds_the_same(results: Any) -> None:
    searches = results["hard negatives"]
    assert "error" not in searches, searches["error"]
    assert searches["device"]["products"] > 0
    assert searches["device"]["labels"] == searches["cpu"]["labels"]
    for name in ("cpu", "no room"):
        assert searches[name]["products"] == 0
        assert searches[name]["labels"] == searches["cpu"]["labels"]


def test_an_exact_search_takes_the_planned_operations_and_memory(results: Any) -> None:
    blocks = results["blocks"]
    assert "error" not in blocks, blocks["error"]
    assert blocks["calls"] == pytest.approx(device_search.BLOCK_CALLS, rel=0.15)
    assert blocks["peak_bytes"] <= blocks["planned_bytes"]


def test_a_search_of_lists_takes_the_planned_operations_and_memory(results: Any) -> None:
    lists = results["lists"]
    assert "error" not in lists, lists["error"]
    assert lists["same"], "a device finds what the CPU finds"
    assert lists["calls"] == pytest.approx(lists["planned_calls"], rel=0.15)
    assert lists["peak_bytes"] <= lists["planned_bytes"]
    # The host asks for the groups and for the hits of lists that are scored together. Other syncs are
    # those of rounds.
    waits = sum(number for line, number in lists["syncs"].items() if line.startswith("nonzero"))
    assert waits == 2 * lists["batches"]
    assert sum(lists["syncs"].values()) - waits <= 8 * lists["rounds"]


@pytest.mark.parametrize("name", OF_EIGHT)
def test_a_step_of_one_rank_of_eight_takes_the_planned_memory(results: Any, name: str) -> None:
    rank = results[name]
    assert "error" not in rank, rank["error"]
    assert rank["peak_bytes"] == pytest.approx(rank["planned_bytes"], rel=0.15)


def test_a_step_costs_the_same_with_a_hundred_times_more_labels(results: Any) -> None:
    few = results["1.3 million labels"]
    many = results["120 million labels"]
    for kind in ("launches", "syncs", "copies"):
        assert many[kind] == few[kind]
    # Not even a bit for each label of the rank.
    assert many["array_bytes"] < 120_000_000 / 8 / 8


def test_a_mixture_of_devices_is_refused(results: Any) -> None:
    assert "MixedDevicesError" in results["mixture"]["error"]
