"""Requests over HTTP: tokens, those that are refused, too many at once, and the pages."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from served import ADMIN, TOKEN, served

from xmcray.serving import request_checks, security, service
from xmcray.serving.schema import SearchRequest
from xmcray.serving.search_batch import find_hits

TOKEN_HEADER = f"Bearer {TOKEN}".encode()


async def test_every_route_wants_its_token(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        search = {"texts": ["a"]}
        reading = [
            ("/v1/search", search),
            ("/v1/encode", search),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "texts": ["a"]}),
            ("/v2/rerank", {"query": "a", "documents": ["a"]}),
            ("/v1/feedback", {"request_id": "r", "label": "u1", "event": "click"}),
            ("/v1/labels/u1", None),
            ("/v1/models", None),
        ]
        reading += [
            (path, None)
            for path in ("/metrics", "/openapi.json", "/", "/docs", "/page/app.js", "/nowhere")
        ]
        admin = [
            ("/admin/v1/labels", {"operations": [{"op": "delete", "uid": "u1"}]}),
            ("/admin/v1/swap", {"bundle": "x"}),
            ("/admin/v1/compact", {"out": "x"}),
            ("/admin/nowhere", None),
        ]
        missing = ("/nowhere", "/v1/feedback")  # this server collects no events
        routes = {route.path for route in one.app.routes if hasattr(route, "methods")}
        asked = {path for path, _ in [*reading, *admin]} | {"/healthz"}
        assert {r.replace("{uid:uid}", "u1").replace("{name}", "app.js") for r in routes} <= asked
        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        for path, body in [*reading, *admin]:
            for header in (None, "Bearer wrong", "Bearer ", TOKEN, "Basic !", f"Bearer {TOKEN}x"):
                answer = await one.ask(
                    path, body, None, headers={"Authorization": header} if header else {}
                )
                assert answer.status_code == 401, (path, header)
                assert answer.headers["content-type"] == "application/problem+json"
                assert "Bearer" in answer.headers["www-authenticate"]
        for path, body in reading:
            for header in (f"Bearer {TOKEN}", f"Basic {basic}"):
                answer = await one.ask(path, body, None, headers={"Authorization": header})
                assert answer.status_code == (404 if path in missing else 200), path
        for path, body in admin:
            assert (await one.ask(path, body, TOKEN)).status_code == 403
            answer = await one.ask(path, body, None, headers={"Authorization": f"Basic {basic}"})
            assert answer.status_code == 401
        assert (await one.ask("/healthz", token=None)).json() == {"status": "ok"}
        # Without tokens of any use the server still says that it lives.
        (Path(one.service.config.state_dir) / "token").write_bytes(b"\xff")
        monkeypatch.setattr(security, "CHECK_S", -1.0)
        assert (await one.ask("/v1/models")).status_code == 401
        assert (await one.ask("/healthz", token=None)).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": b"Basic \xff"}, 401),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
        ({"Authorization": "Basic ²".encode("latin-1")}, 401),
        ({"Authorization": TOKEN_HEADER, "X-Request-Id": b"\xff"}, 404),
        ({"Authorization": TOKEN_HEADER, "Content-Length": "²".encode("latin-1")}, 404),
        ({"Authorization": TOKEN_HEADER, "Content-Length": b"9" * 5000}, 404),
        # The longest number that the parser of HTTP lets through.
        ({"Authorization": TOKEN_HEADER, "Content-Length": str(2**64 - 1).encode()}, 413),
        ({"Authorization": TOKEN_HEADER, "Host": b"["}, 404),
        ({"Authorization": TOKEN_HEADER, "Host": b"\xff"}, 404),
    ],
)
async def test_no_header_is_a_mistake_of_ours(
    headers: dict[str, bytes],
    status: int,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        for _ in range(2):
            answer = await one.ask("/nowhere", token=None, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("given", [None, "", "a b", "é", "a\n", "x" * 129])
def test_a_request_gets_an_id_that_logs_can_take(given: str | None) -> None:
    assert request_checks.request_id("a.b_c:d-1") == "a.b_c:d-1"
    assert request_checks.request_id(given) != given


async def test_a_prefix_opens_no_door(bundles: dict[str, Path], tmp_path: Path) -> None:
    """Behind `route_prefix: /x` of Ray Serve, ASGI's path begins with the prefix."""

    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        transport = httpx.ASGITransport(one.app, root_path="/x")
        async with httpx.AsyncClient(transport=transport, base_url="http://test/x") as client:
            operations = {"operations": [{"op": "delete", "uid": "u1"}]}
            for token, status in ((TOKEN, 403), (ADMIN, 200)):
                headers = {"Authorization": f"Bearer {token}"}
                assert (
                    await client.post("/admin/v1/labels", json=operations, headers=headers)
                ).status_code == status
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401


