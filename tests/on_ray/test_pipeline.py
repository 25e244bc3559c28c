"""`prepare` through a real cluster: contents, equal bytes, malformed rows, a cluster without a free CPU."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from xmcray.data.corpus import Corpus
from xmcray.data.formats import detect
from xmcray.data.pipeline import prepare
from xmcray.data.stream import READ_CPUS, mapped, results, stream_of, watched
from xmcray.errors import ConfigError, DataError, ResourceError, StorageError
from xmcray.ray_adapter import cluster

pytestmark = pytest.mark.usefixtures("cluster")
LABELS = [{"uid": f"l{i}", "text": f"label number {i % 7}"} for i in range(23)]
TRAIN = [
    {
        "uid": f"q{i}",
        "text": f"query {i % 5} about number {i % 11}",
        "labels": sorted({i % 20, (3 * i) % 20}),
    }
    for i in range(70)
]
TEST = [{"uid": f"t{i}", "text": f"test {i}", "labels": [i, 22]} for i in range(5)]
SMALL: dict[str, Any] = {"name": "small", "shard_rows": 16, "array_rows": 32}


def write(folder: Path, **files: list[Any]) -> Path:
    folder.mkdir()
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("raw") / "d", labels=LABELS, train=TRAIN, test=TEST)
    (folder / "filter_labels_train.txt").write_text("3 9\n3 3\n69 19\n69 9\n")
    return folder


@pytest.fixture(scope="module")
def corpus(raw: Path, tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Corpus:
    return prepare(
        detect(str(raw), None), tmp_path_factory.mktemp("out") / "c", parallelism=1, **SMALL
    )


def test_arrays_equal_the_raw_rows(corpus: Corpus) -> None:
    rows = np.array([69, 0, 17, 16, 15, 3, 17])
    train = corpus.split("train")
    assert len(train) == 70
    assert train.texts(rows) == [TRAIN[i]["text"] for i in rows]
    assert train.uids(rows) == [TRAIN[i]["uid"] for i in rows]
    filtered = {3: {9, 3}, 69: {9}}  # 69 does not carry 19
    expected = [[x for x in TRAIN[i]["labels"] if x not in filtered.get(i, ())] for i in rows]
    assert [ids.tolist() for ids in map(train.positives(rows).__getitem__, range(7))] == expected
    filters = train.filters(rows)
    assert [filters[i].tolist() for i in range(7)] == [[9, 19], [], [], [], [], [3, 9], []]
    tokens, again = train.tokens(rows), corpus.tokenizer().encode(train.texts(rows))
    assert tokens.values.tolist() == again.values.tolist()
    assert tokens.offsets.tolist() == again.offsets.tolist()
    assert corpus.label_uids(np.arange(23)) == [label["uid"] for label in LABELS]
    assert len(corpus.label_tokens(np.array([22, 0]))) == 2


def test_counts_order_and_card(corpus: Corpus) -> None:
    everything = corpus.split("train").positives(np.arange(70)).values
    assert corpus.train_counts.tolist() == np.bincount(everything, minlength=23).tolist()
    assert sorted(corpus.label_order.tolist()) == list(range(23))
    assert corpus.label_order.tolist() != list(range(23))
    assert corpus.label_rank[corpus.label_order].tolist() == list(range(23))
    card = corpus.card
    assert (card.num_train, card.num_test, card.num_labels) == (70, 5, 23)
    assert card.odd == {
        "labels: never seen": 2,
        "labels: seen only in test": 1,
        "labels: text of another label": 16,
        "train: all positives filtered": 1,
        "train: text of an earlier training query": 15,
    }
    assert sum(card.frequency.values()) == 23
    assert card.frequency["0"] == 3


def test_training_queries_with_the_text_of_a_test_query_are_left_out(tmp_path: Path) -> None:
    leak = {"uid": "leak", "text": "Query 3  about number 3", "labels": [0]}
    raw = write(tmp_path / "raw", labels=LABELS, train=TRAIN, test=[*TEST, leak])
    corpus = prepare(detect(str(raw), None), tmp_path / "c", on_leak="drop", **SMALL)
    assert corpus.card.rejected == {"train": 2}
    texts = corpus.split("train").texts(np.arange(corpus.card.num_train))
    assert len(texts) == 68
    assert "query 3 about number 3" not in texts


@pytest.mark.parametrize("parallelism", [2, 4])
def test_same_bytes_whatever_the_parallelism(
    corpus: Corpus, raw: Path, tmp_path: Path, parallelism: int
) -> None:
    other = prepare(detect(str(raw), None), tmp_path / "c", parallelism=parallelism, **SMALL)
    names = sorted(
        path.relative_to(corpus.path) for path in corpus.path.rglob("*") if path.is_file()
    )
    assert len(names) > 30
    for name in names:
        assert (other.path / name).read_bytes() == (corpus.path / name).read_bytes(), name
    assert other.sha256 == corpus.sha256


def test_a_changed_byte_is_refused(corpus: Corpus, raw: Path, tmp_path: Path) -> None:
    path = prepare(detect(str(raw), None), tmp_path / "c", **SMALL).path
    shard = path / "train" / "00001.tokens.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StorageError, match=r"train/00001\.tokens\.npy was altered") as caught:
        Corpus.open(path)
    assert "\n" not in str(caught.value)
    assert (
        len(Corpus.open(path, verify=False).split("train")) == 70
    )  # workers trust the driver's check


def test_labels_are_removed_from_a_first_corpus_too(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", labels=LABELS, train=TRAIN)
    removed = raw / "removed_labels.jsonl"
    removed.write_text("".join(json.dumps(label) + "\n" for label in LABELS))
    with pytest.raises(DataError, match="names all labels, expected some to be left"):
        prepare(detect(raw), tmp_path / "c", **SMALL)
    removed.write_text('{"uid": "l3"}\n{"uid": "unknown"}\n')
    corpus = prepare(detect(raw), tmp_path / "c", **SMALL)
    assert corpus.removed_labels.tolist() == [3]


def test_malformed_rows_stop_or_are_recorded(tmp_path: Path) -> None:
    bad = {"uid": "far", "text": "x", "labels": [23]}
    odd = {"uid": "odd", "text": " ", "labels": []}
    rows = [*TRAIN[:20], bad, *TRAIN[20:40], "{broken", odd]
    raw = write(tmp_path / "d", labels=[*LABELS[:5], "{", *LABELS[6:]], train=rows)
    (raw / "filter_labels_train.txt").write_text("20 1\n21 0\n")  # the rejected row, and TRAIN[20]
    source = detect(str(raw), None)
    with pytest.raises(DataError, match=r"labels\.jsonl:6: .*--on-error skip"):
        prepare(source, tmp_path / "c", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]  # nothing half-written
    corpus = prepare(source, tmp_path / "c", on_error="skip", **SMALL)
    rejected = [
        json.loads(line) for line in (corpus.path / "rejected.jsonl").read_text().splitlines()
    ]
    assert [(r["split"], r["file"], r["line"]) for r in rejected] == [
        ("labels", "labels.jsonl", 6),
        ("train", "train.jsonl", 21),
        ("train", "train.jsonl", 42),
    ]
    assert corpus.card.rejected == {"labels": 1, "train": 2}
    assert (
        corpus.card.num_labels == 23
    )  # ids are rows of the file: the rejected label keeps its place
    assert corpus.label_uids(np.array([4, 6])) == ["l4", "l6"]
    assert corpus.label_texts(np.array([5])) == [""]
    train = corpus.split("train")
    assert train.uids(np.array([19, 20, 39, 40])) == ["q19", "q20", "q39", "odd"]
    assert train.filters(np.array([19, 20]))[1].tolist() == [
        0
    ]  # TRAIN[20] is row 21 of the file, row 20 here
    assert train.positives(np.array([20])).values.tolist() == []
    assert corpus.card.odd["train: no text"] == corpus.card.odd["train: no positives"] == 1


def test_no_free_cpu_is_said_and_nothing_is_left(raw: Path, tmp_path: Path) -> None:
    @ray.remote(num_cpus=4)
    class Greedy:
        def ready(self) -> bool:
            return True

    greedy = Greedy.remote()
    assert ray.get(greedy.ready.remote())
    try:
        with pytest.raises(
            ResourceError, match=r"no row for 2 s.*0 of 4 CPUs free, 1 x actor .*Greedy; end"
        ) as caught:
            prepare(detect(str(raw), None), tmp_path / "c", stall_s=2, **SMALL)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    finally:
        ray.kill(greedy)


def test_a_slow_task_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = tmp_path / "looks"
    os.mkfifo(looks)
    free_cpus = cluster.free_cpus

    def look() -> float:
        """What the watchdog asks when the time is over; lets the task end."""
        # If the task is not there yet, the next look does it.
        with contextlib.suppress(OSError):
            os.close(os.open(looks, os.O_WRONLY | os.O_NONBLOCK))
        return free_cpus()

    def slow(item: int) -> Iterator[int]:
        looks.read_bytes()
        yield item

    monkeypatch.setattr(cluster, "free_cpus", look)
    with watched(stall_s=0.2) as beat:
        assert list(results(mapped(stream_of([7]), slow, READ_CPUS), beat)) == [7]


def test_workers_have_the_priority_of_the_command() -> None:
    niceness = ray.remote(lambda: os.getpriority(os.PRIO_PROCESS, 0))
    assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)


def test_the_cluster_is_on_loopback() -> None:
    (node,) = ray.nodes()
    assert node["NodeManagerAddress"] == "127.0.0.1"
    listening = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    port = f"{node['NodeManagerPort']:04X}"
    hosts = [
        fields[1].split(":")[0]
        for fields in listening
        if fields[1].endswith(f":{port}") and fields[3] == "0A"
    ]
    assert hosts
    assert all(host.strip("0") for host in hosts)  # all zeros means every interface


def test_settings_are_checked_before_anything_is_read(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_error"):
        prepare(detect(str(raw), None), tmp_path / "c", name="x", on_error="ignore")
