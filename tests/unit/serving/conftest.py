"""Bundles to swap between, for coordinators and replicas, and a clock and calls of the client."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from bundles import write_bundle_of
from client_calls import Ask, Clock

from xmcray import client as clients
from xmcray.client import AsyncClient, Client
from xmcray.retrieval.labels import remove_labels


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("bundles") / "b", "texts")


@pytest.fixture(scope="module")
def other(bundle: Path) -> Path:
    """The same without one label."""
    path = bundle.with_name("other")
    remove_labels(bundle, ["u3"], path)
    return path


@pytest.fixture(scope="module")
def bundles(bundle: Path) -> dict[str, Path]:
    """Bundles by kind; modules that need further kinds have a fixture of their own."""
    return {"texts": bundle}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr(clients, "time", clock)
    monkeypatch.setattr(clients.call, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(
        random, "uniform", lambda low, high: high
    )  # the longest wait that jitter allows
    monkeypatch.delenv("XMCRAY_TOKEN", raising=False)
    return clock


@pytest.fixture(params=[Client, AsyncClient])
def ask(request: pytest.FixtureRequest, clock: Clock) -> Ask:
    return Ask(request.param)
