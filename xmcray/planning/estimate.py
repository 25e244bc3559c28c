"""Bytes, seconds and money of a training, from a trace of its step and the rates of a machine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from xmcray.planning import sizes
from xmcray.planning.data_size import DataSize
from xmcray.planning.device_search import ANYWHERE, APART, Spread
from xmcray.planning.devices import assumptions
from xmcray.planning.rates import DEVICE_PARTS, Rates
from xmcray.planning.refresh import Refresh, shared_cores_s, shared_device_s
from xmcray.planning.stand_in import epoch_queries
from xmcray.planning.trace import Trace, on_line, trace
from xmcray.retrieval.exact import device_score_bytes
from xmcray.retrieval.index_spec import device_bytes as index_device_bytes
from xmcray.retrieval.index_spec import num_lists
from xmcray.training.run_config import RunConfig

SPARE = 0.95  # of a memory that can be planned with
_CUDA_BYTES = 1 << 30  # context, kernels, and what the allocator cannot give out
_DRIVER_BYTES = 2 << 30  # the driver, the coordinator and Ray's own processes
REFRESH = "refresh of the negatives, while training goes on"
FIRST_REFRESH = "the first refresh, of rows close to their start"
SEARCH = "of which: searching it"
DEVICE_SEARCH = "of which: index and search on the devices, next to the steps"
MERGE = "of which: merging what the shards found"
INDEX = "index actor, while it searches"
BETWEEN_STEPS = "validations and versions, beyond a step"
STEPS = "the steps of an epoch"
WHOLE = "the whole training"
_SNAPSHOT = "copy of a checkpoint that is being written"
_CAUTION = 1.5  # of a time that decides whether a run can be repeated
_MACHINE_DEVICES = 8  # of most machines with such devices
_TRACED_LABELS = 2_000_000  # of a rank; of more, two traces give a straight line
_TRACED_PIECES = 4  # the same of the pieces in which a rank encodes all its labels
_FEWEST_TRACED = 1024  # labels, so that a batch has its positives among them


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training takes.

    Attributes:
        method: Name of the method.
        device: Name of the device.
        source: Where the device's rates come from.
        workers: Training processes.
        labels: L.
        queries: N.
        dim: D, width of the indexed vectors.
        batch: G.
        memory_bytes: Memory of the device; that of a CPU's machine is shared by all workers.
        limit_bytes: What a worker may use: without reserves, and without its index actor where both
            share the machine.
        device_bytes: Bytes of one worker on its device, by part; empty without a GPU.
        host_bytes: Bytes of one worker's process, by part.
        index_bytes: Bytes of an index actor at its largest; there is one per worker.
        cluster_bytes: Bytes of the negatives' coordinator while it clusters queries.
        index_on_disk: Bytes of all indexes of a bundle, without the vectors.
        object_store: Bytes of Ray's object store.
        ledger: Bytes of the negatives' ledger.
        checkpoint: Bytes of a checkpoint.
        checkpoints: Number of checkpoints that exist at a time.
        step_s: Seconds of one step, by kind of work.
        steps_per_epoch: Steps of an epoch.
        epochs: As configured.
        run_s: Seconds of everything that is larger than a step.
        cost: Cost of all workers; None without a price.
        assumptions: What was not measured, in words.
        advice: Settings to change, in words.
    """

    method: str
    device: str
    source: str
    workers: int
    labels: int
    queries: int
    dim: int
    batch: int
    memory_bytes: int
    limit_bytes: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    index_bytes: int
    cluster_bytes: int
    index_on_disk: int
    object_store: int
    ledger: int
    checkpoint: int
    checkpoints: int
    step_s: dict[str, float]
    steps_per_epoch: int
    epochs: int
    run_s: dict[str, float]
    cost: float | None
    assumptions: list[str]
    advice: list[str]

    @property
    def worker_parts(self) -> dict[str, int]:
        """What has to fit a worker's memory: its device, or its process if it has no device."""
        return self.device_bytes or self.host_bytes

    @property
    def worker_bytes(self) -> int:
        """The sum of `worker_parts`."""
        return sum(self.worker_parts.values())

    @property
    def fits(self) -> bool:
        """Whether a worker has the memory that it needs."""
        return self.worker_bytes <= self.limit_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.step_s.values())

    @property
    def total_s(self) -> float:
        """Seconds of all epochs."""
        return self.run_s[WHOLE]


