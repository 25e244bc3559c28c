"""Requests that the description allows, and bodies and heads that none allows, against a server that is running."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings

from xmcray.serving.connections import HEAD_S

Headers = Callable[[str], dict[str, str]]  # of a request to a path: the token it wants

ROUTES = {
    "/v1/search": 120,
    "/v1/encode": 40,
    "/v1/embeddings": 40,
    "/v1/rerank": 40,
    "/v1/feedback": 40,
    "/v1/labels/{uid}": 40,
    "/admin/v1/labels": 80,
    "/admin/v1/swap": 20,
    "/admin/v1/compact": 20,
}
ANSWERS = (200, 400, 404, 409, 413, 422, 503)
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/search",
        {"texts": ["matrix norm", "é\u0000"], "k": 3, "filter": {"deny": ["u1"], "attributes": {}}},
    ),
    ("/v1/search", {"texts": ["a"], "fields": ["uid", "score"], "timeout_ms": 500, "model": "a"}),
    ("/v1/encode", {"texts": ["sort"]}),
    ("/v1/embeddings", {"input": "sort"}),
    ("/v1/rerank", {"query": "sort", "documents": ["join"]}),
    (
        "/admin/v1/labels",
        {"operations": [{"op": "add", "uid": "x", "text": "sort", "attributes": {"n": 1}}]},
    ),
]
PIECES = [
    b'"', b"{", b"]", b"\xff\xfe", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 400, b"null", b"true", b"[" * 3000,
    b'"\\ud800"', b"\x00", b'"a":' * 50, b"[[]]", b'{"gte":"x"}', b"0.5",
]  # fmt: skip

HEADS = [
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n",
    b"POST /admin/v1/labels HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n",
    b"GET /v1/labels/u1?model=a HTTP/1.1\r\nHost: x\r\nX-Request-Id: 7\r\nExpect: 100-continue\r\n",
]
HEAD_PIECES = [
    b"\r\n", b"\n", b"\r", b":", b" ", b"\t", b"\x00", b"\xff\xfe", b"%", b"%00", b"%ff", b"/../", b"//", b"?", b"#",
    b"HTTP/9.9", b"HTTP/1.0", b"Content-Length: -1\r\n", b"Content-Length: 1e3\r\n", b"Content-Length: 99\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Authorization: Basic \xff\r\n", b"Cookie: " + b"a" * 3000 + b"\r\n", b"A" * 40_000, b"Host: [\r\n", b"PRI * HTTP/2.0",
    b"Content-Encoding: gzip\r\n", b"Accept: \xc3\x28\r\n", b"Range: bytes=9-1\r\n", "²".encode(),
]  # fmt: skip
ANSWER_S = 0.1  # a connection without an answer is looked at again when all heads were sent
# The limit of docs/serving.md for a head or a body, and as much for a machine that is busy.
CLOSED_S = 2 * HEAD_S


def ask_described(
    address: str, headers: Headers, route: str, number: int, seed_: int = 1
) -> Counter[int]:
    """About so many random requests that the route's OpenAPI description allows; returns the statuses.

    Raises:
        AssertionError: an answer that the description does not know, or a mistake of the server (5xx).
    """
    described = httpx.get(f"{address}/openapi.json", headers=headers("/")).json()
    schema = schemathesis.openapi.from_dict(described)
    (operation,) = (found.ok() for found in schema.get_all_operations() if found.ok().path == route)
    known = set(operation.definition.raw["responses"]) | {"403", "404", "405", "409"}
    seen = Counter[int]()

    @seed(seed_)
    @settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        answer = case.call(base_url=address, headers=headers(route), session=None)
        seen[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code == 503, (
            route,
            answer.status_code,
            case.body,
        )
        assert str(answer.status_code) in known, (route, answer.status_code, case.body)

    ask()
    return seen


def ask_mutated(address: str, headers: Headers, number: int, seed_: int = 0) -> Counter[int]:
    """So many good bodies with some bytes replaced by others; returns the statuses.

    Raises:
        AssertionError: as `ask_described`, or a refusal that is no problem document.
    """
    draw = random.Random(seed_)
    seen = Counter[int]()
    with httpx.Client(base_url=address, timeout=30) as client:
        for _ in range(number):
            path, body = draw.choice(BODIES)
            data = bytearray(json.dumps(body).encode())
            for _ in range(draw.randint(1, 4)):
                place = draw.randrange(len(data) + 1)
                data[place : place + draw.choice((0, 0, 1, 5))] = draw.choice(PIECES)
            kind = draw.choice(
                ("application/json", "application/json", "text/plain", "application/x-ndjson")
            )
            answer = client.post(
                path, content=bytes(data), headers=headers(path) | {"content-type": kind}
            )
            seen[answer.status_code] += 1
            assert answer.status_code in ANSWERS, (path, answer.status_code, bytes(data[:200]))
            if answer.status_code != 200:
                assert answer.headers["content-type"] == "application/problem+json", (
                    path,
                    bytes(data[:200]),
                )
    return seen


def ask_heads(address: str, headers: Headers, number: int, seed_: int = 0) -> Counter[int]:
    """So many heads with pieces put in at random, over sockets; returns the statuses.

    Status 0 is a connection that was closed without an answer. Some heads are unfinished, or promise
    a body that does not come: these connections stay open, all at once, until the server ends them.

    Raises:
        AssertionError: a mistake of the server (5xx), an answer that is not HTTP, or a connection that
            the server keeps open beyond its limits of time.
    """
    draw = random.Random(seed_)
    seen = Counter[int]()
    silent = []
    url = httpx.URL(address)
    for _ in range(number):
        head = bytearray(draw.choice(HEADS))
        path = head.split(b" ")[1].decode()
        token = headers(path)["Authorization"].encode()
        head += b"Authorization: " + token + b"\r\nConnection: close\r\n"
        for _ in range(draw.randint(1, 3)):
            # Few pieces fall into the first line by chance, and most rules concern it.
            end = len(head) if draw.random() < 0.5 else head.index(b"\r\n")
            place = draw.randrange(end + 1)
            head[place : place + draw.choice((0, 0, 1, 5))] = draw.choice(HEAD_PIECES)
        connection = socket.create_connection((url.host, url.port), timeout=30)
        begin = bytes(head[:300])
        request = bytes(head) + b'\r\n{"texts":["a"]}'
        # Some stop in the middle.
        if draw.random() < 0.05:
            request = request[: draw.randrange(len(request))]
        answer = answer_to(connection, request)
        if answer is None:
            silent.append((connection, begin))
            continue
        connection.close()
        seen[checked_status(answer, begin)] += 1
    for connection, begin in silent:
        with connection:
            seen[checked_status(late_answer_to(connection, begin), begin)] += 1
    return seen


def checked_status(answer: bytes, begin: bytes) -> int:
    """The status of an answer to a head that begins so; 0 if there is none."""
    if not answer:
        return 0
    assert answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), (answer[:100], begin)
    status = int(answer.split(b" ")[1])
    assert status < 500 or status == 503, (status, begin)
    return status


def answer_to(connection: socket.socket, request: bytes) -> bytes | None:
    """The beginning of the answer; empty if the connection is closed, None if it is silent."""
    try:
        connection.sendall(request)
        connection.settimeout(ANSWER_S)
        return connection.recv(4096)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


def late_answer_to(connection: socket.socket, begin: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    connection.settimeout(CLOSED_S)
    try:
        while part := connection.recv(4096):
            answer += part
    except TimeoutError:
        raise AssertionError(f"not closed within {CLOSED_S:.0f} s: {begin!r}") from None
    except ConnectionError:
        pass
    return answer
