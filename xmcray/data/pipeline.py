"""Raw files to a corpus, as a streaming Ray Data pipeline: read -> validate -> tokenise -> write.

One task reads a split and streams chunks of one shard each, any number of tasks tokenise and pack chunks, and the
driver writes the finished files: at any time only a few chunks exist, whatever the number of rows, and nobody but the
driver needs the destination. Two passes: labels and a sample for the vocabulary first, then everything.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from xmcray.data.chunks import Chunk, Shard, pack_chunk, read_chunks, survey
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import Source
from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.data.writer import CorpusWriter, PrepareConfig, short_name, sorted_pairs, statistics_table
from xmcray.errors import ResourceError, XmcrayError
from xmcray.storage import new_artifact
from xmcray.types import Int64Array

__all__ = ["PrepareConfig", "prepare", "ray_session", "start_ray", "statistics_table"]

SAMPLE_TEXTS = 200_000  # texts the vocabulary is trained on
READ_CPUS = 0.1  # a reading task mostly waits for the tokenisers
NO_PAIRS: Int64Array = np.empty((0, 2), np.int64)
RAY_DATA_ACTORS = ("AutoscalingCoordinator", "datasets_stats_actor")  # Ray Data's own, which hold no CPU
QUEUE_BYTES = 128 << 20  # what may lie between the tasks; the reader pauses beyond it


def start_ray(num_cpus: int | None = None, object_store_bytes: int | None = None) -> bool:
    """Joins the cluster in RAY_ADDRESS, or starts a quiet local one on loopback with a token; once per process.

    Args:
        num_cpus: logical CPUs of a local cluster; the machine's if not given.
        object_store_bytes: shared memory of a local cluster; a share of the machine's if not given.

    Returns:
        Whether this call connected; False if the process already was.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return True
    # Ray turns token authentication on by itself unless RAY_AUTH_MODE says otherwise. (Setting that variable here would
    # be too late: it is read when ray is imported.) A token of our own keeps it from writing one into the home folder.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with _loopback() as address:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            _node_ip_address=address,
            **quiet,
        )
    return True


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """Ray for a block; a connection made here ends with it."""
    started = start_ray()
    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextlib.contextmanager
def _loopback() -> Iterator[str]:
    """Lets ray.init take 127.0.0.1 as it is; otherwise it is replaced by the machine's address and every port is open.

    `ray start --node-ip-address=127.0.0.1` needs no such help. Ray's version is pinned.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield "127.0.0.1"
    finally:
        services.resolve_ip_for_localhost = resolve


def prepare(
    source: Source,
    out: str | Path,
    *,
    name: str,
    licence: str = "unknown",
    parallelism: int | None = None,
    stall_s: float = 60.0,
    progress: bool = True,
    **settings: Any,
) -> Corpus:
    """Writes the corpus `out` from raw files; the bytes depend on `source`, `name`, `licence` and `settings` alone.

    Args:
        out: folder or URL that does not exist yet.
        parallelism: tokenising tasks at a time; as many as there are free CPUs if not given.
        stall_s: seconds without a finished chunk after which to give up.
        progress: show rows and rows/s on stderr if that is a terminal.
        settings: fields of PrepareConfig.

    Raises:
        DataError: malformed rows under on_error="fail", an empty split, files that contradict each other.
        ResourceError: nobody had a CPU for the pipeline.
        StorageError: `out` exists, or the disk is full.
    """
    config = PrepareConfig(**settings)
    about = {"name": name, "source": source.path.name, "format": source.format, "licence": licence, **asdict(config)}
    about["tokenizer"] = short_name(config.tokenizer)
    with ray_session(), new_artifact(out, KIND, about) as folder, _bar(progress) as bar:
        run, writer = _Pipeline(source, config, _share(parallelism), stall_s, bar), CorpusWriter(folder)
        tokenizer = run.tokenizer()
        for shard in run.shards(["labels"], tokenizer, {}, 0):
            writer.add(shard)
        filters = {split: sorted_pairs(source.filters(split)) for split in source.splits}
        for shard in run.shards(source.splits, tokenizer, filters, writer.num_rows["labels"]):
            writer.add(shard)
        writer.finish(source, config, name, licence, tokenizer)
    return Corpus.open(out, verify=False)


@dataclass(slots=True)
class _Pipeline:
    """The Ray side: runs readers and packers, and watches that they move.

    The share of the CPUs is taken once: just after a pass, Ray still counts some that are free again as taken.
    """

    source: Source
    config: PrepareConfig
    share: tuple[int, float]
    stall_s: float
    bar: Progress

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer asked for; for "wordpiece" a first pass samples texts."""
        config = self.config
        if config.tokenizer != "wordpiece":
            return from_transformer(config.tokenizer, config.max_len, config.label_max_len)
        task, sample = self.bar.add_task("sample", total=None), list[str]()
        read = functools.partial(
            survey, cap=SAMPLE_TEXTS, seed=config.seed, skip=config.on_error == "skip", block_rows=config.shard_rows
        )
        with _context(self.stall_s) as beat:
            for count, sample in _results(_map(ray.data.from_items([self.source]), read, READ_CPUS), beat):  # noqa: B007
                self.bar.advance(task, count)
        self.bar.update(task, description="vocabulary")
        tokenizer = train_wordpiece(sample, config.vocab_size, config.max_len, config.label_max_len)
        self.bar.remove_task(task)
        return tokenizer

    def shards(
        self, splits: Sequence[str], tokenizer: TextTokenizer, filters: Mapping[str, Int64Array], num_labels: int
    ) -> Iterator[Shard]:
        """Packed shards of the splits, in whatever order they are finished."""
        source, size, skip = self.source, self.config.shard_rows, self.config.on_error == "skip"
        shared = ray.put((tokenizer.to_files(), dict(filters)))

        def read(split: str) -> Iterator[Chunk]:
            return read_chunks(source, split, num_labels, size, skip)

        def pack(chunk: Chunk) -> Iterator[Shard]:
            packer, pairs = _packer(shared)
            yield pack_chunk(chunk, packer, pairs.get(chunk.split, NO_PAIRS), num_labels, size)

        task = self.bar.add_task(" + ".join(splits), total=None)
        tasks, cpus = self.share
        with _context(self.stall_s) as beat:
            start = ray.data.from_items(list(splits), override_num_blocks=len(splits))
            for shard in _results(_map(_map(start, read, READ_CPUS), pack, cpus, concurrency=tasks), beat):
                self.bar.advance(task, shard.num_rows)
                yield shard
        self.bar.update(task, total=1, completed=1)


