"""Checks whether others can run code here: Ray's token, files with tokens, reachable ports."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmcray.doctor.finding import Finding
from xmcray.doctor.sockets import Listener
from xmcray.errors import readable

# Words in the command lines of Ray's processes and of ours.
OUR_PROCESSES = (
    "raylet",
    "gcs_server",
    "ray::",
    "ray/dashboard",
    "ray/_private",
    "ray start",
    "xmcray",
    "ray/serve",
)
DASHBOARD = "dashboard/dashboard.py"
SERVER_TOKENS = ("serve-state/token", "serve-state/admin-token")
MAX_LISTED = 4  # open ports that are named one by one


@dataclass(frozen=True, slots=True)
class RayToken:
    """The token with which programs of this shell authenticate to Ray.

    Attributes:
        mode: RAY_AUTH_MODE in lower case; empty if it is not set.
        source: variable or file that Ray reads the token from; None if there is no token.
    """

    mode: str
    source: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str], home: Path) -> RayToken:
        """Looks where Ray looks: in two variables, then in a file of the home folder."""
        mode = environment.get("RAY_AUTH_MODE", "").lower()
        if environment.get("RAY_AUTH_TOKEN"):
            return cls(mode, "RAY_AUTH_TOKEN")
        # The same order as in Ray, or the doctor would approve of a token that Ray does not read.
        default = home / ".ray" / "auth_token"
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or default)
        return cls(mode, str(path) if path.is_file() else None)

    def read(self, environment: Mapping[str, str]) -> str | None:
        """The token that `ray job submit` would send; none without RAY_AUTH_MODE=token."""
        if self.mode != "token" or self.source is None:
            return None
        if self.source == "RAY_AUTH_TOKEN":
            return environment["RAY_AUTH_TOKEN"]
        remedy = "put the cluster's token there"
        with readable(f"the token file {self.source} cannot be read", remedy):
            return Path(self.source).read_text(encoding="utf-8").strip()


def token_mode(environment: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Checks whether programs of this shell send a token to Ray."""
    token = RayToken.of(environment, home)
    if token.mode == "disabled":
        return  # software.switches warns of it
    if token.mode == "token" and token.source is None:
        yield Finding(
            "Ray token",
            "error",
            "RAY_AUTH_MODE is token, and there is none",
            "run `ray get-auth-token --generate && chmod 600 ~/.ray/auth_token`,"
            " or copy the cluster's token there",
        )
    elif token.mode == "token":
        yield Finding("Ray token", "ok", f"RAY_AUTH_MODE is token, read from {token.source}")
    elif token.source is None:
        yield Finding("Ray token", "ok", "none: a local Ray gets one of its own while it runs")
    else:
        yield Finding(
            "Ray token",
            "warning",
            f"in {token.source}, but RAY_AUTH_MODE is not set",
            "export RAY_AUTH_MODE=token where you use a cluster:"
            " `ray job submit` sends no token without it",
        )


def file_modes(environment: Mapping[str, str], home: Path, folder: Path) -> Iterator[Finding]:
    """Checks whether other users can read files with tokens.

    Args:
        environment: variables of this process.
        home: the user's home folder.
        folder: folder in which a server would keep its state.
    """
    paths = [home / ".ray" / "auth_token"]
    paths += [folder / name for name in SERVER_TOKENS]
    if configured_path := environment.get("RAY_AUTH_TOKEN_PATH"):
        paths.append(Path(configured_path))
    for path in dict.fromkeys(paths):  # each path once
        if not path.is_file():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        text = f"{path} has mode {mode:04o}"
        if mode & 0o077:  # any right of the group or of others
            yield Finding("token file", "error", text, f"run chmod 600 {path}")
        else:
            yield Finding("token file", "ok", text)


def open_ports(listening: Sequence[Listener]) -> Iterator[Finding]:
    """Lists ports of Ray and of our servers that other machines can reach."""
    num_ours = 0
    num_dashboards = 0
    other_ports = []
    for listener in listening:
        if not any(word in listener.command for word in OUR_PROCESSES):
            continue
        num_ours += 1
        if listener.loopback:
            continue
        place = f"{listener.address}:{listener.port}"
        if not _is_dashboard(listener):
            other_ports.append(f"{listener.name} {place}")
            continue
        num_dashboards += 1
        yield Finding(
            "dashboard",
            "error",
            f"listens on {place}, where jobs are submitted",
            "start the head with --dashboard-host=127.0.0.1 and reach it through an SSH tunnel",
        )
    if other_ports:
        ports = ", ".join(other_ports[:MAX_LISTED])
        num_more = len(other_ports) - MAX_LISTED
        if num_more > 0:
            ports = f"{ports} and {num_more} more"
        yield Finding(
            "open ports",
            "warning",
            ports,
            "let only the cluster's own nodes reach them; for one machine alone start Ray with"
            " --node-ip-address=127.0.0.1 and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
            " in its environment",
        )
    elif not num_dashboards:
        text = f"{num_ours} of Ray and xmcray, none beyond this machine"
        yield Finding("open ports", "ok", text)


def _is_dashboard(listener: Listener) -> bool:
    # The process of the dashboard also listens on other ports, which accept no jobs.
    port_option = f"--port={listener.port}"
    return DASHBOARD in listener.command and port_option in listener.command.split()
