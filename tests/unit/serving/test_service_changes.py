"""Labels and bundles that change while they are served, and changes that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from bundles import DIM, write_bundle_of
from served import ADMIN, ASKED, served

from xmcray.retrieval.labels import remove_labels
from xmcray.retrieval.retriever import Retriever


async def test_labels_change_while_they_are_served(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    names = {"a": bundles["texts"]}
    async with served(tmp_path, names) as one:
        before = await one.search(["sort"], k=560)
        # Blanks at the ends are no part of a text, as in `prepare`.
        added = {"op": "add", "uid": "n1", "text": " sort sort join\n"}
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
