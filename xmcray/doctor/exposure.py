"""Who else may run code here: Ray's token, files that hold tokens, ports that other machines reach."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from xmcray.doctor.finding import Finding
from xmcray.doctor.sockets import Listener

OURS = (
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


def token_mode(environment: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Whether programs of this shell prove to Ray who they are."""
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    source = token_source(environment, home)
    if mode == "disabled":
        return  # software.switches says what that means
    if mode == "token" and source is None:
        yield Finding(
            "Ray token",
            "error",
            "RAY_AUTH_MODE is token, and there is none",
            "run `ray get-auth-token --generate && chmod 600 ~/.ray/auth_token`, or copy the cluster's token there",
        )
    elif mode == "token":
        yield Finding("Ray token", "ok", f"RAY_AUTH_MODE is token, read from {source}")
    elif source is None:
        yield Finding("Ray token", "ok", "none: a local Ray gets one of its own while it runs")
    else:
        do = "export RAY_AUTH_MODE=token where you use a cluster: `ray job submit` sends no token without it"
        yield Finding("Ray token", "warning", f"in {source}, but RAY_AUTH_MODE is not set", do)


def token_source(environment: Mapping[str, str], home: Path) -> str | None:
    """Where Ray would read its token: a variable or a file."""
    if environment.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := environment.get("RAY_AUTH_TOKEN_PATH"):
        return path if Path(path).is_file() else None
    default = home / ".ray" / "auth_token"
    return str(default) if default.is_file() else None


def file_modes(environment: Mapping[str, str], home: Path, folder: Path) -> Iterator[Finding]:
    """Files with tokens that others can read."""
    paths = [home / ".ray" / "auth_token", *(folder / name for name in SERVER_TOKENS)]
    if named := environment.get("RAY_AUTH_TOKEN_PATH"):
        paths.append(Path(named))
    for path in dict.fromkeys(paths):
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            good = not mode & 0o077
            do = "" if good else f"run chmod 600 {path}"
            yield Finding(
                "token file", "ok" if good else "error", f"{path} has mode {mode:04o}", do
            )


def open_ports(listening: Sequence[Listener]) -> Iterator[Finding]:
    """Ports of Ray and of our servers that other machines reach."""
    ours = [one for one in listening if any(word in one.command for word in OURS)]
    beyond = [one for one in ours if not one.loopback]
    dashboards = [
        one
        for one in beyond
        if DASHBOARD in one.command and f"--port={one.port}" in one.command.split()
    ]
    for one in dashboards:
        yield Finding(
            "dashboard",
            "error",
            f"listens on {one.address}:{one.port}, where jobs are submitted",
            "start the head with --dashboard-host=127.0.0.1 and reach it through an SSH tunnel",
        )
    others = [one for one in beyond if one not in dashboards]
    if others:
        some = ", ".join(f"{one.name} {one.address}:{one.port}" for one in others[:4])
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        do = (
            "let only the cluster's own nodes reach them; for one machine alone start Ray with"
            " --node-ip-address=127.0.0.1 and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in its environment"
        )
        yield Finding("open ports", "warning", f"{some}{more}", do)
    elif not dashboards:
        yield Finding(
            "open ports", "ok", f"{len(ours)} of Ray and xmcray, none beyond this machine"
        )
