"""The folder of a run: what a kill while it is started leaves, and that it goes on from there."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from xmcray import config as configs
from xmcray.errors import ConfigError, RunError
from xmcray.nn.encoder import SETTINGS
from xmcray.storage.whole_files import aside
from xmcray.storage.work_folder import locked
from xmcray.training.run import RUN_FOLDER, Run, RunConfig, discard, open_or_create


@dataclass
class AnyCorpus:
    origin: str
    sha256: str = "0" * 64


class Killed(BaseException):
    """Stands for the end of the process."""


def start(path: Path, *settings: str) -> Run:
    corpus: Any = AnyCorpus(str(path.parent / "corpus"))
    with locked(path, RUN_FOLDER):
        return open_or_create(path, RunConfig.resolve("astra", {}, settings), corpus, "auto")


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_start_that_was_killed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    replace = Path.replace

    def killed_before(path: Path) -> Path:
        if path.name == name and moment == "before":
            raise Killed
        return aside(path)

    def killed_at_rename(self: Path, target: Path) -> Any:
        if target.name != name or moment == "before":
            return replace(self, target)
        if moment == "after":
            replace(self, target)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("xmcray.storage.whole_files.aside", killed_before)
        patch.setattr(Path, "replace", killed_at_rename)
        for tidy in ("unlink", "rmdir"):  # nobody does after a kill
            patch.setattr(Path, tidy, lambda *_, **__: None)
        with pytest.raises(Killed):
            start(tmp_path / "r")
    again = start(tmp_path / "r")
    assert sorted(path.name for path in again.path.iterdir()) == ["config.yaml", "lock", "run.json"]
    assert Run.open(tmp_path / "r") == again
    assert (
        RunConfig.resolve("astra", yaml.safe_load((again.path / "config.yaml").read_text()))
        == again.config
    )


def test_the_configuration_of_the_start_stays_when_only_the_machine_changes(tmp_path: Path) -> None:
    first = start(tmp_path / "r", "cluster.workers=2")
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    assert start(tmp_path / "r", "cluster.workers=3").config.cluster.workers == 3
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
    with pytest.raises(RunError, match=r"was started with optim\.epochs = 15, now 3"):
        start(tmp_path / "r", "optim.epochs=3")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("optim", {"stop_epoch": 99}),
        ("negatives", {"uniform": 0, "start_epoch": 99}),
    ],
)
def test_a_run_of_an_earlier_release_opens_with_epochs_that_are_refused_now(
    tmp_path: Path, section: str, values: dict[str, int]
) -> None:
    run = start(tmp_path / "run")
    with pytest.raises(ConfigError):
        RunConfig.resolve("astra", {section: values})
    file = run.path / "run.json"
    body = json.loads(file.read_text())
    body["config"][section].update(values)
    file.write_text(json.dumps(body))
    opened = Run.open(run.path).config.to_dict()[section]
    assert values.items() <= opened.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["encoder.name=owner/model", "encoder.residual=false", "encoder.bigram_buckets=7"],
            "encoder.name is 'owner/model', for which encoder.residual and encoder.bigram_buckets would"
            " have no effect; leave out, or set encoder.residual=true encoder.bigram_buckets=0",
        ),
        (["encoder.name=owner/model", "encoder.idf=false"], "set encoder.idf=true"),
        (["encoder.name=owner/model", "encoder.position_decay=1"], "encoder.position_decay=0.0"),
        (["encoder.pooling=cls"], "encoder.name is 'static', for which encoder.pooling would"),
        (["encoder.autocast=bf16"], "set encoder.autocast=auto"),
    ],
)
def test_settings_of_the_other_kind_of_encoder_are_refused(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.resolve("astra", {}, settings)
    values = configs.merge({}, settings)
    stored = RunConfig.resolve("astra", values, is_stored=True)
    assert stored.to_dict()["encoder"].items() >= values["encoder"].items()


def test_a_folder_of_a_static_encoder_goes_with_settings_of_static_encoders(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).touch()
    name = f"encoder.name={tmp_path}"
    RunConfig.resolve("astra", {}, [name, "encoder.position_decay=3", "encoder.residual=false"])
    with pytest.raises(ConfigError, match=r"encoder\.pooling would have no effect"):
        RunConfig.resolve("astra", {}, [name, "encoder.pooling=cls"])


def test_folders_of_models_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "teacher", "static"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    teacher = ["negatives.teacher=teacher", "negatives.max_relative_score=0.9"]
    relative = ["encoder.name=model", *teacher]
    run = start(tmp_path / "run", *relative)
    assert run.config.encoder.name == str(tmp_path / "model")
    assert run.config.negatives.teacher == str(tmp_path / "teacher")
    kept = RunConfig.resolve("astra", {}, ["encoder.init_from=owner/name"]).encoder
    assert (kept.name, kept.init_from) == ("static", "owner/name")
    # Earlier releases kept relative paths.
    file = run.path / "run.json"
    file.write_text(file.read_text().replace(f"{tmp_path}/model", "model"))
    assert start(tmp_path / "run", *relative).config == run.config


def test_runs_may_share_the_vectors_of_a_frozen_encoder(tmp_path: Path) -> None:
    frozen = ["encoder.name=model", "encoder.frozen=true"]
    shared = [*frozen, f"encoder.vectors_folder={tmp_path / 'v'}"]
    alone = start(tmp_path / "a", *frozen)
    first = start(tmp_path / "b", *shared)
    second = start(tmp_path / "c", *shared)
    assert first.vectors == second.vectors != alone.vectors
    for run in (alone, first):
        run.vectors.mkdir(parents=True)
        run.remove_vectors()
    assert second.vectors.is_dir()
    assert not alone.vectors.exists()


def test_a_run_that_was_being_discarded_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def killed_before(self: Path, missing_ok: bool = False) -> None:
        if self.name == "config.yaml" and not (self.parent / "run.json").exists():
            raise Killed
        unlink(self, missing_ok)

    path = tmp_path / "r"
    first = start(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_before)
        with contextlib.suppress(Killed):
            discard(first)
    assert start(path).id != first.id
