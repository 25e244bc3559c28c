"""Gauges that a training exports to Prometheus through Ray: those of rank 0 and of the negative
pool.

Each gauge has the run's id as its tag. Ray exports it as ray_NAME on the metrics port of the node,
as long as the process that set it lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Gauge

TRAINING = {  # by the name of the value in a record of metrics.jsonl
    "step": "Steps done.",
    "last_step": "Steps in all.",
    "epoch": "Epoch, counted from 0.",
    "loss": "Mean loss of a query since the last record.",
    "lr": "Learning rate of the encoder as a share of its peak.",
    "queries_per_s": "Training queries per second, without validation and checkpoints.",
    "step_s": "Seconds of a step.",
    "blocked_s": "Seconds that training waited for hard negatives since the last record.",
    "negatives_age": "Steps since the vectors behind the hard negatives in use were copied.",
    "negatives_version": "Version of the hard negatives in use.",
    "index_recall": "Share of the exact neighbours that the index behind the hard negatives in use finds.",
    "memory_mb": "Resident memory of rank 0 in MB.",
    "P@1": "Precision at 1 on the validation split.",
    "nDCG@5": "nDCG at 5 on the validation split.",
}
POOL = {
    "pool_queue": "Versions of hard negatives that were started and are not complete.",
    "pool_version": "Newest complete version of hard negatives.",
    "pool_refresh_s": "Seconds that building, searching and merging the newest version took.",
}


def exported(name: str) -> str:
    """Returns the name of a gauge in Prometheus."""
    return f"ray_{_plain(name)}"


class Gauges:
    """The gauges of one process.

    Args:
        run_id: their tag.
        descriptions: what each gauge shows, by name; `TRAINING` or `POOL`.
    """

    def __init__(self, run_id: str, descriptions: Mapping[str, str]) -> None:
        self._tags = {"run": run_id}
        self._gauges: dict[str, Gauge] = {}
        for name, description in descriptions.items():
            self._gauges[name] = Gauge(_plain(name), description=description, tag_keys=("run",))

    def show(self, values: Mapping[str, Any]) -> None:
        """Sets the gauges that have a value in `values`; other keys are ignored."""
        for name, gauge in self._gauges.items():
            if values.get(name) is not None:
                gauge.set(float(values[name]), self._tags)


def _plain(name: str) -> str:
    """Replaces "@", which Prometheus does not allow in names."""
    return f"xmcray_{name.replace('@', '_at_').lower()}"
