"""A cross-encoder orders the best answers again, everywhere that answers are given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_corpus
from models import write_bert, write_cross_encoder
from served import served
from shell import run_command, set_options

from xmcray import prediction
from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.cross_encoder import CrossEncoder
from xmcray.retrieval.reranker import RerankConfig, Reranker
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import NO_SHARDS
from xmcray.serving.schema import SearchRequest
from xmcray.serving.search_batch import PendingSearch, SearchHits, find_hits
from xmcray.serving.service import Service
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import EncodedTexts, Snapshot, SnapshotReference
from xmcray.serving.source import SnapshotSource
from xmcray.training import train_reranker
from xmcray.training.outcome import measure_bundle
from xmcray.training.train_reranker import one_cycle
from xmcray.types import Float32Array, TopLabels

QUERIES = ["w1x0 w2x1", "w3x2", ""]
SETTINGS = ("encoder.dim=16", "optim.epochs=1", "negatives.hard=0", "cluster.workers=0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("c"), num_queries=200, num_labels=23)


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    train = f"train astra --data {corpus.path} --out {out} {set_options(SETTINGS)}"
    assert run_command(train) == 0
    return out


@pytest.fixture(scope="module")
def reranker(corpus: Corpus, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by the command."""
    folder = tmp_path_factory.mktemp("reranker")
    label_texts = corpus.label_texts(np.arange(corpus.card.num_labels))
    words = sorted(set(" ".join(label_texts).split()))
    model = write_bert(folder / "model", words)
    small = "--negatives 3 --candidates 10 --max-len 24 --lr 0.003"
    paths = f"--data {corpus.path} --model {model} --out {folder}/r"
    assert run_command(f"train-reranker {run} {paths} {small}") == 0
    return folder / "r"


def test_a_reranker_without_a_negative_to_learn_from_is_refused(
    corpus: Corpus,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As if all answers of each query were its positives.
    monkeypatch.setattr(train_reranker, "_lists", lambda *_: [])
    model = write_bert(tmp_path / "model", ["w1x0"])
    paths = f"--data {corpus.path} --model {model} --out {tmp_path}/r"
    assert run_command(f"train-reranker {run} {paths} --candidates 2") == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: all of the first 2 answers of 184 training queries are positives")
    )
    assert not (tmp_path / "r").exists()


def uids_of(answers: Iterable[Any]) -> list[str]:
    return [answer.uid for answer in answers]


def test_scores_do_not_depend_on_the_order_of_the_pairs(reranker: Path) -> None:
    pairs = [("w1x0", "w2x0"), ("w3x0 w3x1 w4x2", "w1x0")]
    scores = CrossEncoder.load(str(reranker)).score(pairs)
    backwards = CrossEncoder.load(str(reranker)).score(pairs[::-1])
    np.testing.assert_allclose(scores, backwards[::-1], atol=1e-6)


def test_answers_are_ordered_by_both_scores(run: Path, reranker: Path) -> None:
    plain = Retriever.load(run / "bundle")
    trained = Reranker.load(str(reranker))
    encoder = trained.encoder
    assert encoder is not None
    # Training may find a weight of 0 best, with which the bundle's own scores would not count.
    config = replace(trained.config, weight=2.0)
    reranked = replace(plain, reranker=replace(trained, config=config))

    for query, answers in zip(QUERIES, reranked.search(QUERIES, 5), strict=True):
        (candidates,) = plain.search([query], config.candidates)
        pair_scores = encoder.score([(query, label.text) for label in candidates])
        retriever_scores = np.float32([label.score for label in candidates])
        sums = pair_scores + config.weight * retriever_scores
        best = np.argsort(-sums, kind="stable")[:5]
        assert uids_of(answers) == uids_of(candidates[place] for place in best)
        scores = [label.score for label in answers]
        np.testing.assert_allclose(scores, sums[best], atol=1e-5)


def test_labels_that_were_not_read_keep_their_places_behind_the_others() -> None:
    top = TopLabels(np.array([[4, 2, 7, 1, -1]]), np.float32([[9, 8, 7, 6, -np.inf]]))
    reranker = Reranker(encoder=None, config=RerankConfig(candidates=2))

    # The scores of labels 4 and 2, the two candidates: the second one is better.
    reordered = reranker.with_scores(top, np.float32([[-3, 5]]))

    assert reordered.ids.tolist() == [[2, 4, 7, 1, -1]]
    assert np.all(np.diff(reordered.scores[0, :4]) < 0)


