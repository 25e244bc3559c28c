"""The HTTP interface: routes, tokens, limits, and how errors are answered. Independent of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from xmcray import __version__
from xmcray.errors import XmcrayError
from xmcray.serving import interchange, request_checks, schema
from xmcray.serving.connections import KEEP_PLACE, MAX_HEAD, MAX_HEADERS
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.metrics import CONTENT_TYPE, ServingMetrics
from xmcray.serving.problems import RETRY_AFTER_S, STATUS, TITLE, ProblemError, problem_of
from xmcray.serving.security import Tokens
from xmcray.serving.service import Service

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PUBLIC_PATHS = ("/healthz",)
# Refused when too many requests are in progress.
LIMITED_PATHS = (
    "/v1/search",
    "/v1/encode",
    "/v1/feedback",
    interchange.EMBEDDINGS,
    interchange.RERANK,
    interchange.RERANK_2,
)
PAGES = {
    "index.html": "text/html",
    "docs.html": "text/html",
    "app.js": "text/javascript",
    "docs.js": "text/javascript",
    "style.css": "text/css",
}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# Chromium shows its password dialog only if the second realm is there.
CHALLENGE = 'Basic realm="xmcray", Bearer realm="xmcray"'


class _UidConvertor(PathConvertor):
    """A uid in a path; the pattern of Starlette's own `path` ends at a line break."""

    regex = "(?s:.*)"


register_url_convertor("uid", _UidConvertor())


class Gateway(Protocol):
    """What the routes need of the replica that they run in.

    Attributes:
        service: answers requests.
        tokens: tokens of readers.
        admin_tokens: tokens of administrators.
        metrics: counts requests.
        admin: changes what is served.
    """

    service: Service
    tokens: Tokens
    admin_tokens: Tokens
    metrics: ServingMetrics
    admin: SnapshotCoordinator

    async def metrics_text(self) -> str:
        """The metrics of all replicas, in Prometheus' text format."""


def create_app(gateway: Gateway, *, sends_request_id: bool = True) -> FastAPI:
    """The ASGI application of one ingress replica.

    Args:
        sends_request_id: whether to put the request's id into the headers of the answer; Ray
            Serve's proxy does that itself.
    """
    app = FastAPI(
        title="xmcray",
        version=__version__,
        description="Search among the labels of a bundle.",
        docs_url=None,
        redoc_url=None,
        # The pages and the description have routes of their own, which need a token.
        openapi_url=None,
        middleware=[Middleware(_Guard, gateway=gateway, sends_request_id=sends_request_id)],
        exception_handlers=dict.fromkeys(
            (XmcrayError, RequestValidationError, HTTPException, Exception), _answer_error
        ),
        responses={code: {"model": schema.Problem} for code in (401, 408, 413, 422, 431, 503)},
    )
    _add_search_routes(app, gateway)
    interchange.add_routes(app, gateway)
    _add_operations_routes(app, gateway)
    _add_admin_routes(app, gateway)
    _add_pages(app)
    return app


def refusal(gateway: Gateway, scope: Scope) -> Response | None:
    """The answer to a request with a valid token if too many are in progress.

    The application would answer the same, and take longer.

    Args:
        gateway: tokens, limits and metrics.
        scope: ASGI's description of the request.
    Returns:
        None where the application has to answer: there is room, or something else is wrong.
    """
    begin = time.perf_counter()
    path = _path(scope)
    if path not in LIMITED_PATHS:
        return None
    try:
        gateway.service.check_room()
    except ProblemError as problem:
        headers = Headers(scope=scope)
        has_token = gateway.tokens.accept(headers.get("authorization"), basic=True)
        if not has_token or _head_problem(scope) is not None:
            return None
        request_id = request_checks.request_id(headers.get("x-request-id"))
        response = _answer_problem(problem, request_id)
        response.headers["x-request-id"] = request_id
        gateway.metrics.requests.labels(path, str(response.status_code)).inc()
        gateway.metrics.seconds.labels(path).observe(time.perf_counter() - begin)
        return response
    return None


def _add_search_routes(app: FastAPI, gateway: Gateway) -> None:
    service = gateway.service

    @app.post("/v1/search", response_model=schema.SearchResponse, tags=["search"])
    async def search(body: schema.SearchRequest, request: Request) -> Response:
        """The best labels of each text."""
        response = await service.search(body, request.state.id)
        gateway.metrics.texts.labels(response.model).inc(len(body.texts))
        return _answer(response)

    @app.post("/v1/encode", response_model=schema.EncodeResponse, tags=["search"])
    async def encode(body: schema.EncodeRequest, request: Request) -> Response:
        """The vectors by which labels are searched."""
        return _answer(await service.encode(body, request.state.id))

    @app.post("/v1/feedback", response_model=schema.FeedbackResponse, tags=["search"])
    async def feedback(body: schema.FeedbackRequest) -> Response:
        """What a user did with an answer; durable when this is answered."""
        return _answer(await service.feedback(body))

    @app.get("/v1/labels/{uid:uid}", response_model=schema.LabelResponse, tags=["search"])
    async def label(uid: str, model: str | None = None) -> Response:
        """One label: text, attributes."""
        return _answer(await service.label(uid, model))

    @app.get("/v1/models", response_model=schema.ModelsResponse, tags=["search"])
    async def models() -> Response:
        """What is served."""
        return _answer(service.models())


