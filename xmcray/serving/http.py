"""The HTTP interface: routes, who may use them, and how mistakes are told. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from xmcray import __version__
from xmcray.errors import ConfigError, XmcrayError
from xmcray.serving import schema
from xmcray.serving.metrics import CONTENT_TYPE, Metrics
from xmcray.serving.problems import RETRY_AFTER_S, STATUS, TITLE, ProblemError
from xmcray.serving.security import Tokens
from xmcray.serving.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN = ("/healthz",)
LIMITED = ("/v1/search", "/v1/encode")  # refused when too many of them are worked on
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
CHALLENGE = 'Basic realm="xmcray", Bearer realm="xmcray"'  # Chromium asks for no password without the second realm


class Admin(Protocol):
    """The coordinator, as seen from a replica."""

    async def operate(self, model: str, operations: list[schema.Operation]) -> int:
        """See Coordinator."""

    async def swap(self, model: str, request: schema.SwapRequest) -> schema.SwapResponse:
        """See Coordinator."""

    async def compact(self, model: str, out: str) -> schema.CompactResponse:
        """See Coordinator."""


class Gateway(Protocol):
    """What the routes need of the replica they run in."""

    service: Service
    tokens: Tokens
    admin_tokens: Tokens
    metrics: Metrics
    admin: Admin

    async def metrics_text(self) -> str:
        """The metrics of all replicas."""


def create_app(gateway: Gateway, *, tells_request_id: bool = True) -> FastAPI:
    """The ASGI application of one ingress replica.

    Args:
        tells_request_id: put the request's id into the answer's headers; Ray Serve's proxy does it by itself.
    """
    service = gateway.service
    app = FastAPI(
        title="xmcray",
        version=__version__,
        description="Search among the labels of a bundle.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[Middleware(_Guard, gateway=gateway, tells_request_id=tells_request_id)],
        exception_handlers={
            ProblemError: _problem_of,
            XmcrayError: _of_ours,
            RequestValidationError: _of_validation,
            HTTPException: _of_http,
            Exception: _of_mistake,
        },
        responses={code: {"model": schema.Problem} for code in (401, 408, 413, 422, 503)},
    )

    @app.post("/v1/search", response_model=schema.SearchResponse, tags=["search"])
    async def search(body: schema.SearchRequest, request: Request) -> Response:
        """The best labels of each text."""
        found = await service.search(body, request.state.id)
        gateway.metrics.texts.labels(found.model).inc(len(body.texts))
        return _answer(found)

    @app.post("/v1/encode", response_model=schema.EncodeResponse, tags=["search"])
    async def encode(body: schema.EncodeRequest, request: Request) -> Response:
        """The vectors by which labels are searched."""
        return _answer(await service.encode(body, request.state.id))

    @app.get("/v1/labels/{uid:path}", response_model=schema.LabelResponse, tags=["search"])
    async def label(uid: str, model: str | None = None) -> Response:
        """One label: text, attributes."""
        return _answer(service.label(uid, model))

    @app.get("/v1/models", response_model=schema.ModelsResponse, tags=["search"])
    async def models() -> Response:
        """What is served."""
        return _answer(service.models())

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """200 when every model is loaded and has answered a probe."""
        if not service.served.ready:
            raise ProblemError("not-ready", "bundles are being loaded; ask again")
        return {"status": "ok"}

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """For Prometheus: all replicas of the ingress."""
        return Response(await gateway.metrics_text(), media_type=CONTENT_TYPE)

    @app.post("/admin/v1/labels", response_model=schema.OperationsResponse, tags=["admin"])
    async def change_labels(body: schema.OperationsRequest) -> Response:
        """Add, update and delete labels; durable when this is answered."""
        name = service.served.resolve(body.model)
        service.served.current(name)
        return _answer(
            schema.OperationsResponse(
                model=name, label_log=await gateway.admin.operate(name, body.operations)
            )
        )

    @app.post("/admin/v1/swap", response_model=schema.SwapResponse, tags=["admin"])
    async def swap(body: schema.SwapRequest) -> Response:
        """Answer from another bundle, without a lost request."""
        name = service.served.resolve(body.model)
        service.served.current(name)
        return _answer(await gateway.admin.swap(name, body))

    @app.post("/admin/v1/compact", response_model=schema.CompactResponse, tags=["admin"])
    async def compact(body: schema.CompactRequest) -> Response:
        """Write the labels as they are now into a new bundle."""
        name = service.served.resolve(body.model)
        service.served.current(name)
        return _answer(await gateway.admin.compact(name, body.out))

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

    return app


class _Guard:
    """Around every request: its id, its token, the size of its body, what it took."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        gateway: Gateway,
        tells_request_id: bool,
    ) -> None:
        self._app, self._gateway, self._tells_request_id = app, gateway, tells_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, path = time.perf_counter(), 500, _path(scope)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {})["id"] = request_id
        metrics = self._gateway.metrics

        async def told(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._tells_request_id:
                    message["headers"] = [
                        *message["headers"],
                        (b"x-request-id", request_id.encode("latin-1")),
                    ]
            await send(message)

        metrics.working.inc()
        try:
            try:
                self._check_token(path, headers.get(b"authorization"))
                if path in LIMITED:
                    self._gateway.service.check_room()
                try:
                    async with asyncio.timeout(self._gateway.service.config.deadline_ms / 1000):
                        body = await self._body(headers, receive)
                except TimeoutError:
                    raise ProblemError(
                        "late", "the body did not arrive in time; send it at once"
                    ) from None
            except ProblemError as problem:
                await _problem(problem, request_id)(scope, receive, told)
            else:
                await self._app(scope, body, told)
        finally:
            metrics.working.dec()
            route = getattr(scope.get("route"), "path", path if path in LIMITED else "other")
            metrics.requests.labels(route, str(status)).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - begin)

    def _check_token(self, path: str, authorization: str | None) -> None:
        if path.startswith("/admin/"):
            if not self._gateway.admin_tokens.accept(authorization):
                known = self._gateway.tokens.accept(authorization)
                raise ProblemError(
                    "forbidden" if known else "unauthorized",
                    "expected `Bearer` with the admin token",
                )
        elif path not in OPEN and not self._gateway.tokens.accept(authorization, basic=True):
            raise ProblemError("unauthorized", "expected `Authorization: Bearer TOKEN`")

    async def _body(self, headers: MutableMapping[bytes, str], receive: Receive) -> Receive:
        """The whole body, as the application will receive it; refused before it is read where its length is told."""
        limit, length = self._gateway.service.config.max_body, headers.get(b"content-length", "")
        if length.isdigit() and int(length) > limit:
            raise ProblemError(
                "too-large", f"the body has {int(length):,} bytes, expected at most {limit:,}"
            )
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > limit:
                raise ProblemError(
                    "too-large", f"the body has more than {limit:,} bytes; send less at once"
                )
        whole: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": b"".join(parts), "more_body": False}
        ]

        async def again() -> MutableMapping[str, Any]:
            return whole.pop() if whole else await receive()

        return again