@functools.lru_cache(maxsize=1)
def _packer(shared: Any) -> tuple[TextTokenizer, Mapping[str, Int64Array]]:
    """In a task: tokenizer and filters, unpacked once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    files, filters = ray.get(shared)
    return TextTokenizer.from_files(files), filters


def _map(rows: Any, function: Callable[[Any], Iterator[Any]], cpus: float, concurrency: int | None = None) -> Any:
    """A Ray Data stage that turns each item into the items of `function`; an XmcrayError becomes the last item."""

    def stage(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for item in batch["item"]:
            try:
                if isinstance(item, XmcrayError):
                    raise item
                for result in function(item):
                    yield {"item": _boxed(result)}
            except XmcrayError as error:
                yield {"item": _boxed(error)}

    compute = ray.data.TaskPoolStrategy(size=concurrency)
    return rows.map_batches(stage, batch_size=1, num_cpus=cpus, compute=compute, batch_format="numpy")


def _boxed(item: Any) -> Any:
    box = np.empty(1, object)
    box[0] = item
    return box


def _share(parallelism: int | None) -> tuple[int, float]:
    """Tokenising tasks at a time, and the CPUs each reserves: together half of what is free, never the last CPU."""
    free = float(ray.available_resources().get("CPU", 0.0))
    tasks = parallelism or max(1, int(free))
    return tasks, round(max(min(0.5, 0.5 * free / tasks), 0.01), 4)


@contextlib.contextmanager
def _context(stall_s: float) -> Iterator[list[float]]:
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


def _results(rows: Any, beat: list[float]) -> Iterator[Any]:
    """The items of a Ray Data pipeline; an XmcrayError among them, or raised in a task, is raised here."""
    beat[0] = time.monotonic()
    try:
        for batch in rows.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
            item = batch["item"][0]
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
    with contextlib.suppress(Exception):  # the tables are for debugging only; the message is worth more than they are
        from ray._private import state

        names = [actor["Name"] or actor["ActorClassName"] for actor in state.actors(actor_state_name="ALIVE").values()]
        others = Counter(name for name in names if name not in RAY_DATA_ACTORS)
        found += [f"{count} x actor {name}" for name, count in sorted(others.items())]
    with contextlib.suppress(Exception):
        for group in ray.util.placement_group_table().values():
            cpus = sum(bundle.get("CPU", 0.0) for bundle in group["bundles"].values())
            if group["state"] == "CREATED" and cpus:
                found.append(f"placement group {group['name'] or group['placement_group_id'][:8]} holds {cpus:g}")
    return ", ".join(found)


def _bar(progress: bool) -> Progress:
    """Rows and rows/s on stderr; silent unless that is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TextColumn("{task.speed:,.0f} rows/s"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not (progress and console.is_terminal))
