"""PRIME's start values, moving centroids, draws and loss against plain loops; its state in checkpoints and bundles."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import corpus_of, planted_corpus
from loops import trained

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.metrics import inverse_propensity
from xmcray.methods.prime import Prime, PrimeConfig
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Float32Array, Int64Array, Ragged

SETTINGS = [
    "encoder.dim=8",
    "encoder.residual=false",
    "optim.batch_size=32",
    "optim.epochs=2",
    "optim.precision=float64",
    "method.feed_forward=8",
    "method.free_vectors=4",
    "cluster.workers=0",
    "cluster.threads_per_process=1",
]


def built(corpus: Corpus, *extra: str) -> tuple[Setup, Prime]:
    config = RunConfig.resolve("prime", {}, [*SETTINGS, *extra])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    assert isinstance(setup.method, Prime)
    setup.method.start()
    return setup, setup.method


def start_vectors(setup: Setup, ids: Any) -> torch.Tensor:
    """Unit vectors of texts by the encoder as it is now."""
    tokens = setup.data.tokens(np.asarray(ids))
    with torch.no_grad():
        return F.normalize(setup.stepper.encoder(tokens), dim=-1)


def label_start_vectors(setup: Setup, labels: Any) -> torch.Tensor:
    # Label texts come behind the texts of the queries.
    return start_vectors(setup, setup.data.num_train + labels)


def membership(rows: Ragged, labels: Int64Array) -> torch.Tensor:
    """bool [rows, labels]: whether a row holds a label."""
    is_member = [np.isin(labels, rows[row]) for row in range(len(rows))]
    return torch.from_numpy(np.stack(is_member))


def test_centroids_start_as_means_and_move_with_every_query(corpus: Corpus) -> None:
    setup, method = built(corpus, "optim.lr=0", "optim.token_lr=0", "data.validation=0.4")
    data = setup.data
    num_labels = setup.partition.num_labels
    # A label without queries starts as its own text.
    expected = label_start_vectors(setup, np.arange(num_labels))
    positives = data.positives(data.query_ids[:])
    vectors = start_vectors(setup, data.query_ids[:])
    for label in range(num_labels):
        queries = positives.row_ids[positives.values == label]
        if len(queries):
            expected[label] = vectors[queries].mean(dim=0)

    batch = setup.sampler.batch(0, 0, 1)
    setup.stepper.step(batch, None)

    # Learning rates are 0, so the encoder gives the vectors that the step has seen.
    vectors = start_vectors(setup, batch.query_ids)
    for query, label in zip(batch.positives.row_ids, batch.positives.values, strict=True):
        expected[label] = 0.95 * expected[label] + 0.05 * vectors[query]
    torch.testing.assert_close(method.centroid_SD, expected, rtol=1e-9, atol=1e-12)


def test_label_texts_move_no_centroid(corpus: Corpus) -> None:
    settings = ["data.augment_with_labels=true", "optim.lr=0", "optim.token_lr=0"]
    setup, method = built(corpus, *settings)
    before = method.centroid_SD.clone()
    batch = setup.sampler.batch(0, 0, 1)
    positives = batch.positives
    is_of_query = batch.query_ids[positives.row_ids] < setup.data.num_train
    labels_of_queries = np.unique(positives.values[is_of_query])

    setup.stepper.step(batch, None)

    assert len(np.unique(positives.values)) > len(labels_of_queries), "no label text alone"
    has_moved_S = (method.centroid_SD != before).any(dim=1)
    moved_labels = has_moved_S.nonzero().flatten().numpy()
    assert set(moved_labels) <= set(labels_of_queries)


def test_clusters_that_share_a_free_vector_differ_by_at_most_one_label(corpus: Corpus) -> None:
    _, method = built(corpus)
    sizes = torch.bincount(method.cluster_S, minlength=4)
    assert sizes.max() - sizes.min() <= 1


def triplets(
    score_AO: torch.Tensor, drawn_AO: torch.Tensor, positive_AO: torch.Tensor, count: int
) -> torch.Tensor:
    """Mean over anchors of the weighted sum over the hardest negatives, in plain loops.

    Args:
        score_AO: of A anchors with O others.
        drawn_AO: positives that are pulled.
        positive_AO: all of them, which are no negatives.
        count: negatives of an anchor.
    """
    anchor_losses = []
    for score_O, drawn_O, positive_O in zip(score_AO, drawn_AO, positive_AO, strict=True):
        hardest = score_O[~positive_O].sort(descending=True).values[:count]
        pair_losses = []
        for score in score_O[drawn_O]:
            margin = (score - hardest).abs().clamp(0.1, 0.3)
            cost = (hardest - score + margin).clamp_min(0)
            violates = cost > 0
            weight = (hardest[violates] / 0.1).softmax(dim=0)
            pair_losses.append((weight * cost[violates]).sum())
        anchor_losses.append(torch.stack(pair_losses).mean())
    return torch.stack(anchor_losses).mean()


def mean_of_positive(values: list[torch.Tensor]) -> float:
    costs = torch.cat(values)
    return float(costs[costs > 0].mean())


def regulariser(
    text_BS: torch.Tensor,
    prototype_BS: torch.Tensor,
    drawn_BS: torch.Tensor,
    known_BS: torch.Tensor,
) -> float:
    """Prototypes lie nearer to queries than texts of positives, and farther than those of negatives."""
    nearer = []
    farther = []
    for text_S, prototype_S, drawn_S, known_S in zip(
        text_BS, prototype_BS, drawn_BS, known_BS, strict=True
    ):
        nearer.append(F.relu(text_S - prototype_S + 0.1)[drawn_S])
        hardest = prototype_S.masked_fill(known_S, -np.inf).topk(5).indices
        farther.append(F.relu(prototype_S - text_S + 0.1)[hardest])
    return (mean_of_positive(nearer) + mean_of_positive(farther)) / 2


def test_the_loss_is_that_of_plain_loops(corpus: Corpus) -> None:
    setup, method = built(
        corpus, "method.dropout=0", "method.num_positives=1", "method.num_negatives=5"
    )
    batch = setup.sampler.batch(0, 0, 1)
    drawn = method._draw_positives(batch)
    assert (drawn.lengths == 1).all()
    # Only labels that some query has drawn are in the batch.
    labels = np.unique(drawn.values)
    drawn_BS = membership(drawn, labels)
    positive_BS = membership(batch.positives, labels)
    known_BS = positive_BS | membership(batch.excluded, labels)
    assert positive_BS.sum() > len(batch.query_ids), (
        "no positive was left out of the draw: the comparison would show little"
    )
    query_BD = start_vectors(setup, batch.query_ids)
    prototype_score_BS = query_BD @ method.answer_rows()[labels].T
    text_score_BS = query_BD @ label_start_vectors(setup, labels).T

    output = method.loss(batch, None)

    expected = (
        triplets(prototype_score_BS, drawn_BS, known_BS, 5)
        + triplets(text_score_BS, drawn_BS, known_BS, 5)
        + triplets(text_score_BS.T, drawn_BS.T, known_BS.T, 5)
        + 0.1 * regulariser(text_score_BS, prototype_score_BS, drawn_BS, known_BS)
    )
    loss = output.total / output.divisor
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)


def propensity_weights(corpus: Corpus) -> Float32Array:
    card = corpus.card
    counts = corpus.train_counts[corpus.label_order]
    return inverse_propensity(counts, card.num_train, card.propensity_a, card.propensity_b)


def test_positives_are_drawn_by_their_inverse_propensity(corpus: Corpus) -> None:
    setup, method = built(corpus)
    labels = setup.sampler.batch(0, 0, 1).positives.values
    weight_L = propensity_weights(corpus)
    assert len(weight_L) == setup.data.num_labels
    np.testing.assert_array_equal(method.draw_weights(labels), weight_L[labels])


def test_rare_positives_are_drawn_more_often(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, method = built(corpus, "method.num_positives=1")
    weight_L = propensity_weights(corpus)
    # Sharper, so that fewer draws show it.
    monkeypatch.setattr(method, "draw_weights", lambda labels: weight_L[labels] ** 8)
    batch = setup.sampler.batch(0, 0, 1)

    # The sum of the logarithms of the weights that were drawn.
    observed = 0.0
    for step in range(200):
        drawn = method._draw_positives(dataclasses.replace(batch, step=step))
        observed += np.log(weight_L[drawn.values]).sum()

    # Its expected value, with probabilities by the weights and with equal ones.
    expected = 0.0
    uniform = 0.0
    for query in range(len(batch.query_ids)):
        weight_P = weight_L[batch.positives[query]]
        probability_P = weight_P**8 / (weight_P**8).sum()
        expected += 200 * float(probability_P @ np.log(weight_P))
        uniform += 200 * float(np.log(weight_P).mean())
    assert abs(observed - expected) < 0.1 * abs(expected - uniform)


def test_settings_that_cannot_be_are_refused() -> None:
    message = r"free_vectors is 48, expected a power of two; take 32 or 64"
    with pytest.raises(ConfigError, match=message):
        PrimeConfig(free_vectors=48)
    with pytest.raises(ConfigError, match=r"gamma_max"):
        PrimeConfig(gamma_min=0.3, gamma_max=0.1)


def test_more_free_vectors_than_labels_are_clipped(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, method = built(corpus, "method.free_vectors=64")

    # 16 is the largest power of two of at most 23 labels.
    assert method.network.bank.weight.shape == (16, 8)
    assert "free_vectors is 64, clipped to 16 for 23 labels" in caplog.text


def test_labels_without_any_text_are_refused(tmp_path: Path) -> None:
    planted_corpus(tmp_path, num_queries=20, num_labels=5)
    lines = [json.dumps({"uid": f"label{label}", "text": ""}) for label in range(5)]
    (tmp_path / "raw" / "labels.jsonl").write_text("\n".join(lines) + "\n")
    bare = corpus_of(tmp_path / "raw", tmp_path / "bare", vocab_size=2000)

    with pytest.raises(DataError, match="no label text"):
        built(bare)


def test_a_batch_of_one_has_no_negative_and_no_nan(corpus: Corpus) -> None:
    setup, method = built(corpus, "optim.batch_size=1", "method.num_positives=1")
    setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    for module in setup.stepper.modules.values():
        assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert method.centroid_SD.isfinite().all()


def weights(folder: Path, corpus: Corpus, stop: int) -> dict[str, torch.Tensor]:
    """Everything a run that goes on from its folder's checkpoint, if there is one, has after `stop` steps."""
    settings = [*SETTINGS, "optim.precision=float32", "log.checkpoint_every=2"]
    config = RunConfig.resolve("prime", {}, settings)
    setup = trained(folder, corpus, config, stop)
    state = {}
    for module_name, module in setup.stepper.modules.items():
        for name, value in module.state_dict().items():
            state[f"{module_name}.{name}"] = value
    state.update(setup.method.state_tensors())
    state["rows"] = setup.method.answer_rows()
    return state


def test_a_run_goes_on_byte_by_byte(corpus: Corpus, tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", corpus, 6)
    weights(tmp_path / "cut", corpus, 4)
    resumed = weights(tmp_path / "cut", corpus, 6)
    for name, value in resumed.items():
        assert torch.equal(value, whole[name]), name


def test_a_bundle_answers_with_prototypes(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("prime", {}, [*SETTINGS, "optim.precision=float32"])
    run = train(corpus.path, tmp_path / "run", config)
    export_run(run, tmp_path / "bundle")
    retriever = Retriever.load(tmp_path / "bundle")
    tokens = corpus.split("test").tokens(np.arange(9))

    top = retriever.top_labels(tokens, 23, exact=True)

    num_steps = run.result()["steps"]
    prototype_LD = weights(tmp_path / "same", corpus, num_steps)["rows"].numpy()  # type: ignore[arg-type]
    # Prototypes are in the order of the shards, answers name labels of the corpus.
    score_QL = (retriever.encode(tokens) @ prototype_LD.T)[:, corpus.label_rank]
    expected = np.take_along_axis(score_QL, top.ids, 1)
    np.testing.assert_allclose(top.scores, expected, rtol=1e-5, atol=1e-6)
