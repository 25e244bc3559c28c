"""Every command, setting and preset that the documents name exists, and the quick commands work.

Commands that need a network, a Ray cluster, a server or minutes are only parsed; tests/on_ray runs their verbs.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import documents
import pytest
from corpora import planted_corpus
from documents import ROOT, Command
from models import write_cross_encoder

from xmcray import cli, settings_files
from xmcray import config as configs
from xmcray.errors import ConfigError
from xmcray.serving.settings import ServeConfig
from xmcray.training.run_config import RunConfig
from xmcray.tuning.space import parse_space

COMMANDS = documents.commands()
PARSER = cli.parser()  # it takes longer to make than a command to parse
PLACEHOLDERS = {"METHOD": "astra", "N": "3"}
QUICK_VERBS = (
    "train",
    "evaluate",
    "export",
    "memory",
    "fuse",
    "calibrate",
    "labels",
    "search",
    "plan",
    "tune",
    "files",
    "schema",
)
SMALL = [
    *("--workers", "0"),
    *("--set", "encoder.dim=16"),
    *("--set", "optim.batch_size=32"),
    *("--set", "optim.epochs=1"),
    *("--set", "negatives.hard=0"),
    *("--set", "negatives.uniform=10"),
    *("--set", "cluster.threads_per_process=1"),
]


def arguments_of(command: Command) -> list[str]:
    """The arguments that `cli.main` gets; a job script is run to see which verb it calls."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    if words[0] == "xmcray":
        return words[1:]
    received: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "main", lambda arguments: received.append(list(arguments)) or 0)
        patch.setattr(sys, "argv", words[1:])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    return received[0]


def parse(command: Command) -> argparse.Namespace | None:
    """The options of a command; None if it is only the beginning of one.

    Raises:
        ConfigError: the parser refuses it, or a setting of it does not exist.
    """
    arguments = arguments_of(command)
    if "--help" in arguments:
        return None
    verb = subparsers()[arguments[0]]
    for argument in arguments[1:]:
        name = argument.split("=")[0]
        if (
            name.startswith("-") and name not in verb._option_string_actions
        ):  # the parser's own list
            raise ConfigError(f"xmcray {arguments[0]} has no option {name}")
    try:
        options = PARSER.parse_args(arguments)
    except ConfigError as error:
        unfinished = "arguments are required" in str(error) or "expected one" in str(error)
        if unfinished and not command.complete:
            return None
        raise
    check_settings(arguments[0], options)
    return options


def subparsers() -> dict[str, argparse.ArgumentParser]:
    for action in PARSER._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the parser has no verbs")


def check_settings(verb: str, options: argparse.Namespace) -> None:
    """Builds the configuration that the command would build."""
    if verb in ("train", "plan", "tune") and options.method:
        values: dict[str, Any] = {}
        for source in options.config or ():
            if source.startswith("preset:"):
                values = configs.overlay(values, settings_files.load_yaml(source))
        RunConfig.resolve(options.method, values, options.set or ())
    if verb == "serve":
        configs.build(ServeConfig, configs.merge({"bundles": {"a": "b"}}, options.set))
    if verb == "tune":
        space = options.space or f"space:{options.method}"
        assert parse_space(settings_files.load_yaml(space), space)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_one_that_the_parser_takes(command: Command) -> None:
    parse(command)


@pytest.mark.parametrize("verb", sorted(subparsers()))
def test_every_example_of_the_help_is_one_that_the_parser_takes(verb: str) -> None:
    words = documents.command_words((subparsers()[verb].epilog or "").splitlines()[-1])
    assert words[:2] == ["xmcray", verb]
    parse(Command("help", tuple(words), complete=True))


def test_a_wrong_command_is_found() -> None:
    wrong = [
        ("xmcray", "train", "astra", "--data", "C", "--out", "R", "--seed", "1"),
        ("xmcray", "train", "astra", "--data", "C", "--out", "R", "--set", "optim.epoch=1"),
        ("xmcray", "train", "astra", "--data", "C", "--out", "R", "--config", "preset:astra/x"),
        ("xmcray", "labels", "rename", "bundle", "x"),
        ("xmcray", "search", "--depth", "3"),
        ("python", "jobs/train_astra.py", "--data", "C"),
    ]
    for words in wrong:
        with pytest.raises(ConfigError):
            parse(Command("page", words, complete=True))


