"""Jumps of the wall clock decide nothing: it is read only for what is stored or shown as a time."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WALL_CLOCK = re.compile(r"\btime\.time(?:_ns)?\(|\bdatetime\.(?:now|utcnow)\(|\bst_[acm]time")
ALLOWED = {
    "xmcray/client/call.py": "Retry-After may be a date",
    "xmcray/serving/label_log.py": "each commit keeps its time",
    "xmcray/serving/log_upload.py": "a gauge shows the age of what the copy lacks",
    "xmcray/serving/security.py": "a token file may name the date until which a token is accepted",
    "xmcray/training/records.py": "each record keeps its time",
    "xmcray/training/stalls.py": "each interruption keeps its time",
    "xmcray/training/tracking.py": "trackers want a time for each record",
}


def test_the_wall_clock_is_read_only_for_what_is_stored_or_shown() -> None:
    readers = set()
    for file in (ROOT / "xmcray").rglob("*.py"):
        if _WALL_CLOCK.search(file.read_text(encoding="utf-8")):
            readers.add(file.relative_to(ROOT).as_posix())
    assert readers == set(ALLOWED)
