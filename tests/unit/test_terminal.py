"""Texts from elsewhere are shown on a terminal, but never obeyed by it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from bundles import write_bundle_of

from xmcray import cli, logs
from xmcray.cli.output import show, show_json, show_line, show_table
from xmcray.evaluation.table import slice_table
from xmcray.terminal import printable, printable_lines

EVERY = "".join(map(chr, range(0x300))) + "\u200d\u2713\U0001f600"
HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f"
SHOWN = r"\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f"


def controls(printed: str) -> set[str]:
    """The control characters of a text, except those that end lines."""
    return {letter for letter in printed if unicodedata.category(letter) == "Cc"} - {"\n"}


def test_only_control_characters_become_escapes() -> None:
    assert printable("\t\n\r\x1b\x85\x9b\udc9b") == r"\t\n\r\x1b\x85\x9b\udc9b"
    assert printable_lines("a\tb\n\x1b") == "a\tb\n\\x1b"
    for letter in EVERY:
        is_kept = unicodedata.category(letter) != "Cc"
        assert (printable(letter) == letter) == is_kept


@pytest.mark.parametrize("field", ["kind", "release", "schema_version"])
def test_an_error_shows_what_a_manifest_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    bundle = write_bundle_of(tmp_path / "bundle", "texts")
    manifest = json.loads((bundle / "manifest.json").read_text())
    # With a later format, the message names the release.
    manifest["schema_version"] += 1
    manifest[field] = HOSTILE
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["search", str(bundle), "text"]) == 2
    error = capsys.readouterr().err
    assert SHOWN in error
    assert not controls(error)


def test_an_error_shows_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"search{HOSTILE}"]) == 2
    error = capsys.readouterr().err
    assert SHOWN in error
    assert not controls(error)


def test_tables_and_lines_show_their_texts(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"attribute": f"a{HOSTILE}", "value": f"v{HOSTILE}", "queries": 3}
    show(slice_table({"slices": [row]}))
    show_table(f"title {HOSTILE}", ["column"], [[f"cell {HOSTILE}"]])
    show_line(f"line [/red] :smile: {HOSTILE}")
    printed = capsys.readouterr().out
    # rich itself drops the bell.
    assert printed.replace(r"\x07", "").count(SHOWN.replace(r"\x07", "")) == 5
    assert "[/red] :smile: " in printed
    assert not controls(printed)


def test_a_long_path_is_one_line_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / ("a" * 200)
    assert cli.main(["files", "cluster", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f" files in {out}\n")


def test_json_shows_its_texts_and_reads_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    value = {f"name {EVERY}": [EVERY, "\udc9b", 1.5, None]}
    show_json(value)
    printed = capsys.readouterr().out
    assert json.loads(printed) == value
    assert not controls(printed)
    assert "\u2713\U0001f600" in printed


def test_warnings_of_the_log_show_their_texts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.VARIABLE, "text")
    # Python prints with its handler of last resort where no other handler takes a record; pytest has some.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with logs.on_stderr():
        logging.getLogger("xmcray").warning("first line\nsecond %s", HOSTILE)
    logging.getLogger("xmcray").warning("as before")
    assert capsys.readouterr().err == f"first line\nsecond {SHOWN}\nas before\n"


# A command that prints a word which Latin-1 holds in part.
PRINTS = """
import sys
from xmcray import cli
from xmcray.cli.output import show, show_json, show_line
def run(_):
    for print_word in (show, show_line, show_json):
        print_word("\u00fc\u6f22\U0001f600")
cli.VERBS["labels"] = cli.Verb(run, lambda _: None, "prints", "xmcray labels")
cli.command(["labels"])
"""


def printed_by_a_process(
    redirection: str, program: str = PRINTS, **environment: str
) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a process that prints."""
    command = f'"$0" -c "$1" {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, program],
        env={**os.environ, **environment},
        capture_output=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_characters_that_the_encoding_lacks_become_escapes() -> None:
    code, out, err = printed_by_a_process("", PYTHONIOENCODING="latin-1")
    assert (code, err) == (0, b"")
    lines = out.decode("latin-1").splitlines()
    assert lines[:2] == ["\u00fc\\u6f22\\U0001f600"] * 2
    # JSON has escapes of its own.
    assert json.loads(lines[2]) == "\u00fc\u6f22\U0001f600"


def test_a_full_or_closed_stdout_is_no_traceback() -> None:
    code, _, err = printed_by_a_process("> /dev/full")
    assert code == 2
    assert err.startswith(b"error: the output cannot be written (No space left on device); free")
    assert err.count(b"\n") == 1
    assert printed_by_a_process(">&-") == (0, b"", b"")
    assert printed_by_a_process("2>&-")[0] == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"], ["--version"]])
def test_help_that_cannot_be_written_is_one_line(arguments: list[str], unbuffered: str) -> None:
    program = f"from xmcray import cli; cli.command({arguments})"
    code, _, err = printed_by_a_process("> /dev/full", program, PYTHONUNBUFFERED=unbuffered)
    assert code == 2
    assert err.startswith(b"error: the output cannot be written (No space left on device); free")
    assert err.count(b"\n") == 1
    assert printed_by_a_process("| head -0", program, PYTHONUNBUFFERED=unbuffered)[2] == b""
