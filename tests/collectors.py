"""Processes that collect events until they are killed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from xmcray.serving.event_files import read_lines

COLLECTOR = """
import itertools, sys
from pathlib import Path
from xmcray.serving import event_log
from xmcray.serving.events import FeedbackEvent, SearchEvent

folder, seed = sys.argv[1:]
event_log.FILES = 20_000  # files of 50 kB, so that many are begun
log = event_log.EventLog(Path(folder), "m", redact=False, max_days=30, max_bytes=1 << 30)
for count in itertools.count():
    request = f"{seed}-{count}"
    log.note(SearchEvent(request=request, version="v", texts=[f"text {request}"], answers=[["u1"]]))
    event = FeedbackEvent(
        request=request, text=0, label="u1", label_text="one", event="accept"
    )
    print(log.add_feedback(event).result(), request, flush=True)
"""


def kill_collectors(folder: Path, kills: int, seed: int = 0) -> int:
    """Kills collectors of one event log at random moments, and checks what is on the disk.

    Returns:
        The number of acknowledged events.
    Raises:
        AssertionError: an acknowledged event, or the search that it is about, was lost.
    """
    draw = random.Random(seed)
    acknowledged: dict[int, str] = {}
    for kill in range(kills):
        command = [sys.executable, "-c", COLLECTOR, str(folder), str(kill)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as collector:
            assert collector.stdout is not None
            lines_left = draw.randint(1, 60)
            for line in collector.stdout:
                if line.endswith("\n"):
                    number, request = line.split()
                    assert int(number) not in acknowledged, "a number was given again"
                    acknowledged[int(number)] = request
                lines_left -= 1
                if lines_left == 0:
                    collector.kill()
            assert collector.wait() == -9
    searches = set()
    for line in read_lines(folder, "m"):
        for number, event in enumerate(line.operations, line.first):
            if event["kind"] == "search":
                searches.add(event["request"])
            elif number in acknowledged:
                assert acknowledged.pop(number) == event["request"]
                assert event["request"] in searches, "feedback without its search"
    assert not acknowledged, f"lost: {acknowledged}"
    return len(searches)
