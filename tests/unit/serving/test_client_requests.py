"""What the client sends, what it refuses to send, and what it says of the answers."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import httpx
import pytest
from client_calls import ADMIN, ANSWERS, FOUND, TOKEN, URL, WRITES, Ask, Server, problem

from xmcray.errors import ConfigError
from xmcray.serving.schema import Filter


@pytest.mark.parametrize(("method", "arguments", "route", "body"), [
    ("search", (["x", ""], 3), "POST /v1/search", {"texts": ["x", ""], "k": 3}),
    ("encode", (["x"], "m"), "POST /v1/encode", {"texts": ["x"], "model": "m"}),
    ("label", ("..",), "GET /v1/labels/%2E%2E", None),
    ("label", ("a/b ?ü", "m&n"), "GET /v1/labels/a%2Fb%20%3F%C3%BC?model=m%26n", None),
    ("models", (), "GET /v1/models", None),
    ("swap", ("s3://b/c",), "POST /admin/v1/swap", {"bundle": "s3://b/c"}),
    ("change_labels", WRITES[1][1:], "POST /admin/v1/labels",
     {"operations": [{"op": "delete", "uid": "u"}], "model": None}),
    ("compact", ("o",), "POST /admin/v1/compact", {"out": "o", "model": None}),
])  # fmt: skip
def test_what_is_sent(
    ask: Ask, method: str, arguments: tuple[Any, ...], route: str, body: object
) -> None:
    server = Server(ANSWERS[method])
    answer = ask(server, method, *arguments)
    assert (answer if method == "models" else answer.model_dump(exclude_unset=True)) == (
        [] if method == "models" else ANSWERS[method]
    )
    (request,) = server.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == route
    assert (json.loads(request.content) if request.content else None) == body
    assert request.headers["Authorization"] == f"Bearer {ADMIN if '/admin/' in route else TOKEN}"


def test_options_of_a_search(ask: Ask) -> None:
    server = Server(FOUND)
    ask(server, "search", ["x"], filter=Filter(deny=["u"]), fields=["uid"], explain=True)
    sent = json.loads(server.requests[0].content)
    assert sent == {
        "texts": ["x"],
        "k": 10,
        "filter": {"deny": ["u"]},
        "fields": ["uid"],
        "explain": True,
    }


@pytest.mark.parametrize(("method", "arguments", "options"), [
    ("search", (["x"], 0), {}),
    ("search", ("one string",), {}),
    ("search", (["x"],), {"filters": None}),
    ("swap", ("b",), {"version": "1"}),
    ("label", ("",), {}),
])  # fmt: skip
def test_a_request_the_server_would_refuse_is_not_sent(
    ask: Ask, method: str, arguments: Any, options: Any
) -> None:
    server = Server(FOUND)
    with pytest.raises(ConfigError) as caught:
        ask(server, method, *arguments, **options)
    assert "\n" not in str(caught.value)
    assert not server.requests


@pytest.mark.parametrize(("status", "kind"), [
    (401, "unauthorized"), (403, "forbidden"), (404, "not-found"), (409, "refused"), (413, "too-large"),
    (422, "invalid"),
])  # fmt: skip
def test_refusals_are_final_and_told_in_one_line(ask: Ask, status: int, kind: str) -> None:
    server = Server(problem(status, kind, headers={"X-Request-ID": "abc"}))
    error = ask.error(server, "search", ["x"])
    assert (error.status, error.kind, error.request_id) == (status, kind, "abc")
    expected = f"POST {URL}/v1/search: {status} {kind}: found, expected, what to do (request abc)"
    assert str(error) == expected
    assert len(server.requests) == 1
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize(("reply", "kind", "part"), [
    (httpx.Response(404, html="<p>\n</p>"), "http", "404 Not Found"),
    (httpx.Response(302, headers={"Location": "http://elsewhere"}), "http", "302 Found"),
    (httpx.Response(418, json={"type": "about:blank", "title": "", "status": 418, "detail": "x"}), "http", "418"),
    (httpx.Response(200, text="hello"), "malformed", "no SearchResponse"),
    ({**FOUND, "label_log": None}, "malformed", "label_log"),
])  # fmt: skip
def test_answers_of_another_api(ask: Ask, reply: Any, kind: str, part: str) -> None:
    server = Server(reply)
    error = ask.error(server, "search", ["x"])
    assert error.kind == kind
    assert part in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "healthy"), [({"status": "ok"}, True), (503, False), (httpx.ConnectError, False)]
)
def test_healthy_is_asked_once_and_without_a_token(ask: Ask, reply: Any, healthy: bool) -> None:
    server = Server(reply)
    assert ask(server, "healthy") is healthy
    assert "Authorization" not in server.requests[0].headers
    assert len(server.requests) == 1


def test_it_needs_none_of_the_heavy_packages() -> None:
    heavy = ["torch", "ray", "faiss", "fastapi", "transformers", "pyarrow", "numpy"]
    code = f"import sys, xmcray.client; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
