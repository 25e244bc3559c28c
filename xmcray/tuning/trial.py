"""What runs in the actor of a trial: an ordinary training whose records are told to Ray Tune.

The training knows nothing of Tune. Its metrics.jsonl is followed from a thread, as a progress bar does, so a trial that
is resumed tells its old validations first: whoever compares trials then knows all of its past.
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

TIME, SCORE, MISTAKE = "epoch", "score", "mistake"  # of what is reported
_PATIENCE_S = 120.0  # for the process of a killed driver or actor to let go of its run


def run_trial(told: Mapping[str, Any]) -> None:
    """Trains one trial to its end, from its newest checkpoint if there is one. A function trainable of Ray Tune.

    A user's mistake is reported, for whoever sweeps to tell apart what ends one trial and what ends all of them.

    Args:
        told: "sweep", the folder; "number" of the trial; "cluster", settings of that section.
    """
    sweep, number = Sweep.open(told["sweep"]), int(told["number"])
    path = sweep.run_path(number)
    teller = _Teller(sweep.config.metric)
    try:
        wait_until_free(path)
        for record in read_records(path / "metrics.jsonl"):
            teller.hear(record)
        config = sweep.config.resolve(sweep.trial(number).values, told["cluster"])
        train(sweep.config.corpus, path, config, watch=teller.watch)
    except XmcrayError as error:
        tune.report({TIME: 0, SCORE: float("nan"), MISTAKE: [type(error).__name__, str(error)]})
        return
    except Exception:
        with contextlib.suppress(OSError):
            sweep.traceback_path(number).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    teller.finish()


class _Teller:
    """Tells Tune of validations; of the last one only when the run is finished, lest Tune end the trial before it is.

    Args:
        metric: key of the records.
    """

    def __init__(self, metric: str) -> None:
        self.metric, self.last_step = metric, -1
        self.held: dict[str, float] | None = None

    def hear(self, record: Record) -> None:
        """Reports a validation; blocks until Tune has taken it, which holds up nobody but the thread that follows."""
        self.last_step = int(record.get("last_step", self.last_step))
        if self.metric not in record:
            return
        told = {TIME: int(record["epoch"]) + 1, SCORE: float(record[self.metric])}
        if record["step"] == self.last_step:
            self.held = told
        else:
            tune.report(told)

    @contextlib.contextmanager
    def watch(self, run: Run) -> Iterator[None]:
        """Follows a run's records while it trains."""
        with following(run.path / "metrics.jsonl", self.hear):
            yield

    def finish(self) -> None:
        """Reports the last validation."""
        if self.held is not None:
            tune.report(self.held)


def wait_until_free(path: Path) -> None:
    """Waits while another process trains there: one that is about to end, as it was stopped or its driver killed."""
    path.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE_S
    with (path / "lock").open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.2)
