"""Items streamed through tasks of Ray Data: their share of the CPUs, a watchdog, and users' mistakes made in tasks."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.extensions import ArrowPythonObjectArray
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from xmcray import logs
from xmcray.errors import ResourceError, XmcrayError
from xmcray.ray_adapter import private

READ_CPUS = 0.1  # a reading task mostly waits for those who work on what it reads
RAY_DATA_ACTORS = (
    "AutoscalingCoordinator",
    "datasets_stats_actor",
)  # Ray Data's own, which hold no CPU
QUEUE_BYTES = 128 << 20  # what may lie between the tasks; the reader pauses beyond it


def mapped(
    rows: Any, function: Callable[[Any], Iterator[Any]], cpus: float, concurrency: int | None = None
) -> Any:
    """A Ray Data stage that turns each item into the items of `function`; an XmcrayError becomes the last item."""

    def stage(batch: pa.Table) -> Iterator[pa.Table]:
        try:
            item = _unboxed(batch)
            if isinstance(item, XmcrayError):
                raise item
            yield from map(boxed, function(item))
        except XmcrayError as error:
            yield boxed(error)

    compute = ray.data.TaskPoolStrategy(size=concurrency)
    return rows.map_batches(
        stage, batch_size=1, num_cpus=cpus, compute=compute, batch_format="pyarrow"
    )


def boxed(item: Any) -> pa.Table:
    """An item as a block of one row.

    Of Ray's type for objects: given a plain one, Ray Data tries Arrow's own types first, and the error that it then
    makes and drops holds the object's whole repr.
    """
    return pa.table({"item": ArrowPythonObjectArray.from_objects([item])})


def _unboxed(block: pa.Table) -> Any:
    return block["item"][0].as_py()


def share(parallelism: int | None) -> tuple[int, float]:
    """Tokenising tasks at a time, and the CPUs each reserves: together half of what is free, never the last CPU.

    Ray Data looks ten times a second for what has ended, and a task that has ended waits one or two looks for its
    successor: a quarter more tasks than CPUs keep these busy meanwhile.
    """
    free = float(ray.available_resources().get("CPU", 0.0))
    tasks = parallelism or max(1, math.ceil(1.25 * free))
    return tasks, round(max(min(0.5, 0.5 * free / tasks), 0.01), 4)


@contextlib.contextmanager
def watched(stall_s: float) -> Iterator[list[float]]:
    """Ray Data settings for the pipeline, and its heartbeat: the time at which the last result came."""
    beat = [time.monotonic()]

    class Watchdog:
        """Called by Ray Data's scheduling loop about ten times a second."""

        def before_execution_starts(self, executor: Any) -> None: ...

        def after_execution_succeeds(self, executor: Any) -> None: ...

        def after_execution_fails(self, executor: Any, error: Exception) -> None: ...

        def on_execution_step(self, executor: Any) -> None:
            if time.monotonic() - beat[0] > stall_s:
                raise ResourceError(
                    f"the data pipeline got no row for {stall_s:g} s; expected some free CPU, found {_cpu_holders()};"
                    " end what holds them, or give the pipeline a cluster with one CPU more"
                )

    context = copy.deepcopy(ray.data.DataContext.get_current())
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # one item per block: a chunk is the unit of work
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=QUEUE_BYTES
    )
    callbacks: list[Any] = [Watchdog]
    context.custom_execution_callback_classes = callbacks
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # every failure is raised here, once
    warnings.filterwarnings("ignore", "The maximum number of concurrent tasks", UserWarning)
    with ray.data.DataContext.current(context):
        yield beat


def results(rows: Any, beat: list[float]) -> Iterator[Any]:
    """The items of a Ray Data pipeline; an XmcrayError among them, or raised in a task, is raised here."""
    beat[0] = time.monotonic()
    try:
        for batch in rows.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
            item = _unboxed(batch)
            if isinstance(item, XmcrayError):
                raise item
            yield item
            beat[0] = time.monotonic()
    except XmcrayError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, XmcrayError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        raise cause from None


def _cpu_holders() -> str:
    """Who has reserved the cluster's CPUs, in one line."""
    total, free = (r.get("CPU", 0.0) for r in (ray.cluster_resources(), ray.available_resources()))
    found = [f"{free:g} of {total:g} CPUs free"]
    with contextlib.suppress(
        Exception
    ):  # the tables are for debugging only; the message is worth more than they are
        names = private.alive_actor_names()
        others = Counter(name for name in names if name not in RAY_DATA_ACTORS)
        found += [f"{count} x actor {name}" for name, count in sorted(others.items())]
    with contextlib.suppress(Exception):
        for group in ray.util.placement_group_table().values():
            cpus = sum(bundle.get("CPU", 0.0) for bundle in group["bundles"].values())
            if group["state"] == "CREATED" and cpus:
                found.append(
                    f"placement group {group['name'] or group['placement_group_id'][:8]} holds {cpus:g}"
                )
    return ", ".join(found)


def progress_bar(progress: bool) -> Progress:
    """Rows and rows/s on stderr; silent unless that is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TextColumn("{task.speed:,.0f} rows/s"),
        TimeElapsedColumn(),
    )
    return Progress(
        *columns, console=console, disable=logs.as_json() or not (progress and console.is_terminal)
    )
