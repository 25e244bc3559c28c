"""Ray in this process: the cluster that RAY_ADDRESS names, or a quiet local one on loopback with a token."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Iterator
from typing import Any

import ray


def start_ray(
    num_cpus: int | None = None, object_store_bytes: int | None = None, dashboard: bool = False
) -> bool:
    """Joins the cluster in RAY_ADDRESS, or starts a quiet local one on loopback with a token; once per process.

    Args:
        num_cpus: logical CPUs of a local cluster; the machine's if not given.
        object_store_bytes: shared memory of a local cluster; a share of the machine's if not given.
        dashboard: a local cluster has one, on loopback; it wants the token for whatever it tells.

    Returns:
        Whether this call connected; False if the process already was.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if os.environ.get("RAY_ADDRESS"):
        with _own_sigterm():
            ray.init(**quiet)
        return True
    # Ray turns token authentication on by itself unless RAY_AUTH_MODE says otherwise. (Setting that variable here would
    # be too late: it is read when ray is imported.) A token of our own keeps it from writing one into the home folder,
    # which others could read.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not named and os.environ.get("RAY_AUTH_MODE", "").lower() != "disabled":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with _loopback() as address, _own_sigterm():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=dashboard,
            dashboard_host=address,
            _node_ip_address=address,
            **quiet,
        )
    return True


@contextlib.contextmanager
def ray_session(dashboard: bool = False) -> Iterator[None]:
    """Ray for a block; a connection made here ends with it."""
    started = start_ray(dashboard=dashboard)
    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps a handler of SIGTERM that somebody set before; ray.init puts its own there, which ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before):
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _loopback() -> Iterator[str]:
    """Lets ray.init take 127.0.0.1 as it is; otherwise it is replaced by the machine's address and every port is open.

    `ray start --node-ip-address=127.0.0.1` needs RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in its environment for the same;
    here that would be too late: it is read when ray is imported. Ray's version is pinned.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield "127.0.0.1"
    finally:
        services.resolve_ip_for_localhost = resolve
