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
from xmcray.retrieval.answers import FoundLabel, at_least
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
    paths = {kind: folder / kind for kind in KINDS}
    encoder = build_encoder(EncoderConfig(dim=24), corpus.tokenizer(), None, seed=0)
    encoder.save(folder / "encoder")

    memory_config = MemoryConfig(keys=30)
    memory_bundle(str(folder / "encoder"), corpus, paths["memory"], memory_config)

    fused = PartsConfig(
        members=(
            MemberConfig(name="first", memory=0.5),
            MemberConfig(name="second", memory=0.3),
        ),
        words=0.5,
        texts=0.5,
        memory_keys=10,
    )
    write_parts([paths["memory"]] * 2, corpus, paths["fused"], fused)

    # The nearest labels of the same vectors.
    shutil.copytree(paths["memory"], paths["labels"])
    settings = read_settings(paths["labels"])
    settings = dataclasses.replace(settings, predictor=LABELS)
    write_settings(paths["labels"], settings)
    renew_manifest(paths["labels"])

    for path in paths.values():
        calibrate(str(path), corpus)
    return paths


def renew_manifest(bundle: Path) -> None:
    """Lists the files of a bundle as they are now."""
    about = read_manifest(bundle, "bundle").about
    finish_manifest(bundle, "bundle", about, {})


@pytest.fixture(params=KINDS)
def retriever(bundles: dict[str, Path], request: pytest.FixtureRequest) -> Retriever:
    return Retriever.load(bundles[request.param], threads=1)


@pytest.fixture(scope="module")
def texts(corpus: Corpus) -> list[str]:
    return corpus.split("test").texts(np.arange(12))


def probabilities(
    retriever: Retriever,
    texts: list[str],
    k: int,
) -> list[dict[int, float]]:
    """By label id, for each text."""
    by_text = []
    for answers in retriever.search(texts, k):
        by_label = {answer.label_id: answer.probability for answer in answers}
        by_text.append(by_label)
    return by_text


def planted_answers(rng: np.random.Generator, num_queries: int) -> tuple[Sample, np.ndarray]:
    """Answers whose labels are relevant with a known chance, and that chance.

    It depends on how far a score is above the query's tenth best, and on the label's segment.
    """
    shape = (num_queries, 5)
    tenth_Q1 = rng.normal(0, 2, (num_queries, 1))
    gap_QK = rng.exponential(1.0, shape)
    # Best first.
    gap_QK = -np.sort(-gap_QK, axis=1)
    segment_QK = rng.integers(1, 5, shape)
    is_rare = segment_QK == 1
    evidence_QK = 1.5 * gap_QK - 2 - 0.7 * is_rare
    chance_QK = 1 / (1 + np.exp(-evidence_QK))

    score_QK = tenth_Q1 + gap_QK
    best_Q1 = score_QK[:, :1]
    columns = np.broadcast_arrays(score_QK, best_Q1, tenth_Q1)
    is_relevant = rng.random(shape) < chance_QK
    sample = Sample(
        feature_AF=np.stack(columns, axis=-1).reshape(-1, 3),
        relevant_A=is_relevant.ravel(),
        label_A=segment_QK.ravel(),
        place_A=np.tile(np.arange(5), num_queries),
    )
    return sample, chance_QK.ravel()


def test_curves_recover_planted_probabilities_of_each_segment() -> None:
    rng = np.random.default_rng(0)
    sample, _ = planted_answers(rng, 3000)
    new, chance_A = planted_answers(rng, 2000)
    # The label id is the segment here.
    curves = fit_curves(sample, sample.label_A, 3000)
    calibration = Calibration(curves, np.arange(5, dtype=np.uint8))

    # Each answer is a query of its own.
    score_A1 = new.feature_AF[:, :1]
    best_A1 = new.feature_AF[:, 1:2]
    tenth_A1 = new.feature_AF[:, 2:]
    nearest_A10 = np.repeat(tenth_A1, 10, axis=1)
    nearest_A10[:, :1] = best_A1
    ids = new.label_A[:, None]
    top = calibration.with_probabilities(
        TopLabels(ids, score_A1.astype(np.float32)),
        TopLabels(ids, nearest_A10.astype(np.float32)),
    )

    assert top.probabilities is not None
    probability_A = top.probabilities[:, 0]
    error = np.abs(probability_A - chance_A)
    assert error.mean() < 0.03
    for segment in range(1, 5):
        is_member = new.label_A == segment
        mean = probability_A[is_member].mean()
        planted_mean = chance_A[is_member].mean()
        assert abs(mean - planted_mean) < 0.02


