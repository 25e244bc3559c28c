"""Answers over HTTP are those of the retriever; limits, tokens, filters, swaps and live labels."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from bundles import DIM, TEXTS, write_bundle_of, write_fused, write_memory, write_transformer
from pydantic import ValidationError
from served import ADMIN, TOKEN, Call, Served, served

from xmcray.errors import StorageError
from xmcray.retrieval.bundle import read_attributes
from xmcray.retrieval.labels import remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.serving import request_checks, rpc, search_pb2, security, service
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.schema import SearchRequest
from xmcray.serving.search_batch import PendingSearch, find_hits
from xmcray.serving.snapshot import Snapshot, SnapshotReference

KINDS = ("texts", "rowsIVF", "both", "prototypes")
EXPLAINED = ("memory", "fused")
TOKEN_HEADER = f"Bearer {TOKEN}".encode()
ASKED = ["matrix vector norm", "", "sort sort join", "w3x1 w4x2"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    made = {kind: write_bundle_of(folder / kind, kind) for kind in KINDS}
    memory = write_memory(folder)
    return {**made, "memory": memory, "fused": write_fused(memory)}


async def test_answers_are_the_retrievers(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, bundles) as one:
        for kind, path in bundles.items():
            fields = ["uid", "text", "label_id", "score"]
            explain = kind in EXPLAINED
            body = await one.search(ASKED, k=7, model=kind, fields=fields, explain=explain)
            wanted = Retriever.load(path, threads=1).search(ASKED, 7, explain=explain)
            assert body["model"] == kind
            for result, answers in zip(body["results"], wanted, strict=True):
                assert [a["uid"] for a in result["answers"]] == [a.uid for a in answers]
                assert [a["label_id"] for a in result["answers"]] == [a.label_id for a in answers]
                scores = [[a["score"] for a in result["answers"]], [a.score for a in answers]]
                np.testing.assert_allclose(*scores, atol=1e-6)
                if explain:
                    parts = [a.parts for a in answers]
                    assert [a.get("parts") for a in result["answers"]] == parts
                    voters = [[v.uid for v in a.voters or ()] for a in answers]
                    assert [[v["uid"] for v in a["voters"]] for a in result["answers"]] == voters
                if kind == "memory":
                    assert [a["completed"] for a in result["answers"]] == [
                        a.score < 0 for a in answers
                    ]
            encoded = (await one.ask("/v1/encode", {"texts": ASKED, "model": kind})).json()
            np.testing.assert_allclose(
                encoded["vectors"], Retriever.load(path).encode(ASKED), atol=1e-6
            )


async def test_texts_are_encoded_elsewhere_only_where_that_is_sooner(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    """In the composed mode a static encoder's vectors are made by the searchers, a transformer's by the encoder."""
    sent = list[str]()

    class Backend:
        """The other deployments, in this process."""

        def __init__(self, one: Served) -> None:
            self.current = one.models.current

        async def encode(self, reference: SnapshotReference, texts: list[str]) -> Any:
            sent.append(reference.model)
            return self.current(reference.model).encode(texts, 512)

        async def find(self, reference: SnapshotReference, *search: Any) -> Any:
            return find_hits([PendingSearch(self.current(reference.model), *search)], 512)[0]

    paths = {
        "static": bundles["texts"],
        "fused": bundles["fused"],
        "bert": write_transformer(tmp_path),
    }
    async with served(tmp_path, paths) as one:
        one.service._backend = Backend(one)
        for name, path in paths.items():
            wanted = Retriever.load(path, threads=1)
            found = (await one.search(ASKED, k=7, model=name))["results"]
            uids = [[a.uid for a in answers] for answers in wanted.search(ASKED, 7)]
            assert [[a["uid"] for a in result["answers"]] for result in found] == uids
            encoded = (await one.ask("/v1/encode", {"texts": ASKED, "model": name})).json()
            np.testing.assert_allclose(encoded["vectors"], wanted.encode(ASKED), atol=1e-6)
        assert sent == ["bert", "bert"]


def test_a_bundle_that_changes_while_it_is_loaded_is_refused(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    shutil.copytree(bundles["texts"], path)

    def change(*arguments: Any) -> Any:
        remove_labels(path, ["u3"])
        return read_attributes(*arguments)

    monkeypatch.setattr("xmcray.serving.snapshot.read_attributes", change)
    with pytest.raises(StorageError, match="has changed while it was loaded, expected version"):
        Snapshot.load(str(path), "m", threads=1)
    monkeypatch.undo()
    assert Snapshot.load(str(path), "m", threads=1).label_id("u3") is None


async def test_texts_with_and_without_their_vectors_are_no_batch(bundles: dict[str, Path]) -> None:
    """In the composed mode, texts with side vectors are encoded with the search, others before."""
    snapshot = Snapshot.load(str(bundles["texts"]), "m", threads=1)
    texts = ("matrix vector norm", "sort sort join")
    requests = [SearchRequest(texts=[text], k=3) for text in texts]
    encoded = snapshot.encode(requests[0].texts, 512)
    searches = [
        PendingSearch(snapshot, requests[0], 3, encoded.query_BD),
        PendingSearch(snapshot, requests[1], 3),
    ]
    thread = ThreadPoolExecutor(1)
    batcher = MicroBatcher(thread, partial(find_hits, max_tokens=512), 64)
    # The thread is busy until both are queued.
    held = threading.Event()
    thread.submit(held.wait, 10)
    calls = [batcher.run(search.batch_key, 1, search) for search in searches]
    waiting = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    held.set()
    for search, hits in zip(searches, await asyncio.gather(*waiting), strict=True):
        wanted = find_hits([search], 512)[0]
        np.testing.assert_array_equal(hits.neighbours.labels.ids, wanted.neighbours.labels.ids)


async def test_memory_settings_of_a_request(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"memory": bundles["memory"]}) as one:
        body = await one.search(ASKED, k=5, memory={"weight": 0.0, "keys": 9})
        retriever = Retriever.load(bundles["memory"], threads=1)
        known = retriever.memory.config if retriever.memory else MemoryConfig()
        config = MemoryConfig(weight=0.0, keys=9, temperature=known.temperature, joint=known.joint)
        wanted = retriever.search(ASKED, 5, memory=config)
        assert [[a["uid"] for a in r["answers"]] for r in body["results"]] == [
            [a.uid for a in r] for r in wanted
        ]


async def test_every_route_wants_its_token(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        search = {"texts": ["a"]}
        reading = [
            ("/v1/search", search),
            ("/v1/encode", search),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "texts": ["a"]}),
            ("/v1/feedback", {"request_id": "r", "label": "u1", "event": "click"}),
            ("/v1/labels/u1", None),
            ("/v1/models", None),
        ]
        reading += [
            (path, None)
            for path in ("/metrics", "/openapi.json", "/", "/docs", "/page/app.js", "/nowhere")
        ]
        admin = [
            ("/admin/v1/labels", {"operations": [{"op": "delete", "uid": "u1"}]}),
            ("/admin/v1/swap", {"bundle": "x"}),
            ("/admin/v1/compact", {"out": "x"}),
            ("/admin/nowhere", None),
        ]
        missing = ("/nowhere", "/v1/feedback")  # this server collects no events
        routes = {route.path for route in one.app.routes if hasattr(route, "methods")}
        asked = {path for path, _ in [*reading, *admin]} | {"/healthz"}
        assert {r.replace("{uid:uid}", "u1").replace("{name}", "app.js") for r in routes} <= asked
        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        for path, body in [*reading, *admin]:
            for header in (None, "Bearer wrong", "Bearer ", TOKEN, "Basic !", f"Bearer {TOKEN}x"):
                answer = await one.ask(
                    path, body, None, headers={"Authorization": header} if header else {}
                )
                assert answer.status_code == 401, (path, header)
                assert answer.headers["content-type"] == "application/problem+json"
                assert "Bearer" in answer.headers["www-authenticate"]
        for path, body in reading:
            for header in (f"Bearer {TOKEN}", f"Basic {basic}"):
                answer = await one.ask(path, body, None, headers={"Authorization": header})
                assert answer.status_code == (404 if path in missing else 200), path
        for path, body in admin:
            assert (await one.ask(path, body, TOKEN)).status_code == 403
            answer = await one.ask(path, body, None, headers={"Authorization": f"Basic {basic}"})
            assert answer.status_code == 401
        assert (await one.ask("/healthz", token=None)).json() == {"status": "ok"}
        # Without tokens of any use the server still says that it lives.
        (Path(one.service.config.state_dir) / "token").write_bytes(b"\xff")
        monkeypatch.setattr(security, "CHECK_S", -1.0)
        assert (await one.ask("/v1/models")).status_code == 401
        assert (await one.ask("/healthz", token=None)).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": b"Basic \xff"}, 401),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
        ({"Authorization": "Basic ²".encode("latin-1")}, 401),
        ({"Authorization": TOKEN_HEADER, "X-Request-Id": b"\xff"}, 404),
        ({"Authorization": TOKEN_HEADER, "Content-Length": "²".encode("latin-1")}, 404),
        ({"Authorization": TOKEN_HEADER, "Content-Length": b"9" * 5000}, 404),
        # The longest number that the parser of HTTP lets through.
        ({"Authorization": TOKEN_HEADER, "Content-Length": str(2**64 - 1).encode()}, 413),
        ({"Authorization": TOKEN_HEADER, "Host": b"["}, 404),
        ({"Authorization": TOKEN_HEADER, "Host": b"\xff"}, 404),
    ],
)
async def test_no_header_is_a_mistake_of_ours(
    headers: dict[str, bytes],
    status: int,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        for _ in range(2):
            answer = await one.ask("/nowhere", token=None, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("given", [None, "", "a b", "é", "a\n", "x" * 129])
def test_a_request_gets_an_id_that_logs_can_take(given: str | None) -> None:
    assert request_checks.request_id("a.b_c:d-1") == "a.b_c:d-1"
    assert request_checks.request_id(given) != given


async def test_a_prefix_opens_no_door(bundles: dict[str, Path], tmp_path: Path) -> None:
    """Behind `route_prefix: /x` of Ray Serve, ASGI's path begins with the prefix."""

    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        transport = httpx.ASGITransport(one.app, root_path="/x")
        async with httpx.AsyncClient(transport=transport, base_url="http://test/x") as client:
            operations = {"operations": [{"op": "delete", "uid": "u1"}]}
            for token, status in ((TOKEN, 403), (ADMIN, 200)):
                headers = {"Authorization": f"Bearer {token}"}
                assert (
                    await client.post("/admin/v1/labels", json=operations, headers=headers)
                ).status_code == status
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401


