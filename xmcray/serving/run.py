"""`xmcray serve`: the application in this process, or on a Ray that it starts, until it is interrupted."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from xmcray import storage
from xmcray.config import check_range, dump
from xmcray.errors import ConfigError, ResourceError
from xmcray.retrieval.bundle import KIND
from xmcray.serving.settings import ServeConfig, authority, composed_parts

LONGEST_S = (
    605.0  # of a request on Ray Serve: a swap may take long; searches have deadlines of their own
)
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
# What Ray Serve's own RAY_SERVE_THROUGHPUT_OPTIMIZED sets, less its port for HTTP in every replica.
FASTER = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # a hop more on either side; our work is done in our own threads
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # between replicas, instead of actor calls
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
}

# Besides, where Ray is ours alone: its own metrics cost a fifth of a request, and nobody reads them there (our own are
# at /metrics).
ALONE = {"RAY_enable_metrics_collection": "0", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000"}

QUIET = {
    "log_level": "WARNING",
    "enable_access_log": False,
}  # a line for each request costs as much as a small search


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
        ready: told the address when every model answers.
    Raises:
        ConfigError: an address beyond loopback without a token of the user's own, or a proxy that opens more ports.
        ResourceError: the port is taken.
        StorageError: a bundle is missing or damaged.
    """
    for bundle in config.bundles.values():
        storage.open_artifact(bundle, KIND, contents=False)
    alone = not several(config) and not composed_parts(config)
    check_address(config, host, grpc_port if several(config) else 0, accept_open_ports)
    check_port(host, port)
    if grpc_port:
        check_port(host, grpc_port, "--grpc-port")
    if alone:
        from xmcray.serving.local import serve_local

        serve_local(config, host, port, grpc_port, ready)
        return
    done = threading.Event()
    with serving(config, host, port, grpc_port) as url:
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
        ):  # now: Ray sets handlers of its own when it starts
            signal.signal(number, lambda *_: done.set())
        ready(url)
        done.wait()


@contextlib.contextmanager
def serving(config: ServeConfig, host: str, port: int, grpc_port: int = 0) -> Iterator[str]:
    """The application on the Ray of this process, which is started if there is none; yields its address.

    Ray Serve's proxy spreads requests over several replicas of the ingress. A single one listens itself: passing a
    request on takes longer than answering it.

    Args:
        grpc_port: also answer gRPC there, from several replicas on all interfaces: Ray Serve knows no other way. 0: no
            gRPC.
    Raises:
        ResourceError: the port is taken.
    """
    check_port(host, port)
    for (
        name,
        value,
    ) in (
        FASTER.items()
    ):  # read when Ray Serve is imported, here and in every process that it starts
        os.environ.setdefault(name, value)
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
        for name, value in ALONE.items():  # read by the processes that are started
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
        serve.run(application, name=NAME, blocking=False, logging_config=QUIET)
        yield f"http://{authority(host, port)}"
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        if started:
            ray.shutdown()


def several(config: ServeConfig) -> bool:
    """Whether there is, or may be, more than one replica of the ingress."""
    asked = {"num_replicas", "autoscaling_config"} & dict(config.options.get("Gateway", {})).keys()
    return max(config.replicas, config.max_replicas) > 1 or bool(asked)


def check_address(config: ServeConfig, host: str, grpc_port: int, accept_open_ports: bool) -> None:
    """Refuses what would open more than was meant.

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
    """Whether nobody but this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raises ConfigError unless it is a port, and ResourceError if somebody listens there already."""
    check_range(option, port, 1, 65_535)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ResourceError(
                f"{host}:{port} cannot be listened on ({error.strerror}); choose another {option}"
            ) from None
