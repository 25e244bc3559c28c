"""What goes to stderr, for people or for programs: XMCRAY_LOG=json makes each of it one JSON object on a line.

    {"time": "2026-11-21T06:00:00.123+00:00", "level": "info", "run": "4f0c...", "message": "step", "step": 340, ...}

`run` is the id of the run that trains in this process, or null. Without the variable only warnings are shown, as plain
lines; a library that imports us is left alone either way.
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

from xmcray.errors import ConfigError

VARIABLE = "XMCRAY_LOG"
_FORMATS = ("text", "json")
_run: str | None = None  # of the process: its threads too


def as_json() -> bool:
    """Whether programs read stderr.

    Raises:
        ConfigError: the variable holds neither "json" nor "text".
    """
    value = os.environ.get(VARIABLE) or "text"
    if value not in _FORMATS:
        raise ConfigError(f"{VARIABLE} is {value!r}, expected one of {', '.join(_FORMATS)}")
    return value == "json"


@contextlib.contextmanager
def on_stderr() -> Iterator[None]:
    """Writes what is logged while the block runs as JSON, if that is wanted: ours from "info" on, others' warnings.

    For whoever owns the process: the command line, and a Ray worker.
    """
    if not as_json():
        yield
        return
    root, ours, handler = (
        logging.getLogger(),
        logging.getLogger("xmcray"),
        logging.StreamHandler(sys.stderr),
    )
    handler.setFormatter(_Json())
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(before)
        root.removeHandler(handler)


@contextlib.contextmanager
def about(run_id: str) -> Iterator[None]:
    """What is logged while the block runs is about a run."""
    global _run
    before, _run = _run, run_id
    try:
        yield
    finally:
        _run = before


def tell(message: str, values: Mapping[str, Any]) -> None:
    """Logs values by name, as fields of the JSON object."""
    logging.getLogger("xmcray").info(message, extra={"values": values})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "run": _run,
            "message": " ".join(record.getMessage().split()),
        }
        body = {**getattr(record, "values", {}), **head}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**head, **body}, default=str)
