"""Trials on Ray Tune: which ones run, at the same time, and until when.

Tune schedules actors, compares trials and ends those that are behind; what it needs to know comes from the sweep's
folder, and what happens is written there at once. So a restart starts Tune anew with the trials that have not ended.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from xmcray import errors
from xmcray.errors import ResourceError, RunError, StorageError, XmcrayError
from xmcray.ray_adapter import private
from xmcray.ray_adapter.session import ray_session
from xmcray.training.run import ClusterConfig
from xmcray.tuning.proposals import OptunaProposals, Proposals, RandomProposals
from xmcray.tuning.space import Values
from xmcray.tuning.sweep import Sweep, Trial
from xmcray.tuning.trial import MISTAKE, SCORE, TIME, run_trial, wait_until_free

REDUCTION = 3  # of the trials at a rung a third goes on; there is one at a ninth and one at a third of the epochs
_WAITING_BYTES = 256 << 20  # of an actor that trains with workers
_OF_ALL = (ResourceError, StorageError)  # mistakes that every other trial would make too
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run has its own records
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupt ends the sweep as it ends any command
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}
Ended = Callable[[Trial], None]


@dataclass(frozen=True)
class Share:
    """What one trial gets of the cluster.

    Attributes:
        resources: of its actor; those of workers are reserved by the training itself.
        cluster: its settings of that section. slots: trials at the same time.
    """

    resources: Mapping[str, float]
    cluster: Mapping[str, Any]
    slots: int


def run_sweep(
    sweep: Sweep, num_trials: int, keep: int, cluster: ClusterConfig, on_end: Ended
) -> None:
    """Runs the trials below `num_trials` that have not ended.

    Args:
        keep: best trials whose checkpoints stay. cluster: of each trial. on_end: called when a trial has ended.
    Raises:
        XmcrayError: a mistake that is not one of a trial alone, or no trial came to anything.
    """
    ended = {trial.number for trial in sweep.trials() if trial.state != "unfinished"}
    if left := [number for number in range(num_trials) if number not in ended]:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        guide = Guide(sweep, left, keep, on_end)
        with ray_session(
            dashboard=True
        ):  # without a dashboard Tune leaks placement groups of trials it stops
            try:
                _fit(sweep, guide, share(cluster, ray.nodes()))
                for (
                    number
                ) in guide.drawn:  # Tune does not wait for the processes of trials that it stopped
                    wait_until_free(sweep.run_path(number))
            finally:
                private.remove_placement_groups_of_this_job()
                shutil.rmtree(sweep.path / "ray", ignore_errors=True)
        if guide.problem is not None:
            raise guide.problem
    sweep.prune(keep)
    failed = [trial for trial in sweep.trials() if trial.state == "failed"]
    if len(failed) == num_trials:
        raise RunError(
            f"none of {num_trials} trials finished; the first failed because {failed[0].message}"
        )


def _fit(sweep: Sweep, guide: Guide, of_trial: Share) -> None:
    scheduler = FIFOScheduler() if sweep.config.scheduler == "none" else asha(sweep)
    config = {"sweep": str(sweep.path), "cluster": dict(of_trial.cluster)}
    tune.Tuner(
        tune.with_resources(run_trial, tune.PlacementGroupFactory([dict(of_trial.resources)])),
        param_space=config,
        tune_config=tune.TuneConfig(
            search_alg=guide,
            scheduler=scheduler,
            num_samples=len(guide.left),
            max_concurrent_trials=of_trial.slots,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(sweep.path / "ray"),
            stop=_Emergency(guide),
            failure_config=tune.FailureConfig(
                max_failures=sweep.config.resolve({}).cluster.max_failures
            ),
            verbose=0,
        ),
    ).fit()


def share(cluster: ClusterConfig, nodes: list[dict[str, Any]]) -> Share:
    """Divides the nodes of a cluster among trials.

    Args:
        cluster: of a trial; with 0 workers it trains in its own actor.
        nodes: as `ray.nodes()` lists them.
    Raises:
        ResourceError: they do not suffice for one trial.
    """
    have = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(node.get("GPU", 0) for node in have)
    processes = max(cluster.workers, 1)
    gpu = cluster.device == "gpu" or (cluster.device == "auto" and gpus >= processes)
    each = {"CPU": cluster.cpus_per_worker or 1.0, **({"GPU": 1.0} if gpu else {})}
    room = sum(
        int(min(node.get(name, 0) // amount for name, amount in each.items())) for node in have
    )
    if room < processes:
        found = "; ".join(
            ", ".join(f"{node.get(name, 0):g} {name}" for name in each) for node in have
        )
        asked = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
        raise ResourceError(
            f"no trial is feasible: it asks for {processes} x ({asked}), the cluster's nodes have {found}; lower"
            " --workers or cluster.cpus_per_worker, or set cluster.device=cpu"
        )
    threads = cluster.threads_per_process or max(1, int(each["CPU"]))
    settings = {
        "workers": cluster.workers,
        "device": "gpu" if gpu else "cpu",
        "threads_per_process": threads,
    }
    # beside workers, whose CPUs the training reserves itself, the actor only waits; but Tune wants to reserve something
    return Share(
        {"memory": _WAITING_BYTES} if cluster.workers else each, settings, room // processes
    )


def asha(sweep: Sweep) -> ASHAScheduler:
    """The scheduler, which knows the validations of all trials that have ended."""
    epochs = max(config.optim.stop_epoch or config.optim.epochs for config in _extremes(sweep))
    grace = max(1, round(epochs / REDUCTION**2))
    scheduler = ASHAScheduler(
        time_attr=TIME,
        metric=SCORE,
        mode="max",
        grace_period=grace,
        reduction_factor=REDUCTION,
        max_t=grace * REDUCTION**2
        - 1,  # tells where the rungs end: who passed a third of the way is trained to the end
        stop_last_trials=False,
    )
    nobody: Any = None  # of Tune's controller, which the scheduler does not ask
    for trial in sweep.trials():
        if trial.state in ("finished", "stopped"):
            past: Any = _Past(trial.name)
            scheduler.on_trial_add(nobody, past)
            for epoch, score in trial.curve:
                scheduler.on_trial_result(nobody, past, {TIME: epoch, SCORE: score})
    return scheduler


@dataclass(frozen=True)
class _Past:
    """A trial as the scheduler knows it."""

    trial_id: str


def _extremes(sweep: Sweep) -> list[Any]:
    """Configurations with the fewest and the most epochs."""
    names = [name for name in ("optim.epochs", "optim.stop_epoch") if name in sweep.space]
    ends = [{name: value} for name in names for value in sweep.space[name].samples()]
    return [sweep.config.resolve(values) for values in [*ends, {}]]


class Guide(Searcher):
    """Tells Tune which trial comes next, and the sweep's folder which one has ended.

    Args:
        left: numbers of the trials that have not ended; those with values in the ledger go on with them.
        keep: best trials whose checkpoints stay. on_end: called when a trial has ended.
    Attributes:
        problem: a mistake that ends the sweep and no trial of its own. drawn: values by trial.
    """

    def __init__(self, sweep: Sweep, left: list[int], keep: int, on_end: Ended) -> None:
        super().__init__(metric=SCORE, mode="max")
        self.sweep, self.left, self.keep, self.on_end = sweep, left, keep, on_end
        self.problem: XmcrayError | None = None
        self.drawn = {trial.number: trial.values for trial in sweep.trials()}
        # those with values go first: were they to wait, Optuna would not know what they come to
        self._next = iter(sorted(left, key=lambda number: (number not in self.drawn, number)))
        self._running: dict[str, int] = {}
        self._mistakes: dict[str, XmcrayError] = {}
        self.proposals = proposals(sweep)

    def suggest(self, trial_id: str) -> Any:
        """The number of the next trial; its values are in the ledger before it runs."""
        number = next(self._next, None)
        if number is None or self.problem is not None:
            return Searcher.FINISHED
        try:
            if number not in self.drawn:
                self.drawn[number] = self.proposals.propose(number)
                self.sweep.draw(number, self.drawn[number])
        except XmcrayError as error:
            self.problem = error
            return Searcher.FINISHED
        self._running[trial_id] = number
        return {"number": number}

    def hear(self, trial_id: str, kind: str, message: str) -> None:
        """A mistake that ended a trial; some of them end the sweep."""
        found: type[XmcrayError] = getattr(errors, kind, XmcrayError)
        error = found(message)
        self._mistakes[trial_id] = error
        if isinstance(error, _OF_ALL):
            self.problem = self.problem or error

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """A trial has finished, was stopped, or failed."""
        number = self._running.pop(trial_id, None)
        if number is None or self.problem is not None:
            return  # the sweep is about to end: this trial is to go on another time
        mistake, trace = self._mistakes.get(trial_id), self.sweep.traceback_path(number)
        try:
            self.sweep.prune(
                self.keep
            )  # before: the process of a trial that is stopped still trains for a moment
            if mistake is not None:
                self.sweep.end(number, "failed", str(mistake))
            elif error:
                why = (
                    f"of an error, see {trace}"
                    if trace.exists()
                    else "its process died again and again"
                )
                self.sweep.end(number, "failed", why)
            else:
                done = (self.sweep.run_path(number) / "result.json").is_file()
                self.sweep.end(number, "finished" if done else "stopped")
        except XmcrayError as problem:
            self.problem = problem
            return
        trial = self.sweep.trial(number)
        self.proposals.learn(number, trial.values, trial.score)
        self.on_end(trial)

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Nothing: the scheduler decides by results."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: what counts is in the sweep's folder. Tune wants a file."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, for the same reason."""


def proposals(sweep: Sweep) -> Proposals:
    """Where values come from."""

    def check(values: Values) -> None:
        sweep.config.resolve(values)

    space, seed = sweep.space, sweep.config.seed
    if sweep.config.search == "random":
        return RandomProposals(space, seed, check)
    past = [(trial.values, trial.score) for trial in sweep.trials() if trial.state != "unfinished"]
    return OptunaProposals(space, seed, check, past)


class _Emergency(Stopper):
    """Ends everything once there is a problem."""

    def __init__(self, guide: Guide) -> None:
        self.guide = guide

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        if MISTAKE in result:
            self.guide.hear(trial_id, *result[MISTAKE])
        return False

    def stop_all(self) -> bool:
        return self.guide.problem is not None
