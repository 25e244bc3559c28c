"""Which ports the processes of this user listen on, from /proc."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket. command: the process's command line."""

    address: str
    port: int
    pid: int
    command: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    @property
    def name(self) -> str:
        """What the process is, in a word or two."""
        words = self.command.split()
        if words and words[0].startswith("ray::"):
            return words[0]
        scripts = [
            Path(word).name
            for word in words[:6]
            if word.endswith((".py", "raylet", "gcs_server", "xmcray"))
        ]
        return scripts[0] if scripts else Path(words[0]).name if words else "?"


def listeners(proc: Path = Path("/proc")) -> list[Listener]:
    """Listening TCP sockets of processes that this user may look into, by port."""
    sockets = {
        inode: where for name in ("tcp", "tcp6") for inode, where in _table(proc / "net" / name)
    }
    found = set()
    for folder in proc.glob("[0-9]*"):
        for inode in _inodes(folder):
            if inode in sockets:
                address, port = sockets[inode]
                found.add(Listener(address, port, int(folder.name), _command(folder)))
    return sorted(found, key=lambda one: (one.port, one.address, one.pid))


def _table(path: Path) -> list[tuple[str, tuple[str, int]]]:
    rows = []
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return []
    for fields in map(str.split, lines):
        if fields[3] == LISTEN:
            address, port = fields[1].split(":")
            rows.append((fields[9], (_address(address), int(port, 16))))
    return rows


def _address(text: str) -> str:
    """The kernel writes an address as words of 32 bits in the machine's order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def _inodes(process: Path) -> list[str]:
    inodes = []
    try:
        for link in (process / "fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.append(target[8:-1])
    except OSError:  # another user's, or gone
        pass
    return inodes


def _command(process: Path) -> str:
    try:
        return (
            (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        return ""
