"""While replicas load another bundle: operations reach the one that answers, and a failure is reported."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from bundles import write_bundle_of
from served import ADMIN, served

from xmcray.errors import OutOfMemoryError
from xmcray.retrieval.labels import remove_labels
from xmcray.serving.snapshot import Snapshot


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("alongside") / "b", "texts")


@pytest.fixture(scope="module")
def other(bundle: Path) -> Path:
    path = bundle.with_name("other")
    remove_labels(bundle, ["u3"], path)
    return path


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemoryError("it needs 9 GB, expected 1 GB"), "it needs 9 GB, expected 1 GB"),
        (KeyError("a mistake of ours"), "KeyError: 'a mistake of ours'"),
    ],
)
async def test_a_swap_ends_as_soon_as_a_replica_cannot_load(
    bundle: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    load = Snapshot.load
    attempts: list[None] = []

    def fails(*arguments: Any, **options: Any) -> Snapshot:
        attempts.append(None)
        # The coordinator itself loads the bundle first.
        if len(attempts) > 1:
            raise error
        return load(*arguments, **options)

    body = {"bundle": str(other), "recall_floor": 0}
    async with served(tmp_path, {"default": bundle}) as one:
        before = one.models.current(None).version
        monkeypatch.setattr(Snapshot, "load", fails)
        begin = time.monotonic()
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert answer.status_code == 409, answer.text
        assert answer.json()["detail"] == f"a replica cannot load {other}: {reason}"
        assert time.monotonic() - begin < one.service.config.swap_s / 10
        changed = await one.change({"op": "delete", "uid": "u5"})
        await one.reached(changed.json()["label_log"])
        assert one.models.current(None).version == before
        assert len(attempts) == 2, "operations start no other attempt"
        monkeypatch.undo()
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert answer.status_code == 200, answer.text
        assert one.models.current(None).label_id("u5") is None


async def test_operations_reach_what_answers_while_another_bundle_is_loaded(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Snapshot.load
    hold = threading.Event()
    is_loading = threading.Event()
    loads: list[None] = []

    def slow(*arguments: Any, **options: Any) -> Snapshot:
        loads.append(None)
        if len(loads) > 1:
            is_loading.set()
            hold.wait(60)
        return load(*arguments, **options)

    async with served(tmp_path, {"default": bundle}) as one:
        monkeypatch.setattr(Snapshot, "load", slow)
        body = {"bundle": str(other), "recall_floor": 0}
        swap = asyncio.create_task(one.ask("/admin/v1/swap", body, ADMIN))
        try:
            await asyncio.to_thread(is_loading.wait, 60)
            for uid in ("n1", "n2"):
                changed = await one.change({"op": "add", "uid": uid, "text": "sort join"})
                await one.reached(changed.json()["label_log"])
            assert not swap.done()
            assert one.models.current(None).label_id("n2") is not None
        finally:
            hold.set()
        answer = await swap
        assert answer.status_code == 200, answer.text
        await one.reached(2)
        current = one.models.current(None)
        assert current.version == answer.json()["version"]
        assert None not in (current.label_id("n1"), current.label_id("n2"))
        assert len(loads) == 2, "the coordinator and the replica load once each"
