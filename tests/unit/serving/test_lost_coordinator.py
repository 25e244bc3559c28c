"""On Ray a deployment may die with a request, or not take it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bundles import write_bundle_of
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from served import ADMIN, served

from xmcray.serving.application import _Admin, _Backend
from xmcray.serving.problems import ProblemError

OPERATION = {"operations": [{"op": "add", "uid": "n1", "text": "sort join"}]}


NAME: Any = "Coordinator"
# What Serve raises, and the kind of the problem that it becomes.
NOT_TAKEN = [
    (BackPressureError(65, 64), "overloaded"),
    (DeploymentUnavailableError(NAME), "not-ready"),
]


def deployment_that_raises(error: Exception) -> Any:
    """A handle of a deployment."""

    async def remote(*_: Any) -> None:
        raise error

    method = SimpleNamespace(remote=remote)
    return SimpleNamespace(operate=method, swap=method, compact=method, encode=method)


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
    admin: Any = _Admin(deployment_that_raises(died))
    async with served(tmp_path, {"default": bundle}) as one:
        one.admin = admin
        answer = await one.ask(f"/admin/v1/{path}", body, ADMIN)
    assert answer.status_code == 503, answer.text
    assert "Retry-After" not in answer.headers
    assert answer.json()["type"] == "urn:xmcray:lost"
    assert answer.json()["detail"] == (
        "the coordinator was lost with this request, which it may have carried out, and is started"
        " again; look whether it did, then try again"
    )


async def test_a_refusal_of_the_coordinator_stays_one() -> None:
    refusal = ProblemError("refused", "label 'n1' is there already")
    error = RayTaskError("operate", "a traceback", refusal)
    admin: Any = _Admin(deployment_that_raises(error))
    with pytest.raises(ProblemError, match="there already"):
        await admin.operate("default", [])


@pytest.mark.parametrize(("error", "kind"), NOT_TAKEN)
async def test_a_change_that_was_not_taken_says_so(
    error: Exception, kind: str, tmp_path: Path
) -> None:
    """A client tries it again by itself."""
    bundle = write_bundle_of(tmp_path / "b", "texts")
    admin: Any = _Admin(deployment_that_raises(error))
    async with served(tmp_path, {"default": bundle}) as one:
        one.admin = admin
        answer = await one.ask("/admin/v1/labels", OPERATION, ADMIN)
    assert answer.status_code == 503, answer.text
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["type"] == f"urn:xmcray:{kind}"
    assert "the coordinator" in answer.json()["detail"]
    assert answer.json()["detail"].endswith("ask again")


@pytest.mark.parametrize(("error", "kind"), NOT_TAKEN)
async def test_a_search_that_was_not_taken_is_refused(error: Exception, kind: str) -> None:
    backend = _Backend(deployment_that_raises(error), [], None)
    reference: Any = None
    with pytest.raises(ProblemError, match="ask again") as raised:
        await backend.encode(reference, ["sort"])
    assert raised.value.kind == kind