def test_every_setting_in_the_text_exists() -> None:
    known = documents.setting_names()
    assert [found for found in documents.named_settings() if found[1] not in known] == []


def test_every_preset_in_the_text_exists() -> None:
    presets = settings_files.presets()
    assert [found for found in documents.named_presets() if found[1] not in presets] == []


class Workshop:
    """A folder in which documented commands find the inputs that they name."""

    def __init__(self, folder: Path) -> None:
        self.source = folder
        planted_corpus(folder)
        train = ["train", "rae", "--data", f"{folder}/corpus", "--out", f"{folder}/run"]
        evaluate = ["evaluate", f"{folder}/run", "--data", f"{folder}/corpus"]
        assert cli.main([*train, *SMALL]) == 0
        write_cross_encoder(folder / "reranker", ["w0x0", "kettle"])
        assert cli.main([*evaluate, "--predictions", f"{folder}/predictions.npz"]) == 0

    def prepare(self, verb: str, options: argparse.Namespace) -> None:
        """Puts the inputs of a command into the working directory, under the names it uses."""
        data = getattr(options, "data", None) or ()
        for path in [data] if isinstance(data, str) else data:
            self.put("corpus", path)
        if getattr(options, "rerank", None):
            self.put("reranker", options.rerank)
        paths = [getattr(options, name, None) for name in ("path", "encoder", "bundle")]
        for path in (
            *paths,
            *(getattr(options, "paths", None) or ()),
            *(getattr(options, "compare", None) or ()),
        ):
            if path is None:
                continue
            is_run = verb in ("export", "evaluate", "memory", "fuse") and not path.endswith(
                "bundle"
            )
            if path.endswith(".npz"):
                self.put("predictions.npz", path)
            else:
                self.put("run" if is_run else "run/bundle", path)
        if verb == "labels" and options.change == "remove":
            options.what[:] = [self.some_label()]
        elif verb == "labels":
            self.write_labels(options)
        for path in getattr(options, "config", None) or ():
            if not path.startswith("preset:"):
                settings = "index: {factory: Flat}" if verb == "export" else "optim: {lr: 0.002}"
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(settings, encoding="utf-8")

    def put(self, source: str, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if (self.source / source).is_dir():
            shutil.copytree(self.source / source, path, dirs_exist_ok=True)
        else:
            shutil.copyfile(self.source / source, path)

    def some_label(self) -> str:
        first = (self.source / "raw" / "labels.jsonl").read_text(encoding="utf-8").splitlines()[0]
        return str(json.loads(first)["uid"])

    def write_labels(self, options: argparse.Namespace) -> None:
        new = {"uid": "B07", "text": "w0x0 kettle", "attributes": {"price": 19.5}}
        known = {"uid": self.some_label(), "attributes": {"price": 17.5}}
        line = json.dumps(new if options.change == "add" else known)
        Path(options.what[0]).write_text(line + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


def is_quick(command: Command) -> bool:
    """Whether it needs no network, no cluster, no server and no minutes."""
    line = " ".join(command.words)
    verb = command.words[1]
    if command.words[0] != "xmcray" or verb not in QUICK_VERBS or command.page == "docs/scale.md":
        return False
    if verb == "tune" and "--bundle" not in command.words:
        return False
    # The workshop's run has a memory, which is not cut to fewer columns.
    others = ("://", "$", "/mnt/", "log.track", "encoder.name", "--from", "--dim")
    if any(mark in line for mark in others):
        return False
    try:
        return parse(command) is not None
    except ConfigError:  # the test of the parser reports it
        return False


QUICK = {command.words: command for command in COMMANDS if is_quick(command)}


@pytest.mark.parametrize("command", QUICK.values(), ids=str)
def test_every_quick_command_works(
    command: Command, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = arguments_of(command)
    options = PARSER.parse_args(arguments)
    workshop.prepare(arguments[0], options)
    if arguments[0] == "train":
        arguments += SMALL
    if arguments[:2] == ["labels", "remove"]:
        arguments[3:] = options.what
    if arguments[0] == "tune":
        arguments += ["--trials", "3"]
    if arguments[0] == "search" and "-k" in arguments:
        arguments[arguments.index("-k") + 1] = "5"
    assert cli.main(arguments) == 0


def test_many_commands_are_run() -> None:
    assert len(COMMANDS) > 80
    assert len(QUICK) > 20
    assert {command.words[1] for command in QUICK.values()} == set(QUICK_VERBS)
