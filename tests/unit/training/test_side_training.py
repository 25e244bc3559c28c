"""Training with side vectors: what they are worth, bundles and answers, kill and resume."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from corpora import corpus_of
from loops import trained
from planted import write_planted, write_side_vectors
from served import served
from torch import Tensor

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.retrieval.answers import FoundLabel
from xmcray.retrieval.batch_predict import QueryChunk, answer_chunk, read_chunks
from xmcray.retrieval.encoder_export import export_encoder
from xmcray.retrieval.retriever import Retriever
from xmcray.training.launch import train
from xmcray.training.outcome import bundle_of, measure_bundle
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

WIDTH = 16
SETTINGS = [
    "encoder.dim=16",
    "encoder.residual=false",
    "optim.lr=0.02",
    "optim.batch_size=50",
    "optim.epochs=6",
    "negatives.hard=0",
    "cluster.workers=0",
    "cluster.device=cpu",
    "data.validation=0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Texts say little here, because most of their words belong to no label."""
    folder = tmp_path_factory.mktemp("sided")
    write_planted(folder / "raw", 300, 30, noise_words=30, filtered=0, only_in_test=0)
    write_side_vectors(folder / "raw", WIDTH, noise=0.3)
    return corpus_of(folder / "raw", folder / "corpus", vocab_size=500)


def bundle(corpus: Corpus, folder: Path, side: str) -> str:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, f"encoder.side={side}"])
    return bundle_of(train(corpus.path, folder, config), corpus)


@pytest.fixture(scope="module")
def mixed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    return bundle(corpus, tmp_path_factory.mktemp("mix") / "run", "mix")


@pytest.fixture(scope="module")
def plain(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    return bundle(corpus, tmp_path_factory.mktemp("ignore") / "run", "ignore")


def test_planted_vectors_are_worth_five_points(corpus: Corpus, mixed: str, plain: str) -> None:
    precision = {}
    for name, path in (("mix", mixed), ("ignore", plain)):
        evaluation = measure_bundle(Retriever.load(path), corpus, "test")
        precision[name] = evaluation.metrics["P@1"]
    assert precision["mix"] >= precision["ignore"] + 0.05


def test_vectors_of_noise_change_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_planted(tmp_path / "raw", 300, 30, filtered=0, only_in_test=0)
    write_side_vectors(tmp_path / "raw", WIDTH, planted=False)
    corpus = corpus_of(tmp_path / "raw", tmp_path / "corpus", vocab_size=500)
    queries = corpus.split("test").tokens(np.arange(8))
    scores = {}
    for side in ("mix", "ignore"):
        retriever = Retriever.load(bundle(corpus, tmp_path / side, side))
        scores[side] = retriever.top_labels(queries, 3).scores
    assert np.array_equal(scores["mix"], scores["ignore"])
    assert "they are left out, as with encoder.side=ignore" in caplog.text


def test_a_run_does_not_go_on_where_its_side_vectors_have_become_noise(
    corpus: Corpus, mixed: str, tmp_path: Path
) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(corpus.path.parent / "raw", raw)
    write_side_vectors(raw, WIDTH, planted=False)
    noise = corpus_of(raw, tmp_path / "noise", tokenizer=corpus.tokenizer())
    source = Run.open(Path(mixed).parent)
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, "encoder.side=mix"])
    message = f"{noise.path} has side vectors that say nothing about its labels, and {source.path} "
    with pytest.raises(ConfigError, match=re.escape(message)):
        train(noise.path, tmp_path / "run", config, source=source)
    # The other way round, vectors are mixed in from the first step on.
    first = train(noise.path, tmp_path / "first", config)
    assert train(corpus.path, tmp_path / "second", config, source=first).result() is not None


def test_callers_get_the_answers_of_the_corpus(corpus: Corpus, mixed: str) -> None:
    retriever = Retriever.load(mixed)
    test = corpus.split("test")
    rows = np.arange(8)
    vectors = test.side_vectors(rows)
    texts = test.texts(rows)
    of_corpus = retriever.top_labels(test.tokens(rows), 3).ids.tolist()
    assert label_ids(retriever.search(texts, 3, vectors=vectors)) == of_corpus
    of_texts = label_ids(retriever.search(texts, 3))
    assert of_texts != of_corpus
    zeros = np.zeros((8, WIDTH), np.float32)
    assert label_ids(retriever.search(texts, 3, vectors=zeros)) == of_texts


