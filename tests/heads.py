"""A Ray head of one's own: on loopback, with a token, stopped by its own process ids.

`ray stop` is never used: it ends every Ray process of the machine, other people's too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import descendants, kill_family, wait_until

RAY = str(Path(sys.executable).with_name("ray"))
PATIENCE_S, GRACE_S = 60, 1
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        url: of its dashboard, where jobs are submitted. address: of its GCS. pid: of `ray start`.
        token_file: mode 0600.
    """

    url: str
    address: str
    pid: int
    token_file: Path

    def environment(self, token: bool = True) -> dict[str, str]:
        """Environment of a client, with or without the token."""
        env = {name: value for name, value in os.environ.items() if name not in _TOKEN_VARIABLES}
        env |= {
            "RAY_API_SERVER_ADDRESS": self.url,
            "RAY_AUTH_MODE": "token",
            "HOME": str(self.token_file.parent),
            # a job's `python` is the one that the head's shell finds
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        return env | {"RAY_AUTH_TOKEN_PATH": str(self.token_file)} if token else env


@contextlib.contextmanager
def head(
    num_cpus: int = 4, object_store_bytes: int = 256 << 20, loopback: bool = True
) -> Iterator[Head]:
    """Starts a head with ports and a folder of its own; ends it with all its processes.

    Args:
        loopback: all its ports are on 127.0.0.1; otherwise only the dashboard's is, as on a node of
            a cluster.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="xh")
    )  # short: the path of a socket has at most 107 characters
    token_file = folder / "token"
    with os.fdopen(os.open(token_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    port, dashboard, agent, agent_grpc, metrics, client = free_ports(6)
    command = [
        *(RAY, "start", "--head", "--block"),
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}",
        f"--ray-client-server-port={client}",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={object_store_bytes}",
        f"--temp-dir={folder}/r",
        "--disable-usage-stats",
    ]
    if loopback:
        command.append("--node-ip-address=127.0.0.1")
    started = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", 0, token_file)
    environment = started.environment()
    if loopback:
        # Whatever its name says, without this variable the machine's address would replace
        # 127.0.0.1.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        _wait_for(started, process, folder / "log")
        yield Head(started.url, started.address, process.pid, token_file)
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a `ray start --block` and whatever it started and left behind."""
    family = descendants(process.pid)
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:  # Ray gives a raylet that has run jobs half a minute
        process.kill()
        process.wait()
    kill_family(family)


def free_ports(number: int) -> list[int]:
    """Returns free ports of loopback."""
    # All sockets stay open until the last one has its port, so that no port is given twice.
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(number):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return ports


def _wait_for(started: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(f"{started.url}/api/version")
    request.add_header("Authorization", f"Bearer {started.token_file.read_text()}")

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the head at {started.url} ended: {end_of(log)}")
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    wait_until(answers, PATIENCE_S, lambda: f"no head at {started.url}: {end_of(log)}")


def end_of(log: Path) -> str:
    """What was written last."""
    return log.read_text(errors="replace")[-2000:]
