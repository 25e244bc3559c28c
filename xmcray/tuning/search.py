"""Runs the trials of a sweep on Ray Tune.

Tune schedules actors, compares trials and ends those that are behind. It reads trials from the
sweep's folder, and every event is written there at once. So a restart begins a new Tune experiment
with the trials that have not ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import ray.exceptions
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from xmcray import draws, errors
from xmcray.errors import ConfigError, OutOfMemoryError, ResourceError, XmcrayError
from xmcray.ray_adapter import private
from xmcray.ray_adapter.session import ray_session
from xmcray.training.run_config import ClusterConfig
from xmcray.tuning.proposals import OptunaProposals, Proposals, RandomProposals
from xmcray.tuning.space import Values
from xmcray.tuning.sweep import FATAL, Sweep, Trial
from xmcray.tuning.trial import (
    EXPECTED_CPU_S,
    MISTAKE,
    SCORE,
    TIME,
    run_trial,
    wait_until_free,
)

# ASHA compares trials after a ninth and after a third of the epochs. A third of them continues.
REDUCTION = 3
# Memory that is reserved for an actor that trains with workers.
_WAITING_ACTOR_BYTES = 256 << 20
_UNLIMITED = 1 << 16  # trials whose index actors reserve nothing
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run has its own records
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupt ends the sweep as it ends any command
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}
OnEnd = Callable[[Trial], None]


@dataclass(frozen=True)
class Share:
    """The part of a cluster that one trial gets.

    Attributes:
        resources: resources of the trial's actor. The training reserves those of its workers.
        cluster: settings of the trial's section `cluster`.
        slots: trials that run at the same time.
    """

    resources: Mapping[str, float]
    cluster: Mapping[str, Any]
    slots: int


def run_sweep(
    sweep: Sweep,
    num_trials: int,
    keep: int,
    cluster: ClusterConfig,
    on_end: OnEnd,
) -> None:
    """Runs the trials below `num_trials` that have not ended.

    Args:
        sweep: folder of the sweep.
        num_trials: trials in all, earlier calls included.
        keep: number of best trials whose checkpoints stay.
        cluster: section `cluster` of each trial.
        on_end: called when a trial has ended.

    Raises:
        XmcrayError: a mistake that concerns more than one trial.
    """
    ended = {trial.number for trial in sweep.trials() if trial.state != "unfinished"}
    remaining = [number for number in range(num_trials) if number not in ended]
    if remaining:
        _run_remaining(sweep, Guide(sweep, remaining, keep, on_end), cluster)
    sweep.prune(keep)


def _run_remaining(sweep: Sweep, guide: Guide, cluster: ClusterConfig) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Without a dashboard, Tune leaks the placement groups of trials that it stops.
    with ray_session(dashboard=True):
        try:
            trial_share = share(cluster, ray.nodes(), _may_use_index(sweep))
            with eviction_errors():
                _tuner(sweep, guide, trial_share).fit()
            # Tune does not wait for the processes of trials that it stopped.
            for number in guide.values_by_trial:
                wait_until_free(sweep.run_path(number))
        finally:
            private.remove_placement_groups_of_this_job()
            shutil.rmtree(sweep.path / "ray", ignore_errors=True)
    if guide.problem is not None:
        raise guide.problem


@contextlib.contextmanager
def eviction_errors() -> Iterator[None]:
    """Says that Ray has ended a trial because the memory of its machine was full.

    Tune does not expect this end of an actor. It gives up, with an error of its own.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error.__cause__, ray.exceptions.OutOfMemoryError):
            raise
        raise OutOfMemoryError(
            "the memory of the machine was full, so Ray has ended a trial; end other programs or"
            " search smaller sizes (`xmcray plan` estimates what a training needs), then the same"
            " command continues the sweep"
        ) from error


