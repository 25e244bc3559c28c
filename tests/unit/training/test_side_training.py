"""Training with side vectors: what they are worth, bundles and answers, kill and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of
from planted import write_planted, write_side_vectors
from torch import Tensor

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.retrieval.encoder_export import export_encoder
from xmcray.retrieval.retriever import Retriever
from xmcray.training.launch import train
from xmcray.training.loop import Loop, build
from xmcray.training.outcome import bundle_of, measure_bundle
from xmcray.training.run import Run, RunConfig

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


def test_planted_vectors_are_worth_five_points_from_training_to_answers(
    corpus: Corpus, tmp_path: Path
) -> None:
    mixed = Retriever.load(bundle(corpus, tmp_path / "mix", "mix"))
    plain = Retriever.load(bundle(corpus, tmp_path / "ignore", "ignore"))
    precision = {}
    for name, retriever in (("mix", mixed), ("ignore", plain)):
        precision[name] = measure_bundle(retriever, corpus, "test").metrics["P@1"]
    assert precision["mix"] >= precision["ignore"] + 0.05

    # A query of a caller is answered as the same query of the corpus.
    test = corpus.split("test")
    rows = np.arange(8)
    vectors = test.side_vectors(rows)
    texts = test.texts(rows)
    of_corpus = mixed.top_labels(test.tokens(rows), 3)
    answers = mixed.search(texts, 3, vectors=vectors)
    found_ids = [[answer.label_id for answer in row] for row in answers]
    assert found_ids == of_corpus.ids.tolist()
    without = [[answer.label_id for answer in row] for row in mixed.search(texts, 3)]
    zeros = np.zeros((8, WIDTH), np.float32)
    of_zeros = mixed.search(texts, 3, vectors=zeros)
    assert without == [[answer.label_id for answer in row] for row in of_zeros]
    assert without != found_ids

    with pytest.raises(ConfigError, match="uses no side vectors"):
        plain.search(texts, 3, vectors=vectors)
    with pytest.raises(ConfigError, match=r"found side vectors \[8, 15\], expected \[8, 16\]"):
        mixed.search(texts, 3, vectors=zeros[:, 1:])
    with pytest.raises(ConfigError, match="sentence-transformers cannot"):
        export_encoder(tmp_path / "mix" / "bundle", tmp_path / "out")


def test_a_killed_run_goes_on_with_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, "encoder.side=mix"])

    def train_to(folder: Path, step: int) -> dict[str, Tensor]:
        data = TrainingData(corpus, config.data)
        setup = build(config, data, torch.device("cpu"))
        folder.mkdir(exist_ok=True)
        run = Run(folder, "test", config, corpus.origin, corpus.sha256)
        loop = Loop(run, setup, ThreadRefresher(data, RefreshSpec(1, config.negatives, 0)))
        loop.last_step = step
        loop.train()
        return {**setup.stepper.encoder.state_dict(), **setup.stepper.optimizer.tensors()}

    whole = train_to(tmp_path / "whole", 6)
    train_to(tmp_path / "killed", 3)
    resumed = train_to(tmp_path / "killed", 6)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
    assert whole["mixer.projection.weight"].abs().max() > 0
