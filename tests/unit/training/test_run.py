"""The folder of a run: what a kill while it is started leaves, and that it goes on from there."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from xmcray.errors import ConfigError, RunError
from xmcray.nn.encoder import SETTINGS
from xmcray.storage.whole_files import aside
from xmcray.storage.work_folder import locked
from xmcray.training.run import RUN_FOLDER, Run, discard, open_or_create
from xmcray.training.run_config import RunConfig


@dataclass
class AnyCorpus:
    origin: str
    sha256: str = "0" * 64


class Killed(BaseException):
    """Stands for the end of the process."""


def start(path: Path, *settings: str, method: str = "astra") -> Run:
    corpus: Any = AnyCorpus(str(path.parent / "corpus"))
    with locked(path, RUN_FOLDER):
        return open_or_create(path, RunConfig.resolve(method, {}, settings), corpus, "auto")


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
    # A run that was killed for its memory goes on with smaller chunks.
    assert start(tmp_path / "r", "optim.micro_batch=8").config.optim.micro_batch == 8
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
    with pytest.raises(RunError, match=r"was started with optim\.epochs = 15, now 3"):
        start(tmp_path / "r", "optim.epochs=3")


def test_a_run_whose_corpus_has_moved_opens_it_at_its_new_place(tmp_path: Path) -> None:
    first = start(tmp_path / "r")
    moved: Any = AnyCorpus(str(tmp_path / "other" / "corpus"))
    again = open_or_create(first.path, first.config, moved, "auto")
    assert again.corpus == moved.origin
    assert Run.open(first.path) == again


def test_another_method_in_a_folder_is_named(tmp_path: Path) -> None:
    start(tmp_path / "r")
    with pytest.raises(RunError, match="was started with method astra, now unidec"):
        start(tmp_path / "r", method="unidec")


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
    ("method", "settings", "unread"),
    [
        ("astra", ["encoder.position_decay=3", "encoder.idf=false"], []),
        (
            "astra",
            ["encoder.name=owner/model", "encoder.residual=false", "encoder.bigram_buckets=7"],
            ["encoder.residual", "encoder.bigram_buckets"],
        ),
        ("astra", ["encoder.pooling=cls"], ["encoder.pooling"]),
        ("unidec", ["fusion.text_weight=0.3"], []),
        ("dexml", ["negatives.uniform=5"], ["negatives.uniform"]),
        ("unidec", ["fusion.text_weight=0.3", "method.balance=1"], ["fusion.text_weight"]),
    ],
)
def test_settings_that_nothing_reads_are_named(
    method: str, settings: list[str], unread: list[str]
) -> None:
    assert RunConfig.resolve(method, {}, settings).without_effect() == unread


def test_a_folder_of_a_static_encoder_has_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).touch()
    config = RunConfig.resolve("astra", {}, [f"encoder.name={tmp_path}", "encoder.residual=false"])
    assert config.without_effect() == []


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
