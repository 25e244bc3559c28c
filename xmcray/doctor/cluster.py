"""Whether a Ray cluster can be used from here: its head answers, takes our token, and has the GPUs."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from xmcray.doctor.exposure import token_source
from xmcray.doctor.finding import Finding
from xmcray.doctor.software import installed
from xmcray.errors import ConfigError, ResourceError

PATIENCE_S = 10
NODES = "/api/v0/nodes?detail=1&limit=10000"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive. resources: totals, as Ray counts them (memory in bytes)."""

    address: str
    head: bool
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What answers at a URL. ray: its version, None where it was not asked; open: whether it asked for no token."""

    url: str
    ray: str | None
    open: bool
    nodes: tuple[Node, ...]

    def total(self, resource: str) -> float:
        """A resource of all nodes."""
        return sum(node.resources.get(resource, 0) for node in self.nodes)


def look_at(address: str, environment: Mapping[str, str], home: Path) -> Cluster:
    """Asks a cluster who it is, with the token that Ray's own commands would send.

    Args:
        address: of the dashboard (http://127.0.0.1:8265, where jobs are submitted), or of the head (HOST:PORT).
    Raises:
        ConfigError: not an address.
        ResourceError: nobody answers, or the token is missing or wrong.
    """
    url = urlsplit(address if "://" in address else f"ray-head://{address}")
    try:
        port = url.port
    except ValueError:
        port = None
    if (
        url.scheme not in ("http", "https", "ray-head")
        or not url.hostname
        or (url.scheme == "ray-head" and not port)
    ):
        raise ConfigError(
            f"--cluster {address}: expected http://HOST:PORT of the dashboard, or HOST:PORT of the head"
        )
    if url.scheme == "ray-head":
        return _of_head(address, url.hostname, port or 0, environment, home)
    token = _token(environment, home)
    root = f"{url.scheme}://{url.netloc}"
    version = _get(root, "/api/version", token, environment, home)
    nodes = tuple(
        Node(node["node_ip"], bool(node["is_head_node"]), node["resources_total"] or {})
        for node in _get(root, NODES, token, environment, home)["data"]["result"]["result"]
        if node["state"] == "ALIVE"
    )
    return Cluster(root, version["ray_version"], token is None or _answers_strangers(root), nodes)


def findings(cluster: Cluster, gpus: int) -> Iterator[Finding]:
    """What is good and bad about a cluster that answers."""
    here, host = installed("ray"), urlsplit(cluster.url).hostname
    yield Finding(
        "head", "ok", f"answers at {cluster.url}" + (f", Ray {cluster.ray}" if cluster.ray else "")
    )
    if cluster.ray not in (None, here):
        do = f"install ray=={cluster.ray} here, or {here} there"
        yield Finding("Ray", "warning", f"{cluster.ray} there, {here} here", do)
    if cluster.open:
        level, do = (
            "warning" if host in LOOPBACK else "error",
            "start the head with RAY_AUTH_MODE=token and a token",
        )
        yield Finding("token", level, "the head asks for none: whoever reaches it runs code", do)  # type: ignore[arg-type]
    else:
        yield Finding("token", "ok", "accepted")
    if not cluster.nodes:
        yield Finding(
            "nodes",
            "error",
            "none is alive",
            "look at the head's log, or wait until it has started",
        )
    for node in cluster.nodes:
        has = node.resources
        text = f"{has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs, {has.get('memory', 0) / 2**30:.1f} GiB"
        yield Finding("head node" if node.head else "node", "ok", f"{node.address}: {text}")
    if cluster.total("GPU") < gpus:
        yield Finding(
            "GPUs",
            "error",
            f"the cluster has {cluster.total('GPU'):g}, expected at least {gpus}",
            "add GPU nodes, or ask for fewer; nodes that come on demand are not counted before they are there",
        )


def _token(environment: Mapping[str, str], home: Path) -> str | None:
    """The token that `ray job submit` would send; none without RAY_AUTH_MODE=token."""
    if (
        environment.get("RAY_AUTH_MODE", "").lower() != "token"
        or (source := token_source(environment, home)) is None
    ):
        return None
    return (
        environment["RAY_AUTH_TOKEN"]
        if source == "RAY_AUTH_TOKEN"
        else Path(source).read_text().strip()
    )


def _get(
    root: str, path: str, token: str | None, environment: Mapping[str, str], home: Path
) -> Any:
    request = urllib.request.Request(
        root + path, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise _refused(root, environment, home) from None
        raise ResourceError(
            f"{root} answers {error.code}, expected the dashboard of a Ray head; check the port"
        ) from None
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise _silent(root, error) from None
    except (ValueError, KeyError, TypeError):
        raise ResourceError(
            f"{root} answers, but is not the dashboard of a Ray head; check the port"
        ) from None


def _answers_strangers(root: str) -> bool:
    try:
        urllib.request.urlopen(root + "/api/version", timeout=PATIENCE_S).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def _silent(where: str, error: BaseException) -> ResourceError:
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return ResourceError(
        f"no Ray head answers at {where} ({text}); start it, or forward its port: ssh -N -L 8265:127.0.0.1:8265 HEAD"
    )


def _refused(where: str, environment: Mapping[str, str], home: Path) -> ResourceError:
    source, mode = token_source(environment, home), environment.get("RAY_AUTH_MODE", "").lower()
    if mode != "token":
        found, do = (
            "RAY_AUTH_MODE is not token, so Ray's commands send none",
            "export RAY_AUTH_MODE=token",
        )
    elif source is None:
        found, do = (
            "there is none here",
            "put the cluster's token into ~/.ray/auth_token with mode 0600",
        )
    else:
        return ResourceError(
            f"the Ray head at {where} refuses the token of {source}; put that cluster's token there"
        )
    return ResourceError(f"the Ray head at {where} wants a token, and {found}; {do}")


def _of_head(
    address: str, host: str, port: int, environment: Mapping[str, str], home: Path
) -> Cluster:
    """Asks the head itself, in a process of its own: Ray aborts the one in which a token is missing."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE_S).close()
    except OSError as error:
        raise _silent(address, error) from None
    if (
        environment.get("RAY_AUTH_MODE", "").lower() == "token"
        and token_source(environment, home) is None
    ):
        raise _refused(address, environment, home)
    command = [sys.executable, "-m", "xmcray.doctor.head", address]
    try:
        asked = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{address} takes connections, but does not answer as a Ray head; check the port"
        ) from None
    if "InvalidAuthToken" in asked.stderr:
        raise _refused(address, environment, home)
    try:
        answer = json.loads(asked.stdout)
    except ValueError:
        raise ResourceError(
            f"{address} answers, but not as a Ray head of this version; check the port"
        ) from None
    return Cluster(
        address, None, bool(answer["open"]), tuple(Node(**node) for node in answer["nodes"])
    )
