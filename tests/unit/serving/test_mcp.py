"""The tool of the Model Context Protocol answers what the server answers, over stdio and HTTP."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import httpx2
import mcp
import pytest
from bundles import write_bundle_of
from served import TOKEN, Served, listening, served
from shell import Shell

from xmcray.client.mcp_tool import HTTP, tool_server
from xmcray.retrieval.retriever import Retriever

TEXT = "matrix vector norm"
VERB = "import sys; from xmcray.cli import main; sys.exit(main())"


async def found_labels(client: Any, **arguments: Any) -> Any:
    result = await client.call_tool("search", {"text": TEXT, **arguments})
    assert not result.is_error, result.content
    return result.structured_content["labels"]


def in_front_of(one: Served, token_file: Path | None) -> Any:
    transport = httpx.ASGITransport(one.app)
    file = str(token_file) if token_file else None
    return tool_server("http://127.0.0.1:1", file, None, transport=transport)


async def test_the_tool_answers_as_the_bundle_does(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    wanted = Retriever.load(bundle).search([TEXT], 3)[0]

    async with served(tmp_path, {"m": bundle}) as one:
        server = in_front_of(one, token_file)
        async with mcp.Client(server) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == ["search"]
            labels = await found_labels(client, k=3)
            assert [label["uid"] for label in labels] == [label.uid for label in wanted]
            wrong = await client.call_tool("search", {"text": TEXT, "k": 0})
            assert wrong.is_error


def test_a_url_of_no_server_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = Shell(capsys).error(f"mcp ftp://h --token-file {tmp_path}/token")
    assert mistake == "the URL is 'ftp://h', expected http://HOST:PORT or https://HOST"


def test_a_missing_token_file_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = Shell(capsys).error(f"mcp http://127.0.0.1:9 --token-file {tmp_path}/token")
    assert mistake.startswith(f"--token-file {tmp_path}/token cannot be read")


def test_an_empty_token_file_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").touch()
    mistake = Shell(capsys).error(f"mcp http://127.0.0.1:9 --token-file {tmp_path}/token")
    assert mistake.startswith(f"the first line of {tmp_path}/token is empty")


async def test_a_token_file_that_is_emptied_later_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    server = tool_server("http://127.0.0.1:1", str(tmp_path / "token"), None)
    async with mcp.Client(server) as client:
        result = await client.call_tool("search", {"text": TEXT})
    assert result.is_error
    assert "expected a token" in result.content[0].text


def test_a_port_that_is_taken_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistake = Shell(capsys).error(f"mcp http://127.0.0.1:9 --port {port}")
    assert mistake.startswith(f"127.0.0.1:{port} cannot be listened on (Address already in use)")


async def test_over_http_the_token_of_each_request_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    # A client without a token of its own would take this one.
    monkeypatch.setenv("XMCRAY_TOKEN", TOKEN)

    async def ask(one: Served, **headers: str) -> Any:
        server = in_front_of(one, None)
        app = server.streamable_http_app(**HTTP)
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            headers=headers,
        )
        url = "http://127.0.0.1:8000/mcp"
        transport = mcp.client.streamable_http.streamable_http_client(url, http_client=http)
        async with server.session_manager.run(), http, mcp.Client(transport) as client:
            return await client.call_tool("search", {"text": TEXT})

    async with served(tmp_path, {"m": bundle}) as one:
        answer = await ask(one, authorization=f"Bearer {TOKEN}")
        assert len(answer.structured_content["labels"]) == 10
        for refused in (await ask(one, authorization="Bearer another"), await ask(one)):
            assert refused.is_error
            assert "expected `Authorization: Bearer TOKEN`" in refused.content[0].text


async def test_an_agent_starts_it_speaks_over_stdio_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an agent does: a process of its own in front of a server that listens."""
    from mcp.client import stdio

    # On a busy machine; a process that has not ended by then is killed.
    monkeypatch.setattr(stdio, "PROCESS_TERMINATION_TIMEOUT", 60)
    bundle = write_bundle_of(tmp_path / "b", "texts")
    wanted = Retriever.load(bundle).search([TEXT], 3)[0]

    with listening(tmp_path, {"m": bundle}) as address:
        command = [sys.executable, "-c", VERB, "mcp", address]
        command += ["--token-file", str(tmp_path / "state" / "token")]
        # The shell writes the exit status, which the library keeps to itself.
        script = f'"$@"; echo $? > {tmp_path}/status'
        process = stdio.StdioServerParameters(
            command="sh",
            args=["-c", script, "sh", *command],
            env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        with (tmp_path / "errors").open("w") as errors:
            async with mcp.Client(stdio.stdio_client(process, errors)) as client:
                assert client.server_info.name == "xmcray"
                tools = (await client.list_tools()).tools
                assert [tool.name for tool in tools] == ["search"]
                labels = await found_labels(client, k=3)
                assert [label["uid"] for label in labels] == [label.uid for label in wanted]
    assert (tmp_path / "status").read_text() == "0\n"
    assert (tmp_path / "errors").read_text() == ""
