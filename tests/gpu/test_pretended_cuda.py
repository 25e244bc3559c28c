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
        launches: Kernels; ranks differ a little.
        settings: After those of all cases.
        ranks: How many train together.
        exchanged: Bytes that collectives of a rank may get.
        corpus: Name of the corpus.
    """

    method: str
    syncs: int
    copies: int
    launches: int
    settings: tuple[str, ...] = ()
    ranks: int = 1
    exchanged: int = 0
    corpus: str = "corpus"


CASES = {
    "astra": Case("astra", 1, 4, 130),
    "astra, all labels": Case("astra", 1, 4, 100, ("method.exact=true",)),
    "astra, weight decay": Case(
        "astra",
        1,
        4,
        150,
        ("method.classifier.weight_decay=0.01", "method.classifier.storage=bfloat16"),
    ),
    "astra, nearest texts": Case(
        "astra",
        1,
        5,
        130,
        ("method.index_on=labels", "method.max_positives=1", "method.init=texts"),
    ),
    "astra, adam": Case("astra", 1, 3, 140, ("method.classifier.kind=adam", "method.dropout=0")),
    "astra, adagrad": Case("astra", 1, 4, 130, ("method.classifier.kind=adagrad",)),
    # Each prefix asks whether it reads the rows that the first one has read, and moves its inputs.
    "astra, prefixes": Case("astra", 3, 10, 250, ("encoder.matryoshka=[4,8]",)),
    "renee": Case("renee", 1, 4, 100),
    # Five chunks of labels instead of one. Decay makes each step bring all rows up to date.
    "renee, chunks": Case(
        "renee", 1, 4, 160, ("method.chunk_labels=8", "method.classifier.weight_decay=0.01")
    ),
    "renee, centroids": Case("renee", 1, 4, 100, ("method.init=centroids",)),
    "dexml": Case("dexml", 1, 4, 160),
    "dexml, soft top k": Case("dexml", 1, 4, 720, ("method.loss=soft_top_k",)),
    "dexml, softmax": Case(
        "dexml", 1, 6, 170, ("method.loss=softmax", "method.num_positives=1", "method.dropout=0.2")
    ),
    "dexml, bce": Case("dexml", 1, 3, 130, ("method.loss=bce",)),
    "dexml, hard": Case("dexml", 1, 4, 160, ("method.columns=hard", "negatives.hard=5")),
    "dexml, in batch": Case(
        "dexml", 1, 4, 130, ("method.columns=in_batch", "method.normalised=false")
    ),
    # Mining sends the labels with the largest gradients to the host, and encodes twice.
    "dexml, cache": Case("dexml", 3, 11, 270, ("method.columns=cache", "method.cache_hard=8")),
    # Nine chunks of texts are encoded twice, and each counts the distinct rows of its tokens.
    "dexml, micro-batches": Case("dexml", 9, 21, 540, ("optim.micro_batch=8",)),
    # Two losses in two directions, and dropout of three kinds of vectors.
    "unidec": Case("unidec", 1, 15, 370),
    "unidec, texts": Case("unidec", 1, 9, 240, ("method.balance=1",)),
    "unidec, rows": Case(
        "unidec",
        1,
        9,
        220,
        ("method.balance=0", "method.init=random", "method.classifier.kind=sgd"),
    ),
    "unidec, sums": Case(
        "unidec",
        1,
        15,
        370,
        (
            "method.reduction=sum_per_query",
            "method.normaliser=pal",
            "method.classifier_positives=1",
        ),
    ),
    # The regulariser takes a mean over terms whose number depends on the scores.
    "prime": Case("prime", 4, 8, 440),
    "prime, means": Case(
        "prime",
        4,
        8,
        390,
        (
            "method.reduction=mean",
            "method.num_negatives=0",
            "method.regulariser_hinge=false",
            "method.positives=uniform",
        ),
    ),
    "prime, hard": Case(
        "prime",
        4,
        8,
        440,
        ("negatives.hard=5", "method.margin_inverted=true", "method.weights_detached=true"),
    ),
    "prime, clusters": Case("prime", 4, 8, 440, ("negatives.cluster_size=4",)),
    "rae": Case("rae", 1, 4, 160),
    "rae, labels alone": Case("rae", 1, 4, 160, ("method.query_negatives=false",)),
    # Ranks also count the rows of their token tables, and those that all of them touch.
    "astra, ranks": Case("astra", 3, 4, 160, ranks=3, exchanged=32_000),
    "dexml, ranks": Case("dexml", 3, 4, 200, ranks=3, exchanged=64_000),
    "renee, ranks": Case("renee", 3, 4, 130, ranks=3, exchanged=32_000),
    "unidec, ranks": Case("unidec", 3, 15, 420, ranks=3, exchanged=52_000),
    "rae, ranks": Case("rae", 3, 4, 200, ranks=3, exchanged=44_000),
    "prime, ranks": Case("prime", 9, 8, 520, ranks=3, exchanged=200_000),
    # All rows of a transformer's token table are updated, so nothing is counted.
    "transformer": Case("astra", 0, 5, 340, corpus="model-corpus"),
    "dexml, transformer": Case("dexml", 0, 5, 380, corpus="model-corpus"),
    "transformer, ranks": Case(
        "astra", 0, 5, 360, ranks=3, exchanged=64_000, corpus="model-corpus"
    ),
}
TRANSFORMERS = [name for name, case in CASES.items() if case.corpus == "model-corpus"]
SERVED = [
    "astra",
    "renee",
    "dexml",
    "unidec",
    "prime",
    "rae",
    "transformer",
    "dexml, transformer",
    "astra, ranks",
]
RESUMED = ["astra", "renee", "dexml, cache", "unidec", "prime", "rae", "transformer"]
SMALL_BATCH = ("optim.batch_size=256", "data.augment_with_labels=false", "encoder.dim=32")
HARD = (*SMALL_BATCH, "negatives.hard=10")
RANK_OF_EIGHT = (
    "optim.batch_size=1024",
    "negatives.hard=10",
    "negatives.uniform=1000",
    "data.augment_with_labels=false",
    "method.init=zeros",
)
# Method, settings, labels and ranks of a step. Ranks other than the first do not exist: what the first
# one sends comes back from each. So methods that exchange labels (PRIME, the cache of DEXML) have one.
OF_A_RANK = {
    # As many labels as public data sets have, and a hundred times more.
    "astra, few labels": ("astra", ("encoder.dim=64", *RANK_OF_EIGHT), 1_305_265, 8),
    "astra, many labels": ("astra", ("encoder.dim=2", *RANK_OF_EIGHT), 120_000_000, 8),
}
# Other methods that score some labels, with ten times more of them.
for method, ranks, settings in (
    ("dexml", 8, (*HARD, "method.columns=hard")),
    ("unidec", 8, HARD),
    ("prime", 1, (*HARD, "method.free_vectors=1024")),
    ("rae", 8, HARD),
):
    OF_A_RANK[f"{method}, few labels"] = (method, settings, 100_000, ranks)
    OF_A_RANK[f"{method}, many labels"] = (method, settings, 1_000_000, ranks)
SAMPLED = ["astra", "dexml", "unidec", "prime", "rae"]
# Methods that score all labels.
OF_A_RANK |= {
    "renee, few labels": ("renee", (*SMALL_BATCH, "method.init=zeros"), 20_000, 8),
    "renee, many labels": ("renee", (*SMALL_BATCH, "method.init=zeros"), 200_000, 8),
    "dexml, a rank": ("dexml", SMALL_BATCH, 8000, 8),
    "dexml, soft top k, a rank": ("dexml", (*SMALL_BATCH, "method.loss=soft_top_k"), 8000, 8),
    "dexml, softmax, a rank": ("dexml", (*SMALL_BATCH, "method.loss=softmax"), 8000, 8),
    "dexml, bce, a rank": ("dexml", (*SMALL_BATCH, "method.loss=bce"), 8000, 8),
    "dexml, cache, a rank": ("dexml", (*SMALL_BATCH, "method.columns=cache"), 8000, 1),
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
