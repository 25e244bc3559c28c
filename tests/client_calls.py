"""Calls of the client to a server that answers from a script, while no time passes."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import httpx
import pytest

from xmcray.client import AsyncClient, Client, ClientError
from xmcray.serving.schema import Operation

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
