"""Lists the ports on which processes of this user listen."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = (".py", "raylet", "gcs_server", "xmcray")  # ends of words that name a program


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket of one process.

    Attributes:
        address: address on which it listens, such as 127.0.0.1 or ::.
        port: TCP port.
        pid: id of the process.
        command: command line of the process.
    """

    address: str
    port: int
    pid: int
    command: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        # ::ffff:127.0.0.1 is loopback, but only its IPv4 form says so.
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            return address.ipv4_mapped.is_loopback
        return address.is_loopback

    @property
    def name(self) -> str:
        """A short name of the process."""
        words = self.command.split()
        if not words:
            return "?"
        if words[0].startswith("ray::"):
            return words[0]
        # The interpreter and its options precede the program.
        for word in words[:6]:
            if word.endswith(PROGRAMS):
                return Path(word).name
        return Path(words[0]).name


def listeners() -> list[Listener]:
    """Listening TCP sockets of all processes that this user may inspect, by port."""
    sockets = set()
    for process in psutil.process_iter():
        try:
            connections = process.net_connections(kind="tcp")
            command = " ".join(process.cmdline())
        except psutil.Error:  # a process of another user, or one that has ended
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                address, port = connection.laddr
                sockets.add(Listener(address, port, process.pid, command))
    return sorted(sockets, key=lambda listener: (listener.port, listener.address, listener.pid))
