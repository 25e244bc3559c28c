"""The actor of a trial: an ordinary training whose validations are reported to Ray Tune.

The training does not know that Tune runs it. A thread follows its metrics.jsonl, as a progress bar
does. A resumed trial reports its earlier validations first, because Tune compares trials by all of
them.
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
    so that the sweep can decide whether it ends one trial or all of them.

    Args:
        task: "sweep" is the folder, "number" that of the trial, "cluster" the settings of this
            section.
    """
    sweep = Sweep.open(task["sweep"])
    number = int(task["number"])
    path = sweep.run_path(number)
    reporter = Reporter(sweep.config.metric, sweep.config.trial_cpu_s)
    try:
        wait_until_free(path)
        for record in read_records(path / "metrics.jsonl"):
            reporter.hear(record)
        reporter.start_training()
        config = sweep.config.resolve(sweep.trial(number).values, task["cluster"])
        train(sweep.config.corpus, path, config, watch=reporter.watch)
    except XmcrayError as error:
        mistake = [type(error).__name__, str(error)]
        tune.report({TIME: 0, SCORE: float("nan"), MISTAKE: mistake})
        return
    except Exception:
        with contextlib.suppress(OSError):
            sweep.traceback_path(number).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    reporter.finish()


class Reporter:
    """Reports validations to Tune.

    The last one is reported only when the run is finished: Tune might end the trial at once.

    Args:
        metric: the metric that is reported, by its key in the records.
        limit_cpu_s: CPU seconds that a trial may take; one that will need more is reported before
            its first validation. 0 is no limit.
    """

    def __init__(self, metric: str, limit_cpu_s: float) -> None:
        self.metric = metric
        self.limit_cpu_s = limit_cpu_s
        self.num_validations = 0
        self.last_step = -1
        self.last_validation: dict[str, float] | None = None
        # Step and CPU time of the first record that this process wrote.
        self._start: tuple[int, float] | None = None
        self._is_training = False

    def start_training(self) -> None:
        """Begins to count CPU time; records before this call are those of an earlier process."""
        self._is_training = True

    def hear(self, record: Record) -> None:
        """Reports a validation, or that the trial will take too long.

        Blocks until Tune has taken the report. That delays only the thread that follows the records.
        """
        self.last_step = int(record.get("last_step", self.last_step))
        step = int(record["step"])
        expected_cpu_s = self._expected_cpu_s(step)
        score = score_of(record, self.metric)
        if score is None:
            # An epoch of a very expensive trial may take longer than all of its time.
            is_first_epoch = self.num_validations == 0
            if is_first_epoch and 0 < self.limit_cpu_s < expected_cpu_s:
                tune.report({TIME: 0, SCORE: float("nan"), EXPECTED_CPU_S: expected_cpu_s})
            return
        self.num_validations += 1
        validation = {
            TIME: int(record["epoch"]) + 1,
            SCORE: score,
            EXPECTED_CPU_S: expected_cpu_s,
        }
        if step == self.last_step:
            self.last_validation = validation
        else:
            tune.report(validation)

    def _expected_cpu_s(self, step: int) -> float:
        """CPU time of the whole training if all steps are like those of this process."""
        if not self._is_training:
            return 0.0
        if self._start is None:
            # Counted from the first record on, because the corpus has been read by then.
            self._start = (step, time.process_time())
            return 0.0
        start_step, start_cpu_s = self._start
        steps_here = step - start_step
        if steps_here <= 0:
            return 0.0
        cpu_s_per_step = (time.process_time() - start_cpu_s) / steps_here
        return cpu_s_per_step * self.last_step

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
