"""What the client sends, what it tries again and how long, what it says when it gives up, what it never shows."""

from __future__ import annotations

import asyncio
import email.utils
import http.server
import inspect
import json
import logging
import pickle
import random
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from xmcray import client as clients
from xmcray.client import AsyncClient, Client, ClientError
from xmcray.client.call import UNSENT
from xmcray.errors import ConfigError
from xmcray.serving.schema import Filter, Operation

URL = "http://127.0.0.1:1"
TOKEN = "reader-secret-5Tq"
ADMIN = "admin-secret-9Xw"
PINNED = {"model": "m", "version": "0" * 64, "label_log": 3}
FOUND = {
    **PINNED,
    "request_id": "r",
    "took_ms": 1.0,
    "results": [{"answers": [{"uid": "u", "score": 0.5}]}],
}
SWAPPED = {"model": "m", "previous": "0" * 64, "version": "1" * 64, "recall": 1.0, "seconds": 2.0}
LABEL = {**PINNED, "uid": "u", "text": "t", "label_id": 0, "attributes": {}}
CHANGED = {"model": "m", "label_log": 4}


class Clock:
    """Stands in for `time` in the client: sleeping takes no time, and is written down."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps = []

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr(clients, "time", clock)
    monkeypatch.setattr(clients.call, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(
        random, "uniform", lambda low, high: high
    )  # the longest wait that jitter allows
    monkeypatch.delenv("XMCRAY_TOKEN", raising=False)
    return clock


class Server:
    """Answers from a script: a status, a JSON body, a response, a function or an error; the last one for ever."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(reply, type) and issubclass(reply, Exception):
            raise reply("it broke", request=request)
        if isinstance(reply, dict):
            return httpx.Response(200, json=reply)
        if isinstance(reply, int):
            return httpx.Response(reply)
        if isinstance(reply, httpx.Response):  # a new one: each can be read once
            return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)
        return reply()


def problem(status: int, kind: str, **more: Any) -> httpx.Response:
    body = {
        "type": f"urn:xmcray:{kind}",
        "title": kind,
        "status": status,
        "detail": "found, expected,\nwhat to do",
    }
    headers = more.pop("headers", {})
    return httpx.Response(status, json={**body, **more}, headers=headers)


class Ask:
    """One call by either client, given by its method and arguments."""

    def __init__(self, cls: type[Client] | type[AsyncClient]) -> None:
        self.cls = cls

    def __call__(
        self, server: Server, method: str, *arguments: Any, settings: Any = None, **options: Any
    ) -> Any:
        made = {"token": TOKEN, "admin_token": ADMIN, **(settings or {})}
        client = self.cls(URL, transport=httpx.MockTransport(server), **made)

        async def wait(answer: Any) -> Any:
            return await answer

        answer = getattr(client, method)(*arguments, **options)
        return asyncio.run(wait(answer)) if inspect.isawaitable(answer) else answer

    def error(self, *arguments: Any, **options: Any) -> ClientError:
        with pytest.raises(ClientError) as caught:
            self(*arguments, **options)
        assert "\n" not in str(caught.value)
        return caught.value


@pytest.fixture(params=[Client, AsyncClient])
def ask(request: pytest.FixtureRequest, clock: Clock) -> Ask:
    return Ask(request.param)


READS = [("search", ["x"]), ("encode", ["x"]), ("label", "u"), ("models",)]
WRITES = [("swap", "b"), ("change_labels", [Operation(op="delete", uid="u")]), ("compact", "o")]
ANSWERS = {
    "search": FOUND,
    "encode": {**PINNED, "request_id": "r", "dim": 1, "vectors": [[0.5]]},
    "label": LABEL,
    "models": {"models": []},
    "swap": SWAPPED,
    "change_labels": CHANGED,
    "compact": {**CHANGED, "bundle": "o", "version": "1" * 64},
}


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


@pytest.mark.parametrize(
    "failure",
    [
        408,
        429,
        500,
        502,
        503,
        504,
        *UNSENT,
        httpx.ReadError,
        httpx.WriteError,
        httpx.RemoteProtocolError,
    ],
)
def test_reads_are_tried_again(ask: Ask, failure: Any) -> None:
    for call in READS:
        server = Server(failure, ANSWERS[call[0]])
        ask(server, *call)
        first, second = server.requests
        assert first.content == second.content
        assert first.headers["X-Request-ID"] == second.headers["X-Request-ID"]


@pytest.mark.parametrize(
    "failure",
    [
        408,
        429,
        500,
        502,
        503,
        504,
        httpx.ReadError,
        httpx.WriteError,
        httpx.RemoteProtocolError,
        httpx.ReadTimeout,
    ],
)
def test_a_write_that_may_have_been_done_is_not_repeated(ask: Ask, failure: Any) -> None:
    for call in WRITES:
        server = Server(failure)
        error = ask.error(server, *call)
        assert len(server.requests) == 1
        assert isinstance(failure, int) or "may have been done" in str(error)


