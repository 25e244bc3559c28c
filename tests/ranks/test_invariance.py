"""Every method on 1-4 ranks: the same parameters; ASTRA whatever the optimiser of its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_corpus, planted_decoder
from ranks import on_ranks

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.parallel import collectives
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

COMMON = [
    "encoder.dim=12",
    "encoder.position_decay=2",
    "encoder.bigram_buckets=40",
    "optim.batch_size=33",  # neither the queries nor the labels nor 33 divide by 2, 3 or 4
    "optim.epochs=4",
    "optim.warmup_steps=3",
    "optim.lr=0.01",
    "negatives.hard=3",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.index=Flat",
    "data.validation=0.1",
    "log.every=1",
    "log.checkpoint_every=1000",  # at the end alone
]
ASTRA = [
    "method.init=texts",
    "method.dropout=0.5",
    "method.max_positives=2",
    "method.importance_weight=unbiased",
    "data.relevance=weight",
    "method.classifier.weight_decay=0.01",
    "negatives.uniform=9",
]
PRIME = [
    "method.feed_forward=16",
    "method.dropout=0.3",
    "optim.token_lr=0.03",
    "data.relevance=weight",
]
# name: method, steps, settings. An epoch has 3 steps, or 4 with label texts. Five are past the warmup
# and the first epoch; hard negatives and clusters take 12.
OTHERS = {
    "renee": (
        "renee",
        5,
        [
            "method.classifier.lr=3.0",
            "method.init=centroids",
            "negatives.hard=0",
            "encoder.side=mix",
            "data.relevance=weight",
        ],
    ),
    "dexml": ("dexml", 5, ["negatives.hard=0"]),
    "dexml, hard": (
        "dexml",
        12,
        [
            "method.columns=hard",
            "method.hard_per_query=2",
            "method.num_positives=1",
            "encoder.separate_labels=true",
            "encoder.side=mix",
        ],
    ),
    "dexml, softmax": (
        "dexml",
        5,
        [
            "negatives.hard=0",
            "method.loss=softmax",
            "method.num_positives=1",
            "data.relevance=sample",
        ],
    ),
    "dexml, soft top k": (
        "dexml",
        5,  # each has dozens of collectives
        ["negatives.hard=0", "method.loss=soft_top_k", "method.temperature=0.5"],
    ),
    "dexml, bce": ("dexml", 5, ["negatives.hard=0", "method.loss=bce", "method.columns=in_batch"]),
    "dexml, cache": (
        "dexml",
        5,
        [
            "negatives.hard=0",
            "method.columns=cache",
            "method.cache_hard=4",
            "method.num_positives=1",
            "method.dropout=0.3",
        ],
    ),
    "dexml, clusters": (
        "dexml",
        12,
        ["negatives.hard=0", "method.columns=in_batch", "negatives.cluster_size=4"],
    ),
    "prime": (
        "prime",
        5,
        ["negatives.hard=0", "method.num_negatives=4", "method.free_vectors=4", *PRIME],
    ),
    "prime, hard": (
        "prime",
        12,
        [
            "method.reduction=mean",
            "method.num_negatives=0",
            "method.num_positives=1",
            "encoder.separate_labels=true",
            *PRIME,
        ],
    ),
    "rae": (
        "rae",
        12,
        [
            "method.num_positives=2",
            "method.hard_per_query=2",
            "encoder.separate_labels=true",
            "data.relevance=weight",
        ],
    ),
    "unidec": (
        "unidec",
        12,
        [
            "method.num_positives=1",
            "method.hard_per_query=2",
            "method.init=random",
            "data.relevance=weight",
        ],
    ),
    "unidec, pos-clf": (
        "unidec",
        12,
        [
            "method.num_positives=1",
            "method.hard_per_query=2",
            "method.classifier_positives=1",
            "method.balance=0.3",
            "encoder.separate_labels=true",
        ],
    ),
    "supcon": (
        "unidec",
        5,
        ["method.balance=1", "method.num_positives=0", "negatives.hard=0", "method.dropout=0"],
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    return planted_corpus(folder, num_queries=101, num_labels=23, side_width=5, graded=True).path


def train_on_rank(
    corpus: Path, folder: Path, settings: list[str], method: str, steps: int
) -> tuple[list[float], dict[str, Any]]:
    config = RunConfig.resolve(method, {}, [*COMMON, *settings])
    opened = Corpus.open(corpus, verify=False)
    data = TrainingData(opened, config.data)
    run = Run(folder, "test", config, opened.origin, opened.sha256)
    setup = build(config, data, torch.device("cpu"))
    losses: list[float] = []
    step = setup.stepper.step

    def recording(*args: Any) -> Any:
        terms = step(*args)
        loss = (terms.total.detach() / terms.divisor).double()
        losses.append(float(collectives.sum_over_ranks(loss)))
        return terms

    setup.stepper.step = recording  # type: ignore[method-assign]
    refresher = ThreadRefresher(data, RefreshSpec(collectives.num_ranks(), config.negatives, 0))
    loop = Loop(run, setup, refresher)
    loop.last_step = steps
    loop.train()
    if config.negatives.refreshed:
        assert loop.feed.current is not None, (
            "hard negatives were never used: the comparison would show little"
        )
    if config.negatives.cluster_size:
        assert loop.feed.clusters is not None
    modules = setup.stepper.modules.items()
    shared = {
        f"{m}.{n}": p.detach().numpy()
        for m, module in modules
        for n, p in module.named_parameters()
    }
    return losses, {**shared, "rows": setup.method.answer_rows().detach().numpy()}


def trained(
    corpus: Path,
    folder: Path,
    num_ranks: int,
    settings: list[str],
    method: str = "astra",
    steps: int = 12,
) -> tuple[list[float], dict[str, Any]]:
    folder.mkdir(parents=True)
    common = ASTRA if method == "astra" else []
    results = on_ranks(
        train_on_rank, num_ranks, corpus, folder, [*common, *settings], method, steps
    )
    parameters = dict(results[0][1])
    parameters["rows"] = np.concatenate([r[1]["rows"] for r in results])
    for _, other in results[1:]:
        assert all(np.array_equal(parameters[n], other[n]) for n in parameters if n != "rows"), (
            "encoders differ"
        )
    return results[0][0], parameters


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_ranks_train_the_same_model(corpus: Path, tmp_path: Path, kind: str) -> None:
    lr = {"sgd": "3.0", "adagrad": "0.1", "adam": "0.01"}[kind]
    settings = [
        "optim.precision=float64",
        f"method.classifier.kind={kind}",
        f"method.classifier.lr={lr}",
    ]
    # The optimisers differ in what they keep of each row, so one of them meets all numbers of ranks.
    counts = (2, 3, 4) if kind == "adagrad" else (3,)
    check_ranks(corpus, tmp_path, settings, "astra", 12, counts)


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_train_the_same_model_with_every_method(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    method, steps, settings = OTHERS[name]
    settings = ["optim.precision=float64", *settings]
    # Three ranks divide neither labels nor queries. Losses are tested on one to four ranks.
    check_ranks(corpus, tmp_path, settings, method, steps, (3,))


def test_ranks_train_the_same_adapters_of_a_decoder(tmp_path: Path) -> None:
    corpus, name = planted_decoder(tmp_path)
    settings = [
        "optim.precision=float64",
        "optim.micro_batch=5",
        f"encoder.name={name}",
        "encoder.pooling=last_token",
        "encoder.lora_rank=2",
        "negatives.hard=0",
        "method.columns=cache",
        "method.cache_hard=4",
        "method.num_positives=1",
    ]
    check_ranks(corpus.path, tmp_path, settings, "dexml", 5, (3,))


def check_ranks(
    corpus: Path,
    folder: Path,
    settings: list[str],
    method: str,
    steps: int,
    counts: tuple[int, ...],
) -> None:
    losses, parameters = trained(corpus, folder / "1", 1, settings, method, steps)
    for num_ranks in counts:
        others, found = trained(corpus, folder / str(num_ranks), num_ranks, settings, method, steps)
        np.testing.assert_allclose(others, losses, rtol=1e-9)
        for name, value in parameters.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(
                found[name], value, rtol=1e-9, atol=1e-9 * scale, err_msg=name
            )


def test_float32_losses_agree(corpus: Path, tmp_path: Path) -> None:
    settings = ["method.classifier.kind=sgd", "method.classifier.lr=3.0"]
    one, _ = trained(corpus, tmp_path / "1", 1, settings)
    three, _ = trained(corpus, tmp_path / "3", 3, settings)
    np.testing.assert_allclose(three, one, rtol=1e-5)


@pytest.mark.parametrize("method", ["astra", "dexml"])
def test_micro_batches_change_nothing(corpus: Path, tmp_path: Path, method: str) -> None:
    rows = (
        ["method.classifier.kind=sgd", "method.classifier.lr=3.0"]
        if method == "astra"
        else ["negatives.hard=0"]
    )
    settings = ["optim.precision=float64", *rows]
    _, whole = trained(corpus, tmp_path / "whole", 2, settings, method)
    _, cut = trained(corpus, tmp_path / "cut", 2, [*settings, "optim.micro_batch=5"], method)
    for name, value in whole.items():
        np.testing.assert_allclose(cut[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def train_all_on_rank(
    corpus: Path, folder: Path, variants: dict[str, tuple[str, int, list[str]]]
) -> dict[str, Any]:
    trained = {}
    for name, (method, steps, settings) in variants.items():
        (folder / name).mkdir(exist_ok=True)
        trained[name] = train_on_rank(corpus, folder / name, settings, method, steps)
    return trained


def test_ranks_without_labels_and_without_queries(tmp_path: Path) -> None:
    """Two labels on three ranks, and batches of one query: whoever has nothing takes part in everything."""
    corpus = planted_corpus(
        tmp_path, num_queries=3, num_labels=2, side_width=5, only_in_test=0, graded=True
    ).path
    settings = [
        "optim.precision=float64",
        "optim.batch_size=1",
        "negatives.cluster_size=1",
        "data.validation=0",
    ]
    # Clusters and hard negatives begin at step 6, or at step 10 if label texts are queries, too: one
    # variant is enough for that, because all methods get their batches from the same sampler.
    variants = {"astra": ("astra", 12, [*ASTRA, *settings])}
    settings.append("data.augment_with_labels=false")
    for name, (method, _, own) in OTHERS.items():
        variants[name] = (method, 8, [*settings, *own])
    found = {}
    for num_ranks in (1, 3):
        (tmp_path / str(num_ranks)).mkdir()
        found[num_ranks] = on_ranks(
            train_all_on_rank, num_ranks, corpus, tmp_path / str(num_ranks), variants
        )
    for name in variants:
        losses, parameters = found[1][0][name]
        assert np.isfinite(losses).all(), name
        rows = np.concatenate([rank[name][1]["rows"] for rank in found[3]])
        np.testing.assert_allclose(
            found[3][0][name][0], losses, rtol=1e-9, atol=1e-12, err_msg=name
        )
        np.testing.assert_allclose(rows, parameters["rows"], rtol=1e-9, atol=1e-9, err_msg=name)
