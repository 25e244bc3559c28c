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
from corpora import planted_corpus
from served import served
from third_party_package import install

from xmcray.retrieval.retriever import Retriever

XMCRAY = str(Path(sys.executable).with_name("xmcray"))
# Verbs that start no cluster share one process, because importing torch takes longer than they do.
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from xmcray import cli

outputs = []
for arguments in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if code := cli.main(arguments):
            sys.exit(code)
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""
DATA = ["--data", "corpus"]
TRAIN = ["--config", "preset:seventh/planted", "--set", "cluster.threads_per_process=1"]
SPACE = {"method.temperature": {"log_uniform": [0.02, 0.2]}}


class Installation:
    """The command line of an environment in which the package is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = install(folder / "site")

    def run(self, *command: str) -> str:
        """Standard output of a command, which must succeed."""
        path = [str(self.site), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    def run_all(self, *verbs: list[str]) -> list[str]:
        """Standard output of each verb, in one process."""
        output = self.run(sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(verbs))
        return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("seventh")
    planted_corpus(folder, num_queries=300, num_labels=40)
    return Installation(folder)


def test_help_names_it(installation: Installation) -> None:
    shown = installation.run(XMCRAY, "train", "--help")
    assert "astra, dexml, prime, rae, renee, unidec, seventh" in " ".join(shown.split())


def test_it_trains_here_is_planned_answers_and_is_served(installation: Installation) -> None:
    device = ["--workers", "2", "--device", "a100-80gb"]  # its rates need no measurement
    _, evaluated, _, planned = installation.run_all(
        ["train", "seventh", *DATA, "--out", "run", "--workers", "0", *TRAIN, "--no-evaluate"],
        ["evaluate", "run", *DATA, "--json"],
        ["export", "run", "--out", "bundle"],
        ["plan", "seventh", *DATA, *device, *TRAIN, "--json"],
    )
    assert list(installation.folder.glob("run/checkpoints/step-*/state-*.safetensors"))
    assert json.loads(evaluated)["P@1"] > 0.3  # by chance 0.025
    # The plan traces the method's own step, so it needs no code of its own.
    plan = json.loads(planned)
    assert (plan["method"], plan["workers"]) == ("seventh", 2)
    assert sum(plan["step_s"].values()) > 0
    assert sum(plan["host_bytes"].values()) > 0
    # A bundle needs nothing of the package that trained it: what is served is in its files.
    text = "w0x0 w0x1 w0x2"
    bundle = installation.folder / "bundle"
    assert Retriever.load(bundle).search([text], 1)[0][0].uid == "label0"

    async def serve() -> None:
        async with served(installation.folder, {"seventh": bundle}) as application:
            body = await application.search([text], k=1, fields=["uid"])
            assert body["results"][0]["answers"][0]["uid"] == "label0"

    asyncio.run(serve())


@pytest.mark.soak
def test_it_is_tuned_on_a_worker_of_ray(installation: Installation) -> None:
    """The processes of the trial, of its worker and of its index all find the method."""
    (installation.folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    sweep = [*DATA, "--space", "space.yaml", "--out", "sweep", "--trials", "1"]
    workers = ["--workers", "1", "--set", "cluster.cpus_per_worker=0.5"]
    options = [*sweep, *workers, *TRAIN, "--metric", "P@1", "--json"]
    (trial,) = json.loads(installation.run(XMCRAY, "tune", "seventh", *options))["trials"]
    assert trial["state"] == "finished"
    assert "method.temperature" in trial["values"]
    assert trial["score"] > 0.3  # by chance 0.025
