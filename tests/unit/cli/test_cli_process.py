"""How commands and jobs start: settings, help, interrupts, and what they load and upload."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from shell import run_command

import xmcray
from xmcray import cli
from xmcray.cli.arguments import merged_settings
from xmcray.methods.registry import method_names

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("trian", 2)])
def test_the_package_runs_as_a_module(arguments: str, code: int) -> None:
    command = [sys.executable, "-m", "xmcray", arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == code
    expected = f"xmcray {xmcray.__version__}" if code == 0 else "error: "
    assert (process.stdout + process.stderr).startswith(expected)


def test_set_is_stronger_than_a_dotted_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("optim: {lr: 0.1}\noptim.epochs: 5\n")
    options = argparse.Namespace(config=[str(file)], set=["optim.epochs=3"])
    assert merged_settings(options) == {"optim": {"lr": 0.1, "epochs": 3}}


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    verb = dataclasses.replace(cli.VERBS["search"], run=interrupted)
    monkeypatch.setitem(cli.VERBS, "search", verb)
    assert run_command("search B x") == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        with pytest.raises(SystemExit) as exit_:
            run_command(f"{verb} --help")
        assert exit_.value.code == 0
        assert f"example:\n  xmcray {verb} " in capsys.readouterr().out


def test_help_and_mistakes_do_not_load_torch_or_ray() -> None:
    code = (
        "import sys; from xmcray import cli\n"
        "assert cli.main(['train', 'astra', '--out', 'R']) == cli.main(['trian']) == 2\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'ray', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "name",
    [
        "prepare",
        "evaluate",
        "export",
        "predict",
        "continual",
        "train",
        *(f"train_{m}" for m in method_names()),
    ],
)
def test_a_job_is_its_verb(name: str, tmp_path: Path) -> None:
    script = ROOT / "jobs" / f"{name}.py"
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    verb = name.partition("_")[0]
    assert result.stderr.startswith("error: the following arguments are required: ")
    assert result.stderr.endswith(f"see xmcray {verb} --help\n")


def test_a_job_uploads_the_code_and_nothing_else() -> None:
    excludes = yaml.safe_load((ROOT / "jobs" / "runtime_env.yaml").read_text())["excludes"]
    assert {"/.git/", "/.venv/", "/data/", "/runs/"} <= set(excludes)
    # What the commands of the documents write next to the code: folders, tokens, raw data.
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for folder in re.findall(r"--out ([a-z][a-z-]*)", text):
            assert f"/{folder}/" in excludes, page
        for token in re.findall(r"(?:\$PWD/|token-file |> )([a-z-]*token)\b", text):
            assert f"/{token}" in excludes, page
    assert {"/RAW/", "/state/", "/token", "/admin-token"} <= set(excludes)
    assert all(
        pattern.startswith("/") for pattern in excludes
    )  # "data" would leave out xmcray/data
    assert not any(
        pattern.strip("/").split("/")[0] in ("xmcray", "jobs", "serve", "tune")
        for pattern in excludes
    )


def test_an_interrupted_command_ends_without_taking_its_libraries_down() -> None:
    """An interrupted start of Ray leaves threads that can crash the interpreter at its end."""
    program = """
import atexit, sys
from xmcray import cli
def interrupted(options):
    print("printed")
    raise KeyboardInterrupt
cli.VERBS["labels"] = cli.Verb(interrupted, lambda _: None, "waits", "xmcray labels")
atexit.register(print, "taken down")
cli.command(["labels"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "printed\n")
    assert done.stderr.startswith("interrupted; the same command starts it again")
