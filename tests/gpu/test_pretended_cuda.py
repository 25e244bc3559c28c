"""All methods train on a pretended CUDA device, and their steps keep budgets of syncs and copies.

The device is pretended by pretended_cuda.py, in a process of its own. Tests of a real one are in
test_cuda.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import planted_corpus
from gpu_cases import (
    CASES,
    COMMON,
    LEARNING,
    NUM_LABELS,
    OF_A_RANK,
    RESUMED,
    SAMPLED,
    SERVED,
    TRANSFORMERS,
)

from xmcray.planning import device_search

HERE = Path(__file__).parent
# The first test waits for all trainings: a minute, and several on a busy machine.
pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of each case, by name."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler compiles the stand-in for CUDA: run tests/install.sh as root")
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
    cases = {"trained": trained, "of a rank": OF_A_RANK, "served": SERVED, "resumed": RESUMED}
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
def test_a_step_keeps_its_budget(results: Any, name: str) -> None:
    case = CASES[name]
    for kind in ("syncs", "copies", "launches", "exchanged"):
        counts = results[name][kind]
        assert sum(counts.values()) <= getattr(case, kind), (kind, counts)


@pytest.mark.parametrize("name", LEARNING)
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


@pytest.mark.parametrize("name", OF_A_RANK)
def test_a_step_of_one_rank_takes_the_planned_memory(results: Any, name: str) -> None:
    rank = results[name]
    assert "error" not in rank, rank["error"]
    assert rank["peak_bytes"] == pytest.approx(rank["planned_bytes"], rel=0.15)


@pytest.mark.parametrize("method", SAMPLED)
def test_a_step_on_some_labels_costs_the_same_with_more_labels(results: Any, method: str) -> None:
    few = results[f"{method}, few labels"]
    many = results[f"{method}, many labels"]
    for kind in ("launches", "syncs", "copies"):
        assert many[kind] == few[kind]
    # Arrays of the host take the same, to less than a byte for each label of the rank.
    _, _, num_few, _ = OF_A_RANK[f"{method}, few labels"]
    _, _, num_many, ranks = OF_A_RANK[f"{method}, many labels"]
    assert many["array_bytes"] - few["array_bytes"] < (num_many - num_few) / ranks


def test_a_step_on_all_labels_waits_and_copies_as_often_with_more_labels(results: Any) -> None:
    few = results["renee, few labels"]
    many = results["renee, many labels"]
    assert many["launches"] > few["launches"], "labels are scored in chunks"
    for kind in ("syncs", "copies"):
        assert many[kind] == few[kind]


def test_a_mixture_of_devices_is_refused(results: Any) -> None:
    assert "MixedDevicesError" in results["mixture"]["error"]