def test_half_a_character_is_no_value_of_an_attribute() -> None:
    body = {"texts": ["a"], "filter": {"attributes": {"lang": "\ud800"}}}
    with pytest.raises(ValidationError, match="unicode"):
        SearchRequest.model_validate(body)


@pytest.mark.parametrize(
    ("body", "status", "kind", "detail"),
    [
        ({"texts": []}, 422, "invalid", "texts"),
        ({"texts": "one"}, 422, "invalid", "texts"),
        ({"texts": ["a"] * 65}, 422, "invalid", "texts"),
        ({"texts": ["a"] * 64, "k": 101}, 422, "invalid", "6,464, expected at most 6,400"),
        (
            {"texts": ["a"], "k": 0},
            422,
            "invalid",
            "body.k is 0, but input should be greater than or equal to 1; correct it",
        ),
        ([], 422, "invalid", "body is [], but input should be a valid dictionary"),
        ({"texts": ["a"], "k": 1001}, 422, "invalid", "k"),
        (
            {"texts": ["a"], "kk": 1},
            422,
            "invalid",
            "body: unknown field 'kk', expected one of texts, vectors, k, fields, model,",
        ),
        (
            {"texts": ["a"], "filter": {"alow": []}},
            422,
            "invalid",
            "body.filter: unknown field 'alow', expected one of allow, deny, attributes; rename it",
        ),
        ({"texts": ["a"], "model": "b"}, 404, "not-found", "expected one of: a"),
        ({"texts": ["a"], "explain": True}, 422, "invalid", "no memory"),
        ({"texts": ["a"], "memory": {"weight": 0.5}}, 422, "invalid", "no memory"),
        ({"texts": ["a"], "filter": {"attributes": {"lang": "en"}}}, 422, "invalid", "'lang'"),
        ({"texts": ["x" * 2_000_000]}, 413, "too-large", "1,048,576"),
        ({"texts": ["matrix " * 500]}, 422, "too-long", "text 0"),
    ],
)
async def test_requests_that_are_refused(
    body: dict[str, Any],
    status: int,
    kind: str,
    detail: str,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, long_texts="refuse") as one:
        answer = await one.ask("/v1/search", body, headers={"X-Request-ID": "me-1"})
        problem = answer.json()
        assert (answer.status_code, problem["status"], problem["type"]) == (
            status,
            status,
            f"urn:xmcray:{kind}",
        )
        assert detail in problem["detail"]
        assert problem["request_id"] == answer.headers["x-request-id"] == "me-1"


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "kind", "detail"),
    [
        (
            "POST",
            "/v1/search",
            b'{"texts": ["a"',
            {"Content-Type": "application/json"},
            422,
            "invalid",
            "the body is no JSON (Expecting ',' delimiter, character 14), expected a JSON object",
        ),
        (
            "POST",
            "/v1/search",
            b'{"texts": ["\xff"]}',
            {"Content-Type": "application/json"},
            400,
            "invalid",
            "error parsing the body, expected a JSON object in UTF-8; correct it",
        ),
        ("POST", "/v1/search", b"", {}, 422, "invalid", "has no body, expected a JSON object; see"),
        (
            "POST",
            "/v1/search",
            b'{"texts": ["a"]}',
            {"Content-Type": "application/x-www-form-urlencoded"},
            422,
            "invalid",
            "expected the header `Content-Type: application/json`; send it",
        ),
        (
            "GET",
            "/v1/search",
            b"",
            {},
            405,
            "not-allowed",
            "GET /v1/search is not allowed, expected POST; /openapi.json",
        ),
        ("GET", "/v1/serch", b"", {}, 404, "not-found", "/v1/serch is not here, expected another"),
    ],
)
async def test_requests_that_no_route_understands(
    method: str,
    path: str,
    content: bytes,
    headers: dict[str, str],
    status: int,
    kind: str,
    detail: str,
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        answer = await one.ask(path, method=method, content=content, headers=headers)
        problem = answer.json()
        assert (answer.status_code, problem["status"]) == (status, status)
        assert problem["type"] == f"urn:xmcray:{kind}"
        assert answer.headers["content-type"] == "application/problem+json"
        assert {"title", "request_id"} <= problem.keys()
        assert detail in problem["detail"]


async def test_a_long_text_is_cut_and_says_so(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        body = await one.search(["matrix " * 17, "matrix " * 16, "x"], k=1)
        assert [result["truncated"] for result in body["results"]] == [True, False, False]


async def test_a_body_that_does_not_come(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, deadline_ms=300) as one:

        async def begun() -> AsyncIterator[bytes]:
            yield b'{"texts": '
            await asyncio.Event().wait()

        answer = await one.ask("/v1/search", content=begun())
        assert (answer.status_code, answer.json()["type"]) == (408, "urn:xmcray:late")
        assert (await one.search(["a"]))["results"]


async def test_too_many_requests_and_too_little_time(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}, in_flight=2) as one:

        async def stuck(*_: Any) -> Any:
            await asyncio.Event().wait()

        run = one.service._batcher.run
        one.service._batcher.run = stuck  # type: ignore[method-assign]
        body = {"texts": ["a"], "timeout_ms": 500}
        waiting = [asyncio.create_task(one.ask("/v1/search", body)) for _ in range(2)]
        while one.service.working < 2:
            await asyncio.sleep(0.001)
        refused = await one.ask("/v1/search", content=b"not even read")
        assert refused.status_code == 503
        assert (await one.ask("/v1/search", body, "wrong" * 4)).status_code == 401, (
            "only readers learn of the load"
        )
        for answer in [await answer for answer in waiting]:
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:xmcray:timeout")
            assert answer.headers["retry-after"] == "1"
        assert (refused.headers["retry-after"], refused.json()["type"]) == (
            "1",
            "urn:xmcray:overloaded",
        )
        one.service._batcher.run = run  # type: ignore[method-assign]
        assert (await one.ask("/v1/search", body | {"timeout_ms": 9000})).status_code == 200
        assert one.service.working == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
@pytest.mark.parametrize(("settings", "nice"), [({}, 10), ({"search_nice": 0}, 0)])
async def test_searches_give_way_to_the_event_loop(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    nice: int,
) -> None:
    seen: list[int] = []

    def noted(*arguments: Any) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return find_hits(*arguments)

    monkeypatch.setattr(service, "find_hits", noted)
    async with served(tmp_path, {"a": bundles["texts"]}, **settings) as one:
        assert (await one.search(["a"]))["results"]
    loop_nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [min(19, loop_nice + nice)]


async def test_allow_and_deny(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["rowsIVF"]}) as one:
        allow = [f"u{i}" for i in range(0, len(TEXTS), 50)]
        body = await one.search(
            ASKED[:3], k=100, filter={"allow": [*allow, "unknown"], "deny": allow[:2]}
        )
        for result in body["results"]:
            assert {answer["uid"] for answer in result["answers"]} == set(allow[2:])
        assert [
            r["answers"] for r in (await one.search(["a"], filter={"allow": []}))["results"]
        ] == [[]]


