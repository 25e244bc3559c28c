"""`xmcray serve`: the application in this process, or on a Ray that it starts, until it is
interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

from xmcray.config import check_range, dump
from xmcray.errors import ConfigError, ResourceError
from xmcray.retrieval.bundle import KIND
from xmcray.serving.settings import ServeConfig, authority, num_searchers
from xmcray.storage.artifact import open_artifact, refuse_artifact

# Time limit of a request on Ray Serve: a swap may take long; searches have deadlines of their own.
LONGEST_S = 605.0
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
# What Ray Serve's own RAY_SERVE_THROUGHPUT_OPTIMIZED sets, less its port for HTTP in every replica.
FASTER = {
    # A separate thread is one more hop; our work has threads of its own.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # between replicas, instead of actor calls
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
}

# If this process starts Ray: Ray's own metrics cost a fifth of a request and are not read (ours are
# at /metrics).
ALONE = {"RAY_enable_metrics_collection": "0", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000"}

# A line for each request costs as much as a small search.
QUIET = {"log_level": "WARNING", "enable_access_log": False}


def serve_forever(
    config: ServeConfig,
    host: str,
    port: int,
    *,
    grpc_port: int = 0,
    accept_open_ports: bool = False,
    ready: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        config: settings.
        host: address to listen on.
        port: port of HTTP.
        grpc_port: port of gRPC; 0 for none.
        accept_open_ports: allow Ray Serve's proxies to listen on all interfaces.
        ready: called with the URL when every model answers.
    Raises:
        ConfigError: an address that is not this machine's, or beyond loopback without the user's own
            token files, or a proxy that opens more ports.
        ResourceError: the port is taken.
        StorageError: a bundle is missing or damaged.
    """
    # Tokens would lie in it, and go where it goes.
    refuse_artifact(config.state_dir, "--state-dir")
    for bundle in config.bundles.values():
        open_artifact(bundle, KIND, contents=False)
    alone = not several(config) and not num_searchers(config)
    check_address(config, host, grpc_port if several(config) else 0, accept_open_ports)
    check_port(host, port)
    if grpc_port:
        if grpc_port == port:
            raise ConfigError(
                f"--port and --grpc-port are both {port}, expected two ports; choose another"
            )
        check_port(host, grpc_port, "--grpc-port")
    if alone:
        from xmcray.serving.local import serve_local

        serve_local(config, host, port, grpc_port, ready)
        return
    done = threading.Event()
    with serving(config, host, port, grpc_port) as url:
        # Not earlier: Ray sets handlers of its own when it starts.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: done.set())
        ready(url)
        done.wait()


@contextlib.contextmanager
def serving(config: ServeConfig, host: str, port: int, grpc_port: int = 0) -> Iterator[str]:
    """Runs the application on the Ray of this process, which is started if there is none; yields
    its URL.

    Ray Serve's proxy spreads requests over several replicas of the ingress. A single one listens
    itself, because passing a request on takes longer than answering it.

    Args:
        config: settings.
        host: address to listen on.
        port: port of HTTP.
        grpc_port: port of gRPC; 0 for none. With several replicas it is open on all interfaces,
            because Ray Serve has no other way.
    Raises:
        ResourceError: the port is taken, or a deployment refuses what it was given.
    """
    check_port(host, port)
    # Read when Ray Serve is imported, here and in every process that it starts.
    for name, value in FASTER.items():
        os.environ.setdefault(name, value)
    # Not at the top: a single process needs no Ray, and importing it takes seconds.
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from xmcray.ray_adapter.session import start_ray
    from xmcray.serving.application import NAME, build
    from xmcray.serving.rpc import SERVICER

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    proxied = several(config)
    application = build(dump(config), None if proxied else (host, port, grpc_port))
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
    started = start_ray()
    try:
        serve.start(
            proxy_location="HeadOnly" if proxied else "Disabled",
            http_options=HTTPOptions(host=host, port=port, request_timeout_s=LONGEST_S),
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER])
            if proxied and grpc_port
            else None,
            logging_config=QUIET,
        )
        try:
            serve.run(application, name=NAME, blocking=False, logging_config=QUIET)
        except RuntimeError as error:
            deployments = serve.status().applications[NAME].deployments.values()
            mistake = mistake_in([deployment.message for deployment in deployments])
            if mistake is None:
                raise
            raise ResourceError(mistake) from error
        yield f"http://{authority(host, port)}"
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        if started:
            ray.shutdown()


def mistake_in(messages: Sequence[str]) -> str | None:
    """The user's mistake for which deployments did not start.

    Args:
        messages: of the deployments; Serve puts the traceback of a constructor into them.
    Returns:
        The message of our own error; None if there is none.
    """
    for message in messages:
        # The last line of a traceback names the error with its module.
        if found := re.search(r"^xmcray\.[\w.]+Error: (.+)$", message, re.MULTILINE):
            return found[1]
    return None


def several(config: ServeConfig) -> bool:
    """Whether there is, or may be, more than one replica of the ingress."""
    options = config.options.get("Gateway", {})
    has_options = "num_replicas" in options or "autoscaling_config" in options
    return has_options or max(config.replicas, config.max_replicas) > 1


def check_address(config: ServeConfig, host: str, grpc_port: int, accept_open_ports: bool) -> None:
    """Refuses settings that would open more ports than intended.

    Raises:
        ConfigError: see `serve_forever`.
    """
    if os.environ.get(HA_PROXY, "0") not in ("", "0") and not accept_open_ports:
        raise ConfigError(
            f"{HA_PROXY} is set: that proxy opens ports 8404 and 9101 on all interfaces; unset it, or say"
            " --accept-open-ports"
        )
    if grpc_port and not accept_open_ports:
        raise ConfigError(
            f"gRPC on port {grpc_port} would be reachable on all interfaces (each call needs the token); leave it out,"
            " or say --accept-open-ports"
        )
    if not is_loopback(host) and not (config.token_file and config.admin_token_file):
        raise ConfigError(
            f"host {host} is not this machine alone, expected --token-file and --admin-token-file of your own; or use"
            " 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raises ConfigError unless it is a port and an address of this machine, and ResourceError if the
    port is in use.
    """
    check_range(option, port, 1, 65_535)
    no_address = ConfigError(
        f"--host {host} is no address of this machine, expected one of its own; use 127.0.0.1 for"
        " this machine alone, or 0.0.0.0 for all of its addresses"
    )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError):  # the latter for what can be no name, such as a..b
            raise no_address from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise no_address from None
            raise ResourceError(
                f"{authority(host, port)} cannot be listened on ({error.strerror}), expected a free"
                f" port; choose another {option}"
            ) from None
