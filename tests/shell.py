"""The command line in this process, and what a command leaves in a folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from xmcray import cli

# Of a training that takes a second or two.
SMALL_SETTINGS = (
    "--set encoder.dim=16 --set optim.batch_size=32 --set negatives.hard=3"
    " --set negatives.uniform=10 --set cluster.threads_per_process=1"
)
SMALL = "--workers 0 --set optim.epochs=2 " + SMALL_SETTINGS


def set_options(settings: Iterable[str]) -> str:
    """Settings such as "optim.epochs=2" as options of a command."""
    return " ".join(f"--set {setting}" for setting in settings)


def run_command(command: str, *more: object) -> int:
    """The exit status of a command, such as `train astra --data C --out R`; `more` ends its words."""
    return cli.main([*shlex.split(command), *map(str, more)])


class Shell:
    """Runs commands; `error` expects one that fails as a user's mistake must."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def run(self, command: str, *more: object) -> str:
        """What a command prints."""
        self.capture.readouterr()
        assert run_command(command, *more) == 0
        return self.capture.readouterr().out

    def error(self, command: str, *more: object) -> str:
        """The one line that a command prints."""
        self.capture.readouterr()
        assert run_command(command, *more) == 2
        out, err = self.capture.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err.removeprefix("error: ").rstrip("\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
