"""RAE-XMC: which columns a query meets, and a finished run that answers with its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shell import run_command

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.methods import base
from xmcray.nn.encoder import load_encoder
from xmcray.nn.heads import FusionConfig, load_head
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.export import last_checkpoint
from xmcray.training.launch import train
from xmcray.training.loop import build
from xmcray.training.memory import open_encoder
from xmcray.training.run import Run, RunConfig
from xmcray.types import Ragged, Shortlist

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "optim.epochs=4",
    "cluster.workers=0",
    "negatives.hard=5",
]
SETTINGS += ["cluster.threads_per_process=1", "negatives.start_epoch=2", "memory.keys=20"]


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        corpus.path, tmp_path_factory.mktemp("run") / "r", RunConfig.resolve("rae", {}, SETTINGS)
    )


def loss_by_loops(
    setup: Any, batch: Any, drawn: Any, pool: set[int], query_negatives: bool
) -> float:
    """Eq. 10 as it is written, over vectors of length 1."""
    method, data = setup.method, setup.data
    with torch.no_grad():
        query_BD = method.head(method.context.encode_without_graph(batch.tokens)).double().numpy()
        label_LD = method.answer_rows().double().numpy()
    total = 0.0
    for i in range(len(query_BD)):
        positives = set(batch.positives[i].tolist())
        rivals = [
            query_BD[i] @ label_LD[p] for p in pool - positives - set(batch.excluded[i].tolist())
        ]
        others = [
            j for j in range(len(query_BD)) if not positives & set(batch.positives[j].tolist())
        ]
        rivals += [query_BD[i] @ query_BD[j] for j in others if query_negatives]
        score = query_BD[i] @ label_LD[drawn[i]]
        total += np.log(1 + np.exp((np.array(rivals) - score) / method.config.temperature).sum())
    assert len(label_LD) == data.num_labels
    return total


@pytest.mark.parametrize("query_negatives", [True, False])
def test_the_loss_of_a_batch_equals_loops(
    corpus: Corpus, query_negatives: bool, monkeypatch: Any
) -> None:
    config = RunConfig.resolve("rae", {}, [*SETTINGS, f"method.query_negatives={query_negatives}"])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    setup.stepper.encoder.eval()
    batch = setup.sampler.batch(2 * setup.sampler.steps_per_epoch, 0, 1)
    hard = np.full((setup.data.num_train, 6), -1, np.int32)
    rng = np.random.default_rng(0)
    for row, positives in zip(
        batch.query_ids, (batch.positives[i] for i in range(32)), strict=True
    ):
        hard[row, :4] = rng.permutation(np.setdiff1d(np.arange(23), positives))[:4]
    lists: list[Ragged] = []

    draw = base.draw_from_rows
    monkeypatch.setattr(base, "draw_from_rows", lambda *a: lists.append(draw(*a)) or lists[-1])
    output = setup.method.loss(batch, Shortlist(0, 0, hard))
    drawn, negatives = lists
    assert drawn.lengths.tolist() == [1] * 32
    assert negatives.lengths.tolist() == [2] * 32
    pool = set(drawn.values.tolist()) | set(negatives.values.tolist())
    expected = loss_by_loops(setup, batch, drawn.values, pool, query_negatives)
    assert output.total.item() == pytest.approx(expected, rel=1e-5)
    assert output.divisor == 32


def test_a_batch_of_one_has_nothing_to_compete_with(corpus: Corpus) -> None:
    config = RunConfig.resolve("rae", {}, [*SETTINGS, "optim.batch_size=1", "negatives.hard=0"])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    output = setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    assert float(output.total) == 0
    assert all(p.isfinite().all() for p in setup.stepper.encoder.parameters())


def test_a_finished_run_answers_with_its_memory(
    run: Run, corpus: Corpus, tmp_path: Path, capsys: Any
) -> None:
    assert run_command(f"export {run.path} --out {tmp_path}/b") == 0
    retriever = Retriever.load(tmp_path / "b", threads=1)
    assert retriever.memory is not None
    assert retriever.memory.config == MemoryConfig(keys=20)
    last = last_checkpoint(run)
    encode = QueryEncoder(
        load_encoder(last.path / "encoder").eval(),
        load_head(tmp_path / "b" / "head"),
        corpus.tokenizer(),
        normalised=True,
    ).encode
    tokens = corpus.split("test").tokens(np.arange(9))
    np.testing.assert_allclose(retriever.encode(tokens), encode(tokens), atol=1e-6)
    remembered = corpus.split("train").tokens(np.flatnonzero(corpus.split("train").num_positives()))
    found = np.concatenate([index.vectors.numpy() for index in retriever.memory.rows.indexes])
    np.testing.assert_allclose(found, encode(remembered), atol=1e-6)
    capsys.readouterr()
    assert run_command(f"search {tmp_path}/b w3x0 -k 1 --explain --json") == 0
    assert json.loads(capsys.readouterr().out)[0]["answers"][0]["score"] > 0


def test_a_memory_of_a_run_has_the_encoder_and_head_of_the_run(run: Run, corpus: Corpus) -> None:
    encoder, head = open_encoder(str(run.path), corpus)
    assert head.kind == "normalised"
    state = load_encoder(last_checkpoint(run).path / "encoder").state_dict()
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())


def test_settings_of_the_memory_are_checked_before_the_training() -> None:
    with pytest.raises(ConfigError, match=r"memory.weight is 2"):
        RunConfig.resolve("rae", {}, ["memory.weight=2"])
    with pytest.raises(ConfigError, match=r"method.hard_per_query is 0"):
        RunConfig.resolve("rae", {}, ["method.hard_per_query=0"])


def test_sections_of_answers_have_one_name_everywhere() -> None:
    assert RunConfig.resolve("rae", {}, ["memory.weight=0.3"]).memory == MemoryConfig(weight=0.3)
    fused = RunConfig.resolve("unidec", {}, ["fusion.text_weight=0.3"])
    assert fused.fusion == FusionConfig(text_weight=0.3)
    assert not {"memory", "fusion"} & RunConfig.resolve("astra", {}).to_dict().keys()
    for method, setting, message in (
        ("rae", "method.memory.weight=0.3", "'method.memory' is now called 'memory'; rename it"),
        ("unidec", "method.text_share=0.3", "is now called 'fusion.text_weight'; rename it"),
        ("unidec", "fusion.text=0.3", "is now called 'fusion.text_weight'; rename it"),
        ("astra", "memory.weight=0.3", r"astra has no settings memory\.\*; leave them out"),
        ("rae", "fusion.text_weight=0.3", r"rae has no settings fusion\.\*; leave them out"),
        ("astra", "encoder.separate_labels=true", "astra has a classifier row for each label"),
        ("rae", "memory.weigth=0.3", "did you mean 'memory.weight'"),
    ):
        with pytest.raises(ConfigError, match=message):
            RunConfig.resolve(method, {}, [setting])
