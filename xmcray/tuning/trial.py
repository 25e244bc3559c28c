"""The actor of a trial: an ordinary training whose validations are reported to Ray Tune.

The training does not know that Tune runs it. Its metrics.jsonl is followed from a thread, as a
progress bar does. A resumed trial first reports its old validations, so that Tune knows all of its
past when it compares trials.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray import tune

from xmcray.errors import XmcrayError
from xmcray.training.launch import train
from xmcray.training.records import Record, following, read_records
from xmcray.training.run import Run
from xmcray.tuning.sweep import Sweep

# Keys of what is reported to Tune.
TIME = "epoch"
SCORE = "score"
MISTAKE = "mistake"
# How long the process of a killed driver or actor may take to release its run.
_LOCK_TIMEOUT_S = 120.0


def run_trial(task: Mapping[str, Any]) -> None:
    """Trains one trial to its end, from its newest checkpoint if it has one.

    This is a function trainable of Ray Tune. A mistake of the user is reported instead of raised,
    so that the sweep can tell what ends one trial from what ends all of them.

    Args:
        task: "sweep", the folder; "number" of the trial; "cluster", settings of that section.
    """
    sweep = Sweep.open(task["sweep"])
    number = int(task["number"])
    path = sweep.run_path(number)
    reporter = _Reporter(sweep.config.metric)
    try:
        wait_until_free(path)
        for record in read_records(path / "metrics.jsonl"):
            reporter.hear(record)
        config = sweep.config.resolve(sweep.trial(number).values, task["cluster"])
        train(sweep.config.corpus, path, config, watch=reporter.watch)
    except XmcrayError as error:
        tune.report({TIME: 0, SCORE: float("nan"), MISTAKE: [type(error).__name__, str(error)]})
        return
    except Exception:
        with contextlib.suppress(OSError):
            sweep.traceback_path(number).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    reporter.finish()


class _Reporter:
    """Reports validations to Tune.

    The last one is reported only when the run is finished: Tune might end the trial at once.

    Args:
        metric: key of the records.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.last_step = -1
        self.last_validation: dict[str, float] | None = None

    def hear(self, record: Record) -> None:
        """Reports a validation.

        Blocks until Tune has taken it, which delays only the thread that follows the records.
        """
        self.last_step = int(record.get("last_step", self.last_step))
        if self.metric not in record:
            return
        validation = {TIME: int(record["epoch"]) + 1, SCORE: float(record[self.metric])}
        if record["step"] == self.last_step:
            self.last_validation = validation
        else:
            tune.report(validation)

    @contextlib.contextmanager
    def watch(self, run: Run) -> Iterator[None]:
        """Follows a run's records while it trains."""
        with following(run.path / "metrics.jsonl", self.hear):
            yield

    def finish(self) -> None:
        """Reports the last validation."""
        if self.last_validation is not None:
            tune.report(self.last_validation)


def wait_until_free(path: Path) -> None:
    """Waits while another process trains in a folder.

    Such a process is about to end, because Tune stopped it or its driver was killed.
    """
    path.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with (path / "lock").open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.2)