def _path(scope: Scope) -> str:
    """The path as the routes know it: a server may run under a prefix, which is a part of ASGI's `path`."""
    path, root = str(scope["path"]), scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _request_id(given: str | None) -> str:
    return (
        given if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else secrets.token_hex(16)
    )


def _answer(found: BaseModel) -> Response:
    headers = {}
    if isinstance(found, schema.Pinned):
        headers = {"X-Xmcray-Version": found.version, "X-Xmcray-Label-Log": str(found.label_log)}
    return Response(
        found.model_dump_json(exclude_none=True), media_type="application/json", headers=headers
    )


def _page(name: str) -> Response:
    if name not in PAGES:
        raise ProblemError("not-found", "there is no such page")
    text = (resources.files("xmcray.serving") / "page" / name).read_text(encoding="utf-8")
    return Response(text, media_type=PAGES[name], headers=SECURITY)


def _problem(problem: ProblemError, request_id: str, status: int | None = None) -> Response:
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
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    text = body.model_dump_json(exclude_none=True)
    return Response(text, status, media_type="application/problem+json", headers=headers)


async def _problem_of(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return _problem(error, request.state.id)


async def _of_ours(request: Request, error: Exception) -> Response:
    kind = "invalid" if isinstance(error, ConfigError) else "refused"
    return _problem(ProblemError(kind, str(error)), request.state.id)


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"where": list(map(str, found["loc"])), "message": found["msg"]}
        for found in error.errors()[:20]
    ]
    first = errors[0] if errors else {"where": ["body"], "message": "malformed"}
    where = ".".join(first["where"])
    return _problem(
        ProblemError("invalid", f"{where}: {first['message']}", errors), request.state.id
    )


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not-found" if error.status_code in (404, 405) else "invalid"
    detail = f"{request.method} {request.url.path[:200]}: {error.detail}; see /openapi.json"
    found = _problem(ProblemError(kind, detail), request.state.id, error.status_code)
    found.headers.update(error.headers or {})  # of 405: what is allowed
    return found


async def _of_mistake(request: Request, error: Exception) -> Response:
    return _problem(
        ProblemError("internal", "the request could not be answered; see the log"), request.state.id
    )
