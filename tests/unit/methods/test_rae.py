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
from xmcray.training.loop import Setup, build
from xmcray.training.memory import open_encoder
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Ragged, Shortlist

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "optim.epochs=4",
    "cluster.workers=0",
    "cluster.threads_per_process=1",
    "negatives.hard=5",
    "negatives.start_epoch=2",
    "memory.keys=20",
]


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = RunConfig.resolve("rae", {}, SETTINGS)
    return train(corpus.path, tmp_path_factory.mktemp("run") / "r", config)


def built(corpus: Corpus, *settings: str) -> Setup:
    config = RunConfig.resolve("rae", {}, [*SETTINGS, *settings])
    return build(config, TrainingData(corpus, config.data), torch.device("cpu"))


def loss_by_loops(
    setup: Setup, batch: Batch, drawn: Ragged, pool: set[int], query_negatives: bool
) -> float:
    """Eq. 10 as it is written, over vectors of length 1.

    Args:
        setup: before the step.
        batch: the queries.
        drawn: positives of each query.
        pool: labels of the columns.
        query_negatives: whether queries compete too.
    """
    method: Any = setup.method
    with torch.no_grad():
        query_BD = method.head(method.context.encode_without_graph(batch.tokens)).double().numpy()
        label_LD = method.answer_rows().double().numpy()
    assert len(label_LD) == setup.data.num_labels
    positives_of = [set(batch.positives[i].tolist()) for i in range(len(query_BD))]
    total = 0.0
    for i, query_D in enumerate(query_BD):
        rival_labels = pool - positives_of[i] - set(batch.excluded[i].tolist())
        rivals = [label_LD[label] for label in rival_labels]
        if query_negatives:
            # Queries that share no positive with this one.
            is_rival = [positives_of[i].isdisjoint(positives) for positives in positives_of]
            rivals += list(query_BD[is_rival])
        rival_scores = np.array([query_D @ rival_D for rival_D in rivals])
        for positive in drawn[i]:
            score = query_D @ label_LD[positive]
            odds = np.exp((rival_scores - score) / method.config.temperature).sum()
            total += np.log(1 + odds)
    return total


def shortlist_of(setup: Setup, batch: Batch) -> Shortlist:
    """Four hard negatives for each query of a batch; two places are empty."""
    labels = np.full((setup.data.num_train, 6), -1, np.int32)
    generator = np.random.default_rng(0)
    for place, query_id in enumerate(batch.query_ids):
        negatives = np.setdiff1d(np.arange(23), batch.positives[place])
        labels[query_id, :4] = generator.permutation(negatives)[:4]
    return Shortlist(0, 0, labels)