def _add_operations_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """200 when every model is loaded and has answered a probe."""
        if not gateway.service.served.ready:
            raise ProblemError("not-ready", "bundles are being loaded; ask again")
        return {"status": "ok"}

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """For Prometheus: all replicas of the ingress."""
        return Response(await gateway.metrics_text(), media_type=CONTENT_TYPE)


def _add_admin_routes(app: FastAPI, gateway: Gateway) -> None:
    def served_name(name: str | None) -> str:
        """The name of the model that a request means; ProblemError if it is not served."""
        return gateway.service.served.current(name).model

    @app.post("/admin/v1/labels", response_model=schema.OperationsResponse, tags=["admin"])
    async def change_labels(body: schema.OperationsRequest) -> Response:
        """Add, update and delete labels; durable when this is answered."""
        name = served_name(body.model)
        number = await gateway.admin.operate(name, body.operations)
        return _answer(schema.OperationsResponse(model=name, label_log=number))

    @app.post("/admin/v1/swap", response_model=schema.SwapResponse, tags=["admin"])
    async def swap(body: schema.SwapRequest) -> Response:
        """Answer from another bundle, without a lost request."""
        return _answer(await gateway.admin.swap(served_name(body.model), body))

    @app.post("/admin/v1/compact", response_model=schema.CompactResponse, tags=["admin"])
    async def compact(body: schema.CompactRequest) -> Response:
        """Write the labels as they are now into a new bundle."""
        return _answer(await gateway.admin.compact(served_name(body.model), body.out))


