"""A method of another package goes through every verb: one file and one preset, and no change here."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from planted import write_planted
from served import served
from third_party_package import install

from xmcray.retrieval.retriever import Retriever

XMCRAY = str(Path(sys.executable).with_name("xmcray"))
TRAIN = ["--config", "preset:seventh/planted", "--set", "cluster.threads_per_process=1"]
SPACE = {"method.temperature": {"log_uniform": [0.02, 0.2]}}


class Installation:
    """The command line of an environment in which the package is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = install(folder / "site")

    def run(self, *arguments: str) -> str:
        """Standard output of `xmcray ARGUMENTS`, which must succeed."""
        path = [str(self.site), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [XMCRAY, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    def train(self, run: str) -> Path:
        """Trains the method in one process and returns the folder of the run."""
        data = ["--data", "corpus", "--out", run, "--workers", "0"]
        self.run("train", "seventh", *data, *TRAIN, "--no-evaluate")
        return self.folder / run


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("seventh")
    write_planted(folder / "raw", num_queries=300, num_labels=40)
    made = Installation(folder)
    made.run("prepare", "raw", "--out", "corpus")
    return made


def test_help_names_it(installation: Installation) -> None:
    assert "astra, dexml, prime, rae, renee, unidec, seventh" in " ".join(
        installation.run("train", "--help").split()
    )


def test_it_trains_here_answers_and_is_served(installation: Installation) -> None:
    run = installation.train("alone")
    assert list(run.glob("checkpoints/step-*/state-*.safetensors"))
    metrics = json.loads(installation.run("evaluate", "alone", "--data", "corpus", "--json"))
    assert metrics["P@1"] > 0.3  # by chance 0.025
    installation.run("export", "alone", "--out", "bundle")
    # A bundle needs nothing of the package that trained it: what is served is in its files.
    text = "w0x0 w0x1 w0x2"
    bundle = installation.folder / "bundle"
    assert Retriever.load(bundle).search([text], 1)[0][0].uid == "label0"

    async def serve() -> None:
        async with served(installation.folder, {"seventh": bundle}) as application:
            body = await application.search([text], k=1, fields=["uid"])
            assert body["results"][0]["answers"][0]["uid"] == "label0"

    asyncio.run(serve())


def test_it_is_planned(installation: Installation) -> None:
    """The plan traces the method's own step, so it needs no code of its own."""
    device = ["--workers", "2", "--device", "a100-80gb"]  # its rates need no measurement
    plan = json.loads(
        installation.run("plan", "seventh", "--data", "corpus", *device, *TRAIN, "--json")
    )
    assert (plan["method"], plan["workers"]) == ("seventh", 2)
    assert sum(plan["step_s"].values()) > 0
    assert sum(plan["host_bytes"].values()) > 0


def test_it_is_tuned_on_two_workers(installation: Installation) -> None:
    """The processes of the trial, of its workers and of its index all find the method."""
    (installation.folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    sweep = ["--data", "corpus", "--space", "space.yaml", "--out", "sweep", "--trials", "1"]
    workers = ["--workers", "2", "--set", "cluster.cpus_per_worker=0.5"]
    options = [*sweep, *workers, *TRAIN, "--metric", "P@1", "--json"]
    (trial,) = json.loads(installation.run("tune", "seventh", *options))["trials"]
    assert trial["state"] == "finished"
    assert "method.temperature" in trial["values"]
    assert trial["score"] > 0.3  # by chance 0.025
