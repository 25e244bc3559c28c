"""Jumps of the wall clock decide nothing: it is read only for what is stored or shown as a time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of the module `time`. Its other clocks, such as `monotonic`, never jump.
OF_TIME = {"asctime", "clock_gettime", "clock_gettime_ns", "ctime", "gmtime", "localtime"}
OF_TIME |= {"strftime", "time", "time_ns"}
# Of classes of `datetime`, of `os.path`, and of what `os.stat` returns.
OF_ANYTHING = {"now", "today", "utcnow", "getatime", "getctime", "getmtime"}
OF_ANYTHING |= {"st_atime", "st_ctime", "st_mtime", "st_atime_ns", "st_ctime_ns", "st_mtime_ns"}
ALLOWED = {
    "xmcray/client/call.py": "Retry-After may be a date",
    "xmcray/serving/event_log.py": "each event keeps its time",
    "xmcray/serving/label_log.py": "each commit keeps its time",
    "xmcray/serving/log_upload.py": "a gauge shows the age of what the copy lacks",
    "xmcray/serving/security.py": "a token file may name the date until which a token is accepted",
    "xmcray/storage/cache.py": "of the copies that no process holds, the oldest are removed",
    "xmcray/training/records.py": "each record keeps its time",
    "xmcray/training/stalls.py": "each interruption keeps its time",
    "xmcray/training/tracking.py": "trackers want a time for each record",
}


def reads_the_wall_clock(source: str) -> bool:
    """Whether a module names something that tells the time of day, called or not."""
    nodes = list(ast.walk(ast.parse(source)))
    # The names by which the module knows the module `time`.
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name for name in node.names if name.name == "time"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if OF_TIME & {name.name for name in node.names}:
                return True
        elif isinstance(node, ast.Attribute):
            if node.attr in OF_ANYTHING:
                return True
            if node.attr in OF_TIME and ast.unparse(node.value) in modules:
                return True
    return False


def test_the_wall_clock_is_read_only_for_what_is_stored_or_shown() -> None:
    readers = set()
    for file in (ROOT / "xmcray").rglob("*.py"):
        if reads_the_wall_clock(file.read_text(encoding="utf-8")):
            readers.add(file.relative_to(ROOT).as_posix())
    assert readers == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.time()",
        "import time as t; wait(clock=t.time)",
        "from time import monotonic, time",
        "from time import time_ns as clock",
        "import time; time.strftime('%H')",
        "import time; time.localtime()",
        "import time; time.gmtime().tm_hour",
        "import datetime; datetime.datetime.now()",
        "from datetime import datetime as d; d.now(UTC)",
        "from datetime import date; date.today()",
        "path.stat().st_mtime_ns",
        "os.path.getmtime(path)",
    ],
)
def test_every_way_to_read_it_is_found(source: str) -> None:
    assert reads_the_wall_clock(source)


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.monotonic() - time.perf_counter()",
        "from time import monotonic, sleep",
        "record.time + time",
    ],
)
def test_other_clocks_and_names_are_not(source: str) -> None:
    assert not reads_the_wall_clock(source)