def test_predict_reads_vectors_of_queries(corpus: Corpus, mixed: str, tmp_path: Path) -> None:
    retriever = Retriever.load(mixed)
    test = corpus.split("test")
    rows = np.arange(8)
    vectors: list[list[float] | None] = test.side_vectors(rows).tolist()  # type: ignore[union-attr]
    vectors[3] = None
    columns = {"text": test.texts(rows), "vector": vectors}
    pq.write_table(pa.table(columns), tmp_path / "queries.parquet")
    chunks = read_chunks([tmp_path / "queries.parquet"], 100, vectors=True)
    chunk = next(chunks)
    assert isinstance(chunk, QueryChunk)
    expected = retriever.top_labels(test.tokens(rows), 3).ids.tolist()
    (expected[3],) = retriever.top_labels(test.texts(rows[3:4]), 3).ids.tolist()
    assert answer_chunk(retriever, chunk, 3)["label_id"].to_pylist() == expected
    chunk.vectors[5] = np.ones(2, np.float32)
    with pytest.raises(DataError, match="'5' has a vector of 2 numbers, expected 16"):
        answer_chunk(retriever, chunk, 3)


def test_vectors_that_a_bundle_cannot_use_are_refused(
    mixed: str, plain: str, tmp_path: Path
) -> None:
    vectors = np.zeros((1, WIDTH), np.float32)
    with pytest.raises(ConfigError, match="uses no side vectors"):
        Retriever.load(plain).search(["w1x1"], 3, vectors=vectors)
    with pytest.raises(ConfigError, match=r"found side vectors \[1, 15\], expected \[1, 16\]"):
        Retriever.load(mixed).search(["w1x1"], 3, vectors=vectors[:, 1:])
    with pytest.raises(ConfigError, match="sentence-transformers cannot"):
        export_encoder(mixed, tmp_path / "out")


async def test_a_server_takes_vectors_of_queries(
    corpus: Corpus, mixed: str, tmp_path: Path
) -> None:
    test = corpus.split("test")
    rows = np.arange(4)
    texts = test.texts(rows)
    vectors = test.side_vectors(rows)
    assert vectors is not None
    retriever = Retriever.load(mixed)

    async with served(tmp_path, {"a": Path(mixed)}) as server:
        fields = {"k": 3, "fields": ["label_id"]}
        (model,) = (await server.ask("/v1/models")).json()["models"]
        assert model["side_width"] == WIDTH
        # Requests with and without vectors are one batch.
        sided, plain = await asyncio.gather(
            server.search(texts, vectors=vectors.tolist(), **fields),
            server.search(texts, **fields),
        )
        assert served_ids(sided) == label_ids(retriever.search(texts, 3, vectors=vectors))
        assert served_ids(plain) == label_ids(retriever.search(texts, 3))
        for wrong in ([[0.0] * WIDTH], [[0.0]] * 4, [[0.0], *vectors[1:].tolist()]):
            answer = await server.ask("/v1/search", {"texts": texts, "vectors": wrong})
            assert answer.status_code == 422
            assert "side vectors" in answer.json()["detail"]


def served_ids(body: dict[str, Any]) -> list[list[int]]:
    return [[answer["label_id"] for answer in result["answers"]] for result in body["results"]]


def label_ids(answers: list[list[FoundLabel]]) -> list[list[int]]:
    return [[answer.label_id for answer in row] for row in answers]


def test_a_killed_run_goes_on_with_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, "encoder.side=mix"])

    def train_to(folder: Path, step: int) -> dict[str, Tensor]:
        stepper = trained(folder, corpus, config, step).stepper
        return {**stepper.encoder.state_dict(), **stepper.optimizer.tensors()}

    whole = train_to(tmp_path / "whole", 6)
    train_to(tmp_path / "killed", 3)
    resumed = train_to(tmp_path / "killed", 6)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
    assert whole["mixer.projection.weight"].abs().max() > 0