def _tuner(sweep: Sweep, guide: Guide, trial_share: Share) -> tune.Tuner:
    bundle = dict(trial_share.resources)
    trainable = tune.with_resources(run_trial, tune.PlacementGroupFactory([bundle]))
    tune_config = tune.TuneConfig(
        search_alg=guide,
        scheduler=FIFOScheduler() if sweep.config.scheduler == "none" else asha(sweep),
        num_samples=len(guide.remaining),
        max_concurrent_trials=trial_share.slots,
    )
    max_failures = sweep.config.resolve({}).cluster.max_failures
    run_config = tune.RunConfig(
        name="tune",
        storage_path=str(sweep.path / "ray"),
        stop=TrialStopper(guide, sweep.config.trial_cpu_s),
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
    )
    return tune.Tuner(
        trainable,
        param_space={"sweep": str(sweep.path), "cluster": dict(trial_share.cluster)},
        tune_config=tune_config,
        run_config=run_config,
    )


def _may_use_index(sweep: Sweep) -> bool:
    """Whether a trial may search hard negatives or cluster queries."""
    names = ("hard", "cluster_size")
    negatives = sweep.config.settings["negatives"]
    return any(negatives[name] or f"negatives.{name}" in sweep.space for name in names)


def share(cluster: ClusterConfig, nodes: list[dict[str, Any]], may_use_index: bool = True) -> Share:
    """Divides the nodes of a cluster among trials.

    Args:
        cluster: section `cluster` of a trial; with 0 workers it trains in its own actor.
        nodes: as `ray.nodes()` lists them.
        may_use_index: whether a trial with workers may have index actors.

    Raises:
        ResourceError: the nodes do not suffice for one trial.
    """
    node_resources = [node["Resources"] for node in nodes if node["Alive"]]
    num_processes = max(cluster.workers, 1)
    num_gpus = sum(resources.get("GPU", 0) for resources in node_resources)
    needs_gpu = cluster.device == "gpu"
    if cluster.device == "auto":
        needs_gpu = num_gpus >= num_processes
    process_needs = {"CPU": cluster.cpus_per_worker or 1.0}
    if needs_gpu:
        process_needs["GPU"] = 1.0
    # A process cannot be split over nodes, so what is left over on a node does not count.
    num_places = sum(_processes_on(resources, process_needs) for resources in node_resources)
    if num_places < num_processes:
        available = "; ".join(_amounts(process_needs, resources) for resources in node_resources)
        raise ResourceError(
            f"no trial is feasible: it needs {num_processes} x"
            f" ({_amounts(process_needs, process_needs)}), the cluster's nodes have {available};"
            " lower --workers or cluster.cpus_per_worker, or set cluster.device=cpu"
        )
    settings = {
        "workers": cluster.workers,
        "device": "gpu" if needs_gpu else "cpu",
        "threads_per_process": cluster.threads_per_process or max(1, int(process_needs["CPU"])),
    }
    actor_needs: dict[str, float] = process_needs
    if cluster.workers:
        # The training reserves CPUs and GPUs for its workers itself, and the actor only waits. But
        # Tune has to reserve something.
        actor_needs = {"memory": _WAITING_ACTOR_BYTES}
    slots = num_places // num_processes
    if cluster.workers and may_use_index:
        slots = min(slots, _trials_with_index_actors(cluster, node_resources, needs_gpu))
    return Share(actor_needs, settings, slots)


def _processes_on(resources: Mapping[str, float], process_needs: Mapping[str, float]) -> int:
    """How many processes fit on a node."""
    # A little is added because 1 // 0.1 is 9.
    fits = [resources.get(name, 0) / amount + 1e-9 for name, amount in process_needs.items()]
    # The scarcest resource limits the node.
    return int(min(fits))


