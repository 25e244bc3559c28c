"""On Ray the coordinator may die with a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bundles import write_bundle_of
from ray.exceptions import ActorUnavailableError, RayTaskError
from served import ADMIN, served

from xmcray.serving.application import _Admin
from xmcray.serving.problems import ProblemError

OPERATION = {"operations": [{"op": "add", "uid": "n1", "text": "sort join"}]}


def coordinator_that_raises(error: Exception) -> Any:
    """A handle of the coordinator's deployment."""

    async def remote(*_: Any) -> None:
        raise error

    method = SimpleNamespace(remote=remote)
    return SimpleNamespace(operate=method, swap=method, compact=method)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("labels", OPERATION),
        ("swap", {"bundle": "other"}),
        ("compact", {"out": "compacted"}),
    ],
)
async def test_a_change_says_to_try_again(tmp_path: Path, path: str, body: Any) -> None:
    """But not that nothing was done, upon which a client tries again by itself."""
    bundle = write_bundle_of(tmp_path / "b", "texts")
    died = ActorUnavailableError("Actor is unavailable.", b"0" * 16)
    admin: Any = _Admin(coordinator_that_raises(died))
    async with served(tmp_path, {"default": bundle}) as one:
        one.admin = admin
        answer = await one.ask(f"/admin/v1/{path}", body, ADMIN)
    assert answer.status_code == 503, answer.text
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["type"] == "urn:xmcray:lost"
    assert answer.json()["detail"] == (
        "the coordinator was lost with this request, which it may have carried out, and is started"
        " again; look whether it did, then try again"
    )


async def test_a_refusal_of_the_coordinator_stays_one() -> None:
    refusal = ProblemError("refused", "label 'n1' is there already")
    error = RayTaskError("operate", "a traceback", refusal)
    admin: Any = _Admin(coordinator_that_raises(error))
    with pytest.raises(ProblemError, match="there already"):
        await admin.operate("default", [])
