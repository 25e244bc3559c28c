"""Routes in the shapes of OpenAI, Cohere and Text Embeddings Inference give what the own routes give."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_bundle_of
from served import served

from xmcray.retrieval import new_vectors

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
TEXTS = ["matrix vector norm", "sort sort join"]
DOCUMENTS = ["vector space", "join of tables", "matrix norm", "sort keys"]
LONG_TEXT = "matrix " * 500


async def test_embeddings_are_the_vectors_of_encode(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")

    async with served(tmp_path, {"m": bundle}) as one:
        encoded = (await one.ask("/v1/encode", {"texts": TEXTS})).json()
        wanted = np.float32(encoded["vectors"])
        body = {"input": TEXTS, "model": "m", "user": "somebody"}
        answer = (await one.ask("/v1/embeddings", body)).json()
        assert answer["object"] == "list"
        assert answer["model"] == "m"
        assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        assert [entry["index"] for entry in answer["data"]] == [0, 1]
        vectors = [entry["embedding"] for entry in answer["data"]]
        np.testing.assert_array_equal(np.float32(vectors), wanted)
        # OpenAI's own client asks for base64.
        body = {"input": TEXTS[1], "encoding_format": "base64"}
        answer = (await one.ask("/v1/embeddings", body)).json()
        encoded_vector = base64.b64decode(answer["data"][0]["embedding"])
        np.testing.assert_array_equal(np.frombuffer(encoded_vector, "<f4"), wanted[1])
        refused = await one.ask("/v1/embeddings", {"input": "a", "dimensions": 3})
        assert refused.status_code == 422
        assert "expected 16" in refused.json()["detail"]


@pytest.mark.parametrize("kind", ["texts", "rowsIVF", "both", "prototypes"])
async def test_texts_are_ranked_as_if_they_were_labels(tmp_path: Path, kind: str) -> None:
    bundle = write_bundle_of(tmp_path / kind, kind)

    async with served(tmp_path, {"m": bundle}) as one:
        body = {"query": TEXTS[0], "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}]}
        body["documents"] += DOCUMENTS[2:]
        answer = (await one.ask("/v1/rerank", {**body, "return_documents": True})).json()
        score_of = {
            result["document"]["text"]: result["relevance_score"] for result in answer["results"]
        }
        scores = list(score_of.values())
        assert scores == sorted(scores, reverse=True)
        best = (await one.ask("/v2/rerank", {**body, "top_n": 1})).json()["results"]
        assert best == [{key: answer["results"][0][key] for key in ("index", "relevance_score")}]
        as_texts = {"query": TEXTS[0], "texts": DOCUMENTS}
        ranked = (await one.ask("/v1/rerank", as_texts)).json()
        assert [entry["score"] for entry in ranked] == scores
        changed = await one.change(
            *({"op": "add", "uid": text, "text": text} for text in DOCUMENTS)
        )
        await one.reached(changed.json()["label_log"])
        found = await one.search([TEXTS[0]], k=1000, filter={"allow": DOCUMENTS})
        answers = found["results"][0]["answers"]
        wanted = [score_of[entry["uid"]] for entry in answers]
        np.testing.assert_allclose([entry["score"] for entry in answers], wanted, atol=1e-6)


async def test_searches_go_on_while_a_bundle_learns_to_rank_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle_of(tmp_path / "rows", "rows")
    may_end = threading.Event()
    fit = new_vectors._fit_rows

    def slow_fit(*arguments: Any) -> Any:
        assert may_end.wait(20)
        return fit(*arguments)

    monkeypatch.setattr(new_vectors, "_fit_rows", slow_fit)
    body = {"query": TEXTS[0], "documents": DOCUMENTS}
    async with served(tmp_path, {"m": bundle}, deadline_ms=1000) as one:
        late = await one.ask("/v1/rerank", body)
        assert late.status_code == 503
        await one.search([TEXTS[0]])
        may_end.set()
        answer = await one.ask("/v1/rerank", body)
        assert answer.status_code == 200


async def test_answers_name_the_version_as_those_of_a_search_do(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")
    names = ("x-xmcray-version", "x-xmcray-label-log")
    async with served(tmp_path, {"m": bundle}) as one:
        searched = await one.ask("/v1/search", {"texts": TEXTS})
        for path, body in (
            (EMBEDDINGS, {"input": TEXTS}),
            (RERANK, {"query": TEXTS[0], "texts": DOCUMENTS}),
            (RERANK, {"query": TEXTS[0], "documents": DOCUMENTS}),
        ):
            answer = await one.ask(path, body)
            assert all(answer.headers[name] == searched.headers[name] for name in names)


async def test_a_field_that_is_null_has_its_default(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")
    embeddings: dict[str, Any] = {"input": TEXTS[0]}
    rerank: dict[str, Any] = {"query": TEXTS[0], "texts": DOCUMENTS}
    nulls = {
        EMBEDDINGS: ("model", "encoding_format", "dimensions", "user"),
        RERANK: ("model", "documents", "top_n", "return_documents", "return_text"),
    }
    async with served(tmp_path, {"m": bundle}) as one:
        for path, body in ((EMBEDDINGS, embeddings), (RERANK, rerank)):
            plain = await one.ask(path, body)
            with_nulls = await one.ask(path, {**body, **dict.fromkeys(nulls[path])})
            assert with_nulls.status_code == plain.status_code == 200
            assert with_nulls.json() == plain.json()
        refused = await one.ask(EMBEDDINGS, {"input": None})
        assert refused.status_code == 422


async def test_what_cannot_be_ranked_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")

    async with served(tmp_path, {"m": bundle}) as one:
        for body, message in (
            ({}, "either `documents` or `texts`"),
            ({"documents": ["sort"], "texts": ["sort"]}, "either `documents` or `texts`"),
            ({"documents": ["sort", ""]}, "has no token"),
        ):
            refused = await one.ask("/v1/rerank", {"query": "sort", **body})
            assert refused.status_code == 422
            assert message in refused.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "detail"),
    [
        (EMBEDDINGS, {}, 422, "invalid", "body.input is missing, expected a value; add it"),
        (EMBEDDINGS, {"input": []}, 422, "invalid", "at least 1"),
        (EMBEDDINGS, {"input": [[7, 8]]}, 422, "invalid", "valid string"),
        (EMBEDDINGS, {"input": ["a"] * 65}, 422, "invalid", "at most 64"),
        (EMBEDDINGS, {"input": ["a"] * 9}, 422, "invalid", "9 texts in one request, expected at"),
        (EMBEDDINGS, {"input": "x" * 100_001}, 422, "invalid", "at most 100000 characters"),
        (EMBEDDINGS, {"input": "x" * 2_000_000}, 413, "too-large", "1,048,576"),
        (EMBEDDINGS, {"input": ["a", LONG_TEXT]}, 422, "too-long", "text 1 has more tokens"),
        (EMBEDDINGS, {"input": "a", "model": "b"}, 404, "not-found", "expected one of: m"),
        (RERANK, {"texts": []}, 422, "invalid", "at least 1"),
        (RERANK, {"texts": ["a"] * 65}, 422, "invalid", "at most 64"),
        (RERANK, {"documents": ["a"] * 65}, 422, "invalid", "at most 64"),
        (RERANK, {"documents": ["a"] * 9}, 422, "invalid", "9 texts in one request, expected at"),
        (RERANK, {"documents": ["x" * 100_001]}, 422, "invalid", "at most 100000 characters"),
        (RERANK, {"texts": ["a"], "query": "x" * 2_000_000}, 413, "too-large", "1,048,576"),
        (
            RERANK,
            {"texts": ["a"], "query": LONG_TEXT},
            422,
            "too-long",
            "the query has more tokens",
        ),
        (RERANK, {"texts": ["a"], "top_n": 0}, 422, "invalid", "greater than or equal to 1"),
        (RERANK, {"texts": ["a"], "model": "b"}, 404, "not-found", "expected one of: m"),
    ],
)
async def test_limits_are_those_of_a_search(
    path: str, body: dict[str, Any], status: int, kind: str, detail: str, tmp_path: Path
) -> None:
    if path == RERANK:
        body = {"query": "sort", **body}
    bundle = write_bundle_of(tmp_path / "texts", "texts")
    async with served(tmp_path, {"m": bundle}, long_texts="refuse", max_texts=8) as one:
        answer = await one.ask(path, body)
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (status, f"urn:xmcray:{kind}")
        assert answer.headers["content-type"] == "application/problem+json"
        # Pydantic names an alternative of a union after the place; only the first is in `detail`.
        assert detail in str([problem["detail"], problem.get("errors")])
        for token in (None, "wrong" * 4):
            answer = await one.ask(path, body, token)
            assert (answer.status_code, answer.json()["type"]) == (401, "urn:xmcray:unauthorized")


async def test_what_is_too_long_is_cut_if_the_settings_say_so(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")
    async with served(tmp_path, {"m": bundle}) as one:
        for path, body in (
            (EMBEDDINGS, {"input": LONG_TEXT}),
            (RERANK, {"query": LONG_TEXT, "texts": [LONG_TEXT]}),
        ):
            assert (await one.ask(path, body)).status_code == 200


async def test_with_too_many_requests_they_are_refused(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "texts", "texts")
    async with served(tmp_path, {"m": bundle}, in_flight=1) as one:

        async def stuck(*_: Any) -> Any:
            await asyncio.Event().wait()

        one.service._batcher.run = stuck  # type: ignore[method-assign]
        body = {"texts": ["a"], "timeout_ms": 2000}
        waiting = asyncio.create_task(one.ask("/v1/search", body))
        while one.service.working < 1:
            await asyncio.sleep(0.001)
        for path in (EMBEDDINGS, RERANK):
            refused = await one.ask(path, content=b"not even read")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        waiting.cancel()
