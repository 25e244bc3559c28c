"""What goes to stderr: text for people, or one JSON object per line if XMCRAY_LOG=json.

    {"time": "2026-11-21T06:00:00.123+00:00", "level": "info", "run": "4f0c...", "message": "step", "step": 340, ...}

`run` is the id of the run that trains in this process, or null. Without the variable only warnings
are shown, as plain lines. A library that imports this package sees no change in either case.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from xmcray.config import check_choice
from xmcray.terminal import printable_lines

VARIABLE = "XMCRAY_LOG"
_FORMATS = ("text", "json")
_run: str | None = None  # one for the whole process, whichever thread logs


def as_json() -> bool:
    """Whether stderr is for programs.

    Raises:
        ConfigError: the variable holds neither "json" nor "text".
    """
    value = os.environ.get(VARIABLE) or "text"
    check_choice(VARIABLE, value, _FORMATS)
    return value == "json"


@contextlib.contextmanager
def on_stderr() -> Iterator[None]:
    """Writes log records as JSON while the block runs, if XMCRAY_LOG asks for it.

    Otherwise Python prints warnings as lines, here without the characters that a terminal obeys.
    Our own records are written from level "info" on, those of other libraries from "warning" on.
    Only the owner of the process calls this: the command line, or a Ray worker.
    """
    if not as_json():
        with _printable_warnings():
            yield
        return
    root = logging.getLogger()
    ours = logging.getLogger("xmcray")
    level_before = ours.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level_before)
        root.removeHandler(handler)


@contextlib.contextmanager
def _printable_warnings() -> Iterator[None]:
    """Changes Python's handler of last resort, which prints what no other handler takes."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    formatter_before = handler.formatter
    handler.setFormatter(_LineFormatter())
    try:
        yield
    finally:
        handler.setFormatter(formatter_before)


@contextlib.contextmanager
def about(run_id: str) -> Iterator[None]:
    """Adds the id of a run to what is logged while the block runs."""
    global _run
    run_before = _run
    _run = run_id
    try:
        yield
    finally:
        _run = run_before


def log_values(message: str, values: Mapping[str, Any]) -> None:
    """Logs values by name, as fields of the JSON object."""
    logging.getLogger("xmcray").info(message, extra={"values": values})


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        head = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "run": _run,
            "message": " ".join(record.getMessage().split()),
        }
        # `head` comes twice: first for the order of the fields, last so that no value replaces it.
        body = {**head, **getattr(record, "values", {}), **head}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)
