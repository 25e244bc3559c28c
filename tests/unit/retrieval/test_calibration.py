"""Probabilities of answers: fitted on held-out queries, kept in the bundle, used by every verb."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError
from xmcray.evaluation.reliability import BINS, Reliability
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.label_side import load_label_side
from xmcray.retrieval.batch_predict import QueryChunk, answer_chunk
from xmcray.retrieval.bundle import LABELS, read_settings, write_settings
from xmcray.retrieval.calibration import Calibration
from xmcray.retrieval.labels import NewLabel, with_labels
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.storage.whole_files import read_json
from xmcray.training.calibrate import calibrate
from xmcray.training.fuse import write_parts
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import measure_bundle
from xmcray.training.probability_curves import Sample, fit_curves
from xmcray.types import Ragged, TopLabels

NUM_LABELS = 47
KINDS = ("labels", "memory", "fused")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    return planted_corpus(folder, num_queries=301, num_labels=NUM_LABELS)


@pytest.fixture(scope="module")
def bundles(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibrated bundles of an untrained encoder, one of each kind."""
    folder = tmp_path_factory.mktemp("bundles")
    build_encoder(EncoderConfig(dim=24), corpus.tokenizer(), None, seed=0).save(folder / "encoder")
    memory_bundle(str(folder / "encoder"), corpus, folder / "memory", MemoryConfig(keys=30))
    members = (MemberConfig(name="first", memory=0.5), MemberConfig(name="second", memory=0.3))
    fused = PartsConfig(members=members, words=0.5, texts=0.5, memory_keys=10)
    write_parts([folder / "memory"] * 2, corpus, folder / "fused", fused)
    # The nearest labels of the same vectors.
    shutil.copytree(folder / "memory", folder / "labels")
    settings = dataclasses.replace(read_settings(folder / "labels"), predictor=LABELS)
    write_settings(folder / "labels", settings)
    about = read_manifest(folder / "memory", "bundle").about
    finish_manifest(folder / "labels", "bundle", about, {})
    for kind in KINDS:
        calibrate(str(folder / kind), corpus)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def retriever(bundles: dict[str, Path], request: pytest.FixtureRequest) -> Retriever:
    return Retriever.load(bundles[request.param], threads=1)


@pytest.fixture(scope="module")
def texts(corpus: Corpus) -> list[str]:
    return corpus.split("test").texts(np.arange(12))


def probabilities(retriever: Retriever, texts: list[str], k: int) -> list[dict[int, float]]:
    """By label id, for each text."""
    all_answers = retriever.search(texts, k)
    return [{answer.label_id: answer.probability for answer in answers} for answers in all_answers]


def planted_answers(rng: np.random.Generator, num_queries: int) -> tuple[Sample, np.ndarray]:
    """Answers whose labels are relevant with a known chance, and that chance.

    It depends on how far a score is above the query's tenth best, and on the label's segment.
    """
    tenth = rng.normal(0, 2, (num_queries, 1))
    gap = -np.sort(-rng.exponential(1.0, (num_queries, 5)), axis=1)
    segment = rng.integers(1, 5, (num_queries, 5))
    chance = 1 / (1 + np.exp(2 - 1.5 * gap + 0.7 * (segment == 1)))
    best = tenth + gap[:, :1]
    columns = np.broadcast_arrays(tenth + gap, best, tenth)
    sample = Sample(
        feature_AF=np.stack(columns, axis=-1).reshape(-1, 3),
        relevant_A=(rng.random(chance.shape) < chance).ravel(),
        label_A=segment.ravel(),
        place_A=np.tile(np.arange(5), num_queries),
    )
    return sample, chance.ravel()


def test_curves_recover_planted_probabilities_of_each_segment() -> None:
    rng = np.random.default_rng(0)
    sample, _ = planted_answers(rng, 3000)
    calibration = Calibration(
        fit_curves(sample, sample.label_A, 3000), np.arange(5, dtype=np.uint8)
    )
    new, chance = planted_answers(rng, 2000)
    # The label id is the segment here, and each answer is a query of its own.
    top = TopLabels(new.label_A[:, None], new.feature_AF[:, :1].astype(np.float32))
    nearest = np.repeat(new.feature_AF[:, 2:], 10, axis=1)
    nearest[:, 0] = new.feature_AF[:, 1]
    found = calibration.with_probabilities(top, TopLabels(top.ids, nearest.astype(np.float32)))
    assert found.probabilities is not None
    error = np.abs(found.probabilities[:, 0] - chance)
    assert error.mean() < 0.03
    for segment in range(1, 5):
        members = new.label_A == segment
        bias = found.probabilities[members, 0].mean() - chance[members].mean()
        assert abs(bias) < 0.02


def test_a_segment_without_answers_has_the_curve_of_rare_labels() -> None:
    sample, _ = planted_answers(np.random.default_rng(1), 500)
    curves = fit_curves(sample, sample.label_A, 500)
    evidence = np.linspace(-4, 4, 33)
    unseen = curves.by_segment["unseen"].at(evidence)
    np.testing.assert_allclose(unseen, curves.by_segment["tail"].at(evidence), atol=0.02)


def test_every_answer_has_a_probability_that_does_not_depend_on_k_or_on_other_queries(
    retriever: Retriever, texts: list[str]
) -> None:
    together = probabilities(retriever, texts, 20)
    for text, expected in zip(texts, together, strict=True):
        assert all(0 <= value <= 1 for value in expected.values())
        for k in (1, 3):
            [alone] = probabilities(retriever, [text], k)
            # Scores of one query and of many differ in their last bits.
            assert alone == pytest.approx({label: expected[label] for label in alone}, abs=1e-5)


