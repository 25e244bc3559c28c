"""Items streamed through tasks of Ray Data: share of the CPUs, watchdog, and users' mistakes."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.extensions import ArrowPythonObjectArray
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from xmcray import logs
from xmcray.errors import ResourceError, XmcrayError
from xmcray.ray_adapter import cluster, private
from xmcray.ray_adapter.session import ray_session

READ_CPUS = 0.1  # a reading task mostly waits for the tasks that process its rows
RAY_DATA_ACTORS = ("AutoscalingCoordinator", "datasets_stats_actor")  # Ray Data's own hold no CPU
QUEUE_BYTES = 128 << 20  # data between the tasks; the reader pauses beyond it
_WAIT_FOR_NODE_S = 3600  # a machine in the cloud may take long to start

logger = logging.getLogger(__name__)


def stream_of(items: Iterable[Any]) -> Any:
    """Starts a Ray Data pipeline with these items. It needs no task, which could wait for a CPU."""
    return ray.data.from_blocks([boxed(item) for item in items])


def mapped(
    rows: Any,
    function: Callable[[Any], Iterator[Any]],
    cpus: float,
    concurrency: int | None = None,
) -> Any:
    """A Ray Data stage that turns each item into the items that `function` yields.

    An XmcrayError becomes the last item, because Ray would wrap an exception of a task in its own.

    Args:
        rows: a Ray Data dataset of boxed items.
        cpus: CPUs that each task reserves.
        concurrency: tasks at a time; None leaves it to Ray Data.
    """

    def stage(batch: pa.Table) -> Iterator[pa.Table]:
        try:
            item = _unboxed(batch)
            if isinstance(item, XmcrayError):
                raise item
            for result in function(item):
                yield boxed(result)
        except XmcrayError as error:
            yield boxed(error)

    compute = ray.data.TaskPoolStrategy(size=concurrency)
    return rows.map_batches(
        stage,
        batch_size=1,
        num_cpus=cpus,
        compute=compute,
        batch_format="pyarrow",
    )


def boxed(item: Any) -> pa.Table:
    """An item as a block of one row, in Ray's type for objects.

    Given a plain object, Ray Data tries Arrow's own types first, and the error that it then makes
    and drops holds the object's whole repr.
    """
    return pa.table({"item": ArrowPythonObjectArray.from_objects([item])})


def _unboxed(block: pa.Table) -> Any:
    return block["item"][0].as_py()


def share(parallelism: int | None) -> tuple[int, float]:
    """Tokenising tasks at a time, and the CPUs that each reserves.

    Together they reserve half of what is free, and never the last CPU. Ray Data checks for finished
    tasks ten times a second, so a finished task waits one or two checks for its successor. A
    quarter more tasks than CPUs keep the CPUs busy meanwhile.
    """
    free_cpus = cluster.free_cpus()
    num_tasks = parallelism or max(1, math.ceil(1.25 * free_cpus))
    cpus = min(0.5, 0.5 * free_cpus / num_tasks)
    return num_tasks, round(max(cpus, 0.01), 4)


@contextlib.contextmanager
def pipeline_session() -> Iterator[None]:
    """Connects to Ray for pipelines, on a cluster that has a CPU: an autoscaler may first have to start a node.

    Raises:
        ResourceError: there is no CPU after an hour.
    """
    with ray_session():
        _wait_for_first_node()
        yield


def _wait_for_first_node() -> None:
    if ray.cluster_resources().get("CPU") or not cluster.is_autoscaled():
        return
    logger.info("the cluster has no CPU yet; waiting for a node")
    if not cluster.started_cpu(_WAIT_FOR_NODE_S):
        raise ResourceError(
            f"the cluster has had no CPU for {_WAIT_FOR_NODE_S} s; expected its autoscaler to start a node that has"
            " some; look at `ray status`"
        )


@contextlib.contextmanager
def watched(stall_s: float, cpus: float = READ_CPUS) -> Iterator[list[float]]:
    """Sets Ray Data up for a pipeline; gives its heartbeat: the time of the last result.

    The heartbeat is a list of one number, which `results` replaces and the watchdog reads. With a
    CPU free, a pipeline without results is slow, not stuck: its tasks run, on a busy machine perhaps.

    Args:
        stall_s: seconds without a result, and without a free CPU, that end the pipeline.
        cpus: what a task of the pipeline reserves.
    """
    beat = [time.monotonic()]

    class Watchdog:
        """Ray Data's scheduling loop calls this about ten times a second."""

        def before_execution_starts(self, executor: Any) -> None: ...

        def after_execution_succeeds(self, executor: Any) -> None: ...

        def after_execution_fails(self, executor: Any, error: Exception) -> None: ...

        def on_execution_step(self, executor: Any) -> None:
            if time.monotonic() - beat[0] > stall_s and cluster.free_cpus() < cpus:
                raise ResourceError(
                    f"the data pipeline got no row for {stall_s:g} s; expected some free CPU, found {_cpu_holders()};"
                    " end what holds them, or give the pipeline a cluster with one CPU more"
                )

    context = copy.deepcopy(ray.data.DataContext.get_current())
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # one item per block: a chunk is the unit of work
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = limits.copy(object_store_memory=QUEUE_BYTES)
    callbacks: list[Any] = [Watchdog]
    context.custom_execution_callback_classes = callbacks
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # every failure is raised here, once
    warnings.filterwarnings("ignore", "The maximum number of concurrent tasks", UserWarning)
    with ray.data.DataContext.current(context):
        yield beat


def results(rows: Any, beat: list[float]) -> Iterator[Any]:
    """The items of a Ray Data pipeline.

    Raises:
        XmcrayError: one that is among the items, or that was raised in a task.
    """
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
        # Ray wraps an exception of a task, and may wrap it again.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, XmcrayError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is None:
            raise
        raise cause from None


def _cpu_holders() -> str:
    """What has reserved the cluster's CPUs, in one line."""
    total = ray.cluster_resources().get("CPU", 0.0)
    free = cluster.free_cpus()
    holders = [f"{free:g} of {total:g} CPUs free"]
    # The tables below are Ray's debugging aids: without them the message still has its number.
    with contextlib.suppress(Exception):
        counts = Counter(private.alive_actor_names())
        names = sorted(counts.keys() - set(RAY_DATA_ACTORS))
        holders += [f"{counts[name]} x actor {name}" for name in names]
    with contextlib.suppress(Exception):
        for group in ray.util.placement_group_table().values():
            bundles = group["bundles"].values()
            cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
            if group["state"] == "CREATED" and cpus:
                name = group["name"] or group["placement_group_id"][:8]
                holders.append(f"placement group {name} holds {cpus:g}")
    return ", ".join(holders)


def progress_bar(progress: bool) -> Progress:
    """Rows and rows/s on stderr; silent unless that is a terminal."""
    console = Console(stderr=True)
    is_shown = progress and console.is_terminal and not logs.as_json()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TextColumn("{task.speed:,.0f} rows/s"),
        TimeElapsedColumn(),
        console=console,
        disable=not is_shown,
    )
