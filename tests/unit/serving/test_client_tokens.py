"""Where the client's tokens come from, when they are read again, and that nothing shows them."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_calls import ADMIN, ANSWERS, FOUND, READS, TOKEN, URL, WRITES, Ask, Server, problem

from xmcray import client as clients
from xmcray.client import Client, ClientError
from xmcray.errors import ConfigError


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
