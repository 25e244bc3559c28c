"""Whatever is sent, the answer is one of the description's: no mistake of ours (5xx), no growth."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from bundles import write_bundle_of
from hypothesis import HealthCheck, given, seed, settings
from served import ADMIN, TOKEN, listening

ROUTES = {"/v1/search": 120, "/v1/encode": 40, "/v1/labels/{uid}": 40, "/admin/v1/labels": 80, "/admin/v1/swap": 20}
MUTATIONS = 200
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/search", {"texts": ["matrix norm", "é\u0000"], "k": 3, "filter": {"deny": ["u1"], "attributes": {}}}),
    ("/v1/search", {"texts": ["a"], "fields": ["uid", "score"], "timeout_ms": 500, "model": "a"}),
    ("/v1/encode", {"texts": ["sort"]}),
    ("/admin/v1/labels", {"operations": [{"op": "add", "uid": "x", "text": "sort", "attributes": {"n": 1}}]}),
]
PIECES = [
    b'"', b"{", b"]", b"\xff\xfe", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 400, b"null", b"true", b"[" * 3000,
    b'"\\ud800"', b"\x00", b'"a":' * 50, b"[[]]", b'{"gte":"x"}', b"0.5",
]  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    with listening(folder, {"a": write_bundle_of(folder / "b", "texts")}) as url:
        yield url


def headers(path: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {ADMIN if path.startswith('/admin') else TOKEN}"}


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_description_allows(route: str, address: str) -> None:
    with httpx.Client(base_url=address) as client:
        described = client.get("/openapi.json", headers=headers("/")).json()
        schema = schemathesis.openapi.from_dict(described)
        (operation,) = (found.ok() for found in schema.get_all_operations() if found.ok().path == route)
        known = set(operation.definition.raw["responses"]) | {"403", "404", "405", "409"}
        seen = Counter[int]()

        @seed(1)
        @settings(max_examples=ROUTES[route], deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(base_url=address, headers=headers(route), session=None)
            seen[answer.status_code] += 1
            assert answer.status_code < 500 or answer.status_code in (503, 504)
            assert str(answer.status_code) in known

        ask()
        assert sum(seen.values()) >= ROUTES[route] // 2
        assert client.get("/healthz").status_code == 200


def test_what_no_description_allows(address: str) -> None:
    draw = random.Random(0)
    statuses = Counter[int]()
    with httpx.Client(base_url=address, timeout=30) as client:
        for _ in range(MUTATIONS):
            path, body = draw.choice(BODIES)
            data = bytearray(json.dumps(body).encode())
            for _ in range(draw.randint(1, 4)):
                place = draw.randrange(len(data) + 1)
                data[place : place + draw.choice((0, 0, 1, 5))] = draw.choice(PIECES)
            kind = draw.choice(("application/json", "application/json", "text/plain", "application/x-ndjson"))
            answer = client.post(path, content=bytes(data), headers=headers(path) | {"content-type": kind})
            statuses[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 409, 413, 422, 503, 504), (path, bytes(data[:200]))
            if answer.status_code != 200:
                assert answer.headers["content-type"] == "application/problem+json"
        assert statuses[422] > MUTATIONS // 2
        answer = client.post("/v1/search", json={"texts": ["matrix"]}, headers=headers("/"))
        assert len(answer.json()["results"][0]["answers"]) == 10