def test_a_segment_without_answers_has_the_curve_of_rare_labels() -> None:
    rng = np.random.default_rng(1)
    sample, _ = planted_answers(rng, 500)
    evidence = np.linspace(-4, 4, 33)

    curves = fit_curves(sample, sample.label_A, 500)

    unseen = curves.by_segment["unseen"].at(evidence)
    tail = curves.by_segment["tail"].at(evidence)
    np.testing.assert_allclose(unseen, tail, atol=0.02)


def test_rounding_of_a_number_that_is_always_the_same_decides_nothing() -> None:
    """Where every query is a label too, its best inner product is 1."""
    rng = np.random.default_rng(0)
    sample, _ = planted_answers(rng, 500)
    rounding = rng.choice([-1, 0, 1], len(sample.label_A)) * 2.0**-24
    sample.feature_AF[:, 1] = 1 + rounding

    curves = fit_curves(sample, sample.label_A, 500)

    assert abs(curves.best) < 1
    assert curves.score > 0.5


def test_scores_that_are_the_same_but_for_rounding_make_curves() -> None:
    """As those of an encoder that gives all texts one vector."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sample, _ = planted_answers(rng, int(rng.integers(20, 200)))
        shape = sample.feature_AF.shape
        sample.feature_AF[:] = 1 + rng.integers(-2, 3, shape) * 2.0**-24
        # A curve that does not rise is refused.
        fit_curves(sample, sample.label_A, 60)


def test_every_answer_has_a_probability_that_does_not_depend_on_k_or_on_other_queries(
    retriever: Retriever, texts: list[str]
) -> None:
    together = probabilities(retriever, texts, 20)

    for text, of_twenty in zip(texts, together, strict=True):
        for value in of_twenty.values():
            assert 0 <= value <= 1
        for k in (1, 3):
            (alone,) = probabilities(retriever, [text], k)
            expected = {label: of_twenty[label] for label in alone}
            # Scores of one query and of many differ in their last bits.
            assert alone == pytest.approx(expected, abs=1e-5)


def test_probabilities_stay_when_labels_join_or_are_filtered_out(
    retriever: Retriever,
    bundles: dict[str, Path],
    texts: list[str],
) -> None:
    before = probabilities(retriever, texts, NUM_LABELS)

    is_allowed = np.arange(NUM_LABELS) % 3 == 0
    filtered = probabilities(retriever.restricted(is_allowed), texts, 5)
    for answers, of_all in zip(filtered, before, strict=True):
        assert answers == {label: of_all[label] for label in answers}

    side = load_label_side(bundles["memory"] / "label_side")
    sides = [side] * len(retriever.members)
    new = NewLabel("new", texts[0])
    grown = with_labels(retriever, sides, [new])
    after = probabilities(grown, texts, NUM_LABELS + 1)
    for answers, of_all in zip(after, before, strict=True):
        joined = answers.pop(NUM_LABELS)
        assert 0 <= joined <= 1
        assert answers == pytest.approx(of_all, abs=1e-6)


def test_probabilities_stay_when_a_label_that_is_the_query_itself_is_masked(
    retriever: Retriever, texts: list[str]
) -> None:
    """Evaluations mask it, a server answers it or gets a filter."""
    before = probabilities(retriever, texts, NUM_LABELS)
    # The most probable label of each query is the nearest, or has the nearest voters.
    own_labels = [[max(of_all, key=of_all.__getitem__)] for of_all in before]

    top = retriever.top_labels(texts, 5, exclude=Ragged.from_rows(own_labels))

    assert top.probabilities is not None
    for ids, values, own, of_all in zip(
        top.ids, top.probabilities, own_labels, before, strict=True
    ):
        assert own[0] not in ids
        expected = [of_all[label] for label in ids.tolist()]
        assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_min_probability_leaves_out_what_is_less_probable(
    retriever: Retriever, texts: list[str]
) -> None:
    everything = retriever.search(texts, 20)
    values = [answer.probability for answer in everything[0]]
    level = float(np.median(values))

    probable = retriever.search(texts, 20, min_probability=level)

    for answers, of_all in zip(probable, everything, strict=True):
        expected = [answer for answer in of_all if answer.probability >= level]
        assert answers == expected

    # A bulk prediction leaves out the same.
    chunk = QueryChunk(0, texts, texts)
    table = answer_chunk(retriever, chunk, 20, min_probability=level)
    for row, answers in zip(table.to_pylist(), probable, strict=True):
        expected_values = [answer.probability for answer in answers]
        assert row["label_id"] == [answer.label_id for answer in answers]
        assert row["probability"] == pytest.approx(expected_values)


def test_answers_of_other_settings_and_other_bundles_have_no_probability(
    bundles: dict[str, Path],
    corpus: Corpus,
    texts: list[str],
    tmp_path: Path,
) -> None:
    memory = Retriever.load(bundles["memory"], threads=1)
    other = MemoryConfig(weight=0.25)

    ((answer,),) = memory.search(texts[:1], 1, memory=other)
    assert answer.probability is None
    with pytest.raises(ConfigError, match="no probabilities"):
        memory.search(texts, 1, memory=other, min_probability=0.5)
    with pytest.raises(ConfigError, match="at most 1"):
        memory.search(texts, 1, min_probability=1.5)

    # Parts that are added to a calibrated bundle change its scores.
    path = tmp_path / "fused"
    write_parts([bundles["memory"]], corpus, path, PartsConfig(texts=1.0))
    fused = Retriever.load(path, threads=1)
    ((answer,),) = fused.search(texts[:1], 1)
    assert answer.probability is None
    with pytest.raises(ConfigError, match="xmcray calibrate"):
        fused.search(texts, 1, min_probability=0.5)


def test_a_malformed_curve_is_refused(
    bundles: dict[str, Path],
    corpus: Corpus,
    tmp_path: Path,
) -> None:
    copy = tmp_path / "bundle"
    calibrate(str(bundles["labels"]), corpus, copy)
    path = copy / "calibration" / "curves.json"
    curves = read_json(path)
    curves["by_segment"]["tail"]["probability"][0] = 2.0
    path.write_text(json.dumps(curves))
    renew_manifest(copy)

    with pytest.raises(BundleError, match="calibrate the bundle again"):
        Retriever.load(copy)


def test_an_evaluation_says_how_right_probabilities_are(
    bundles: dict[str, Path], corpus: Corpus
) -> None:
    retriever = Retriever.load(bundles["fused"], threads=1)
    uncalibrated = dataclasses.replace(retriever, calibration=None)

    measured = measure_bundle(retriever, corpus, "test").to_json()
    without = measure_bundle(uncalibrated, corpus, "test").to_json()

    assert "calibration" not in without
    calibration = measured["calibration"]
    assert calibration["ECE@5"] < 0.15
    has_positive = corpus.split("test").num_positives() > 0
    num_answers = [row["answers"] for row in calibration["bins"]]
    assert sum(num_answers) == 5 * has_positive.sum()
    coverages = [row["coverage"] for row in calibration["thresholds"]]
    assert coverages == sorted(coverages, reverse=True)


def calibration_error(
    probability_QK: np.ndarray,
    ids: np.ndarray,
    truth: Ragged,
) -> float:
    """ECE@5 by a plain loop: the error of each bin, weighted by its share of the answers."""
    error_of_bin = [0.0] * BINS
    num_answers = 0
    for query, positives in enumerate(truth):
        if len(positives) == 0:
            continue
        for place in range(5):
            label = ids[query, place]
            if label < 0:
                continue
            value = float(probability_QK[query, place])
            is_hit = label in positives
            error_of_bin[int(value * BINS)] += value - is_hit
            num_answers += 1
    absolute = [abs(error) for error in error_of_bin]
    return sum(absolute) / num_answers


def test_calibration_error_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    probability_QK = rng.random((40, 12)).astype(np.float32)
    ids = np.tile(np.arange(12), (40, 1))
    # One query has few answers, and one has no positives.
    ids[5, 3:] = -1
    is_positive = rng.random((40, 12)) < 0.4
    is_positive[7] = False
    truth = Ragged.from_rows([np.flatnonzero(row) for row in is_positive])
    no_scores = np.zeros(ids.shape, np.float32)
    top = TopLabels(ids, no_scores, probability_QK)

    reliability = Reliability(12)
    for start, stop in [(0, 25), (25, 40)]:
        part = top.slice(start, stop)
        reliability.update(part, truth.slice(start, stop))

    result = reliability.result()
    assert result is not None
    expected = calibration_error(probability_QK, ids, truth)
    assert result["ECE@5"] == pytest.approx(expected)

    rows = {row["min_probability"]: row for row in result["thresholds"]}
    is_probable = probability_QK >= 0.9
    is_label = ids >= 0
    has_positive = truth.lengths > 0
    is_counted = is_probable & is_label & has_positive[:, None]
    # Thresholds count the first ten answers.
    expected_answers = is_counted[:, :10].sum()
    assert rows[0.9]["answers"] == expected_answers


@pytest.mark.parametrize("level", [0.1, 0.7, 0.95])
def test_a_probability_that_is_the_level_passes_everywhere(level: float) -> None:
    probability = np.float32(level)
    ids = np.zeros((1, 1), np.int64)
    top = TopLabels(ids, np.ones((1, 1), np.float32), np.full((1, 1), probability))
    found = FoundLabel(0, "uid", "text", 1.0, float(probability))
    reliability = Reliability(1)
    reliability.update(top, Ragged.from_rows([[0]]))
    result = reliability.result()
    assert result is not None
    (threshold,) = (t for t in result["thresholds"] if t["min_probability"] == level)

    assert top.at_least(level).ids[0, 0] == 0
    assert at_least([found], level) == [found]
    assert threshold["answers"] == 1
