"""The command `tune`: mistakes that it names, and the sweep that it makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpora import planted_corpus
from shell import Shell

from xmcray import settings_files
from xmcray.api import sweeps
from xmcray.errors import ConfigError
from xmcray.tuning.sweep import Sweep


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected a METHOD to train, or --bundle BUNDLE to search"),
        ("astra --bundle b", "expected a METHOD to train, or --bundle BUNDLE to search"),
        ("astar", "unknown method 'astar'; did you mean 'astra'?"),
        ("astra --trials 0", "trials is 0, expected at least 1"),
        ("astra --keep 0", "keep is 0, expected at least 1"),
        ("astra --metric P@2", "unknown metric 'P@2'; did you mean 'P@5'?"),
        (
            "astra --set data.validation=0",
            "data.validation is 0, so no query is left to compare trials by",
        ),
        ("astra --set log.validate_every=0", "log.validate_every is 0, but asha compares trials"),
        ("astra --set log.validate_every=2", "log.validate_every is 2, but asha compares trials"),
        ("astra --set log.validate_every=2 --scheduler none", "C does not exist"),
        (
            "astra --trial-cpu-s 60 --workers 2",
            "--trial-cpu-s limits trials that train in one process each, but they have 2 workers",
        ),
        (
            "astra --trial-cpu-s 60 --set cluster.workers=2",
            "--trial-cpu-s limits trials that train in one process each, but they have 2 workers",
        ),
        ("astra --set cluster.workers=-1", "cluster.workers is -1, expected at least 0"),
        # The workers of a preset are not those of a trial, so the corpus is missing first.
        ("astra --trial-cpu-s 60 --config preset:astra/msdocs-links", "C does not exist"),
        ("astra --set optim.lr=-1", "optim.lr is -1.0, expected at least 0"),
        ("--bundle b --keep 2", "--keep is for trainings, but --bundle only searches"),
        ("--bundle b", "unknown inference-time setting 'optim.lr'"),
    ],
)
def test_mistakes_of_a_command(arguments: str, message: str, tmp_path: Path, shell: Shell) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: {uniform: [0, 1]}\n")
    command = f"tune {arguments} --data C --space {space} --out {tmp_path}/out"
    assert message in shell.error(command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("own", "workers", "expected"),
    [
        ({}, None, {"workers": 0, "threads_per_process": 0}),
        ({}, 2, {"workers": 2, "threads_per_process": 0}),
        ({"cluster.workers": 3}, None, {"threads_per_process": 0}),
        ({"cluster.threads_per_process": 4}, None, {"workers": 0}),
    ],
)
def test_trials_have_no_processes_or_threads_of_a_preset(
    own: dict[str, int], workers: int | None, expected: dict[str, int]
) -> None:
    config = ["preset:astra/msdocs-links", own]
    assert settings_files.load_yaml(config[0])["cluster"].keys() == {
        "workers",
        "threads_per_process",
    }
    assert sweeps._processes_of_a_trial(config, workers) == expected


def test_trials_use_hard_negatives_that_the_first_settings_have_no_use_for(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(sweep: Sweep, *_: object) -> None:
        for columns, hard in (("all", 0), ("hard", 20)):
            trial = sweep.config.resolve({"method.columns": columns})
            assert trial.negatives.hard == hard
        swept.append(sweep)

    swept: list[Sweep] = []
    monkeypatch.setattr("xmcray.tuning.search.run_sweep", run_sweep)
    monkeypatch.setattr(Sweep, "check_scores", lambda _: None)
    corpus = planted_corpus(tmp_path, num_queries=201, num_labels=31)
    space = tmp_path / "space.yaml"
    space.write_text("method.columns: {choice: [hard, all]}\n")
    first = tmp_path / "first.yaml"
    first.write_text("method.columns: hard\n")
    settings = f"--set negatives.hard=20 --set method.columns=all --first {first}"
    shell.run(f"tune dexml --data {corpus.path} --space {space} --out {tmp_path}/out {settings}")
    assert swept[0].config.first == ({"method.columns": "hard"},)


@pytest.mark.parametrize(
    "name", ["log.every", "cluster.workers", "data.validation", "memory.weight"]
)
def test_what_cannot_be_searched(name: str, tmp_path: Path, shell: Shell) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(f"{name}: {{int: [1, 2]}}\n")
    error = shell.error(f"tune rae --data C --space {space} --out D")
    assert f"{name} cannot be searched: " in error


@pytest.mark.parametrize(
    ("option", "warns"), [("--set optim.epochs=2", True), ("--config preset:renee/sample", False)]
)
def test_a_value_without_effect_is_named(
    option: str,
    warns: bool,
    tmp_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The next thing that is missing is the corpus.
    error = shell.error(f"tune renee --data {tmp_path}/C --out {tmp_path}/out {option}")
    assert f"{tmp_path}/C does not exist" in error
    warning = "optim.epochs is searched by space:renee, so its value has no effect"
    assert (warning in caplog.text) == warns


def test_transformers_that_cannot_be_had_are_left_out(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    space = tmp_path / "space.yaml"
    command = f"tune rae --data {tmp_path}/C --space {space} --out {tmp_path}/out"
    # The next thing that is missing is the corpus.
    space.write_text('encoder.init_from: {choice: ["", no/such]}\n')
    assert f"{tmp_path}/C" in shell.error(command)
    space.write_text("encoder.init_from: {choice: [no/such]}\n")
    assert f"{space}: encoder.init_from: encoder 'no/such' is no folder" in shell.error(command)


def test_a_sweep_that_began_without_a_network_goes_on_with_one(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(sweep: Sweep, *_: object) -> None:
        choices.append(sweep.space["encoder.init_from"].values_to_check())

    def find(name: str) -> Path:
        if not is_online:
            raise ConfigError(f"encoder {name!r} cannot be downloaded")
        return tmp_path

    choices: list[object] = []
    is_online = False
    monkeypatch.setattr("xmcray.tuning.search.run_sweep", run_sweep)
    monkeypatch.setattr("xmcray.nn.pretrained.find", find)
    monkeypatch.setattr(Sweep, "check_scores", lambda _: None)
    corpus = planted_corpus(tmp_path, num_queries=201, num_labels=31)
    space = tmp_path / "space.yaml"
    space.write_text('encoder.init_from: {choice: ["", some/model]}\n')
    command = f"tune rae --data {corpus.path} --space {space} --out"
    shell.run(command, tmp_path / "sweep")
    is_online = True
    shell.run(command, tmp_path / "sweep")
    shell.run(command, tmp_path / "other")
    is_online = False
    shell.run(command, tmp_path / "other")
    both = ("", "some/model")
    assert choices == [("",), ("",), both, both]
    # The space itself is compared as it was given.
    space.write_text('encoder.init_from: {choice: ["", other/model]}\n')
    assert "holds a sweep with space.encoder.init_from.choice" in shell.error(
        command, tmp_path / "sweep"
    )
    space.write_text("optim.lr: {uniform: [0.1, 0.2]}\n")
    assert "holds a sweep with space.encoder.init_from" in shell.error(command, tmp_path / "sweep")
