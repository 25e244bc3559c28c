"""PRIME's start values, moving centroids, draws and loss against plain loops; its state in checkpoints and bundles."""

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
from xmcray.training.run import RunConfig

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
    encoder = setup.stepper.encoder
    with torch.no_grad():
        return F.normalize(encoder(setup.data.tokens(np.asarray(ids))), dim=-1)


def test_centroids_start_as_means_and_move_with_every_query(corpus: Corpus) -> None:
    setup, method = built(corpus, "optim.lr=0", "optim.token_lr=0", "data.validation=0.4")
    data, part = setup.data, setup.partition
    positives = data.positives(data.query_ids[:])
    expected = start_vectors(setup, data.num_train + np.arange(part.num_labels))
    vectors = start_vectors(setup, data.query_ids[:])
    for label in range(part.num_labels):
        queries = positives.row_ids[positives.values == label]
        if len(queries):
            expected[label] = vectors[queries].mean(dim=0)
    batch = setup.sampler.batch(0, 0, 1)
    setup.stepper.step(batch, None)
    vectors = start_vectors(setup, batch.query_ids)
    for query, label in zip(batch.positives.row_ids, batch.positives.values, strict=True):
        expected[label] = 0.95 * expected[label] + 0.05 * vectors[query]
    torch.testing.assert_close(method.centroid_SD, expected, rtol=1e-9, atol=1e-12)
    sizes = torch.bincount(method.cluster_S, minlength=4)
    assert sizes.max() - sizes.min() <= 1


def triplets(
    score: torch.Tensor, positive: torch.Tensor, true: torch.Tensor, count: int
) -> torch.Tensor:
    """Mean over anchors of the weighted sum over the hardest negatives, in plain loops."""
    total = []
    for s, drawn, known in zip(score, positive, true, strict=True):
        negative = s[~known].sort(descending=True).values[:count]
        of_anchor = []
        for s_p in s[drawn]:
            term = (negative - s_p + (s_p - negative).abs().clamp(0.1, 0.3)).clamp_min(0)
            violating = negative[term > 0]
            weight = (violating / 0.1).softmax(dim=0)
            of_anchor.append((weight * term[term > 0]).sum())
        total.append(torch.stack(of_anchor).mean())
    return torch.stack(total).mean()


def test_the_loss_is_that_of_plain_loops(corpus: Corpus) -> None:
    setup, method = built(
        corpus, "method.dropout=0", "method.num_positives=1", "method.num_negatives=5"
    )
    batch = setup.sampler.batch(0, 0, 1)
    drawn = method._draw_positives(batch)
    assert (drawn.lengths == 1).all()
    labels = np.unique(drawn.values)
    query = start_vectors(setup, batch.query_ids)
    text, prototype = (
        start_vectors(setup, setup.data.num_train + labels),
        method.answer_rows()[labels],
    )
    true = torch.from_numpy(
        np.stack([np.isin(labels, batch.positives[i]) for i in range(len(query))])
    )
    assert true.sum() > len(query), (
        "no positive was left out of the draw: the comparison would show little"
    )
    known = true | torch.from_numpy(
        np.stack([np.isin(labels, batch.excluded[i]) for i in range(len(query))])
    )
    picked = torch.from_numpy(np.stack([np.isin(labels, drawn[i]) for i in range(len(query))]))
    b, s = query @ prototype.T, query @ text.T
    expected = (
        triplets(b, picked, known, 5)
        + triplets(s, picked, known, 5)
        + triplets(s.T, picked.T, known.T, 5)
    )
    near, far = [], []
    for i in range(len(query)):
        near += [float(v) for v in F.relu(s[i] - b[i] + 0.1)[picked[i]]]
        hardest = b[i].masked_fill(known[i], -np.inf).topk(5).indices
        far += [float(v) for v in F.relu(b[i] - s[i] + 0.1)[hardest]]
    expected = (
        expected + 0.1 * sum(float(np.mean([v for v in part if v > 0])) for part in (near, far)) / 2
    )
    output = method.loss(batch, None)
    loss = output.total / output.divisor
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)


def test_rare_positives_are_drawn_more_often(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, method = built(corpus, "method.num_positives=1")
    data, card = setup.data, corpus.card
    counts = corpus.train_counts[corpus.label_order]
    weight = inverse_propensity(counts, card.num_train, card.propensity_a, card.propensity_b)
    batch = setup.sampler.batch(0, 0, 1)
    drawn_with = method.draw_weights(batch.positives.values)
    np.testing.assert_array_equal(drawn_with, weight[batch.positives.values])
    # Sharper, so that fewer draws show it.
    monkeypatch.setattr(method, "draw_weights", lambda labels: weight[labels] ** 8)
    expected = found = uniform = 0.0
    for step in range(200):
        batch = setup.sampler.batch(0, 0, 1)
        batch = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "step": step})
        drawn = method._draw_positives(batch)
        found += np.log(weight[drawn.values]).sum()
        for i in range(len(batch.query_ids)):
            own = weight[batch.positives[i]]
            expected += float(own**8 / (own**8).sum() @ np.log(own))
            uniform += float(np.log(own).mean())
    assert data.num_labels == len(weight)
    assert abs(found - expected) < 0.1 * abs(expected - uniform)


def test_settings_that_cannot_be_are_refused_or_clipped(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError, match=r"free_vectors is 48, expected a power of two; take 32 or 64"
    ):
        PrimeConfig(free_vectors=48)
    with pytest.raises(ConfigError, match=r"gamma_max"):
        PrimeConfig(gamma_min=0.3, gamma_max=0.1)
    with caplog.at_level(logging.WARNING):
        _, method = built(corpus, "method.free_vectors=64")
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
    config = RunConfig.resolve(
        "prime", {}, [*SETTINGS, "optim.precision=float32", "log.checkpoint_every=2"]
    )
    setup = trained(folder, corpus, config, stop)
    state = {
        f"{m}.{k}": v
        for m, module in setup.stepper.modules.items()
        for k, v in module.state_dict().items()
    }
    return {**state, **setup.method.state_tensors(), "rows": setup.method.answer_rows()}


def test_a_run_goes_on_byte_by_byte(corpus: Corpus, tmp_path: Path) -> None:
    whole = weights(tmp_path / "whole", corpus, 6)
    weights(tmp_path / "cut", corpus, 4)
    for name, value in weights(tmp_path / "cut", corpus, 6).items():
        assert torch.equal(value, whole[name]), name


def test_a_bundle_answers_with_prototypes(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("prime", {}, [*SETTINGS, "optim.precision=float32"])
    run = train(corpus.path, tmp_path / "run", config)
    export_run(run, tmp_path / "bundle")
    after = weights(tmp_path / "same", corpus, run.result()["steps"])["rows"].numpy()  # type: ignore[index]
    tokens = corpus.split("test").tokens(np.arange(9))
    retriever = Retriever.load(tmp_path / "bundle")
    top = retriever.top_labels(tokens, 23, exact=True)
    score_QL = (retriever.encode(tokens) @ after.T)[:, corpus.label_rank]
    np.testing.assert_allclose(
        top.scores, np.take_along_axis(score_QL, top.ids, 1), rtol=1e-5, atol=1e-6
    )