@pytest.mark.parametrize("query_negatives", [True, False])
def test_the_loss_of_a_batch_equals_loops(
    corpus: Corpus, query_negatives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = built(corpus, f"method.query_negatives={query_negatives}")
    setup.stepper.encoder.eval()
    first_step_of_epoch_2 = 2 * setup.sampler.steps_per_epoch
    batch = setup.sampler.batch(first_step_of_epoch_2, 0, 1)
    # What the method draws: a positive of each query, and then hard negatives.
    draws: list[Ragged] = []
    draw_from_rows = base.draw_from_rows

    def recorded(*arguments: Any) -> Ragged:
        draws.append(draw_from_rows(*arguments))
        return draws[-1]

    monkeypatch.setattr(base, "draw_from_rows", recorded)

    output = setup.method.loss(batch, shortlist_of(setup, batch))

    drawn, negatives = draws
    assert drawn.lengths.tolist() == [1] * 32
    assert negatives.lengths.tolist() == [2] * 32
    pool = {*drawn.values.tolist(), *negatives.values.tolist()}
    expected = loss_by_loops(setup, batch, drawn, pool, query_negatives)
    assert output.total.item() == pytest.approx(expected, rel=1e-5)
    assert output.divisor == 32


def test_all_positives_of_a_query_can_be_learned_at_once(corpus: Corpus) -> None:
    setup = built(corpus, "method.num_positives=0", "negatives.hard=0")
    setup.stepper.encoder.eval()
    batch = setup.sampler.batch(0, 0, 1)
    assert batch.positives.lengths.max() > 1, "no query has two positives"

    output = setup.method.loss(batch, None)

    pool = set(batch.positives.values.tolist())
    expected = loss_by_loops(setup, batch, batch.positives, pool, query_negatives=True)
    assert output.total.item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_one_has_nothing_to_compete_with(corpus: Corpus) -> None:
    setup = built(corpus, "optim.batch_size=1", "negatives.hard=0")
    output = setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    assert float(output.total.detach()) == 0
    for parameter in setup.stepper.encoder.parameters():
        assert parameter.isfinite().all()


def test_a_finished_run_answers_with_its_memory(
    run: Run, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "b"
    assert run_command(f"export {run.path} --out {bundle}") == 0

    retriever = Retriever.load(bundle, threads=1)
    assert retriever.memory is not None
    assert retriever.memory.config == MemoryConfig(keys=20)

    # Queries and keys are vectors of the last encoder and the bundle's head.
    encoder = load_encoder(last_checkpoint(run).path / "encoder").eval()
    head = load_head(bundle / "head")
    encode = QueryEncoder(encoder, head, corpus.tokenizer(), normalised=True).encode
    queries = corpus.split("test").tokens(np.arange(9))
    np.testing.assert_allclose(retriever.encode(queries), encode(queries), atol=1e-6)
    train_split = corpus.split("train")
    remembered = train_split.tokens(np.flatnonzero(train_split.num_positives()))
    keys = np.concatenate([index.vectors.numpy() for index in retriever.memory.rows.indexes])
    np.testing.assert_allclose(keys, encode(remembered), atol=1e-6)

    capsys.readouterr()
    assert run_command(f"search {bundle} w3x0 -k 1 --explain --json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["answers"][0]["score"] > 0


def test_a_memory_of_a_run_has_the_encoder_and_head_of_the_run(run: Run, corpus: Corpus) -> None:
    encoder, head = open_encoder(str(run.path), corpus)
    assert head.kind == "normalised"
    expected = load_encoder(last_checkpoint(run).path / "encoder").state_dict()
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_settings_of_the_memory_are_checked_before_the_training() -> None:
    with pytest.raises(ConfigError, match=r"memory.weight is 2"):
        RunConfig.resolve("rae", {}, ["memory.weight=2"])
    with pytest.raises(ConfigError, match=r"method.hard_per_query is 0"):
        RunConfig.resolve("rae", {}, ["method.hard_per_query=0"])


def test_sections_of_answers_have_one_name_everywhere() -> None:
    with_memory = RunConfig.resolve("rae", {}, ["memory.weight=0.3"])
    fused = RunConfig.resolve("unidec", {}, ["fusion.text_weight=0.3"])
    neither = RunConfig.resolve("astra", {}).to_dict()
    assert with_memory.memory == MemoryConfig(weight=0.3)
    assert fused.fusion == FusionConfig(text_weight=0.3)
    assert "memory" not in neither
    assert "fusion" not in neither


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("rae", "method.memory.weight=0.3", "'method.memory' is now called 'memory'; rename it"),
        ("unidec", "method.text_share=0.3", "is now called 'fusion.text_weight'; rename it"),
        ("unidec", "fusion.text=0.3", "is now called 'fusion.text_weight'; rename it"),
        ("astra", "memory.weight=0.3", r"astra has no settings memory\.\*; leave them out"),
        ("rae", "fusion.text_weight=0.3", r"rae has no settings fusion\.\*; leave them out"),
        ("astra", "encoder.separate_labels=true", "astra has a classifier row for each label"),
        ("rae", "memory.weigth=0.3", "did you mean 'memory.weight'"),
    ],
)
def test_other_names_are_refused_with_the_right_one(
    method: str, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.resolve(method, {}, [setting])
