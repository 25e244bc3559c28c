"""Whether a Ray cluster can be used: its head answers, accepts our token, and has the GPUs."""

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

from xmcray.doctor.exposure import RayToken
from xmcray.doctor.finding import Finding
from xmcray.doctor.software import installed
from xmcray.errors import ConfigError, ResourceError

TIMEOUT_S = 10
HEAD_TIMEOUT_S = 60  # importing Ray in a new process takes seconds
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NODES = "/api/v0/nodes?detail=1&limit=10000"


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive.

    Attributes:
        address: its IP address.
        head: whether it is the head.
        resources: totals of its resources as Ray counts them; memory in bytes.
    """

    address: str
    head: bool
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that answers.

    Attributes:
        url: address at which it answers.
        ray: its version of Ray; None if only its head was asked, which does not tell the version.
        open: whether it accepts clients without a token.
        nodes: nodes that are alive.
    """

    url: str
    ray: str | None
    open: bool
    nodes: tuple[Node, ...]

    def total(self, resource: str) -> float:
        """A resource, summed over all nodes."""
        return sum(node.resources.get(resource, 0) for node in self.nodes)


def look_at(address: str, environment: Mapping[str, str], home: Path) -> Cluster:
    """Asks a cluster for its nodes, with the token that Ray's own commands would send.

    Args:
        address: address of the dashboard, where jobs are submitted (http://127.0.0.1:8265), or of
            the head (HOST:PORT).
        environment: variables of this process.
        home: the user's home folder.

    Raises:
        ConfigError: this is not an address.
        ResourceError: nothing answers, or the token is missing or wrong.
    """
    # HOST:PORT has no scheme, and urlsplit would take the host for one.
    malformed = ConfigError(
        f"--cluster {address}: expected http://HOST:PORT of the dashboard, or HOST:PORT of the head"
    )
    try:
        url = urlsplit(address if "://" in address else f"ray-head://{address}")
        port = url.port
    except ValueError:  # a bracket that is not closed; a port that is no number, or above 65535
        raise malformed from None
    is_dashboard = url.scheme in ("http", "https")
    is_head = url.scheme == "ray-head" and port
    if not url.hostname or not (is_dashboard or is_head):
        raise malformed
    token = RayToken.of(environment, home)
    if is_dashboard:
        return _ask_dashboard(f"{url.scheme}://{url.netloc}", token, environment)
    return _ask_head(address, (url.hostname, port or 0), token, environment)


def findings(cluster: Cluster, gpus: int) -> Iterator[Finding]:
    """Checks a cluster that answers.

    Args:
        cluster: the cluster.
        gpus: number of GPUs that it must have.
    """
    version = f", Ray {cluster.ray}" if cluster.ray else ""
    yield Finding("head", "ok", f"answers at {cluster.url}{version}")
    version_here = installed("ray")
    if cluster.ray not in (None, version_here):
        yield Finding(
            "Ray",
            "warning",
            f"{cluster.ray} there, {version_here} here",
            f"install ray=={cluster.ray} here, or {version_here} there",
        )
    yield _token_finding(cluster)
    if not cluster.nodes:
        remedy = "look at the head's log, or wait until it has started"
        yield Finding("nodes", "error", "none is alive", remedy)
    for node in cluster.nodes:
        yield _node_finding(node)
    if cluster.total("GPU") < gpus:
        yield Finding(
            "GPUs",
            "error",
            f"the cluster has {cluster.total('GPU'):g}, expected at least {gpus}",
            "add GPU nodes, or require fewer; nodes that start on demand are not counted"
            " before they have started",
        )


def _token_finding(cluster: Cluster) -> Finding:
    """Whether the head requires a token."""
    if not cluster.open:
        return Finding("token", "ok", "accepted")
    is_loopback = urlsplit(cluster.url).hostname in LOOPBACK
    return Finding(
        "token",
        "warning" if is_loopback else "error",
        "the head requires none: anyone who can reach it can run code",
        "start the head with RAY_AUTH_MODE=token and a token",
    )


