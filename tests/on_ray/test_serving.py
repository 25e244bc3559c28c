"""The application on Ray Serve: the retriever's answers in both modes, and no request lost while parts of it die."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from bundles import WORDS, write_bundle_of, write_memory, write_transformer
from models import write_cross_encoder
from ray import serve
from replicas import Askers, Killer, client_of, insist, known_answers, replicas

from xmcray.doctor.sockets import listeners
from xmcray.errors import ResourceError
from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.application import NAME
from xmcray.serving.label_log import LabelLog
from xmcray.serving.run import FASTER, serving
from xmcray.serving.schema import Operation
from xmcray.serving.search_pb2 import SearchRequest
from xmcray.serving.search_pb2_grpc import RetrieverStub
from xmcray.serving.settings import ServeConfig

os.environ.update(
    FASTER
)  # before any test starts the cluster, whose processes inherit it, as those of `xmcray serve`
KINDS = ("texts", "rowsIVF", "both", "prototypes", "memory")
ASKED = ["matrix vector norm", "", "sort sort join", "w3x1 w4x2"]
K = 7


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    made = {
        kind: write_bundle_of(folder / kind, kind, shard_rows=200)
        for kind in KINDS
        if kind != "memory"
    }
    return {**made, "bert": write_transformer(folder), "memory": write_memory(folder)}


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


def _metrics(url: str, state: Path) -> str:
    headers = {"Authorization": f"Bearer {(state / 'token').read_text().strip()}"}
    return httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text


def test_composed_answers_are_the_retrievers(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int, grpc_port: int
) -> None:
    paths = {name: str(path) for name, path in bundles.items()}
    config = ServeConfig(
        bundles=paths,
        mode="composed",
        parts=2,
        state_dir=str(tmp_path / "s"),
        collect_events=True,
        bundle_roots=(str(tmp_path),),
    )
    with (
        serving(config, "127.0.0.1", port, grpc_port) as url,
        client_of(url, tmp_path / "s") as client,
    ):
        # at once: Serve itself may not know yet that this replica is ready
        assert 'xmcray_requests_in_flight{replica="' in _metrics(url, tmp_path / "s")
        for kind, path in bundles.items():
            retriever = Retriever.load(path, threads=1)
            voted = kind == "memory"
            found = client.search(ASKED, K, model=kind, explain=voted).results
            for result, answers in zip(
                found, retriever.search(ASKED, K, explain=voted), strict=True
            ):
                assert [a.uid for a in result.answers] == [a.uid for a in answers]
                np.testing.assert_allclose(
                    [a.score for a in result.answers], [a.score for a in answers], atol=1e-6
                )
        # gRPC gives the same, on loopback too: a single ingress listens itself
        ours = {(one.port, one.loopback) for one in listeners() if one.port in (port, grpc_port)}
        assert ours == {(port, True), (grpc_port, True)}
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            call = RetrieverStub(channel).Search
            request = SearchRequest(
                texts=ASKED, k=K, model="memory", explain=True, fields=["uid", "score"]
            )
            token = ("authorization", f"Bearer {(tmp_path / 's' / 'token').read_text().strip()}")
            response = call(request, metadata=[token])
            assert [[a.uid for a in r.answers] for r in response.results] == [
                [a.uid for a in r.answers] for r in found
            ]
            assert [len(a.voters) for a in response.results[0].answers] == [
                len(a.voters) for a in found[0].answers
            ]
            for metadata, code in [((), "UNAUTHENTICATED"), ([token], "INVALID_ARGUMENT")]:
                with pytest.raises(grpc.RpcError, match=code):
                    call(SearchRequest(texts=["a"], k=0), metadata=metadata)
        # feedback finds its search, which is on its way to the coordinator
        search = client.search(ASKED, K, model="texts")
        uid = str(search.results[0].answers[0].uid)
        assert client.feedback(search.request_id, uid, "accept", model="texts").number >= 2
        # an operation, a filter and a swap through all parts
        number = client.change_labels(
            [Operation(op="add", uid="n1", text="sort sort join")], model="texts"
        ).label_log
        deadline = time.monotonic() + 5
        asked = {"model": "texts", "filter": {"deny": ["u1"]}}
        while (found := client.search(["sort sort join"], 3, **asked)).label_log < number:
            assert time.monotonic() < deadline, "an operation is visible within 5 s"
        assert found.results[0].answers[0].uid == "n1"
        add_labels(bundles["both"], [NewLabel("n2", "trace trace norm")], tmp_path / "both")
        swapped = client.swap(str(tmp_path / "both"), model="both")
        assert client.search(["trace trace norm"], 1, model="both").version == swapped.version
        assert client.label("n2", model="both").text == "trace trace norm"


@pytest.mark.soak
def test_a_reranker_of_its_own_answers_as_one_process(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int
) -> None:
    reranker = str(write_cross_encoder(tmp_path / "reranker", WORDS))
    config = ServeConfig(
        bundles={"texts": str(bundles["texts"])},
        mode="composed",
        state_dir=str(tmp_path / "s"),
        rerank=reranker,
    )
    wanted = Retriever.load(bundles["texts"], threads=1).reranked_by(reranker).search(ASKED, K)
    with (
        serving(config, "127.0.0.1", port) as url,
        client_of(url, tmp_path / "s") as client,
    ):
        results = client.search(ASKED, K).results
        for result, answers in zip(results, wanted, strict=True):
            assert [a.uid for a in result.answers] == [a.uid for a in answers]
            assert [a.score for a in result.answers] == [a.score for a in answers]
        assert "Reranker" in serve.status().applications[NAME].deployments


def test_nothing_is_lost_while_replicas_die_and_bundles_are_swapped(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int, grpc_port: int
) -> None:
    """500 requests with the client's own retries; every answer is wholly of one version and one operation."""
    add_labels(bundles["texts"], [NewLabel("extra", "matrix vector norm")], tmp_path / "other")
    known = known_answers([bundles["texts"], tmp_path / "other"])
    config = ServeConfig(
        bundles={"a": str(bundles["texts"])},
        mode="single",
        replicas=2,
        state_dir=str(tmp_path / "s"),
        bundle_roots=(str(tmp_path),),
    )
    with (
        serving(config, "127.0.0.1", port, grpc_port) as url,
        client_of(url, tmp_path / "s") as admin,
    ):
        with grpc.insecure_channel(
            f"127.0.0.1:{grpc_port}"
        ) as channel:  # Ray Serve's, which knows of all replicas
            token = ("authorization", f"Bearer {(tmp_path / 's' / 'token').read_text().strip()}")
            request = SearchRequest(texts=ASKED[:1], k=K, fields=["uid"])
            response = RetrieverStub(channel).Search(
                request, metadata=[token, ("application", "xmcray")]
            )
            assert len(response.results[0].answers) == K
        text = _metrics(url, tmp_path / "s")
        assert (
            len(
                [
                    line
                    for line in text.splitlines()
                    if line.startswith("xmcray_requests_in_flight{")
                ]
            )
            == 2
        )
        assert 'xmcray_replicas{replica="coordinator"} 2.0' in text
        askers = Askers(url, tmp_path / "s", known)
        killer = Killer(lambda: found if len(found := replicas("Gateway")) == 2 else [], 2.0)
        live = [Operation(op="add", uid="live", text="matrix vector norm")]
        assert admin.change_labels(live).label_log == 1
        for bundle in [tmp_path / "other", bundles["texts"], tmp_path / "other"]:
            swapped = insist(functools.partial(admin.swap, str(bundle)))
        askers.finish(500)
        killer.close()
        assert not askers.failed
        assert not askers.mixed
        assert askers.seen == set(known)
        assert killer.killed
        # the coordinator dies too, and has forgotten nothing
        (coordinator,) = replicas("Coordinator")
        os.kill(coordinator, signal.SIGKILL)
        update = [Operation(op="update", uid="live", text="sort join")]
        assert insist(lambda: admin.change_labels(update)).label_log == 2
        assert admin.search(["matrix"]).version == swapped.version


@pytest.mark.soak
def test_a_mistake_in_a_deployment_is_one_line(
    cluster: None, bundles: dict[str, Path], tmp_path: Path, port: int
) -> None:
    config = ServeConfig(
        bundles={"texts": str(bundles["texts"])}, replicas=2, state_dir=str(tmp_path)
    )
    in_use = pytest.raises(ResourceError, match="is in use by another server, expected one server")
    log = LabelLog(tmp_path / "texts" / "labels", "texts")
    with log, in_use, serving(config, "127.0.0.1", port):
        pass
