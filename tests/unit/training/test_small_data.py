"""Settings that ask for more than a small corpus has, for every method: clipped with a warning, never a NaN."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of
from shell import Shell

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.methods.astra import Astra
from xmcray.methods.one_vs_all import OneVsAll
from xmcray.methods.registry import method_entry, method_names
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import clipped, train
from xmcray.training.loop import build
from xmcray.training.outcome import finish
from xmcray.training.records import read_records
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "encoder.dim=8",
    "cluster.workers=0",
    "cluster.threads_per_process=1",
    "optim.epochs=3",
    "log.every=1",
]
SETTINGS += [
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.hard=50",
    "negatives.cluster_size=40",
]
WORDS = ("apple", "bread", "candle", "door", "engine")


def prepared(folder: Path, labels: list[str], filters: str = "") -> Corpus:
    """Thirteen queries, one of them empty, on some labels; filter pairs as "query label" lines."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    texts = [f"{WORDS[i % 5]} {WORDS[i * 2 % 5]}" if i else "" for i in range(13)]
    rows = [
        {"uid": str(i), "text": text, "labels": [i % len(labels)]} for i, text in enumerate(texts)
    ]
    (raw / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (raw / "labels.jsonl").write_text(
        "\n".join(json.dumps({"uid": f"l{i}", "text": t}) for i, t in enumerate(labels))
    )
    (raw / "filter_labels_train.txt").write_text(filters)
    return corpus_of(raw, folder / "corpus", vocab_size=200)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    """Three labels, one without text, and a query whose only label is itself; and one label that has every query."""
    folder = tmp_path_factory.mktemp("small")
    three = prepared(folder / "three", ["apple bread", "", "door"], "3 0\n")
    return {"three": three, "one": prepared(folder / "one", ["apple"])}


def test_a_test_split_without_a_positive_is_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(tmp_path, ["apple bread", "door"])
    row = {"uid": "only", "text": "apple", "labels": [0]}
    (tmp_path / "raw" / "test.jsonl").write_text(json.dumps(row))
    (tmp_path / "raw" / "filter_labels_test.txt").write_text("0 0\n")
    corpus = corpus_of(tmp_path / "raw", tmp_path / "tested", vocab_size=200)
    run = train(corpus.path, tmp_path / "run", RunConfig.resolve("dexml", {}, SETTINGS))

    assert finish(run, corpus) is None

    assert "the test split is not measured: none of 1 queries has a positive left" in caplog.text
    assert (run.path / "report.html").is_file()
    assert not (run.path / "metrics.json").exists()


@pytest.mark.parametrize("name", method_names())
@pytest.mark.parametrize(("data", "batch_size"), [("three", 1), ("three", 11), ("one", 4)])
def test_every_method_trains_on_few_labels(
    name: str,
    data: str,
    batch_size: int,
    corpora: dict[str, Corpus],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = corpora[data]
    config = RunConfig.resolve(name, {}, [*SETTINGS, f"optim.batch_size={batch_size}"])
    with caplog.at_level(logging.WARNING):
        run = train(corpus.path, tmp_path / "run", config)
    warning = f"negatives.hard is 50, clipped to the number of labels, {corpus.card.num_labels}"
    assert (warning in caplog.messages) == (config.negatives.hard == 50)
    assert (
        "negatives.cluster_size is 40, clipped to the number of training queries, 13"
        in caplog.messages
    )
    warning = f"1 of 3 labels have no text, by which {name} would find them"
    expected = method_entry(name).uses_label_texts and data == "three"
    assert (warning in caplog.messages) == expected
    losses = [
        record["loss"] for record in read_records(run.path / "metrics.jsonl") if "loss" in record
    ]
    assert np.isfinite(losses).all()
    export_run(run, tmp_path / "bundle")
    retriever = Retriever.load(tmp_path / "bundle")
    for answers in retriever.search(["apple", ""], corpus.card.num_labels):
        assert {answer.uid for answer in answers} == set(retriever.labels.ids_by_uid())
        assert np.isfinite([answer.score for answer in answers]).all()


@pytest.mark.parametrize(
    "name", [name for name in method_names() if method_entry(name).uses_label_texts]
)
def test_texts_are_needed_where_labels_are_made_of_them(name: str, tmp_path: Path) -> None:
    corpus = prepared(tmp_path, ["", ""])
    with pytest.raises(
        DataError, match=f"has no label text, expected some for {name}; train astra instead"
    ):
        train(corpus.path, tmp_path / "run", RunConfig.resolve(name, {}, SETTINGS))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["negatives.hard=0", "negatives.uniform=0"],
            "negatives.uniform and negatives.hard are 0: rows would only meet positives; raise one,"
            " or set method.exact=true",
        ),
        (
            ["negatives.uniform=0", "optim.epochs=5"],
            "negatives.uniform is 0, and hard negatives begin after 5 epochs, of which the run has 5:"
            " rows would only meet positives; raise negatives.uniform, lower negatives.start_epoch,"
            " or set method.exact=true",
        ),
        (["negatives.uniform=0", "optim.stop_epoch=2"], "of which the run has 2: rows would only"),
    ],
)
def test_rows_need_negatives(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.resolve("astra", {}, settings)
    assert message in str(caught.value)
    RunConfig.resolve("astra", {}, [*settings, "method.exact=true"])
    RunConfig.resolve("dexml", {}, settings)


@pytest.mark.parametrize(
    ("name", "settings", "num_hard"),
    [
        ("astra", [], 50),
        ("astra", ["method.exact=true"], 0),
        ("renee", [], 0),
        ("dexml", ["method.columns=hard"], 50),
        ("dexml", ["method.columns=in_batch"], 0),
        ("unidec", ["method.hard_per_query=1"], 50),
        ("unidec", ["method.hard_per_query=0"], 0),
    ],
)
def test_no_index_is_built_for_a_loss_without_hard_negatives(
    name: str, settings: list[str], num_hard: int
) -> None:
    config = RunConfig.resolve(name, {}, ["negatives.hard=50", *settings])
    assert config.negatives.hard == num_hard


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("flat", r"negatives.index is 'flat', expected a FAISS factory string \(could not parse"),
        ("IVF4,Flat", "negatives.index is 'IVF4,Flat' with 4 lists, found 3 labels in an index"),
    ],
)
def test_an_index_that_cannot_be_built_is_refused_at_the_start(
    corpora: dict[str, Corpus], tmp_path: Path, index: str, message: str
) -> None:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, f"negatives.index={index}"])
    with pytest.raises(ConfigError, match=message):
        train(corpora["three"].path, tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_something_is_held_out_where_it_decides(
    corpora: dict[str, Corpus], tmp_path: Path, shell: Shell
) -> None:
    data = corpora["three"].path
    options = "--set data.validation=0.01"
    for command in ("train dexml --refit", "tune dexml"):
        message = shell.error(f"{command} --data {data} --out {tmp_path}/out {options}")
        assert message == (
            "data.validation=0.01 and data.validation_from=0 hold out no query with a positive, of"
            f" {corpora['three'].card.num_train} training queries; raise the first or lower the"
            " second"
        )
        assert not (tmp_path / "out").exists()


def test_a_training_that_holds_nothing_out_says_so(
    corpora: dict[str, Corpus], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for share, is_said in ((0.01, True), (0.0, False), (0.2, False)):
        caplog.clear()
        settings = [*SETTINGS, f"data.validation={share}"]
        config = RunConfig.resolve("astra", {}, settings)
        train(corpora["three"].path, tmp_path / f"{share}", config)
        assert any("holds out no query" in message for message in caplog.messages) == is_said


def test_rows_in_bfloat16_are_refused_in_float64(
    corpora: dict[str, Corpus], tmp_path: Path
) -> None:
    settings = ["method.classifier.storage=bfloat16", "optim.precision=float64"]
    for name in ("astra", "renee", "unidec"):
        config = RunConfig.resolve(name, {}, [*SETTINGS, *settings])
        with pytest.raises(ConfigError, match=r"storage is bfloat16, but optim\.precision is"):
            train(corpora["one"].path, tmp_path / "run", config)
        assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_is_said_once(
    corpora: dict[str, Corpus],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is added to every score.
    monkeypatch.setattr(OneVsAll, "prior", lambda *_: math.nan)
    settings = [*SETTINGS, "log.every=1"]
    train(corpora["one"].path, tmp_path / "run", RunConfig.resolve("astra", {}, settings))
    messages = [message for message in caplog.messages if "is nan" in message]
    assert len(messages) == 1
    assert messages[0].startswith("the loss of the steps up to 1 is nan, so weights may be")


def test_a_warm_up_that_is_longer_than_the_run_is_said(
    corpora: dict[str, Corpus], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def messages(warmup_steps: int, *more: str) -> list[str]:
        caplog.clear()
        settings = [*SETTINGS, "optim.batch_size=20", f"optim.warmup_steps={warmup_steps}", *more]
        config = RunConfig.resolve("astra", {}, settings)
        train(corpora["one"].path, tmp_path / f"{warmup_steps}{more}", config)
        return [message for message in caplog.messages if "warmup_steps" in message]

    # Three epochs of one batch.
    assert messages(3) == []
    assert messages(12) == [
        "optim.warmup_steps is 12, but the run has 3 steps, so the learning rate rises to 25 % of"
        " its peak; lower it"
    ]
    # Of the schedule's three steps a refit may take fewer.
    assert messages(2, "optim.stop_epoch=1") == [
        "optim.warmup_steps is 2, but the run has 1 steps, so the learning rate rises to 50 % of"
        " its peak; lower it"
    ]


def test_what_is_clipped_is_said() -> None:
    def lines(method: str, *settings: str) -> list[str]:
        return list(clipped(RunConfig.resolve(method, {}, list(settings)), 100, 20))

    assert lines("astra", "negatives.hard=20") == lines("dexml") == lines("renee") == []
    assert lines("dexml", "method.top_k=21") == [
        "method.top_k is 21, clipped to the number of labels, 20"
    ]
    eta = ["method.hard_per_query=9", "negatives.hard=7"]
    assert lines("unidec", *eta) == ["method.hard_per_query is 9, clipped to negatives.hard, 7"]
    some = ["negatives.uniform=0", "optim.epochs=6"]
    assert lines("astra", "negatives.hard=20", *some) == [
        "5 of 6 epochs have no negatives: rows only meet positives; raise negatives.uniform"
    ]
    unused = [
        "hard negatives and clusters begin after 5 epochs, of which the run has 4; lower"
        " negatives.start_epoch to use them"
    ]
    assert lines("unidec", "negatives.hard=12", "optim.epochs=4") == unused
    assert lines("dexml", "negatives.cluster_size=9", "optim.epochs=4") == unused
    assert lines("dexml", "negatives.cluster_size=9", "optim.epochs=6") == []


def test_a_curriculum_grows_to_the_labels_there_are(corpora: dict[str, Corpus]) -> None:
    config = RunConfig.resolve("astra", {}, ["negatives.hard=40", "negatives.curriculum=4"])
    data = TrainingData(corpora["one"], config.data)
    setup = build(config, data, torch.device("cpu"))
    last_epoch = config.negatives.start_epoch + 3
    assert isinstance(setup.method, Astra)
    assert setup.method.context.negatives.hard_at(last_epoch) == data.num_labels < 40


def test_a_validation_split_without_a_query_is_said() -> None:
    def lines(num_train: int, *settings: str) -> list[str]:
        return list(clipped(RunConfig.resolve("astra", {}, list(settings)), num_train, 2000))

    none = "of {} training queries is none, so no epoch is validated; raise it"
    assert lines(10) == [f"data.validation=0.05 {none.format(10)}"]
    assert lines(11) == lines(10, "data.validation=0") == lines(10, "data.validation=0.1") == []
    assert lines(20, "data.validation_from=15") == [f"data.validation=0.05 {none.format(5)}"]


def test_a_batch_of_one_without_negatives_is_said() -> None:
    def lines(method: str, *settings: str) -> list[str]:
        values = ["optim.batch_size=1", "optim.epochs=7", *settings]
        return list(clipped(RunConfig.resolve(method, {}, values), 100, 200))

    for method, num_epochs in (("prime", 7), ("rae", 5), ("unidec", 5)):
        assert lines(method) == [
            f"{num_epochs} of 7 epochs have no negatives: optim.batch_size is 1, and {method} takes"
            " them from the other queries of a batch; raise it"
        ]
        assert lines(method, "optim.batch_size=2") == []
    assert len(lines("dexml", "method.columns=in_batch")) == 1
    assert lines("dexml") == lines("dexml", "method.columns=cache") == lines("astra") == []