@pytest.mark.parametrize("kind", ["overloaded", "not-ready", None])
def test_a_write_that_was_not_done_is_repeated(ask: Ask, kind: str | None) -> None:
    for call in WRITES:
        server = Server(problem(503, kind) if kind else httpx.ConnectError, ANSWERS[call[0]])
        ask(server, *call)
        assert len(server.requests) == 2


def test_only_a_503_promises_that_nothing_was_done(ask: Ask) -> None:
    server = Server(problem(504, "overloaded"))
    assert ask.error(server, "swap", "b").status == 504
    assert len(server.requests) == 1


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


@pytest.mark.parametrize(("call", "name"), [(READS[0], "token"), (WRITES[0], "admin_token")])
def test_a_rotated_token_is_read_again(call: Any, name: str, ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "file"
    settings = {"token": None, "admin_token": None, f"{name}_file": path}

    def refusing(content: str) -> Any:
        """Refuses once the file has another content."""
        path.write_text("old-secret")
        return lambda: (path.write_text(content), problem(401, "unauthorized"))[1]

    server = Server(refusing("new-secret\nold-secret"), ANSWERS[call[0]])
    ask(server, *call, settings=settings)
    sent = [request.headers["Authorization"] for request in server.requests]
    assert sent == ["Bearer old-secret", "Bearer new-secret"]
    # not for ever, and not for the same token or a file that is being written
    for content, requests in [("new-secret", 2), ("old-secret", 1), ("", 1)]:
        server = Server(refusing(content))
        assert ask.error(server, *call, settings=settings).status == 401
        assert len(server.requests) == requests


def test_waits_grow_until_the_time_is_over(ask: Ask, clock: Clock) -> None:
    server = Server(httpx.ConnectError)
    error = ask.error(server, "models", settings={"timeout_s": 8})
    assert error.kind == "unreachable"
    assert "is the server running?" in str(error)
    assert clock.sleeps == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]
    )  # another 2 s would be too long
    left = [request.extensions["timeout"]["read"] for request in server.requests]
    assert left == pytest.approx([8, 7.9, 7.7, 7.3, 6.5, 4.9, 2.9, 0.9])


def test_jitter_is_full(ask: Ask, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(random, "uniform", lambda *bounds: drawn.append(bounds) or 0.0)
    ask(Server(500, 500, FOUND), "search", ["x"])
    assert drawn == [(0.0, 0.1), (0.0, 0.2)]
    assert clock.sleeps == [0.0, 0.0]


@pytest.mark.parametrize("retries", [0, 2])
def test_number_of_retries(ask: Ask, retries: int) -> None:
    server = Server(500)
    ask.error(server, "search", ["x"], settings={"retries": retries})
    assert len(server.requests) == 1 + retries


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("written", "seconds"), [("3", 3.0), ("date", 3.0), ("soon", 0.0), ("-1", 0.0), ("nan", 0.0)]
)
def test_retry_after(ask: Ask, clock: Clock, status: int, written: str, seconds: float) -> None:
    value = email.utils.formatdate(clock.now + 3, usegmt=True) if written == "date" else written
    ask(
        Server(problem(status, "overloaded", headers={"Retry-After": value}), FOUND),
        "search",
        ["x"],
    )
    assert clock.sleeps == pytest.approx([seconds + 0.1])


def test_retry_after_the_deadline_is_not_waited_for(ask: Ask, clock: Clock) -> None:
    server = Server(problem(503, "overloaded", headers={"Retry-After": "30"}))
    assert ask.error(server, "search", ["x"]).kind == "overloaded"
    assert clock.sleeps == []


def test_a_swap_has_a_time_of_its_own(ask: Ask) -> None:
    server = Server(SWAPPED)
    ask(server, "swap", "b", settings={"timeout_s": 1})
    ask(server, "swap", "b", timeout_s=20, settings={"timeout_s": 1})
    assert [request.extensions["timeout"]["read"] for request in server.requests] == [600, 20]


def test_an_attempt_without_answer_ends_the_call(ask: Ask) -> None:
    server = Server(500, httpx.ReadTimeout)
    error = ask.error(server, "search", ["x"])
    assert (error.kind, error.status) == ("deadline", None)
    assert "no answer within 10 s" in str(error)
    assert len(server.requests) == 2


def test_a_sync_call_ends_though_bytes_keep_coming(clock: Clock) -> None:
    def dribs() -> Iterator[bytes]:
        while True:
            clock.now += 3
            yield b" "

    server = Server(lambda: httpx.Response(200, content=dribs()))
    assert Ask(Client).error(server, "search", ["x"]).kind == "deadline"
    assert clock.now == 1012


def test_an_async_call_ends_though_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def call() -> None:
        async with AsyncClient(
            URL, TOKEN, timeout_s=0.02, transport=httpx.MockTransport(never)
        ) as client:
            await client.search(["x"])

    with pytest.raises(ClientError, match=r"within 0\.02 s") as caught:
        asyncio.run(call())
    assert caught.value.kind == "deadline"


