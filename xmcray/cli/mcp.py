"""A tool for programs that speak the Model Context Protocol: mcp."""

from __future__ import annotations

import argparse

from xmcray.config import check_range
from xmcray.errors import ConfigError


def mcp_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("url", metavar="URL", help="a running server")
    verb.add_argument("--token-file", metavar="FILE", help="its reader's token; needed over stdio")
    verb.add_argument("--model", metavar="NAME", help="the model to search (default: the first)")
    verb.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="speak HTTP on this port of this machine, with the token of each request (default:"
        " stdin and stdout)",
    )


def mcp(options: argparse.Namespace) -> None:
    """Offers a server's search as a tool until it is interrupted."""
    try:
        from xmcray.client.mcp_tool import run
    except ImportError:
        raise ConfigError("this needs the package mcp; pip install 'xmcray[mcp]'") from None
    if options.port is not None:
        check_range("--port", options.port, 1, 65_535)
    if options.port is None and options.token_file is None:
        raise ConfigError("stdin carries no token; add --token-file FILE")
    if options.port is not None and options.token_file is not None:
        raise ConfigError(
            "with --port each request brings its own token, so that the port gives no one rights;"
            " leave --token-file out"
        )
    run(options.url, options.token_file, options.model, options.port)
