"""A Ray head of one's own: on loopback, with a token, stopped by its own process ids.

`ray stop` is never used: it ends every Ray process of the machine, other people's too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import descendants, wait_until

RAY = str(Path(sys.executable).with_name("ray"))
PATIENCE_S, GRACE_S = 60, 3
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
        loopback: all its ports are on 127.0.0.1; otherwise only the dashboard's is, as on a node of a cluster.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="xh")
    )  # short: the path of a socket has at most 107 characters
    token_file = folder / "token"
    with os.fdopen(os.open(token_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    port, dashboard, agent, agent_grpc, metrics, client = free_ports(6)
    command = [RAY, "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1"] if loopback else []
    command += [
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--num-cpus={num_cpus}",
    ]
    command += [
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
    ]
    command += [f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"]
    command += [
        f"--object-store-memory={object_store_bytes}",
        f"--temp-dir={folder}/r",
        "--disable-usage-stats",
    ]
    found = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", 0, token_file)
    # without that variable, whatever its name says, 127.0.0.1 would be replaced by the address of the machine
    environment = found.environment() | (
        {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if loopback else {}
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        _wait_for(found, process, folder / "log")
        yield Head(found.url, found.address, process.pid, token_file)
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
    for pid, command in family.items():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(
                b"\0", b" "
            ).decode() == command:
                os.kill(pid, signal.SIGKILL)


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for(found: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(f"{found.url}/api/version")
    request.add_header("Authorization", f"Bearer {found.token_file.read_text()}")

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the head at {found.url} ended: {end_of(log)}")
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    wait_until(answers, PATIENCE_S, lambda: f"no head at {found.url}: {end_of(log)}")


def end_of(log: Path) -> str:
    """What was written last."""
    return log.read_text(errors="replace")[-2000:]
