"""Sweeps on a cluster: killed and restored, stopped early, and with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from corpora import planted_corpus
from loops import final_weights
from processes import When, descendants, last_step, wait_until
from ray.util.placement_group import placement_group_table

from xmcray import cli
from xmcray.training.launch import train
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.tuning.sweep import Sweep

MAIN = "import sys; from xmcray.cli import main; sys.exit(main(sys.argv[1:]))"
SPACE = {
    # What no machine has is left out.
    "encoder.init_from": {"choice": ["", "no/such"]},
    "optim.lr": {"log_uniform": [1e-3, 3e-2]},
    "method.classifier.lr": {"log_uniform": [0.01, 0.3]},
}
SETTINGS = [
    "cluster.cpus_per_worker=1",
    "cluster.device=cpu",
    "encoder.dim=24",
    "optim.batch_size=64",
    "optim.warmup_steps=10",
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "negatives.uniform=50",
    "negatives.hard=5",
    "negatives.start_epoch=2",
    "negatives.refresh_every=2",
    "log.every=1",
    "log.checkpoint_every=7",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_corpus(tmp_path_factory.mktemp("tuning"), num_queries=1500, num_labels=150).path


ONE_BY_ONE = ["--set", "cluster.cpus_per_worker=4", "--set", "cluster.threads_per_process=1"]


def command(corpus: Path, folder: Path, *options: str, epochs: int) -> list[str]:
    space = folder / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    words = [
        "tune",
        "astra",
        "--data",
        str(corpus),
        "--space",
        str(space),
        "--out",
        str(folder / "sweep"),
    ]
    for setting in [*SETTINGS, f"optim.epochs={epochs}"]:
        words += ["--set", setting]
    return [*words, "--metric", "P@1", *options]


@pytest.mark.usefixtures("cluster")
def test_sweep_killed_and_restored(
    corpus: Path,
    tmp_path: Path,
    other_driver: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The driver is killed when a trial has ended and a second is on its way; the same command ends
    the sweep.
    """
    options = ["--trials", "2", "--scheduler", "none", "--keep", "2", *ONE_BY_ONE]
    words = command(corpus, tmp_path, *options, epochs=6)
    sweep = tmp_path / "sweep"

    def ended() -> dict[str, str]:
        entries = {path.name: path.read_text() for path in (sweep / "ledger").glob("[0-9]*.json")}
        return {name: text for name, text in entries.items() if '"state"' in text}

    def under_way() -> bool:
        runs = [
            path
            for path in (sweep / "trials").glob("[0-9]*")
            if not (path / "result.json").exists()
        ]
        return len(ended()) >= 1 and any(last_step(run) >= 20 for run in runs)

    def strike() -> None:
        # Alone, a trial's process would go on for a while, even to its end.
        for pid in [*trial_processes(), driver.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    driver = subprocess.Popen([sys.executable, "-c", MAIN, *words], env=other_driver)
    watcher = When(under_way, strike)
    assert driver.wait() == -signal.SIGKILL
    watcher.close()
    before = ended()
    assert len(before) == 1
    assert cli.main(words) == 0
    after = ended()
    assert len(after) == 2
    assert {name: after[name] for name in before} == before, (
        "a trial that had ended was touched again"
    )
    tuned = Sweep.open(sweep)
    assert [trial.state for trial in tuned.trials()] == ["finished"] * 2
    for trial in tuned.trials():
        result = Run.open(tuned.run_path(trial.number)).result()
        assert result is not None
        assert result["steps"] == trial.steps
        steps = [point[0] for point in trial.curve]
        assert steps == [1, 2, 3, 4, 5, 6], "each epoch was reported once"
    resumed = [
        t.number
        for t in tuned.trials()
        if Run.open(tuned.run_path(t.number)).result()["steps_here"] < t.steps
    ]  # type: ignore[index]
    assert resumed, "the second trial began anew instead of from its checkpoint"
    number = resumed[0]
    config = tuned.config.resolve(
        tuned.trial(number).values, {"workers": 0, "device": "cpu", "threads_per_process": 1}
    )
    train(corpus, tmp_path / "undisturbed", config)
    assert final_weights(tuned.run_path(number)) == final_weights(tmp_path / "undisturbed")
    assert not (sweep / "ray").exists()
    best = RunConfig.resolve("astra", yaml.safe_load((sweep / "best.yaml").read_text()))
    ranked = json.loads((sweep / "results.json").read_text())["trials"]
    assert best.optim.lr == ranked[0]["values"]["optim.lr"]
    again = [
        "train",
        "astra",
        "--data",
        str(corpus),
        "--config",
        str(sweep / "best.yaml"),
        "--out",
        str(tmp_path / "r"),
    ]
    assert cli.main([*again, "--workers", "0", "--set", "optim.stop_epoch=1", "--no-evaluate"]) == 0
    capfd.readouterr()


@pytest.mark.usefixtures("cluster")
def test_asha_stops_trials_and_leaves_nothing(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Side by side, the worst trial may be the first one at each comparison, and go on.
    options = ["--trials", "3", "--keep", "1", "--json", *ONE_BY_ONE]
    words = command(corpus, tmp_path, *options, epochs=9)
    assert cli.main(words) == 0
    out, err = capfd.readouterr()
    results = json.loads(out)
    states = [trial["state"] for trial in results["trials"]]
    assert "stopped" in states
    assert set(states) <= {"stopped", "finished"}
    assert all(line.startswith("trial 000") for line in err.splitlines()), "Ray was to be quiet"
    tuned = Sweep.open(tmp_path / "sweep")
    kept = [
        trial.number
        for trial in tuned.trials()
        if (tuned.run_path(trial.number) / "checkpoints").exists()
    ]
    assert kept == [tuned.ranked()[0].number]
    full = 9 * tuned.trial(kept[0]).steps // len(tuned.trial(kept[0]).curve)
    assert all((trial.steps < full) == (trial.state == "stopped") for trial in tuned.trials())
    wait_until(lambda: not trial_processes(), 60, lambda: "the process of a stopped trial goes on")
    assert states_of_groups() <= {"REMOVED"}


def trial_processes() -> list[int]:
    """Processes of the trials of all sweeps in the shared cluster."""
    return [pid for pid, text in descendants(os.getpid()).items() if "ImplicitFunc" in text]


def states_of_groups() -> set[str]:
    job = ray.get_runtime_context().get_job_id()
    return {about["state"] for key, about in placement_group_table().items() if key.endswith(job)}


@pytest.mark.usefixtures("cluster")
def test_no_trial_fits_the_cluster(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(corpus, tmp_path, "--workers", "9", epochs=1)) == 2
    err = capfd.readouterr().err
    assert err.startswith(
        "error: no trial is feasible: it needs 9 x (1 CPU), the cluster's nodes have 4 CPU;"
    )
    assert err.count("\n") == 1
