"""A group of Ray Train workers: how it is described, how it runs, and what a worker may ask Ray."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

from xmcray.errors import RunError, XmcrayError
from xmcray.ray_adapter import private
from xmcray.ray_adapter.actors import kill_actors
from xmcray.ray_adapter.rendezvous import torch_config

_SETTINGS = {  # of Ray Train, read from the environment
    # The controller polls its workers this often, and a report waits for the next poll. Ray's
    # default is 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
# How long the controller waits for the nodes of a group each time that it tries to start one.
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
# How long a worker may leave the controller's polls unanswered.
_STALL_TIMEOUT = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
# Whether an actor asks for the nodes that a cloud is about to take away.
_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
_ELASTIC_START_S = 5.0
_START_S = 120.0
_ABORT_S = 3  # a controller that waits for nodes does not answer

_train: Any = ray.train  # type checkers see the classes of Ray Train v1 under these names


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Settings of a group of workers.

    Attributes:
        name: begins the name under which Ray Train knows the group.
        storage: folder for the files of Ray Train.
        num_workers: workers of the full group.
        min_workers: fewest workers to go on with when nodes are lost; 0 for a group of fixed size.
        use_gpu: whether each worker has a GPU.
        cpus_per_worker: logical CPUs that each worker reserves.
        resize_every_s: seconds between two attempts to grow an elastic group.
        wait_s: seconds without room for the workers after which the run ends.
        timeout_s: seconds after which a collective of the workers fails.
        stall_s: seconds without a sign of life after which a worker counts as failed.
        max_failures: restarts of the group after a worker has failed.
        environment: variables of the workers' processes.
    """

    name: str
    storage: Path
    num_workers: int
    min_workers: int
    use_gpu: bool
    cpus_per_worker: float
    resize_every_s: float
    wait_s: float
    timeout_s: int
    stall_s: float
    max_failures: int
    environment: Mapping[str, str]


def run_workers(
    work: Callable[[dict[str, Any]], Any],
    settings: dict[str, Any],
    group: WorkerGroup,
    after_turn: Callable[[bool, bool], None],
    on_restart: Callable[[Mapping[int, private.WorkerFailure]], None],
) -> None:
    """Runs a function in all workers of a group until it returns everywhere.

    Args:
        work: the function; it finds a process group of torch.distributed.
        settings: its argument.
        after_turn: see `private.controller_callback`.
        on_restart: see there too.

    Raises:
        XmcrayError: `after_turn` has raised it, or a worker, again after each restart.
        RunError: workers were lost, and all restarts are used up.
        KeyboardInterrupt: the workers have been ended.
    """
    callback = private.controller_callback(after_turn, on_restart)
    trainer = _trainer(work, settings, group, callback)
    is_actor = ray.get_runtime_context().get_actor_id() is not None
    private.leave_out_helpers(trainer, in_driver=not is_actor)
    controllers = private.take_over_interrupts(trainer)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        for controller in controllers:
            private.abort_controller(controller, _ABORT_S)
        raise
    except _train.ControllerError as error:
        if isinstance(error.controller_failure, XmcrayError):
            raise error.controller_failure from None
        raise
    except _train.WorkerGroupError as error:
        failures = private.worker_failures(error)
        for failure in failures.values():
            # On a full disk the note of a user's mistake is lost, but Ray brings the error itself.
            if failure.mistake is not None:
                raise failure.mistake from None
        lost = [failure.text(group.stall_s) for failure in failures.values() if failure.is_lost]
        if not lost:
            raise
        raise RunError(
            f"{'; '.join(lost)}; the workers were started again {group.max_failures} times, which is"
            " cluster.max_failures: look for full memory or a frozen machine"
        ) from None
    finally:
        # The traceback of an error would keep the controller's process as long as the error lives.
        kill_actors(controllers)


def _trainer(
    work: Callable[[dict[str, Any]], Any],
    settings: dict[str, Any],
    group: WorkerGroup,
    callback: Any,
) -> Any:
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
    if private.started_here():
        # The only node is this machine. Watching it would take an actor of its own.
        os.environ.setdefault(_WATCHER, "0")
    if group.min_workers:
        size: Any = (group.min_workers, group.num_workers)
        # Ray chooses the size of an elastic group by the nodes it knows of, and may not have
        # noticed yet that one is lost. A short time-out makes it look again.
        start_s = _ELASTIC_START_S
    else:
        size = group.num_workers
        start_s = min(group.wait_s, _START_S)
    os.environ[_START_TIMEOUT] = str(start_s)
    os.environ[_STALL_TIMEOUT] = str(group.stall_s)
    return _train.torch.TorchTrainer(
        work,
        train_loop_config=settings,
        torch_config=torch_config(
            "nccl" if group.use_gpu else "gloo", group.timeout_s, str(group.storage / "rendezvous")
        ),
        scaling_config=_train.ScalingConfig(
            num_workers=size,
            use_gpu=group.use_gpu,
            resources_per_worker={"CPU": group.cpus_per_worker},
            elastic_resize_monitor_interval_s=group.resize_every_s,
        ),
        run_config=_train.RunConfig(
            # Ray silently resumes a name that it has seen, so each start has a new one. Only the
            # checkpoints of training/checkpoint.py count.
            name=f"{group.name}-{secrets.token_hex(3)}",
            storage_path=str(group.storage),
            # Failed starts of the group are limited by time (wait_s). Ray's own limit counts them
            # over the whole run.
            failure_config=_train.FailureConfig(
                max_failures=group.max_failures, controller_failure_limit=-1
            ),
            callbacks=[callback],
            logging_config=_train.LoggingConfig(log_level="ERROR"),
            worker_runtime_env={"env_vars": dict(group.environment)},
        ),
    )


def report(values: dict[str, Any]) -> None:
    """Hands values of a worker to Ray Train, which wants at least one report from each worker."""
    ray.train.report(values)


def node_leaves_soon() -> bool:
    """Tells a worker whether its cloud has said that a node of the group will be taken away."""
    return _train.get_preemption_info() is not None