async def test_a_call_of_grpc_can_allow_no_label(bundles: dict[str, Path], tmp_path: Path) -> None:
    """A message cannot tell an empty list from none."""
    async with served(tmp_path, {"a": bundles["texts"]}) as one:

        async def num_answers(call: Call, **label_filter: Any) -> int:
            request = search_pb2.SearchRequest(texts=["a"], k=3, filter=label_filter)
            reply = await rpc.search(one, request, call)
            return sum(len(result.answers) for result in reply.results)

        assert await num_answers(Call(), allow=[]) == 3
        assert await num_answers(Call(), allow_none=True) == 0
        assert await num_answers(Call(), allow=["u1"]) == 1
        call = Call()
        assert await num_answers(call, allow=["u1"], allow_none=True) == 0
        assert call.problem == "filter has allow and allow_none, expected one of them"


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (float("nan"), rpc.NOT_FINITE),
        ({"lt": float("inf")}, rpc.NOT_FINITE),
        ({"gte": -(2.0**53)}, "filter.attributes has the number -9007199254740992.0, expected one"),
        ([1, 2**53 + 1], "filter.attributes has the number 9007199254740992.0, expected one below"),
        (2**53 - 1, "no label has an attribute 'year'; there are: none"),
    ],
)
async def test_numbers_of_a_filter_that_a_message_does_not_hold_are_refused(
    condition: Any, problem: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        label_filter = {"attributes": {"year": condition}}
        request = search_pb2.SearchRequest(texts=["a"], filter=label_filter)
        call = Call()
        await rpc.search(one, request, call)
        assert call.problem.startswith(problem)


async def test_voters_are_named_of_so_many_texts_times_keys(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, {"a": bundles["memory"]}) as one:

        async def problem(**fields: Any) -> str:
            fields = {"texts": ["a"] * 64, "explain": True, **fields}
            answer = await one.ask("/v1/search", fields)
            call = Call()
            await rpc.search(one, search_pb2.SearchRequest(**fields), call)
            assert call.problem == answer.json().get("detail", "")
            return call.problem

        assert await problem() == ""
        assert await problem(memory={"keys": 200}) == ""
        assert await problem(memory={"keys": 10_000}, explain=False) == ""
        assert await problem(memory={"keys": 201}) == (
            "64 texts times 201 keys of the memory is 12,864, expected at most 12,800 with"
            " `explain`; send fewer texts at once"
        )


async def test_labels_change_while_they_are_served(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    names = {"a": bundles["texts"]}
    async with served(tmp_path, names) as one:
        before = await one.search(["sort"], k=560)
        added = {"op": "add", "uid": "n1", "text": "sort sort join"}
        answer = await one.change(added, {"op": "delete", "uid": "u9"})
        assert answer.json() == {"model": "a", "label_log": 2}
        await one.reached(2)
        after = await one.search(["sort"], k=560)
        assert (before["label_log"], after["label_log"]) == (0, 2)
        scores = [
            {a["uid"]: a["score"] for a in body["results"][0]["answers"]}
            for body in (before, after)
        ]
        assert scores[0].keys() - scores[1].keys() == {"u9"}
        assert scores[1].keys() - scores[0].keys() == {"n1"}
        assert all(scores[1][uid] == scores[0][uid] for uid in scores[0].keys() & scores[1].keys())
        assert (await one.search(["sort sort join"], k=1))["results"][0]["answers"][0][
            "uid"
        ] == "n1"
        assert (await one.ask("/v1/labels/n1")).json()["text"] == "sort sort join"
        for operation, reason in [
            ({"op": "add", "uid": "n1", "text": "x"}, "there already"),
            ({"op": "delete", "uid": "u9"}, "not there"),
            ({"op": "update", "uid": "u9", "text": "x"}, "not there"),
            ({"op": "add", "uid": "n2", "text": " "}, "no text"),
        ]:
            refused = await one.change({"op": "delete", "uid": "u10"}, operation)
            assert refused.status_code == 409
            assert reason in refused.json()["detail"]
        assert (await one.ask("/v1/labels/u10")).status_code == 200, "all of a batch or nothing"
        assert (await one.change({"op": "update", "uid": "n1", "text": "median"})).json()[
            "label_log"
        ] == 3
        compact = await one.ask("/admin/v1/compact", {"out": str(tmp_path / "compact")}, ADMIN)
        assert (compact.status_code, compact.json()["label_log"]) == (200, 3)
    # the same state folder again: the log is replayed
    async with served(tmp_path, names) as one:
        answer = (await one.search(["median"], k=1))["results"][0]["answers"][0]
        assert (answer["uid"], (await one.ask("/v1/labels/u9")).status_code) == ("n1", 404)
        everything = await one.search(ASKED, k=560)
        await one.change({"op": "add", "uid": "late", "text": "trace trace"})
        swapped = await one.ask("/admin/v1/swap", {"bundle": str(tmp_path / "compact")}, ADMIN)
        assert (swapped.status_code, swapped.json()["recall"]) == (200, 1.0)
        assert (await one.search(["trace trace"], k=1))["results"][0]["answers"][0]["uid"] == "late"
        again = await one.search(ASKED, k=560, filter={"deny": ["late"]})
        assert again["version"] != everything["version"]
        assert again["results"] == everything["results"]
    # what was swapped in stays
    async with served(tmp_path, names) as one:
        assert (await one.search(["trace trace"], k=1))["version"] == again["version"]
        assert (await one.ask("/v1/labels/late")).status_code == 200


@pytest.mark.parametrize("uid", ["a\nb", "a\n", "a/b", "\r\u2028"])
async def test_a_label_is_found_whatever_its_uid_is_made_of(
    uid: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    async with served(tmp_path, {"m": bundles["texts"]}) as one:
        changed = await one.change({"op": "add", "uid": uid, "text": "sort sort join"})
        await one.reached(changed.json()["label_log"])
        answer = await one.ask(f"/v1/labels/{quote(uid, safe='')}")
        assert answer.json()["uid"] == uid


async def test_swaps_that_are_refused(
    bundles: dict[str, Path],
    tmp_path: Path,
) -> None:
    damaged = {
        name: shutil.copytree(bundles["texts"], tmp_path / name) for name in ("flipped", "missing")
    }
    vectors = damaged["flipped"] / "vectors" / "00000.safetensors"
    data = bytearray(vectors.read_bytes())
    data[-7] ^= 1
    vectors.write_bytes(data)
    (damaged["missing"] / "vectors" / "00000.safetensors").unlink()
    write_bundle_of(tmp_path / "wide", "texts", dim=2 * DIM)
    worse = tmp_path / "worse"
    remove_labels(bundles["texts"], [f"u{i}" for i in range(300)], worse)

    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        before = await one.search(ASKED, k=9)
        for name, reason in [
            ("flipped", "was altered"),
            ("missing", "is missing"),
            ("wide", "width 32, expected 16"),
            ("worse", "of the best labels"),
            ("nowhere", "does not exist"),
        ]:
            answer = await one.ask(
                "/admin/v1/swap", {"bundle": str(tmp_path / name), "recall_floor": 0.9}, ADMIN
            )
            assert (answer.status_code, answer.json()["type"]) == (409, "urn:xmcray:refused")
            assert reason in answer.json()["detail"]
            assert (await one.search(ASKED, k=9))["results"] == before["results"]
        answer = await one.ask("/admin/v1/swap", {"bundle": str(worse), "recall_floor": 0.1}, ADMIN)
        assert answer.status_code == 200
        assert (await one.search(["a"]))["version"] == answer.json()["version"] != before["version"]


async def test_a_bundle_that_does_not_fit_is_no_swap(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise MemoryError

    copy = shutil.copytree(bundles["texts"], tmp_path / "copy")
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        before = await one.search(ASKED)
        with monkeypatch.context() as patch:
            patch.setattr(Retriever, "load", load)
            answer = await one.ask("/admin/v1/swap", {"bundle": str(copy)}, ADMIN)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:xmcray:refused")
        assert "there is no memory" in answer.json()["detail"]
        assert (await one.search(ASKED))["results"] == before["results"]


async def test_pages_and_description(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        page = await one.ask("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert (await one.ask("/page/..%2f..%2fschema.py")).status_code == 404
        described = (await one.ask("/openapi.json")).json()
        assert {"/v1/search", "/v1/encode", "/v1/models", "/admin/v1/swap"} <= described[
            "paths"
        ].keys()
        await one.search(["a", "b"])
        text = (await one.ask("/metrics")).text
        assert 'xmcray_texts_total{model="a",replica="local"} 2.0' in text
        assert 'xmcray_requests_total{replica="local",route="/v1/search",status="200"} 1.0' in text
        assert json.dumps(TOKEN) not in text
