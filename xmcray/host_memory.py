"""Memory of this machine, or of the container that this process is in.

A container's limit is in the files of its control group, of version 2 or 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

CONTROL_GROUP = Path("/sys/fs/cgroup")
# Limit, used memory and statistics of a container. Used memory includes cached files.
_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
    ),
)


class HostMemory(NamedTuple):
    """Bytes that processes may have in all, and those that are free."""

    total: int
    free: int


def host_memory(control_group: Path = CONTROL_GROUP) -> HostMemory:
    """The memory of the machine, or less if its container has a limit.

    Args:
        control_group: folder with the limits of the container.
    """
    machine = psutil.virtual_memory()
    for limit_name, used_name, statistics_name in _FILES:
        try:
            limit = int((control_group / limit_name).read_text())
            used = int((control_group / used_name).read_text())
            statistics = (control_group / statistics_name).read_text().split()
        except (OSError, ValueError):
            continue  # another version, or "max", which is no limit
        if limit >= machine.total:
            continue
        # Files that were read once are dropped if memory is needed.
        names, values = statistics[::2], statistics[1::2]
        dropped = int(dict(zip(names, values, strict=False)).get("inactive_file", 0))
        free = max(0, limit - (used - dropped))
        return HostMemory(limit, min(free, machine.available))
    return HostMemory(machine.total, machine.available)
