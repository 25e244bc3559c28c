"""The application on Ray Serve: the retriever's answers in both modes, and no request lost while parts of it die."""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import pytest
from bundles import TEXTS, write_bundle_of, write_memory
from processes import descendants

from xmcray.client import Client, ClientError
from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.run import serving
from xmcray.serving.schema import Operation
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.serving.search_pb2_grpc import RetrieverStub
from xmcray.serving.settings import ServeConfig

KINDS = ("texts", "rowsIVF", "both", "prototypes", "memory")
ASKED = ["matrix vector norm", "", "sort sort join", "w3x1 w4x2"]
K = 7
Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    made = {kind: write_bundle_of(folder / kind, kind, shard_rows=200) for kind in KINDS if kind != "memory"}
    return {**made, "memory": write_memory(folder)}


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return _free()


@pytest.fixture
def grpc_port() -> int:
    return _free()


def client_of(url: str, state: Path) -> Client:
    return Client(url, token_file=state / "token", admin_token=(state / "admin-token").read_text().strip())


def insist(request: Callable[[], Answer]) -> Answer:
    """A write as an operator makes it: again, where the process that took it died and nobody knows what came of it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return request()
        except ClientError as error:
            if error.status not in (500, 502, 503) or time.monotonic() > deadline:
                raise


def replicas(deployment: str) -> list[int]:
    """Processes of a deployment's replicas."""
    return [pid for pid, command in descendants(os.getpid()).items() if f"ServeReplica:xmcray:{deployment}" in command]


def test_composed_answers_are_the_retrievers(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int, grpc_port: int
) -> None:
    paths = {name: str(path) for name, path in bundles.items()}
    config = ServeConfig(bundles=paths, mode="composed", parts=2, state_dir=str(tmp_path / "s"))
    with serving(config, "127.0.0.1", port, grpc_port) as url, client_of(url, tmp_path / "s") as client:
        for kind, path in bundles.items():
            retriever, voted = Retriever.load(path, threads=1), kind == "memory"
            found = client.search(ASKED, K, model=kind, explain=voted).results
            for result, answers in zip(found, retriever.search(ASKED, K, explain=voted), strict=True):
                assert [a.uid for a in result.answers] == [a.uid for a in answers]
                np.testing.assert_allclose([a.score for a in result.answers], [a.score for a in answers], atol=1e-6)
        # gRPC gives the same
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            call = RetrieverStub(channel).Search
            request = SearchRequest(texts=ASKED, k=K, model="memory", explain=True, fields=["uid", "score"])
            token = ("authorization", f"Bearer {(tmp_path / 's' / 'token').read_text().strip()}")
            told = call(request, metadata=[token, ("application", "xmcray")])
            assert [[a.uid for a in r.answers] for r in told.results] == [[a.uid for a in r.answers] for r in found]
            assert [len(a.voters) for a in told.results[0].answers] == [len(a.voters) for a in found[0].answers]
            for metadata, code in [((), "UNAUTHENTICATED"), ([token], "INVALID_ARGUMENT")]:
                with pytest.raises(grpc.RpcError, match=code):
                    call(SearchRequest(texts=["a"], k=0), metadata=[*metadata, ("application", "xmcray")])
        # an operation, a filter and a swap through all parts
        number = client.change_labels([Operation(op="add", uid="n1", text="sort sort join")], model="texts").label_log
        deadline = time.monotonic() + 5
        asked = {"model": "texts", "filter": {"deny": ["u1"]}}
        while (found := client.search(["sort sort join"], 3, **asked)).label_log < number:
            assert time.monotonic() < deadline, "an operation is visible within 5 s"
        assert found.results[0].answers[0].uid == "n1"
        add_labels(bundles["both"], [NewLabel("n2", "trace trace norm")], tmp_path / "both")
        swapped = client.swap(str(tmp_path / "both"), model="both")
        assert client.search(["trace trace norm"], 1, model="both").version == swapped.version
        assert client.label("n2", model="both").text == "trace trace norm"


def test_nothing_is_lost_while_replicas_die_and_bundles_are_swapped(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int
) -> None:
    """500 requests with the client's own retries; every answer is wholly of one version and one operation."""
    add_labels(bundles["texts"], [NewLabel("extra", "matrix vector norm")], tmp_path / "other")
    versions = {str(path): Retriever.load(path, threads=1) for path in (bundles["texts"], tmp_path / "other")}
    wanted = {r.sha256: [[a.uid for a in answers] for answers in r.search(TEXTS[:40], K)] for r in versions.values()}
    config = ServeConfig(bundles={"a": str(bundles["texts"])}, mode="single", replicas=2, state_dir=str(tmp_path / "s"))
    mixed, seen, killed, failed = list[str](), set[str](), list[int](), list[Exception]()
    swapped, done = threading.Event(), threading.Event()

    def ask(seed: int) -> None:
        draw, asked = random.Random(seed), 0
        with client_of(url, tmp_path / "s") as client:
            while asked < 125 or not swapped.is_set():
                asked += 1
                place = draw.randrange(0, 38)
                try:
                    found = client.search(TEXTS[place : place + 2], K, filter={"deny": ["live"]})
                except Exception as error:
                    failed.append(error)
                    continue
                answers = [[a.uid for a in result.answers] for result in found.results]
                seen.add(found.version)
                if answers != wanted[found.version][place : place + 2]:
                    mixed.append(found.version)

    def kill() -> None:
        while not done.wait(2.0):
            if len(found := replicas("Gateway")) == 2:
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])

    with serving(config, "127.0.0.1", port) as url, client_of(url, tmp_path / "s") as admin:
        askers = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(4)]
        killer = threading.Thread(target=kill, daemon=True)
        for thread in [*askers, killer]:
            thread.start()
        live = [Operation(op="add", uid="live", text="matrix vector norm")]
        assert admin.change_labels(live).label_log == 1
        for bundle in [tmp_path / "other", bundles["texts"], tmp_path / "other"]:
            insist(functools.partial(admin.swap, str(bundle)))
        swapped.set()
        for asker in askers:
            asker.join()
        done.set()
        killer.join()
        assert not failed
        assert not mixed
        assert seen == set(wanted)
        assert killed
        # the coordinator dies too, and has forgotten nothing
        (coordinator,) = replicas("Coordinator")
        os.kill(coordinator, signal.SIGKILL)
        update = [Operation(op="update", uid="live", text="sort join")]
        assert insist(lambda: admin.change_labels(update)).label_log == 2
        assert admin.search(["matrix"]).version == versions[str(tmp_path / "other")].sha256
