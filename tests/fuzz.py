"""Requests that the description allows, and bodies that no description allows, against a server that is running."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings

Headers = Callable[[str], dict[str, str]]  # of a request to a path: the token it wants

ROUTES = {
    "/v1/search": 120,
    "/v1/encode": 40,
    "/v1/labels/{uid}": 40,
    "/admin/v1/labels": 80,
    "/admin/v1/swap": 20,
}
ANSWERS = (200, 400, 404, 409, 413, 422, 503)
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/search",
        {"texts": ["matrix norm", "é\u0000"], "k": 3, "filter": {"deny": ["u1"], "attributes": {}}},
    ),
    ("/v1/search", {"texts": ["a"], "fields": ["uid", "score"], "timeout_ms": 500, "model": "a"}),
    ("/v1/encode", {"texts": ["sort"]}),
    (
        "/admin/v1/labels",
        {"operations": [{"op": "add", "uid": "x", "text": "sort", "attributes": {"n": 1}}]},
    ),
]
PIECES = [
    b'"', b"{", b"]", b"\xff\xfe", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 400, b"null", b"true", b"[" * 3000,
    b'"\\ud800"', b"\x00", b'"a":' * 50, b"[[]]", b'{"gte":"x"}', b"0.5",
]  # fmt: skip


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
