"""What stays as it is over the life of a server: its answers, its memory, files and threads."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bundles import TEXTS, WORDS, write_bundle_of
from served import ADMIN, Served, served

from xmcray.serving.snapshot import Snapshot

QUERIES = [f"{first} {second}" for first in WORDS[:10] for second in WORDS[10:]]
ROUND = 24  # searches and changes between two counts
NUM_THREADS = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # An approximate index of several shards, which compaction and restarts build anew.
    return write_bundle_of(tmp_path_factory.mktemp("b") / "b", "textsIVF", shard_rows=300)


async def recall(one: Served) -> float:
    """Share of the ten best labels that the approximate index finds."""
    approximate = await answers(one)
    snapshot = one.models.current(None)
    retriever = snapshot.retriever
    exact = retriever.top_labels(retriever.tokenizer.encode(QUERIES), 10, exact=True)
    num_found = 0
    for text, label_ids in zip(QUERIES, exact.ids.tolist(), strict=True):
        found_ids = {snapshot.label_id(uid) for uid in approximate[text]}
        num_found += len(found_ids & set(label_ids))
    return num_found / (10 * len(QUERIES))


async def answers(one: Served) -> dict[str, set[str]]:
    results = {}
    for start in range(0, len(QUERIES), 40):
        texts = QUERIES[start : start + 40]
        body = await one.search(texts, k=10)
        for text, result in zip(texts, body["results"], strict=True):
            results[text] = {answer["uid"] for answer in result["answers"]}
    return results


def changes(number: int, draw: random.Random) -> list[dict[str, object]]:
    return [
        {"op": "add", "uid": f"n{number}-{i}", "text": " ".join(draw.sample(WORDS, 3))}
        for i in range(5)
    ]


async def test_recall_after_a_restart_and_a_compaction(bundle: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    async with served(tmp_path, {"a": bundle}) as one:
        for number in range(12):
            await one.change(*changes(number, draw))
        deleted = [{"op": "delete", "uid": f"u{uid}"} for uid in range(0, len(TEXTS), 19)]
        last = (await one.change(*deleted)).json()["label_log"]
        await one.reached(last)
        before = await recall(one)
        same = await answers(one)
    async with served(tmp_path, {"a": bundle}) as one:
        await one.reached(last)
        assert await answers(one) == same
        out = {"out": str(tmp_path / "compacted")}
        assert (await one.ask("/admin/v1/compact", out, ADMIN)).status_code == 200
        swap = {"bundle": out["out"], "recall_floor": 0.5}
        assert (await one.ask("/admin/v1/swap", swap, ADMIN)).status_code == 200
        assert await recall(one) >= before - 0.001


async def test_a_compaction_links_the_shards_that_did_not_change(
    bundle: Path, tmp_path: Path
) -> None:
    """Whether other labels joined before the bundle was loaded, or while it is served."""
    source = bundle
    draw = random.Random(0)
    for number in range(3):
        out = tmp_path / f"compacted{number}"
        async with served(tmp_path / "home", {"a": source}, bundle_roots=(str(tmp_path),)) as one:
            last = (await one.change(*changes(number, draw))).json()["label_log"]
            await one.reached(last)
            before = await answers(one)
            answer = await one.ask("/admin/v1/compact", {"out": str(out)}, ADMIN)
            assert answer.status_code == 200, answer.text
            swap = {"bundle": str(out), "recall_floor": 0}
            assert (await one.ask("/admin/v1/swap", swap, ADMIN)).status_code == 200
            assert await answers(one) == before
        names = [path.name for path in sorted((out / "vectors").iterdir())]
        is_linked = [
            (source / "vectors" / name).exists()
            and (source / "vectors" / name).samefile(out / "vectors" / name)
            for name in names
        ]
        # Labels that join have a shard of their own, the last one.
        assert len(names) > 2
        assert is_linked == [True] * (len(names) - 1) + [False]
        source = out


def test_files_threads_and_memory_stay_flat(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round searches, changes labels back and forth and swaps; later rounds keep nothing."""

    async def play(one: Served, draw: random.Random) -> None:
        for number in range(ROUND):
            await one.search([draw.choice(QUERIES)], k=10)
            if number % 4 == 0:
                added = changes(0, draw)
                removed = [{"op": "delete", "uid": change["uid"]} for change in added]
                assert (await one.change(*added, *removed)).status_code == 200
        for folder in ("other", "b"):
            swap = {"bundle": str(tmp_path / folder), "recall_floor": 0}
            assert (await one.ask("/admin/v1/swap", swap, ADMIN)).status_code == 200

    async def main() -> list[tuple[int, int, float]]:
        draw = random.Random(0)
        counts = []
        await start_threads()
        async with served(tmp_path, {"a": tmp_path / "b"}, keep_s=0.0) as one:
            for _ in range(5):
                await play(one, draw)
                gc.collect()
                counts.append((await num_lasting_files(), threading.active_count(), resident_mb()))
        return counts

    loaders = set[str]()
    load = Snapshot.load

    def noted(*arguments: Any, **options: Any) -> Snapshot:
        loaders.add(f"{threading.current_thread().name}, {threading.get_ident()}")
        return load(*arguments, **options)

    monkeypatch.setattr(Snapshot, "load", noted)
    for name in ("b", "other"):
        (tmp_path / name).symlink_to(bundle)
    counts = asyncio.run(main())
    # The first rounds fill pools and caches.
    warm = counts[2]
    last = counts[-1]
    assert last[0] <= warm[0], f"open files: {counts}"
    assert last[1] <= warm[1], f"threads: {counts}"
    assert last[2] <= warm[2] + 8, f"memory in MB: {counts}"
    # One of the coordinator and one of its replica: each thread that loads keeps some memory.
    assert len(loaders) == 2, loaders


async def start_threads() -> None:
    """Starts all threads of the loop's pool, of which each else starts when calls first overlap."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
    all_running = threading.Barrier(NUM_THREADS)
    await asyncio.gather(*(asyncio.to_thread(all_running.wait) for _ in range(NUM_THREADS)))


async def num_lasting_files() -> int:
    """Files that stay open: after a swap a thread looks at this machine's copies for a moment."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(0.01)
    return min(counts)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
