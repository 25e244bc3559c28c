"""Whatever is sent, the answer is one of the description's: no mistake of ours (5xx), no growth."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from bundles import write_bundle_of
from fuzz import ROUTES, ask_described, ask_heads, ask_mutated
from served import ADMIN, TOKEN, listening

from xmcray.serving import connections

MUTATIONS = 200
HEADS = 150


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    bundles = {"a": write_bundle_of(folder / "b", "texts")}
    with pytest.MonkeyPatch.context() as patch, listening(folder, bundles, deadline_ms=3000) as url:
        # By default, 10 s for a head and as long for a body.
        patch.setattr(connections, "HEAD_S", 1.0)
        yield url


def headers(path: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {ADMIN if path.startswith('/admin') else TOKEN}"}


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_description_allows(route: str, address: str) -> None:
    seen = ask_described(address, headers, route, ROUTES[route])
    assert seen.total() >= ROUTES[route] // 2
    assert httpx.get(f"{address}/healthz").status_code == 200


def test_what_no_description_allows(address: str) -> None:
    assert ask_mutated(address, headers, MUTATIONS)[422] > MUTATIONS // 2
    answer = httpx.post(f"{address}/v1/search", json={"texts": ["matrix"]}, headers=headers("/"))
    assert len(answer.json()["results"][0]["answers"]) == 10


def test_heads_that_no_protocol_allows(address: str) -> None:
    seen = ask_heads(address, headers, HEADS)
    assert seen[400] > HEADS // 10
    assert httpx.get(f"{address}/healthz").status_code == 200