@pytest.mark.parametrize(
    ("reply", "healthy"), [({"status": "ok"}, True), (503, False), (httpx.ConnectError, False)]
)
def test_healthy_is_asked_once_and_without_a_token(ask: Ask, reply: Any, healthy: bool) -> None:
    server = Server(reply)
    assert ask(server, "healthy") is healthy
    assert "Authorization" not in server.requests[0].headers
    assert len(server.requests) == 1


@pytest.mark.usefixtures("clock")
class TestTokens:
    def sent(self, **settings: Any) -> str | None:
        server = Server({"models": []})
        Client(URL, transport=httpx.MockTransport(server), **settings).models()
        return server.requests[0].headers.get("Authorization")

    def test_where_they_come_from(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "token").write_text("of-the-file\nold\n")
        assert self.sent() is None
        monkeypatch.setenv("XMCRAY_TOKEN", "of-the-environment\n")
        assert self.sent() == "Bearer of-the-environment"
        assert self.sent(token_file=tmp_path / "token") == "Bearer of-the-file"
        assert self.sent(token="given") == "Bearer given"

    @pytest.mark.parametrize("settings", [
        {"token": "a", "token_file": "b"}, {"token_file": "missing"}, {"token": ""}, {"token": "xyz\nxyz"},
        {"admin_token": "xyz xyz"}, {"token": "xyzé"}, {"timeout_s": 0}, {"retries": -1},
    ])  # fmt: skip
    def test_wrong_settings(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            self.sent(**settings)
        assert "xyz" not in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        ["", "127.0.0.1:80", "ftp://h", "http://", "http://u:pw@h", "http://h?a=b", "http://h:x"],
    )
    def test_wrong_urls(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            Client(url)
        assert "pw" not in str(caught.value)

    def test_a_prefix_of_the_path_stays(self) -> None:
        server = Server({"models": []})
        Client(f"{URL}/search/", transport=httpx.MockTransport(server)).models()
        assert server.requests[0].url.path == "/search/v1/models"

    def test_an_administrator_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="admin_token"):
            Client(URL, TOKEN).swap("b")

    @pytest.mark.parametrize(("url", "token", "warned"), [
        ("http://example.org", TOKEN, 1), ("http://10.0.0.1:80", TOKEN, 1), ("https://example.org", TOKEN, 0),
        ("http://example.org", None, 0), ("http://localhost:1", TOKEN, 0), ("http://[::1]:1", TOKEN, 0),
    ])  # fmt: skip
    def test_plain_http_is_warned_of_once(self, url: str, token: str | None, warned: int) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            client = Client(url, token, transport=httpx.MockTransport(Server({"models": []})))
            client.models()
            client.models()
        assert len(caught) == warned
        assert all(TOKEN not in str(w.message) and w.filename == __file__ for w in caught)

    def test_no_variable_of_a_traceback_shows_one(self) -> None:
        transport = httpx.MockTransport(Server(401))
        with pytest.raises(ClientError) as caught:
            Client(URL, TOKEN, admin_token=ADMIN, transport=transport).swap("b")
        frames = [
            frame
            for frame, _ in traceback.walk_tb(caught.tb)
            if Path(clients.__file__).parent in Path(frame.f_code.co_filename).parents
        ]
        assert len(frames) == 3
        shown = repr([frame.f_locals for frame in frames]) + repr(
            [vars(frame.f_locals["self"]) for frame in frames]
        )
        assert TOKEN not in shown
        assert ADMIN not in shown

    def test_a_proxy_does_not_get_what_is_meant_for_this_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert not Client(URL)._http._mounts
        assert Client("http://example.org")._http._mounts


class Flaky(http.server.BaseHTTPRequestHandler):
    """Hangs up on the first request after reading it, refuses the second and echoes its headers, answers the third."""

    protocol_version = "HTTP/1.1"
    served = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Flaky.served += 1
        if Flaky.served == 1:
            self.close_connection = True
            return
        detail = str(self.headers) if Flaky.served == 2 else ""
        said = {"type": "urn:xmcray:overloaded", "title": "", "status": 503, "detail": detail}
        body = json.dumps(said if detail else FOUND).encode()
        self.send_response(503 if detail else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_over_a_real_connection_and_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with Client(
                f"http://127.0.0.1:{server.server_port}", TOKEN, admin_token=ADMIN
            ) as client:
                assert client.search(["x"]).results[0].answers[0].uid == "u"
                Flaky.served = 1
                with pytest.raises(ClientError) as caught:
                    Client(client._url, TOKEN, admin_token=ADMIN, retries=0).search(["x"])
        finally:
            server.shutdown()
    error = caught.value
    assert "Bearer ***" in str(error)
    shown = "".join(
        [caplog.text, str(error), repr(error), repr(client), repr(vars(client)), repr(vars(error))]
    )
    for secret in (TOKEN, ADMIN):
        assert secret not in shown


def test_it_needs_none_of_the_heavy_packages() -> None:
    heavy = ["torch", "ray", "faiss", "fastapi", "transformers", "pyarrow", "numpy"]
    code = f"import sys, xmcray.client; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
