"""XMCRAY_LOG=json: whatever a command has to say on stderr is one JSON object on a line, with the run it is about."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from shell import run_command

from xmcray import cli, logs
from xmcray.progress import counting, watch_training
from xmcray.training.records import Records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig


def lines(capture: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out, err = capture.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_records_warnings_and_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XMCRAY_LOG", "json")
    run = Run(tmp_path, "0123456789ab", RunConfig.resolve("astra", {}), "corpus", "0" * 64)
    records = Records(tmp_path / "metrics.jsonl")
    with logs.on_stderr(), watch_training(run), counting("queries", 3) as progress:
        records.add({"step": 20, "epoch": 0, "loss": 0.5})
        progress(1)
        logging.getLogger("xmcray.training.launch").warning("two\nlines of %d", 2)
        logging.getLogger("other.library").info("nobody asked")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("from Python", stacklevel=1)
    warning, python, step = sorted(lines(capsys), key=lambda line: line["message"] == "step")
    assert (warning["level"], warning["message"], warning["run"]) == (
        "warning",
        "two lines of 2",
        run.id,
    )
    assert "from Python" in python["message"]
    assert step["time"].endswith("+00:00")
    assert {k: step[k] for k in ("level", "run", "message", "step", "loss")} == {
        "level": "info", "run": run.id, "message": "step", "step": 20, "loss": 0.5,
    }  # fmt: skip
    assert run_command("train astrra --data a --out b") == 2
    (error,) = lines(capsys)
    assert error["level"] == "error"
    assert error["run"] is None
    assert "did you mean 'astra'?" in error["message"]


def test_our_own_mistake_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XMCRAY_LOG", "json")
    monkeypatch.setattr(cli, "parser", lambda: 1 / 0)
    assert cli.main([]) == 1
    (error,) = lines(capsys)
    assert "ZeroDivisionError" in error["traceback"]


def test_quiet_by_default_and_a_wrong_format_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XMCRAY_LOG", raising=False)
    before = list(logging.getLogger().handlers)
    with logs.on_stderr():
        assert logging.getLogger().handlers == before
        logs.log_values("step", {"loss": 1.0})
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("XMCRAY_LOG", "xml")
    assert cli.main(["--version"]) == 2
    assert capsys.readouterr().err == "error: XMCRAY_LOG is 'xml', expected one of text, json\n"
