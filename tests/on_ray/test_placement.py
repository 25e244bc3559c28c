"""A run over several nodes: what goes where, a node lost, another one joined, and one copy of the corpus on each."""

from __future__ import annotations

import collections
import functools
import http.server
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from corpora import planted_corpus
from local_nodes import LocalNodes, environment, slow_until, standing
from loops import trained_on_rank
from processes import When, last_step, train_workers
from ranks import on_ranks

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.training.launch import train
from xmcray.training.preemption import StopFlag, Terminated
from xmcray.training.records import read_records
from xmcray.training.run_config import RunConfig

BATCH_SIZE = 256
SETTINGS = [
    "cluster.workers=2",
    "cluster.min_workers=1",
    "cluster.resize_every_s=0.5",
    "cluster.cpus_per_worker=2",
    "cluster.threads_per_process=1",
    "cluster.device=cpu",
    "encoder.dim=24",
    f"optim.batch_size={BATCH_SIZE}",
    # In float32, rounding changes a cluster after some hundred steps, and with it a batch.
    "optim.precision=float64",
    "optim.epochs=400",
    "optim.warmup_steps=10",
    "optim.lr=0.01",
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "negatives.uniform=50",
    "negatives.hard=5",
    "negatives.cluster_size=4",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.wait_s=120",
    "log.every=1",
    "log.checkpoint_every=7",
    "log.validate_every=0",
]
Curve = dict[int, float]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, collections.Counter[str]]]:
    """A folder over HTTP on loopback, and how often each file was asked for."""
    asked: collections.Counter[str] = collections.Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path.lstrip("/")] += 1
            super().do_GET()

        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def curve(run: Path) -> Curve:
    return {
        record["step"]: record["loss"]
        for record in read_records(run / "metrics.jsonl")
        if "loss" in record
    }


def two_one_two(out: Path, corpus: str) -> None:
    """Trains with 2 workers, 1 when a node is lost, 2 when another one has joined; prints what was where."""
    nodes = LocalNodes(out.parent / "caches")
    nodes.add("trainer1", cpus=2, gpus=1)
    nodes.add("trainer2", cpus=2, gpus=1)
    nodes.add("index", cpus=1, resources={"index": 2})
    first = {}
    step_when_back: list[int] = []
    over = threading.Event()

    def lose() -> None:
        first.update(trainers=nodes.carried("RayTrainWorker"), index=nodes.carried("IndexShard"))
        nodes.lose("trainer2")

    def began_again() -> bool:
        """A lost node's processes may go on for a second, so the worker that stayed has to be a new one."""
        return lost.done and nodes.carried("RayTrainWorker").count("trainer1") >= 2

    def is_back() -> bool:
        return "trainer3" in nodes.carried("RayTrainWorker")

    def join() -> None:
        left = train_workers()
        with standing(left):
            nodes.add("trainer3", cpus=2, gpus=1)
        # Slowed down, so that there are fewer steps to compare.
        slow_until(is_back, left, over)
        step_when_back.append(last_step(out))

    def went_on() -> bool:
        return joined.done and last_step(out) >= step_when_back[0] + 30

    lost = When(lambda: last_step(out) >= 30, lose)
    joined = When(lambda: began_again() and last_step(out) >= 60, join)
    stop = When(went_on, StopFlag(out).hoist)
    with suppress(Terminated):
        train(corpus, out, RunConfig.resolve("astra", {}, SETTINGS))
    over.set()
    for watcher in (lost, joined, stop):
        watcher.close()
    kinds = ("RayTrainWorker", "IndexShard", "IndexCoordinator")
    carried = {kind: nodes.carried(kind) for kind in kinds}
    nodes.close()
    print(json.dumps({"first": first, "all": carried}))


@pytest.mark.soak
def test_nodes_lost_and_joined(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path / "data", num_queries=1500, num_labels=150).path
    out = tmp_path / "run"
    with served(corpus) as (url, asked), environment() as variables:
        command = [sys.executable, __file__, str(out), url]
        variables["XMCRAY_CACHE"] = str(tmp_path / "caches" / "driver")
        done = subprocess.run(
            # 85 s on an idle machine; the limit only ends a run that hangs.
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    where = json.loads(done.stdout.splitlines()[-1])
    assert where["first"]["trainers"] == ["trainer1", "trainer2"]
    assert set(where["all"]["IndexShard"]) == {"index"}
    assert where["all"]["IndexCoordinator"] == ["index"]
    assert "index" not in where["all"]["RayTrainWorker"]
    assert where["all"]["RayTrainWorker"].count("trainer1") >= 3, (
        "2, 1 and 2 workers are three groups"
    )
    # Every node that opened the corpus, and the driver, copied each file once, whatever ran there.
    nodes = ("driver", "index", "trainer1", "trainer2", "trainer3")
    assert {path.name for path in (tmp_path / "caches").iterdir()} == set(nodes)
    assert {number for name, number in asked.items() if name != "manifest.json"} == {len(nodes)}
    recorded = [record["step"] for record in read_records(out / "metrics.jsonl")]
    assert recorded == list(range(1, len(recorded) + 1)), "a step was lost or recorded twice"
    resized = curve(out)
    data = TrainingData(Corpus.open(corpus), RunConfig.resolve("astra", {}).data)
    steps_per_epoch = math.ceil(len(data.query_ids) / BATCH_SIZE)
    num_epochs = math.ceil(recorded[-1] / steps_per_epoch)
    settings = [*SETTINGS, f"optim.stop_epoch={num_epochs}"]
    (tmp_path / "undisturbed").mkdir()
    on_ranks(trained_on_rank, 2, corpus, tmp_path / "undisturbed", settings)
    expected = curve(tmp_path / "undisturbed")
    assert resized == pytest.approx({step: expected[step] for step in resized}, rel=1e-9)


if __name__ == "__main__":
    two_one_two(Path(sys.argv[1]), sys.argv[2])
