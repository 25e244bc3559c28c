"""Routes in the shapes of OpenAI, Cohere and Text Embeddings Inference give what the own routes give."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from bundles import write_bundle_of
from served import served

TEXTS = ["matrix vector norm", "sort sort join"]
DOCUMENTS = ["vector space", "join of tables", "matrix norm", "sort keys"]


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
        best = (await one.ask("/v1/rerank", {**body, "top_n": 1})).json()["results"]
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
