"""Routes in the shapes of other services, for programs that speak only those.

    POST /v1/embeddings    as OpenAI's: query vectors of texts
    POST /v1/rerank        as Cohere's, with `documents`; as that of Text Embeddings Inference, with `texts`
    POST /v2/rerank        the same, for Cohere's second client

Tokens, limits and problem documents are those of the other routes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from xmcray.serving.problems import ProblemError
from xmcray.serving.schema import MAX_TEXTS, Name, Text
from xmcray.types import Float32Array

if TYPE_CHECKING:
    from xmcray.serving.http import Gateway

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
RERANK_2 = "/v2/rerank"  # of Cohere's second client, with the same fields


class Foreign(BaseModel):
    """A request of another service's clients, which send further fields of their own."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Clients send null for what was not set, so such a field has its default."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class EmbeddingsRequest(Foreign):
    """POST /v1/embeddings: the vectors of /v1/encode, in OpenAI's shape.

    Attributes:
        input: a text, or several.
        model: name of the bundle; the first one if not given.
        encoding_format: base64 is of little-endian float32.
        dimensions: expected width of the vectors; another one is refused.
    """

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class Embedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One vector for each text, in the order of the request."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Document(BaseModel):
    """A text to rank."""

    text: Text


class RerankRequest(Foreign):
    """POST /v1/rerank: texts by their score as if they were labels that joined now.

    Attributes:
        query: what they are compared with.
        documents: texts to rank, in Cohere's shape.
        texts: texts to rank, in the shape of Text Embeddings Inference; one of both is needed.
        model: name of the bundle; the first one if not given.
        top_n: only so many of the best ones are answered.
        return_documents, return_text: whether the texts are in the answer.
    """

    query: Text
    documents: (
        Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_TEXTS)] | None
    ) = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False


class RankedDocument(BaseModel):
    """A text of the request by its place there, with the inner product of its vector and the query's."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(BaseModel):
    """The texts of `documents`, best first."""

    id: str
    model: str
    results: list[RankedDocument]


class RankedText(BaseModel):
    """A text of `texts` by its place there, with its score as in `RankedDocument`."""

    index: int
    score: float
    text: str | None = None


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes to the application of a gateway."""
    service = gateway.service

    @app.post(EMBEDDINGS, response_model_exclude_none=True, tags=["interchange"])
    async def embeddings(body: EmbeddingsRequest, response: Response) -> EmbeddingsResponse:
        """The vectors of /v1/encode, in OpenAI's shape."""
        texts = [body.input] if isinstance(body.input, str) else body.input
        pinned, vectors, num_tokens = await service.vectors(texts, body.model)
        width = vectors.shape[1]
        if body.dimensions not in (None, width):
            raise ProblemError(
                "invalid",
                f"dimensions is {body.dimensions}, expected {width}, the width of model {pinned.model!r};"
                " `xmcray export --dim` writes a narrower bundle",
            )
        data = []
        for index, vector in enumerate(vectors):
            value = _base64(vector) if body.encoding_format == "base64" else vector.tolist()
            data.append(Embedding(index=index, embedding=value))
        usage = Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        response.headers.update(pinned.headers)
        return EmbeddingsResponse(data=data, model=pinned.model, usage=usage)

    @app.post(RERANK_2, response_model_exclude_none=True, include_in_schema=False)
    @app.post(RERANK, response_model_exclude_none=True, tags=["interchange"])
    async def rerank(
        body: RerankRequest, request: Request, response: Response
    ) -> RerankResponse | list[RankedText]:
        """Texts by their score as if they were labels that joined now."""
        if (body.documents is None) == (body.texts is None):
            raise ProblemError("invalid", "expected either `documents` or `texts`")
        texts = body.texts or []
        for document in body.documents or ():
            texts.append(document if isinstance(document, str) else document.text)
        pinned, scores = await service.score_documents(body.query, texts, body.model)
        response.headers.update(pinned.headers)
        best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        if body.texts is not None:
            return _ranked_texts(texts, scores, best, body.return_text)
        results = []
        for index in best:
            ranked = RankedDocument(index=index, relevance_score=float(scores[index]))
            if body.return_documents:
                ranked.document = Document(text=texts[index])
            results.append(ranked)
        return RerankResponse(id=request.state.id, model=pinned.model, results=results)


def _ranked_texts(
    texts: Sequence[str], scores: Float32Array, best: Sequence[int], with_text: bool
) -> list[RankedText]:
    ranked = []
    for index in best:
        text = texts[index] if with_text else None
        ranked.append(RankedText(index=index, score=float(scores[index]), text=text))
    return ranked


def _base64(vector: Float32Array) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