def _node_finding(node: Node) -> Finding:
    """The resources of a node."""
    num_cpus = node.resources.get("CPU", 0)
    num_gpus = node.resources.get("GPU", 0)
    gib = node.resources.get("memory", 0) / 2**30
    text = f"{node.address}: {num_cpus:g} CPUs, {num_gpus:g} GPUs, {gib:.1f} GiB"
    return Finding("head node" if node.head else "node", "ok", text)


def _ask_dashboard(root: str, token: RayToken, environment: Mapping[str, str]) -> Cluster:
    secret = token.read(environment)
    version = _get(root, "/api/version", token, secret)
    answer = _get(root, NODES, token, secret)
    try:
        ray_version = str(version["ray_version"])
        nodes = _alive_nodes(answer["data"]["result"]["result"])
    except (LookupError, TypeError, ValueError):  # another service that answers with JSON
        raise _other_service(root) from None
    # If no token was sent, the answer itself shows that none is needed. Otherwise a second request
    # without the token finds out.
    is_open = secret is None or _answers_without_token(root)
    return Cluster(root, ray_version, is_open, nodes)


def _alive_nodes(answer: Any) -> tuple[Node, ...]:
    """The nodes in an answer of the dashboard; LookupError, TypeError or ValueError if it is none."""
    nodes = []
    for node in answer:
        if node["state"] == "ALIVE":
            resources = dict(node["resources_total"] or {})
            nodes.append(Node(node["node_ip"], bool(node["is_head_node"]), resources))
    return tuple(nodes)


def _get(root: str, path: str, token: RayToken, secret: str | None) -> Any:
    """Gets JSON from the dashboard."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(root + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        # 401: no token was sent, 403: a wrong one.
        if error.code in (401, 403):
            raise _refusal(root, token) from None
        raise ResourceError(
            f"{root} answers {error.code}, expected the dashboard of a Ray head; check the port"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(root, error) from None
    except ValueError:
        raise _other_service(root) from None


def _answers_without_token(root: str) -> bool:
    try:
        urllib.request.urlopen(f"{root}/api/version", timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _ask_head(
    address: str,
    host_and_port: tuple[str, int],
    token: RayToken,
    environment: Mapping[str, str],
) -> Cluster:
    """Asks the head itself, in another process, because Ray aborts a process without a token."""
    # Ray itself would try for a long time before it says that nothing answers.
    try:
        socket.create_connection(host_and_port, timeout=TIMEOUT_S).close()
    except OSError as error:
        raise _no_answer(address, error) from None
    if token.mode == "token" and token.source is None:
        raise _refusal(address, token)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "xmcray.doctor.head", address],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=HEAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{address} accepts connections, but does not answer as a Ray head; check the port"
        ) from None
    # The process aborts inside Ray's C++ code, so only its stderr tells the reason.
    if "InvalidAuthToken" in process.stderr:
        raise _refusal(address, token)
    try:
        answer = json.loads(process.stdout)
    except ValueError:
        raise ResourceError(
            f"{address} answers, but not as a Ray head of this version; check the port"
        ) from None
    nodes = tuple(Node(**node) for node in answer["nodes"])
    return Cluster(address, None, bool(answer["open"]), nodes)


def _other_service(root: str) -> ResourceError:
    return ResourceError(f"{root} answers, but is not the dashboard of a Ray head; check the port")


def _no_answer(where: str, error: BaseException) -> ResourceError:
    reason = getattr(error, "reason", error)  # urllib wraps the error of the system
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return ResourceError(
        f"no Ray head answers at {where} ({text}); start it,"
        " or forward its port: ssh -N -L 8265:127.0.0.1:8265 HEAD"
    )


def _refusal(where: str, token: RayToken) -> ResourceError:
    """Why a head refuses us, and the remedy."""
    head = f"the Ray head at {where}"
    if token.mode != "token":
        return ResourceError(
            f"{head} wants a token, and RAY_AUTH_MODE is not token, so Ray's commands send none;"
            " export RAY_AUTH_MODE=token"
        )
    if token.source is None:
        return ResourceError(
            f"{head} wants a token, and there is none here;"
            " put the cluster's token into ~/.ray/auth_token with mode 0600"
        )
    return ResourceError(
        f"{head} refuses the token of {token.source}; put that cluster's token there"
    )