def test_half_a_character_is_no_value_of_an_attribute() -> None:
    body = {"texts": ["a"], "filter": {"attributes": {"lang": "\ud800"}}}
    with pytest.raises(ValidationError, match="unicode"):
        SearchRequest.model_validate(body)


@pytest.mark.parametrize(
    ("body", "status", "kind", "detail"),
    [
        ({"texts": []}, 422, "invalid", "texts"),
        ({"texts": "one"}, 422, "invalid", "texts"),
        ({"texts": ["a"] * 65}, 422, "invalid", "texts"),
        ({"texts": ["a"] * 64, "k": 101}, 422, "invalid", "6,464, expected at most 6,400"),
        (
            {"texts": ["a"], "k": 0},
            422,
            "invalid",
            "body.k is 0, but input should be greater than or equal to 1; correct it",
        ),
        ([], 422, "invalid", "body is [], but input should be a valid dictionary"),
        ({"texts": ["a"], "k": 1001}, 422, "invalid", "k"),
        (
            {"texts": ["a"], "kk": 1},
            422,
            "invalid",
            "body: unknown field 'kk', expected one of texts, vectors, k, fields, model,",
        ),
        (
            {"texts": ["a"], "filter": {"alow": []}},
            422,
            "invalid",
            "body.filter: unknown field 'alow', expected one of allow, deny, attributes; rename it",
        ),
        ({"texts": ["a"], "model": "b"}, 404, "not-found", "expected one of: a"),
        ({"texts": ["a"], "explain": True}, 422, "invalid", "no memory"),
        ({"texts": ["a"], "memory": {"weight": 0.5}}, 422, "invalid", "no memory"),
        ({"texts": ["a"], "filter": {"attributes": {"lang": "en"}}}, 422, "invalid", "'lang'"),
        ({"texts": ["x" * 2_000_000]}, 413, "too-large", "1,048,576"),
        ({"texts": ["matrix " * 500]}, 422, "too-long", "text 0"),
    ],
)
async def test_requests_that_are_refused(
    body: dict[str, Any],
    status: int,
    kind: str,
    detail: str,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, long_texts="refuse") as one:
        answer = await one.ask("/v1/search", body, headers={"X-Request-ID": "me-1"})
        problem = answer.json()
        assert (answer.status_code, problem["status"], problem["type"]) == (
            status,
            status,
            f"urn:xmcray:{kind}",
        )
        assert detail in problem["detail"]
        assert problem["request_id"] == answer.headers["x-request-id"] == "me-1"


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "kind", "detail"),
    [
        (
            "POST",
            "/v1/search",
            b'{"texts": ["a"',
            {"Content-Type": "application/json"},
            422,
            "invalid",
            "the body is no JSON (Expecting ',' delimiter, character 14), expected a JSON object",
        ),
        (
            "POST",
            "/v1/search",
            b'{"texts": ["\xff"]}',
            {"Content-Type": "application/json"},
            400,
            "invalid",
            "error parsing the body, expected a JSON object in UTF-8; correct it",
        ),
        ("POST", "/v1/search", b"", {}, 422, "invalid", "has no body, expected a JSON object; see"),
        (
            "POST",
            "/v1/search",
            b'{"texts": ["a"]}',
            {"Content-Type": "application/x-www-form-urlencoded"},
            422,
            "invalid",
            "expected the header `Content-Type: application/json`; send it",
        ),
        (
            "GET",
            "/v1/search",
            b"",
            {},
            405,
            "not-allowed",
            "GET /v1/search is not allowed, expected POST; /openapi.json",
        ),
        ("GET", "/v1/serch", b"", {}, 404, "not-found", "/v1/serch is not here, expected another"),
    ],
)
async def test_requests_that_no_route_understands(
    method: str,
    path: str,
    content: bytes,
    headers: dict[str, str],
    status: int,
    kind: str,
    detail: str,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        answer = await one.ask(path, method=method, content=content, headers=headers)
        problem = answer.json()
        assert (answer.status_code, problem["status"]) == (status, status)
        assert problem["type"] == f"urn:xmcray:{kind}"
        assert answer.headers["content-type"] == "application/problem+json"
        assert {"title", "request_id"} <= problem.keys()
        assert detail in problem["detail"]


async def test_a_body_that_does_not_come(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, deadline_ms=300) as one:

        async def begun() -> AsyncIterator[bytes]:
            yield b'{"texts": '
            await asyncio.Event().wait()

        answer = await one.ask("/v1/search", content=begun())
        assert (answer.status_code, answer.json()["type"]) == (408, "urn:xmcray:late")
        assert (await one.search(["a"]))["results"]


async def test_too_many_requests_and_too_little_time(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, in_flight=2) as one:

        async def stuck(*_: Any) -> Any:
            await asyncio.Event().wait()

        run = one.service._batcher.run
        one.service._batcher.run = stuck  # type: ignore[method-assign]
        body = {"texts": ["a"], "timeout_ms": 500}
        waiting = [asyncio.create_task(one.ask("/v1/search", body)) for _ in range(2)]
        while one.service.working < 2:
            await asyncio.sleep(0.001)
        refused = await one.ask("/v1/search", content=b"not even read")
        assert refused.status_code == 503
        assert (await one.ask("/v1/search", body, "wrong" * 4)).status_code == 401, (
            "only readers learn of the load"
        )
        for answer in [await answer for answer in waiting]:
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:xmcray:timeout")
            assert answer.headers["retry-after"] == "1"
        assert (refused.headers["retry-after"], refused.json()["type"]) == (
            "1",
            "urn:xmcray:overloaded",
        )
        one.service._batcher.run = run  # type: ignore[method-assign]
        assert (await one.ask("/v1/search", body | {"timeout_ms": 9000})).status_code == 200
        assert one.service.working == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
@pytest.mark.parametrize(("settings", "nice"), [({}, 10), ({"search_nice": 0}, 0)])
async def test_searches_give_way_to_the_event_loop(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    nice: int,
) -> None:
    seen: list[int] = []

    def noted(*arguments: Any) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return find_hits(*arguments)

    monkeypatch.setattr(service, "find_hits", noted)
    async with served(tmp_path, {"a": bundles["texts"]}, **settings) as one:
        assert (await one.search(["a"]))["results"]
    loop_nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [min(19, loop_nice + nice)]


async def test_pages_and_description(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        page = await one.ask("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert (await one.ask("/page/..%2f..%2fschema.py")).status_code == 404
        described = (await one.ask("/openapi.json")).json()
        assert {"/v1/search", "/v1/encode", "/v1/models", "/admin/v1/swap"} <= described[
            "paths"
        ].keys()
        await one.search(["a", "b"])
        text = (await one.ask("/metrics")).text
        assert 'xmcray_texts_total{model="a",replica="local"} 2.0' in text
        assert 'xmcray_requests_total{replica="local",route="/v1/search",status="200"} 1.0' in text
        assert json.dumps(TOKEN) not in text
