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
from xmcray.tuning.sweep import Sweep, score_of

# Keys of what is reported to Tune.
TIME = "epoch"
SCORE = "score"
EXPECTED_CPU_S = "expected_cpu_s"
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
    config = sweep.config.resolve(sweep.trial(number).values, task["cluster"])
    reporter = _Reporter(sweep.config.metric, config.optim.stop_epoch or config.optim.epochs)
    try:
        wait_until_free(path)
        for record in read_records(path / "metrics.jsonl"):
            reporter.hear(record)
        reporter.start_clock()
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
        epochs: of the trial.
    """

    def __init__(self, metric: str, epochs: int) -> None:
        self.metric = metric
        self.epochs = epochs
        self.first_epoch = 0
        self.start_cpu_s: float | None = None
        self.last_step = -1
        self.last_validation: dict[str, float] | None = None

    def start_clock(self) -> None:
        """Begins to count CPU time; epochs that were heard before are not part of it."""
        self.start_cpu_s = time.process_time()

    def hear(self, record: Record) -> None:
        """Reports a validation.

        Blocks until Tune has taken it, which delays only the thread that follows the records.
        """
        self.last_step = int(record.get("last_step", self.last_step))
        score = score_of(record, self.metric)
        if score is None:
            return
        epoch = int(record["epoch"]) + 1
        validation = {TIME: epoch, SCORE: score, EXPECTED_CPU_S: self._expected_cpu_s(epoch)}
        if record["step"] == self.last_step:
            self.last_validation = validation
        else:
            tune.report(validation)

    def _expected_cpu_s(self, epoch: int) -> float:
        """CPU time that the trial will have taken at its end, if later epochs are like those here."""
        if self.start_cpu_s is None:
            self.first_epoch = max(self.first_epoch, epoch)
            return 0.0
        epochs_here = epoch - self.first_epoch
        if epochs_here <= 0:
            return 0.0
        seconds_per_epoch = (time.process_time() - self.start_cpu_s) / epochs_here
        return seconds_per_epoch * self.epochs

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