def test_probabilities_stay_when_labels_join_or_are_filtered_out(
    retriever: Retriever, bundles: dict[str, Path], texts: list[str]
) -> None:
    before = probabilities(retriever, texts, NUM_LABELS)
    allowed = np.arange(NUM_LABELS) % 3 == 0
    for answers, expected in zip(
        probabilities(retriever.restricted(allowed), texts, 5), before, strict=True
    ):
        assert answers == {label: expected[label] for label in answers}
    side = load_label_side(bundles["memory"] / "label_side")
    sides = [side] * len(retriever.members)
    grown = with_labels(retriever, sides, [NewLabel("new", texts[0])])
    after = probabilities(grown, texts, NUM_LABELS + 1)
    for answers, expected in zip(after, before, strict=True):
        joined = answers.pop(NUM_LABELS)
        assert 0 <= joined <= 1
        assert answers == pytest.approx({label: expected[label] for label in answers}, abs=1e-6)


def test_min_probability_leaves_out_what_is_less_probable(
    retriever: Retriever, texts: list[str]
) -> None:
    everything = retriever.search(texts, 20)
    level = float(np.median([answer.probability for answer in everything[0]]))
    probable = retriever.search(texts, 20, min_probability=level)
    for answers, expected in zip(probable, everything, strict=True):
        assert answers == [answer for answer in expected if answer.probability >= level]
    table = answer_chunk(retriever, QueryChunk(0, texts, texts), 20, min_probability=level)
    for row, answers in zip(table.to_pylist(), probable, strict=True):
        assert row["label_id"] == [answer.label_id for answer in answers]
        assert row["probability"] == pytest.approx([answer.probability for answer in answers])


def test_answers_of_other_settings_and_other_bundles_have_no_probability(
    bundles: dict[str, Path], corpus: Corpus, texts: list[str], tmp_path: Path
) -> None:
    memory = Retriever.load(bundles["memory"], threads=1)
    other = MemoryConfig(weight=0.25)
    assert memory.search(texts[:1], 1, memory=other)[0][0].probability is None
    with pytest.raises(ConfigError, match="no probabilities"):
        memory.search(texts, 1, memory=other, min_probability=0.5)
    with pytest.raises(ConfigError, match="at most 1"):
        memory.search(texts, 1, min_probability=1.5)
    # Parts that are added to a calibrated bundle change its scores.
    write_parts([bundles["memory"]], corpus, tmp_path / "fused", PartsConfig(texts=1.0))
    fused = Retriever.load(tmp_path / "fused", threads=1)
    assert fused.search(texts[:1], 1)[0][0].probability is None
    with pytest.raises(ConfigError, match="xmcray calibrate"):
        fused.search(texts, 1, min_probability=0.5)


def test_a_malformed_curve_is_refused(
    bundles: dict[str, Path], corpus: Corpus, tmp_path: Path
) -> None:
    calibrate(str(bundles["labels"]), corpus, tmp_path / "bundle")
    path = tmp_path / "bundle" / "calibration" / "curves.json"
    curves = read_json(path)
    curves["by_segment"]["tail"]["probability"][0] = 2.0
    path.write_text(json.dumps(curves))
    about = read_manifest(tmp_path / "bundle", "bundle").about
    finish_manifest(tmp_path / "bundle", "bundle", about, {})
    with pytest.raises(BundleError, match="calibrate the bundle again"):
        Retriever.load(tmp_path / "bundle")


def test_an_evaluation_says_how_right_probabilities_are(
    bundles: dict[str, Path], corpus: Corpus
) -> None:
    retriever = Retriever.load(bundles["fused"], threads=1)
    calibration = measure_bundle(retriever, corpus, "test").to_json()["calibration"]
    uncalibrated = dataclasses.replace(retriever, calibration=None)
    assert "calibration" not in measure_bundle(uncalibrated, corpus, "test").to_json()
    assert calibration["ECE@5"] < 0.15
    counted = [row["answers"] for row in calibration["bins"]]
    assert sum(counted) == 5 * sum(corpus.split("test").num_positives() > 0)
    coverages = [row["coverage"] for row in calibration["thresholds"]]
    assert coverages == sorted(coverages, reverse=True)


def test_calibration_error_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    probability = rng.random((40, 12)).astype(np.float32)
    ids = np.tile(np.arange(12), (40, 1))
    ids[5, 3:] = -1
    positives = [np.flatnonzero(rng.random(12) < 0.4) for _ in range(40)]
    positives[7] = positives[7][:0]
    truth = Ragged(
        np.concatenate(positives), np.cumsum([0, *(len(labels) for labels in positives)])
    )
    reliability = Reliability(12)
    scores = np.zeros(ids.shape, np.float32)
    for start in (0, 25):
        stop = min(start + 25, 40)
        top = TopLabels(ids[start:stop], scores[start:stop], probability[start:stop])
        reliability.update(top, truth.slice(start, stop))
    by_bin: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for query in range(40):
        for place in range(5):
            label = ids[query, place]
            if len(positives[query]) and label >= 0:
                value = float(probability[query, place])
                by_bin[int(value * BINS)].append((value, label in positives[query]))
    error = 0.0
    for answers in by_bin:
        error += abs(sum(value - hit for value, hit in answers))
    result = reliability.result()
    assert result is not None
    assert result["ECE@5"] == pytest.approx(error / sum(map(len, by_bin)))
    high = [row for row in result["thresholds"] if row["min_probability"] == 0.9]
    assert (
        high[0]["answers"]
        == ((probability[:, :10] >= 0.9) & (ids[:, :10] >= 0) & (truth.lengths > 0)[:, None]).sum()
    )