@dataclass(frozen=True)
class _Training:
    """What is planned, and the numbers that several parts of a plan need.

    Attributes:
        config: Settings of the training.
        data: Its data in numbers.
        rates: Rates of the device.
        workers: Number of workers.
        index_on_device: Whether index actors search on the workers' devices.
    """

    config: RunConfig
    data: DataSize
    rates: Rates
    workers: int
    index_on_device: bool = False

    @property
    def rows(self) -> int:
        """Labels of the worker that has most."""
        return math.ceil(self.data.num_labels / self.workers)

    @property
    def queries(self) -> int:
        """Queries of an epoch."""
        return epoch_queries(self.config, self.data)

    @property
    def batch(self) -> int:
        """Queries of a step."""
        return min(self.config.optim.batch_size, self.queries)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.queries / self.batch)

    @property
    def epochs(self) -> int:
        """Epochs that are trained, of which a run may stop early."""
        return self.config.optim.num_epochs

    @property
    def num_versions(self) -> int:
        """Versions of the negatives."""
        negatives = self.config.negatives
        if not negatives.refreshed:
            return 0
        return negatives.schedule_of.num_versions(self.epochs)

    @property
    def num_validations(self) -> int:
        """Validations during the training, of which there is one after the last step."""
        every = self.config.log.validate_every or self.epochs
        return math.ceil(self.epochs / every)

    @property
    def found(self) -> int:
        """Labels that a shard finds for a query."""
        return sizes.num_found(self.config.negatives, self.data.positives_per_query)

    @property
    def traced_labels(self) -> int:
        """The most labels of a rank of which a step is traced."""
        piece = self.config.optim.micro_batch
        if piece and getattr(self.config.method, "columns", "") == "all":
            # Each piece of a step takes time to trace, and each is like the others.
            few = max(_FEWEST_TRACED, _TRACED_PIECES * piece)
            return min(_TRACED_LABELS, few)
        return _TRACED_LABELS

    @property
    def first_spread(self) -> Spread:
        """How the rows lie that the first version of the negatives indexes."""
        starts_anywhere = getattr(self.config.method, "init", "") in ("random", "zeros")
        return ANYWHERE if starts_anywhere else APART