def _add_pages(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _page("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return _page("docs.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        return _page(name)


class _Guard:
    """ASGI middleware: checks the token and the body's size, and counts requests and their time.

    Args:
        app: the application behind it.
        gateway: tokens, limits and metrics.
        sends_request_id: see `create_app`.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        gateway: Gateway,
        sends_request_id: bool,
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Such as the start of the application (ASGI's lifespan).
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        # If the application raises before it answers.
        status = 500
        path = _path(scope)
        headers = Headers(scope=scope)
        request_id = request_checks.request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["id"] = request_id
        metrics = self._gateway.metrics

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._sends_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        metrics.working.inc()
        try:
            try:
                if (problem := _head_problem(scope)) is not None:
                    raise problem
                # First: without a token no other limit can be probed.
                self._check_token(path, headers.get("authorization"))
                _check_place(path, scope)
                receive_body = await self._check(path, headers, receive)
            except ProblemError as problem:
                await _answer_problem(problem, request_id)(scope, receive, send_counted)
            else:
                await self._app(scope, receive_body, send_counted)
        finally:
            metrics.working.dec()
            # Starlette notes the route; unknown paths must not each become a time series of their
            # own.
            default = path if path in LIMITED_PATHS else "other"
            route = getattr(scope.get("route"), "path", default)
            metrics.requests.labels(route, str(status)).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - begin)

    async def _check(self, path: str, headers: Headers, receive: Receive) -> Receive:
        """Checks a request with a valid token before it is parsed.

        Returns:
            The function from which the application receives the body.
        Raises:
            ProblemError: too many requests, or the body is too large or late.
        """
        if path in LIMITED_PATHS:
            self._gateway.service.check_room()
        if path in PUBLIC_PATHS:
            # Their routes read no body, and anyone could let them wait for one.
            return receive
        try:
            async with asyncio.timeout(self._gateway.service.config.deadline_ms / 1000):
                return await self._receive_body(headers, receive)
        except TimeoutError:
            message = "the body did not arrive in time; send it at once"
            raise ProblemError("late", message) from None

    def _check_token(self, path: str, authorization: str | None) -> None:
        tokens = self._gateway.tokens
        if path.startswith("/admin/"):
            if not self._gateway.admin_tokens.accept(authorization):
                # A reader's token is not enough; other tokens are unknown.
                kind = "forbidden" if tokens.accept(authorization) else "unauthorized"
                raise ProblemError(kind, "expected `Bearer` with the admin token")
        elif path not in PUBLIC_PATHS and not tokens.accept(authorization, basic=True):
            raise ProblemError("unauthorized", "expected `Authorization: Bearer TOKEN`")

    async def _receive_body(self, headers: Headers, receive: Receive) -> Receive:
        """Reads the whole body, which the application then receives at once."""
        limit = self._gateway.service.config.max_body
        length = headers.get("content-length", "")
        # Refused before it is read, if the header gives its length. The parser of HTTP has refused
        # numbers of more than 64 bits, which have up to 20 digits.
        if re.fullmatch("[0-9]{1,20}", length) and int(length) > limit:
            raise ProblemError(
                "too-large", f"the body has {int(length):,} bytes, expected at most {limit:,}"
            )
        body = bytearray()
        with contextlib.suppress(ClientDisconnect):
            async for part in Request({"type": "http"}, receive).stream():
                body += part
                if len(body) > limit:
                    raise ProblemError(
                        "too-large", f"the body has more than {limit:,} bytes; send less at once"
                    )
        request: Message = {"type": "http.request", "body": bytes(body), "more_body": False}
        messages = [request]

        # After the body: the application learns when the client leaves.
        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        return receive_again


def _head_problem(scope: Scope) -> ProblemError | None:
    """What is wrong with headers that came in one piece, or through a proxy; see connections.py."""
    if len(scope["headers"]) > MAX_HEADERS:
        message = f"the request has too many headers, expected at most {MAX_HEADERS}; send fewer"
        return ProblemError("long-header", message)
    num_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    for name, value in scope["headers"]:
        num_bytes += len(name) + len(value)
    if num_bytes > MAX_HEAD:
        message = f"path and headers have {num_bytes:,} bytes, expected at most {MAX_HEAD:,}"
        return ProblemError("long-header", message)
    return None


def _check_place(path: str, scope: Scope) -> None:
    """Keeps the connection for a request with a token; see connections.py.

    Ray Serve's proxy has no such limit.

    Raises:
        ProblemError: another connection has taken the place.
    """
    extension = scope.get("extensions", {}).get(KEEP_PLACE)
    if path not in PUBLIC_PATHS and extension is not None and not extension["call"]():
        # The client already has a 503, which says that nothing was done.
        raise ProblemError("overloaded", "the connection was closed for another one; ask again")


def _path(scope: Scope) -> str:
    """The path as the routes know it: ASGI's `path` includes the prefix of a mounted server."""
    path = str(scope["path"])
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _answer(body: BaseModel) -> Response:
    headers = body.headers if isinstance(body, schema.Pinned) else {}
    text = body.model_dump_json(exclude_none=True)
    return Response(text, media_type="application/json", headers=headers)


def _page(name: str) -> Response:
    if name not in PAGES:
        raise ProblemError("not-found", "there is no such page")
    # From the package, also if it is in an archive.
    text = (resources.files("xmcray.serving") / "page" / name).read_text(encoding="utf-8")
    return Response(text, media_type=PAGES[name], headers=SECURITY)


def _answer_problem(problem: ProblemError, request_id: str, status: int | None = None) -> Response:
    status = status or STATUS[problem.kind]
    body = schema.Problem(
        type=f"urn:xmcray:{problem.kind}",
        title=TITLE[problem.kind],
        status=status,
        detail=problem.detail,
        request_id=request_id,
        errors=problem.errors,
    )
    headers = {"X-Content-Type-Options": "nosniff"}
    if status == 401:
        headers["WWW-Authenticate"] = CHALLENGE
    # With it a client would try again by itself, which it must not if something may have been done.
    if status == 503 and problem.kind != "lost":
        headers["Retry-After"] = str(RETRY_AFTER_S)
    text = body.model_dump_json(exclude_none=True)
    return Response(text, status, media_type="application/problem+json", headers=headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """The problem document of any error that a route raised."""
    if isinstance(error, HTTPException):
        problem = _route_problem(request, error)
        response = _answer_problem(problem, request.state.id, error.status_code)
        response.headers.update(error.headers or {})  # status 405 names the allowed methods
        return response
    return _answer_problem(problem_of(error), request.state.id)


def _route_problem(request: Request, error: HTTPException) -> ProblemError:
    """The problem of a request that no route answers, or that FastAPI refuses itself."""
    # Not from `request.url`, which also parses the Host header.
    path = _path(request.scope)[:200]
    advice = "/openapi.json describes all of them"
    if error.status_code == 404:
        return ProblemError("not-found", f"{path} is not here, expected another path; {advice}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} {path} is not allowed, expected {allowed}; {advice}"
        return ProblemError("not-allowed", message)
    # FastAPI's 400: the body is not UTF-8, or nested too deeply.
    message = (
        f"{request.method} {path}: {error.detail}, expected a JSON object in UTF-8; correct it"
    )
    return ProblemError("invalid", message)
