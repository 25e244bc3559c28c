"""Runs all checks of a machine, and all of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from xmcray.doctor import exposure, machine, sockets, software
from xmcray.doctor.cluster import findings, look_at
from xmcray.doctor.finding import Finding
from xmcray.host_memory import host_memory


def of_machine() -> list[Finding]:
    """Checks this machine."""
    environment = os.environ
    home = Path.home()
    memory = host_memory()
    return [
        *software.versions(),
        machine.devices(),
        *machine.cores(environment),
        machine.memory(memory.total, memory.free),
        machine.shared_memory(),
        *machine.disk(environment),
        machine.limits(),
        machine.mappings(),
        *software.switches(environment),
        *exposure.token_mode(environment, home),
        *exposure.file_modes(environment, home, Path.cwd()),
        *exposure.open_ports(sockets.listeners()),
    ]


def of_cluster(address: str, gpus: int) -> list[Finding]:
    """Checks a cluster; raises ResourceError if it does not answer."""
    cluster = look_at(address, os.environ, Path.home())
    return list(findings(cluster, gpus))
