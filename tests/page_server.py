"""A small server that answers by the schema, for the page at / and the API page; answers.json holds its answers."""

import base64
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from xmcray.serving.http import CHALLENGE, SECURITY
from xmcray.serving.schema import (
    FeedbackRequest,
    ModelsResponse,
    Problem,
    SearchRequest,
    SearchResponse,
)

PAGE = Path(__file__).parents[1] / "xmcray" / "serving" / "page"
RECORDED = json.loads(
    Path(__file__).with_name("browser").joinpath("answers.json").read_text(encoding="utf-8")
)
PEAKS, FILL = RECORDED["answers"]
LABELS, MEMORY = (model["model"] for model in RECORDED["models"])
MARKUP = "<img src=x onerror=alert(1)>"
TOKEN = "a token"


class Server:
    """Answers recorded queries; `markup`, `broken`, `slow` and `long` behave in their own way, others find nothing.

    Attributes:
        bodies: of the searches, as they came.
        ready: whether the models can be listed.
        fused: whether all models are calibrated fused bundles.
        collects: whether events are collected.
        feedback: as it came.
        answers_slow: lets the query `slow` be answered.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ready = True
        self.fused = False
        self.collects = False
        self.feedback: list[dict[str, Any]] = []
        self.slow_came = threading.Event()
        self.answers_slow = threading.Event()
        self._socket = socket.create_server(
            ("127.0.0.1", 0)
        )  # listens from now on: the test need not wait for the thread
        self.origin = "http://{}:{}".format(*self._socket.getsockname())
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.answers_slow.set()
        self._server.should_exit = True
        self._thread.join(timeout=10)

    def url(self, path: str = "/", **settings: object) -> str:
        """With user and token, as in a link that a user passed on."""
        address = self.origin.replace("//", f"//anyone:{TOKEN.replace(' ', '%20')}@")
        return f"{address}{path}#{urlencode(settings)}"

    def _app(self) -> FastAPI:
        app = FastAPI(
            title="xmcray", docs_url=None, redoc_url=None, responses={422: {"model": Problem}}
        )

        @app.middleware("http")
        async def guard(request: Request, call: Callable[[Request], Any]) -> Response:
            kind, _, secret = request.headers.get("authorization", "").partition(" ")
            known = kind == "Basic" and base64.b64decode(secret).decode().partition(":")[2] == TOKEN
            response = await call(request) if known else Response(status_code=401)
            response.headers.update({**SECURITY, "WWW-Authenticate": CHALLENGE})
            return response

        @app.get("/", include_in_schema=False)
        async def page() -> FileResponse:
            return FileResponse(PAGE / "index.html")

        @app.get("/docs", include_in_schema=False)
        async def docs() -> FileResponse:
            return FileResponse(PAGE / "docs.html")

        @app.get("/page/{file}", include_in_schema=False)
        async def asset(file: str) -> FileResponse:
            return FileResponse(PAGE / file)

        @app.get("/v1/models", response_model=ModelsResponse)
        async def models() -> Any:
            kind = {"predictor": "fused", "calibrated": True} if self.fused else {}
            facts = {"attributes": ["package", "year"], "feedback": self.collects, **kind}
            listed = [{**model, **facts} for model in RECORDED["models"]]
            return (
                {"models": listed} if self.ready else problem("not-ready", "no model is loaded yet")
            )

        @app.post("/v1/search", response_model=SearchResponse, response_model_exclude_none=True)
        def search(request: SearchRequest) -> Any:
            """Ranks the labels for each text."""
            return self._search(request)

        @app.post("/v1/feedback", include_in_schema=False)
        def feedback(request: FeedbackRequest) -> Any:
            self.feedback.append(request.model_dump())
            if request.event == "reject":
                return problem("refused", "the feedback was not acknowledged: the disk is full")
            return {"model": request.model, "number": len(self.feedback)}

        return app

    def _search(self, request: SearchRequest) -> Any:
        self.bodies.append(request.model_dump(exclude_unset=True))
        model = next(model for model in RECORDED["models"] if model["model"] == request.model)
        explains = self.fused or model["predictor"] == "memory"
        assert request.explain == explains, "only a memory or a fused bundle can explain"
        text = request.texts[0]
        result = {"answers": [], "truncated": request.texts == ["long"]}
        took_ms = 0.4
        if text == "broken":
            return problem(
                "overloaded", "all 8 places of the queue are taken; send the request again in 2 s"
            )
        if text == "slow":
            self.slow_came.set()
            self.answers_slow.wait(60)
        if text == "markup":
            answer = {
                "uid": "u<b>1</b>",
                "text": MARKUP,
                "score": 0.5,
                "attributes": {"package": MARKUP},
            }
            voters = [{"uid": MARKUP, "text": MARKUP, "weight": 0.25}]
            result["answers"] = [{**answer, "voters": voters} if request.explain else answer]
        if text == "long":
            voters = {"completed": True, "voters": []} if request.explain else {}
            result["answers"] = [{"uid": "u", "text": "u", "score": -1.5, **voters}]
        query = next(
            (query for query in RECORDED["answers"] if text and query.startswith(text)), None
        )
        if query:
            found = RECORDED["answers"][query][model["model"]]
            wanted = request.filter.attributes.get("package") if request.filter else None
            kept = [
                one
                for one in found["answers"]
                if not wanted or one["attributes"]["package"] in wanted
            ]
            result["answers"] = kept[: request.k]
            if self.fused:
                result["answers"] = fused_answers(kept[: request.k], request.min_probability or 0)
            took_ms = found["took_ms"]
        pinned = {
            "model": model["model"],
            "version": model["version"],
            "label_log": model["label_log"],
        }
        return {**pinned, "request_id": "1", "took_ms": took_ms, "results": [result]}


def fused_answers(answers: list[dict[str, Any]], min_probability: float) -> list[dict[str, Any]]:
    """The answers as a calibrated fused bundle gives them: 95 %, 90 % ..., by parts in turn."""
    changed = []
    for place, answer in enumerate(answers):
        probability = 0.95 - 0.05 * place
        parts = {"dexml.labels": 0.2, "words": 0.1 + 0.2 * (place % 2)}
        facts = {"probability": probability, "parts": parts, "voters": []}
        if probability >= min_probability:
            changed.append({**answer, **facts})
    return changed


def problem(kind: str, detail: str) -> JSONResponse:
    described = Problem(type=f"urn:xmcray:{kind}", title=kind, status=503, detail=detail)
    return JSONResponse(
        described.model_dump(exclude_none=True), 503, media_type="application/problem+json"
    )


def recorded(query: str, model: str) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = RECORDED["answers"][query][model]["answers"]
    return answers


def uids(query: str, model: str) -> list[str]:
    return [answer["uid"] for answer in recorded(query, model)]