def test_evaluation_measures_the_reranked_answers(
    run: Path, reranker: Path, corpus: Corpus
) -> None:
    reranked = Retriever.load(run / "bundle").reranked_by(reranker)

    measured = measure_bundle(reranked, corpus, "test").metrics["P@1"]

    split = corpus.split("test")
    rows = np.arange(len(split))
    best = reranked.top_labels(split.texts(rows), 1).ids[:, 0]
    positives = split.positives(rows)
    is_hit = [best[row] in positives[row] for row in rows]
    assert measured == pytest.approx(np.mean(is_hit), abs=1e-6)


async def test_serving_gives_the_reranked_answers(
    run: Path, reranker: Path, tmp_path: Path
) -> None:
    expected = Retriever.load(run / "bundle").reranked_by(reranker).search(QUERIES, 5)
    request = SearchRequest(texts=QUERIES, k=5)

    async with served(tmp_path, {"m": run / "bundle"}, rerank=str(reranker)) as server:
        # A replica follows the coordinator; a server in one process answers from it.
        replica = server.service
        in_one_process = Service(replica.config, server.admin)
        for service in (replica, in_one_process):
            response = await service.search(request, "test")
            for result, labels in zip(response.results, expected, strict=True):
                assert uids_of(result.answers) == uids_of(labels)


def test_in_the_composed_mode_another_process_reads(
    run: Path, reranker: Path, tmp_path: Path
) -> None:
    """The gateway loads no cross-encoder, and answers as one process does."""
    reranked = Retriever.load(run / "bundle").reranked_by(reranker)
    assert reranked.reranker is not None
    whole = Snapshot.load(str(run / "bundle"), "m", threads=1)
    gateway = Snapshot.load(str(run / "bundle"), "m", 1, NO_SHARDS, rerank=str(reranker))
    assert gateway.retriever.reranker is not None
    assert gateway.retriever.reranker.encoder is None
    num_pairs: list[int] = []
    encoder = CrossEncoder.load(str(reranker), reranked.reranker.config.max_len)

    class Source(SnapshotSource):
        def snapshots(self) -> dict[str, Snapshot | None]:
            return {"m": gateway}

    class Backend:
        """The other deployments, in this process."""

        async def encode(self, *_: object) -> EncodedTexts:
            raise AssertionError("searchers encode by a static encoder")

        async def find(self, reference: SnapshotReference, *search: Any) -> SearchHits:
            return find_hits([PendingSearch(whole, *search)], 512)[0]

        async def score_pairs(self, pairs: list[tuple[str, str]]) -> Float32Array:
            num_pairs.append(len(pairs))
            return encoder.score(pairs)

    config = ServeConfig(bundles={"m": str(run / "bundle")}, state_dir=str(tmp_path))
    service = Service(config, Source(), Backend())
    request = SearchRequest(texts=QUERIES[:1], k=5, fields=["uid", "score"])

    (result,) = asyncio.run(service.search(request, "test")).results

    (expected,) = reranked.search(QUERIES[:1], 5)
    assert uids_of(result.answers) == uids_of(expected)
    scores = [answer.score for answer in result.answers]
    assert scores == [label.score for label in expected]
    assert num_pairs == [reranked.reranker.config.candidates]


@pytest.mark.parametrize("num_steps", range(1, 31))
def test_the_rate_rises_and_falls_whatever_the_number_of_steps(num_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = one_cycle(optimizer, 1.0, num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.04)
    assert max(rates) <= 1
    assert num_steps == 1 or max(rates) > 0.9
    assert schedule.get_last_lr()[0] < 0.001 or num_steps == 1


def test_a_model_with_several_outputs_is_refused(tmp_path: Path) -> None:
    model = write_bert(tmp_path / "model", ["w1"])
    with pytest.raises(BundleError, match="expected a cross-encoder with one output"):
        CrossEncoder.load(str(model))


def test_a_missing_model_is_named_as_a_cross_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = "cross-encoder 'no/such' is .*such as cross-encoder/ms-marco-MiniLM-L6-v2"
    with pytest.raises(ConfigError, match=message):
        CrossEncoder.load("no/such")


def test_predictions_know_another_cross_encoder_of_the_same_folder(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "model", ["a", "b"])
    path, before = prediction._named_reranker(str(folder))
    assert prediction._named_reranker(str(folder)) == (path, before)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert prediction._named_reranker(str(folder)) != (path, before)