def _trials_with_index_actors(
    cluster: ClusterConfig, node_resources: Sequence[Mapping[str, float]], needs_gpu: bool
) -> int:
    """How many trials have room for an index actor of each worker, by the rules of `placement.place`."""
    if not cluster.index_may_use_gpu:
        return _UNLIMITED
    units = sum(resources.get(cluster.index_resource, 0) for resources in node_resources)
    if units:
        return max(1, int(units) // cluster.workers)
    gpus = sum(resources.get("GPU", 0) for resources in node_resources)
    if needs_gpu and gpus >= 2 * cluster.workers:
        return int(gpus) // (2 * cluster.workers)
    return _UNLIMITED


def _amounts(names: Mapping[str, float], resources: Mapping[str, float]) -> str:
    """Amounts of the named resources, such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def asha(sweep: Sweep) -> ASHAScheduler:
    """Makes the scheduler and tells it the validations of all trials that have ended."""
    # The default is for a space without a feasible trial, in which nothing is compared.
    epochs = max(_possible_epochs(sweep), default=1)
    grace = max(1, round(epochs / REDUCTION**2))
    scheduler = ASHAScheduler(
        time_attr=TIME,
        metric=SCORE,
        mode="max",
        grace_period=grace,
        reduction_factor=REDUCTION,
        # Just before a third rung: a trial that passes the second one is trained to the end.
        max_t=grace * REDUCTION**2 - 1,
        stop_last_trials=False,
    )
    no_controller: Any = None  # the scheduler does not use it
    for trial in sweep.trials():
        if trial.state in ("finished", "stopped"):
            # The scheduler wants no more of a trial than its name.
            past_trial: Any = SimpleNamespace(trial_id=trial.name)
            scheduler.on_trial_add(no_controller, past_trial)
            for validation in trial.curve:
                result = {TIME: validation.epochs, SCORE: validation.score}
                scheduler.on_trial_result(no_controller, past_trial, result)
    return scheduler


def _possible_epochs(sweep: Sweep) -> list[int]:
    """Numbers of epochs at the ends of the space."""
    names = [name for name in ("optim.epochs", "optim.stop_epoch") if name in sweep.space]
    ends = [sweep.space[name].values_to_check() for name in names]
    possible_epochs = []
    # Each end of one range with each end of the other; once without values if neither is searched.
    for corner in itertools.product(*ends):
        values = dict(zip(names, corner, strict=True))
        # Some ends do not fit together: a trial does not stop after its last epoch.
        with contextlib.suppress(ConfigError):
            possible_epochs.append(sweep.config.resolve(values).optim.num_epochs)
    return possible_epochs


class Guide(Searcher):
    """Tells Tune which trial comes next, and records the end of each trial in the sweep's folder.

    Args:
        sweep: folder of the sweep.
        remaining: numbers of the trials that have not ended. Those with values in the ledger keep
            them.
        keep: number of best trials whose checkpoints stay.
        on_end: called when a trial has ended.

    Attributes:
        problem: an error that ends the whole sweep; None if there is none.
        values_by_trial: values of the trials that have some, by number.
    """

    def __init__(self, sweep: Sweep, remaining: list[int], keep: int, on_end: OnEnd) -> None:
        super().__init__(metric=SCORE, mode="max")
        self.sweep = sweep
        self.remaining = remaining
        self.keep = keep
        self.on_end = on_end
        self.problem: XmcrayError | None = None
        self.values_by_trial = {trial.number: trial.values for trial in sweep.trials()}
        # Trials with values go first. If they waited, Optuna would not learn their scores.
        begun = [number for number in remaining if number in self.values_by_trial]
        new = [number for number in remaining if number not in self.values_by_trial]
        self._next_numbers = iter(begun + new)
        self._running: dict[str, int] = {}
        self._mistakes: dict[str, XmcrayError] = {}
        self._reasons: dict[str, str] = {}
        self.proposals = proposals(sweep)

    def suggest(self, trial_id: str) -> Any:
        """The number of the next trial, whose values are written to the ledger first."""
        number = next(self._next_numbers, None)
        if number is None or self.problem is not None:
            return Searcher.FINISHED
        try:
            if number not in self.values_by_trial:
                values = self._values_of(number)
                self.sweep.draw(number, values)
                self.values_by_trial[number] = values
        except XmcrayError as error:
            self.problem = error
            return Searcher.FINISHED
        self._running[trial_id] = number
        return {"number": number}

    def _values_of(self, number: int) -> Values:
        """The values of a new trial: given ones for the first trials, then sampled ones."""
        first = self.sweep.config.first
        if number < len(first):
            return dict(first[number])
        return self.proposals.propose(number)

    def note_error(self, trial_id: str, kind: str, message: str) -> None:
        """Takes note of an error that ended a trial. Some errors end the whole sweep.

        Args:
            trial_id: Tune's name of the trial.
            kind: class name of the error.
            message: message of the error.
        """
        error_type: type[XmcrayError] = getattr(errors, kind, XmcrayError)
        error = error_type(message)
        self._mistakes[trial_id] = error
        if isinstance(error, FATAL) and self.problem is None:
            self.problem = error

    def note_stop(self, trial_id: str, reason: str) -> None:
        """Takes note of why a trial is stopped. A trial without a reason was behind others.

        Args:
            trial_id: Tune's name of the trial.
            reason: a clause that follows "because".
        """
        self._reasons[trial_id] = reason

    def on_trial_complete(
        self,
        trial_id: str,
        result: Mapping[str, Any] | None = None,
        error: bool = False,
    ) -> None:
        """Records that a trial has finished, was stopped, or failed."""
        number = self._running.pop(trial_id, None)
        if number is None or self.problem is not None:
            return  # the sweep is about to end: the next command continues this trial
        try:
            # Before the end is recorded, so that this trial is not pruned yet: the process of a
            # stopped trial still trains for a moment.
            self.sweep.prune(self.keep)
            self._record_end(trial_id, number, error)
        except XmcrayError as problem:
            self.problem = problem
            return
        trial = self.sweep.trial(number)
        self.proposals.learn(number, trial.values, trial.score)
        self.on_end(trial)

    def _record_end(self, trial_id: str, number: int, died: bool) -> None:
        """Writes how a trial ended to the ledger."""
        mistake = self._mistakes.get(trial_id)
        if mistake is not None:
            self.sweep.end(number, "failed", str(mistake))
        elif died:
            traceback = self.sweep.traceback_path(number)
            reason = "its process died again and again"
            if traceback.exists():
                reason = f"of an error, see {traceback}"
            self.sweep.end(number, "failed", reason)
        elif (self.sweep.run_path(number) / "result.json").is_file():
            self.sweep.end(number, "finished")
        else:
            reason = self._reasons.get(trial_id, "it was behind others after as many epochs")
            self.sweep.end(number, "stopped", reason)

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Does nothing: the scheduler decides by results."""

    def save(self, checkpoint_path: str) -> None:
        """Writes an empty file, which Tune wants; the state is in the sweep's folder."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: the state is in the sweep's folder."""


def proposals(sweep: Sweep) -> Proposals:
    """The source of values that the sweep's definition names."""
    config = sweep.config
    if config.search == "random":
        return RandomProposals(sweep.space, config.seed, config.resolve)
    trials = sweep.trials()
    past = [(trial.values, trial.score) for trial in trials if trial.state != "unfinished"]
    # Each restart uses another seed. With the same one, Optuna would propose the first samples again.
    seed = draws.torch_seed(config.seed, "tune", len(trials))
    return OptunaProposals(sweep.space, seed, config.resolve, past)


class TrialStopper(Stopper):
    """Ends a trial that is too expensive, and all trials as soon as the sweep has a problem.

    Args:
        guide: gets the errors that end trials.
        limit_cpu_s: CPU seconds that a trial may take; 0 is no limit.
    """

    def __init__(self, guide: Guide, limit_cpu_s: float) -> None:
        self.guide = guide
        self.limit_cpu_s = limit_cpu_s

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Whether a trial ends with this result."""
        if MISTAKE in result:
            kind, message = result[MISTAKE]
            self.guide.note_error(trial_id, kind, message)
        expected_cpu_s = float(result.get(EXPECTED_CPU_S, 0.0))
        if not 0 < self.limit_cpu_s < expected_cpu_s:
            return False
        reason = (
            f"it would take {expected_cpu_s:,.0f} s of CPU time,"
            f" and --trial-cpu-s allows {self.limit_cpu_s:,.0f}"
        )
        self.guide.note_stop(trial_id, reason)
        return True

    def stop_all(self) -> bool:
        """Whether all trials end now."""
        return self.guide.problem is not None
