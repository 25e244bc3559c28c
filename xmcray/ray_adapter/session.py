"""Connects this process to Ray: the cluster that RAY_ADDRESS names, or a quiet local one on
loopback with a token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from xmcray.errors import ConfigError, ResourceError, one_line
from xmcray.ray_adapter import private
from xmcray.ray_adapter.switches import UNPICKLING

_LOCAL_SETTINGS = {  # of a local cluster, read from the environment
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray keeps what it knows of so many finished calls, about 3 KB each. Its default is 100,000,
    # which the polls of training workers reach in some hours.
    "RAY_task_events_max_num_task_in_gcs": "10000",
    # By default workers yield to all other processes: on a busy machine the command that waits for
    # them would hardly move.
    "RAY_worker_niceness": "0",
}
_END_S = 2.0  # that killed processes may take


def start_ray(
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    dashboard: bool = False,
) -> bool:
    """Joins the cluster in RAY_ADDRESS, or starts a local one. Does nothing in a process that is
    connected.

    Args:
        num_cpus: logical CPUs of a local cluster; by default those of the machine.
        object_store_bytes: shared memory of a local cluster; by default a share of the machine's
            memory.
        dashboard: start the dashboard of a local cluster, on loopback. Each request to it needs the
            token.

    Returns:
        Whether this call connected.

    Raises:
        ConfigError: a variable of the environment would let data files run code.
        ResourceError: no cluster answers at RAY_ADDRESS, or a local one does not start.
    """
    for name in UNPICKLING:
        if os.environ.get(name, "").lower() in ("1", "true"):
            raise ConfigError(f"{name} is set, with which data files can run code; unset it")
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if os.environ.get("RAY_ADDRESS"):
        advice = "look at RAY_ADDRESS, or unset it to start Ray on this machine"
        with _keep_sigterm_handler(), _in_one_line("the cluster does not answer", advice):
            ray.init(**quiet)
        return True
    for name, value in _LOCAL_SETTINGS.items():
        os.environ.setdefault(name, value)
    _set_token()
    advice = "the machine may be too busy or out of memory: try again"
    with (
        private.loopback_address() as addresses,
        _keep_sigterm_handler(),
        _in_one_line("Ray did not start", advice),
        _nothing_left_on_failure(),
    ):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=dashboard,
            **addresses,
            **quiet,
        )
    return True


@contextlib.contextmanager
def _in_one_line(what: str, advice: str) -> Iterator[None]:
    """Turns what `ray.init` raises into one line; Ray raises bare exceptions of many kinds."""
    try:
        yield
    except Exception as error:
        reason = one_line(str(error))
        raise ResourceError(f"{what} ({reason}); {advice}") from error


@contextlib.contextmanager
def ray_session(dashboard: bool = False) -> Iterator[None]:
    """Connects to Ray for a block. A connection that was made here ends with the block."""
    started = start_ray(dashboard=dashboard)
    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextlib.contextmanager
def _nothing_left_on_failure() -> Iterator[None]:
    """If the block fails or is interrupted, kills the processes that it has started.

    Ray itself leaves some of them: an agent that still starts does not notice for a minute that its
    raylet has ended.
    """
    this = psutil.Process()
    before = set(this.children())
    try:
        yield
    except BaseException:
        started = []
        for child in this.children():
            if child not in before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.suspend()  # so that it starts nothing more
                    started += [child, *child.children(recursive=True)]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, _END_S)
        ray.shutdown()
        raise


def put_object(value: Any) -> Any:
    """Puts a value into Ray's object store, for tasks that share it; returns the key for
    `get_object`.
    """
    return ray.put(value)


def get_object(key: Any) -> Any:
    """Returns a value of Ray's object store."""
    return ray.get(key)


def _set_token() -> None:
    """Sets a random token for the local cluster, unless the user has one or has switched tokens
    off.

    Ray turns token authentication on by itself unless RAY_AUTH_MODE says otherwise. (It would be
    too late to set that variable here, because Ray reads it when it is imported.) Without a token
    in the environment Ray writes one into the home folder, which others could read.
    """
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    is_disabled = os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled"
    if not has_token and not is_disabled:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM after the block; `ray.init` sets one that ends the
    process.
    """
    # Neither Ray nor Python sets a handler in another thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        # Ray's handler has met the signal.
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        # None stands for a handler that Python did not set, and cannot set again.
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
