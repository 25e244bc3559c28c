"""Answers over HTTP are those of the retriever, for each kind of bundle and with filters."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import TEXTS, write_bundle_of, write_fused, write_memory, write_transformer
from served import ASKED, Call, Served, served

from xmcray.errors import StorageError
from xmcray.retrieval.bundle import read_attributes
from xmcray.retrieval.labels import remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.serving import rpc, search_pb2
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.schema import SearchRequest
from xmcray.serving.search_batch import PendingSearch, find_hits
from xmcray.serving.snapshot import Snapshot, SnapshotReference

KINDS = ("texts", "rowsIVF", "both", "prototypes")
EXPLAINED = ("memory", "fused")


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


async def test_a_long_text_is_cut_and_says_so(bundles: dict[str, Path], tmp_path: Path) -> None:
    async with served(tmp_path, {"a": bundles["texts"]}) as one:
        body = await one.search(["matrix " * 17, "matrix " * 16, "x"], k=1)
        assert [result["truncated"] for result in body["results"]] == [True, False, False]


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