def estimate(
    config: RunConfig,
    data: DataSize,
    rates: Rates,
    workers: int | None = None,
    memory_bytes: int | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Plans a training whether it fits or not; arguments as for `plan.plan`."""
    workers = max(1, config.cluster.workers if workers is None else workers)
    training = _Training(config, data, rates, workers)
    traced = _traced(training)
    dim = traced.index_dim
    negatives = config.negatives
    limit_bytes = int(SPARE * rates.memory_bytes) if memory_bytes is None else memory_bytes
    device_bytes = _device_bytes(training, traced)
    index_bytes = _device_index_bytes(training, dim)
    if index_bytes and sum(device_bytes.values()) + index_bytes <= limit_bytes:
        device_bytes[INDEX] = index_bytes
        training = dataclasses.replace(training, index_on_device=True)
    actor_bytes = _actor_bytes(training, dim)
    file_bytes = 0
    if negatives.hard:
        file_bytes = sizes.index_bytes(negatives.index, training.rows, dim)
    cluster_bytes = 0
    if negatives.cluster_size:
        cluster_bytes = sizes.cluster_bytes(training.queries, dim)
    if memory_bytes is None and not rates.on_gpu:
        # Workers and index actors share the machine with the driver and the coordinator.
        shared_bytes = limit_bytes - _DRIVER_BYTES - cluster_bytes
        limit_bytes = shared_bytes // workers - actor_bytes
    run_s = _run_seconds(training, traced)
    cost = None
    if price_per_hour is not None:
        cost = price_per_hour * (workers * run_s[WHOLE] / 3600)
    return Plan(
        method=config.method_name,
        device=rates.device,
        source=rates.source,
        workers=workers,
        labels=data.num_labels,
        queries=data.num_train,
        dim=dim,
        batch=training.batch,
        memory_bytes=memory_bytes or rates.memory_bytes,
        limit_bytes=limit_bytes,
        device_bytes=device_bytes,
        host_bytes=_host_bytes(training, traced),
        index_bytes=actor_bytes,
        cluster_bytes=cluster_bytes,
        index_on_disk=file_bytes * workers,
        object_store=sizes.object_store_bytes(rates.threads, data),
        ledger=sizes.ledger_bytes(
            negatives, data.num_labels, training.queries, dim, workers, training.found
        ),
        checkpoint=traced.shared_state + traced.label_state * data.num_labels // training.rows,
        checkpoints=config.log.keep + 1,
        step_s=traced.step_s,
        steps_per_epoch=training.steps,
        epochs=training.epochs,
        run_s=run_s,
        cost=cost,
        assumptions=_assumptions(training),
        advice=_advice(training, run_s),
    )


def _traced(training: _Training) -> Trace:
    """One trace, or a straight line through two if a rank has very many labels."""
    config = training.config
    data = training.data
    rates = training.rates
    workers = training.workers
    num_labels = training.traced_labels * workers
    if data.num_labels <= num_labels:
        return trace(config, data, rates, workers)
    few = dataclasses.replace(data, num_labels=num_labels, label_share_L=None)
    more = dataclasses.replace(few, num_labels=2 * num_labels)
    line = on_line(
        vars(trace(config, few, rates, workers)),
        vars(trace(config, more, rates, workers)),
        distance=data.num_labels / num_labels - 1,
    )
    return Trace(**line)


def _device_index_bytes(training: _Training, dim: int) -> int:
    """Bytes of an index on the worker's GPU; 0 if it cannot be there."""
    config = training.config
    negatives = config.negatives
    may_be_there = negatives.suits_gpu and config.cluster.index_may_use_gpu
    if not training.rates.on_gpu or not may_be_there:
        return 0
    return _CUDA_BYTES + index_device_bytes(negatives.index, training.rows, dim)


def _actor_bytes(training: _Training, dim: int) -> int:
    """Bytes of the process that makes negatives and clusters for a worker."""
    negatives = training.config.negatives
    num_bytes = 0
    if negatives.refreshed:
        # Clusters alone are made by the same actors, without an index.
        num_bytes += training.rates.process_bytes[0]
    if negatives.hard:
        factory = "Flat" if training.index_on_device else negatives.index
        num_bytes += sizes.index_actor_bytes(factory, training.rows, dim)
    return num_bytes


def _device_bytes(training: _Training, traced: Trace) -> dict[str, int]:
    """Bytes of one worker on its GPU, by part; empty without a GPU."""
    if not training.rates.on_gpu:
        return {}
    num_bytes = {"CUDA": _CUDA_BYTES, **_trained_bytes(traced)}
    # Between steps, label vectors and scores may take the place of a step's activations.
    other_bytes = max(traced.index_rows_bytes, _validation_bytes(training, traced))
    if other_bytes > traced.step_bytes:
        num_bytes[BETWEEN_STEPS] = other_bytes - traced.step_bytes
    return num_bytes


def _validation_bytes(training: _Training, traced: Trace) -> int:
    """Bytes of a device that a validation takes: label vectors and all held-out queries or scores."""
    num_queries = training.config.data.num_held_out(training.data.num_train)
    if not num_queries:
        return 0
    query_bytes = num_queries * traced.index_dim * sizes.VALUE
    # Queries leave the device before labels are scored.
    return traced.answer_rows_bytes + max(query_bytes, device_score_bytes(training.rows))


def _trained_bytes(traced: Trace) -> dict[str, int]:
    """Bytes of what is trained, and of what a step adds to it."""
    return {**traced.tensors, "activations and scores": traced.step_bytes}


def _host_bytes(training: _Training, traced: Trace) -> dict[str, int]:
    """Bytes of one worker's process, by part."""
    config = training.config
    data = training.data
    num_query_ids = data.num_train
    if config.data.augment_with_labels:
        num_query_ids += data.num_labels
    static_bytes, transformer_bytes = training.rates.process_bytes
    host = {
        "process": static_bytes if config.encoder.name == "static" else transformer_bytes,
        "tokens": sizes.corpus_bytes(data, num_query_ids, config.negatives.cluster_size > 0),
        "negatives": sizes.shortlist_bytes(config.negatives, num_query_ids),
    }
    snapshot_bytes = traced.shared_state + traced.label_state
    if training.rates.on_gpu:
        host["copies for start and versions"] = traced.copy_bytes
        host[_SNAPSHOT] = snapshot_bytes
        return host
    # Label vectors are never copied during a step: the copies may take the step's place.
    host["copies for start and versions"] = max(0, traced.copy_bytes - traced.step_bytes)
    # Tensors of a step differ in size from those of the step before, so some do not fit into the
    # gaps that those left in the heap. Measured: DEXML's and PRIME's steps leave gaps as large as
    # they are.
    host["gaps between activations"] = traced.step_bytes
    steps_between = config.log.checkpoint_every or training.steps
    if steps_between >= training.epochs * training.steps:
        # No step follows the only checkpoint: its copy may take the step's place.
        snapshot_bytes = max(0, snapshot_bytes - traced.step_bytes)
    host[_SNAPSHOT] = snapshot_bytes
    return {**host, **_trained_bytes(traced)}


def _run_seconds(training: _Training, traced: Trace) -> dict[str, float]:
    """Seconds of everything that is larger than a step."""
    log = training.config.log
    training_s = training.steps * sum(traced.step_s.values())
    seconds = _refresh_seconds(training, traced, training_s)
    late_s = _late_s(training, seconds, training_s, _busy(traced))
    seconds[STEPS] = training_s
    validation_s = _validation_s(training, traced)
    seconds["one validation"] = validation_s
    # Some epochs have neither a version nor a validation: what an epoch takes is the mean.
    between_s = training.num_versions * late_s + training.num_validations * validation_s
    epoch_s = training_s + between_s / training.epochs
    # A worker writes its share of the label rows; the first one also writes the encoder.
    checkpoint_s = (traced.shared_state + traced.label_state) / training.rates.disk_bytes_s
    seconds["one checkpoint"] = checkpoint_s
    saves = 1.0
    if log.checkpoint_every:
        saves = max(saves, training.steps / log.checkpoint_every)
    # It is written in the background; training waits only for one that the next one overtakes.
    epoch_s = max(epoch_s, saves * checkpoint_s)
    seconds["one epoch"] = epoch_s
    first_late_s = 0.0
    if _waits(training):
        first_s = seconds.get(FIRST_REFRESH, 0.0)
        first_late_s = max(0.0, first_s - max(seconds.get(REFRESH, 0.0), training_s))
    seconds[WHOLE] = training.epochs * epoch_s + first_late_s
    return seconds


def _waits(training: _Training) -> bool:
    """Whether training waits for a version that is late."""
    return training.config.negatives.schedule != "eager"


def _late_s(
    training: _Training, seconds: dict[str, float], training_s: float, busy: float
) -> float:
    """Seconds by which a version makes training longer.

    Args:
        training: What is planned.
        seconds: Those of `_refresh_seconds`.
        training_s: Seconds of the steps of an epoch.
        busy: Share of a step in which the device works.
    """
    late_s = 0.0
    if _waits(training):
        # Only for what a version takes longer than an epoch.
        late_s = max(0.0, seconds.get(REFRESH, 0.0) - training_s)
    if DEVICE_SEARCH in seconds:
        # Or, if that is more, for the turns that the search takes on the device of the steps, which
        # are as long as those of the steps meanwhile.
        late_s = max(late_s, seconds[DEVICE_SEARCH] * busy / (1 + busy))
    return late_s


def _busy(traced: Trace) -> float:
    """Share of a step in which the device works, and does not wait for the host or other ranks."""
    device_s = sum(traced.step_s.get(part, 0.0) for part in DEVICE_PARTS)
    return device_s / sum(traced.step_s.values())


def _refresh_seconds(training: _Training, traced: Trace, epoch_s: float) -> dict[str, float]:
    """Seconds of a version of the negatives, while an epoch trains; nothing without versions."""
    config = training.config
    if not training.num_versions:
        return {}
    work = Refresh(
        rates=training.rates,
        config=config.negatives,
        rows=training.rows,
        dim=traced.index_dim,
        queries=training.queries,
        found=training.found,
        on_device=training.index_on_device,
    )
    if training.index_on_device:

        def search_s(spread: Spread) -> float:
            """Seconds of index and search next to an epoch of training."""
            device_s = work.build_s() + work.search_s(spread)
            return shared_device_s(device_s, epoch_s, _busy(traced))

        return {
            REFRESH: search_s(APART) + work.host_s(),
            DEVICE_SEARCH: search_s(APART),
            MERGE: work.merge_s(),
            FIRST_REFRESH: search_s(training.first_spread) + work.host_s(),
        }

    def total_s(spread: Spread) -> float:
        """Seconds of a version next to an epoch of training."""
        return shared_cores_s(
            work.total_s(spread),
            epoch_s,
            training.rates,
            training.workers,
            config.cluster.index_nice,
        )

    seconds = {REFRESH: total_s(APART)}
    if config.negatives.hard:
        seconds["of which: building an index"] = work.build_s()
        seconds[SEARCH] = work.search_s(APART)
        seconds[MERGE] = work.merge_s()
    seconds[FIRST_REFRESH] = total_s(training.first_spread)
    return seconds


def _validation_s(training: _Training, traced: Trace) -> float:
    """Held-out queries against all labels; a method may answer with encoded label texts."""
    num_queries = training.config.data.num_held_out(training.data.num_train)
    if not num_queries:
        return 0.0
    num_texts = num_queries / training.workers + traced.encoded_labels
    flop = 2.0 * traced.index_dim * num_queries * training.rows
    return num_texts * traced.forward_s + flop / training.rates.search_flop_s


def _advice(training: _Training, run_s: dict[str, float]) -> list[str]:
    """What a run of this size needs that the defaults do not give it, a sentence each."""
    negatives = training.config.negatives
    if not training.num_versions or not _waits(training):
        return []
    # A version is built in one epoch, for use in the next.
    slowest_refresh_s = max(run_s[REFRESH], run_s.get(FIRST_REFRESH, 0.0))
    late_s = slowest_refresh_s - run_s[STEPS]
    if late_s <= negatives.wait_s:
        return []
    hours = math.ceil(_CAUTION * late_s / 3600)
    return [
        f"a version of the negatives is up to {late_s / 3600:.3g} h late: set"
        f" negatives.wait_s={3600 * hours}, or training goes on with an older one"
    ]


def _assumptions(training: _Training) -> list[str]:
    """What was not measured or counted, a sentence each."""
    rates = training.rates
    notes = list(training.data.assumptions)
    if rates.source == "measured":
        notes.append(
            f"{rates.threads} threads in each process (cluster.threads_per_process), as where all"
            " share this machine"
        )
    if rates.source == "published specs":
        notes += assumptions()
        if training.workers > _MACHINE_DEVICES:
            notes.append(
                "workers of different machines exchange as fast as devices of one machine, which few"
                " networks do"
            )
    if training.config.negatives.hard and training.num_versions:
        if num_lists(training.config.negatives.index, training.rows):
            note = (
                f"a search of an index with lists visits {APART.visited:.0%} of them, and"
                f" {APART.long:.0%} of the rows with every query"
            )
            if training.first_spread == ANYWHERE:
                note += (
                    f"; that of the first version {ANYWHERE.visited:.0%}, because rows are close to"
                    " their start"
                )
            notes.append(note)
        if training.index_on_device:
            notes.append(
                "index actors search on the workers' devices, where steps and searches take turns;"
                " they merge on their own cores"
            )
        else:
            shared = "the cores that workers leave, and those of workers that wait for them"
            notes.append(f"index actors have {shared if rates.cores else 'their own cores'}")
    if training.rows > training.traced_labels:
        notes.append("what a step takes grows along a straight line with the number of labels")
    return notes
