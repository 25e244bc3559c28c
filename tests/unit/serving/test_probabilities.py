"""Probabilities over HTTP and gRPC, and the drift of those that are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from bundles import write_memory
from served import Call, Served, served

from xmcray.data.corpus import Corpus
from xmcray.retrieval.calibration import FEWEST, Drift
from xmcray.retrieval.retriever import Retriever
from xmcray.serving import rpc
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.training.calibrate import calibrate

ASKED = ["w3x1 w4x2", "w5x0 w6x2", ""]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A calibrated bundle, and one without probabilities."""
    folder = tmp_path_factory.mktemp("served")
    plain = write_memory(folder)
    calibrate(str(plain), Corpus.open(folder / "corpus"), folder / "calibrated")
    return {"calibrated": folder / "calibrated", "plain": plain}


def test_probabilities_are_those_of_the_retriever(bundles: dict[str, Path], tmp_path: Path) -> None:
    wanted = Retriever.load(bundles["calibrated"], threads=1).search(ASKED, 9)
    level = sorted(answer.probability or 0 for answer in wanted[0])[4]

    async def test() -> None:
        async with served(tmp_path, bundles) as one:
            body = await one.search(ASKED, k=9)
            for result, answers in zip(body["results"], wanted, strict=True):
                found = [answer["probability"] for answer in result["answers"]]
                assert found == pytest.approx([answer.probability for answer in answers], abs=1e-5)
            body = await one.search(ASKED, k=9, min_probability=level - 1e-4)
            probable = [a.uid for a in wanted[0] if (a.probability or 0) >= level]
            assert [answer["uid"] for answer in body["results"][0]["answers"]] == probable
            request = SearchRequest(texts=ASKED, k=9, min_probability=level - 1e-4)
            reply = await rpc.search(one, request, Call())
            assert [answer.uid for answer in reply.results[0].answers] == probable
            assert min(answer.probability for answer in reply.results[0].answers) >= level - 1e-4
            await refusals(one)

    async def refusals(one: Served) -> None:
        plain = await one.search(ASKED, model="plain")
        assert "probability" not in plain["results"][0]["answers"][0]
        for fields in ({"model": "plain"}, {"memory": {"weight": 0.2}}):
            answer = await one.ask("/v1/search", {"texts": ["a"], "min_probability": 0.5, **fields})
            assert answer.status_code == 422
            assert "xmcray calibrate" in answer.json()["detail"]
        models = (await one.ask("/v1/models")).json()["models"]
        assert [model["calibrated"] for model in models] == [True, False]

    asyncio.run(test())


async def test_the_drift_of_served_probabilities_is_a_gauge(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, bundles) as one:
        name = 'xmcray_probability_drift{model="calibrated"'
        assert name not in (await one.ask("/metrics")).text
        # A least probability changes what is answered and not what is noted.
        for _ in range(2):
            await one.search([ASKED[0]] * (FEWEST // 2), min_probability=1.0)
        assert name in (await one.ask("/metrics")).text
        assert one.service.drifts()["calibrated"] > 0.25


@pytest.mark.parametrize(
    ("new", "is_alike"), [(lambda i: (i % 10) / 10 + 0.05, True), (lambda i: 0.95, False)]
)
def test_drift_tells_another_distribution_from_the_same(
    new: Callable[[int], float], is_alike: bool
) -> None:
    drift = Drift((0.1,) * 10)
    for i in range(FEWEST - 1):
        drift.add(new(i))
    assert drift.index() is None
    for i in range(1000):
        drift.add(new(i))
    index = drift.index()
    assert index is not None
    assert (index < 0.01) == is_alike
    assert (index > 0.25) == (not is_alike)
