"""A tool `search` for programs that speak the Model Context Protocol (MCP), in front of a running server.

Over stdio the program starts this process, which has a reader's token. Over HTTP each request
brings its own token, which is sent on, so access to the port alone gives no rights.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from xmcray import __version__
from xmcray.client import AsyncClient, SearchOptions, server_address
from xmcray.client.call import Token
from xmcray.errors import ResourceError, XmcrayError
from xmcray.serving.schema import MAX_K

HOST = "127.0.0.1"
# Each request is complete in itself: there are no sessions to keep or to steal.
HTTP: dict[str, Any] = {"stateless_http": True, "json_response": True}
DESCRIPTION = "The labels that fit a text best, best first. The text may be a title, a question or a paragraph."


class Hit(BaseModel):
    """A label.

    Attributes:
        uid: names the label.
        text: its text.
        score: higher is better; comparable between answers to one text only.
        probability: that it fits, if the bundle is calibrated.
    """

    uid: str
    text: str
    score: float
    probability: float | None = None


class Hits(BaseModel):
    """The labels that were found, best first."""

    labels: list[Hit]


def tool_server(
    url: str, token_file: str | None, model: str | None, transport: Any = None
) -> MCPServer:
    """An MCP server with the tool.

    Args:
        url: a running xmcray server.
        token_file: file with its reader's token; None if requests bring it.
        model: name of the model to search; the first one if None.
        transport: see `Client`.
    Raises:
        ConfigError: `url` is no URL of a server.
    """
    server_address(url)  # a wrong one is refused now, not by the first search
    server = MCPServer("xmcray", version=__version__, log_level="WARNING")

    @server.tool(description=DESCRIPTION)
    async def search(
        text: str, context: Context, k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    ) -> Hits:
        token = None if token_file else _bearer(context)
        options: SearchOptions = {} if model is None else {"model": model}
        try:
            async with AsyncClient(
                url, token, token_file=token_file, transport=transport
            ) as client:
                response = await client.search([text], k=k, **options)
        except XmcrayError as error:
            # The text of other errors is kept from the caller.
            raise ToolError(str(error)) from None
        answers = response.results[0].answers
        return Hits(labels=[Hit.model_validate(answer.model_dump()) for answer in answers])

    return server


def _bearer(context: Context) -> str:
    """The token that came with an HTTP request.

    Raises:
        ToolError: none came. A client without a token would take that of the environment.
    """
    words = (context.headers or {}).get("authorization", "").split()
    if len(words) == 2 and words[0].lower() == "bearer":
        return words[1]
    raise ToolError("the request has no token, expected `Authorization: Bearer TOKEN`")


def run(url: str, token_file: str | None, model: str | None, port: int | None) -> None:
    """Serves the tool until it is interrupted.

    Args:
        url: see `tool_server`.
        token_file: see `tool_server`.
        model: see `tool_server`.
        port: of HTTP on this machine; stdin and stdout if None.
    Raises:
        ConfigError: `url` is no URL of a server, or the file has no token.
        ResourceError: the port is taken.
    """
    server = tool_server(url, token_file, model)
    if token_file is not None:
        # Each search reads it again; a wrong file is refused now.
        Token.of_file(Path(token_file), "--token-file")
    if port is None:
        server.run("stdio")
    else:
        _check_port(port)
        server.run("streamable-http", host=HOST, port=port, **HTTP)


def _check_port(port: int) -> None:
    # If it were taken, the server would log that and end the process itself.
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ResourceError(
            f"{HOST}:{port} cannot be listened on ({reason}), expected a free port; choose another"
            " --port"
        ) from None
