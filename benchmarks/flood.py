"""What clients notice while others hold connections: idle sockets, slow bodies, an endless head.

    python benchmarks/flood.py                    # two minutes, on an idle machine
    python benchmarks/flood.py --seconds 5 --anyway    # does it work?

A server in one process, searches from one client with a connection of its own, 20 a second. First
nothing else happens. Then, at once: 1,000 sockets that send nothing, 100 requests with a token that
send a byte of their body each second, and a head that never ends. A connection that the server closes
comes back a second later. Last, the same searches after all of that. The client tries each search
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, write_table
from xmcray_serve import Server

from xmcray.client import Client, ClientError

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import TEXTS, write_bundle_of

IDLE = 1000
SLOW = 100
PER_SECOND = 20
LIMIT_MS = 50.0  # of the added p99
AGAIN_S = 1.0  # until a closed connection comes back
HEAD = b"POST /v1/search HTTP/1.1\r\nHost: x\r\n"
# With a token: without one, a request is refused before its body.
BODY = HEAD + b"Content-Type: application/json\r\nContent-Length: 5000\r\nAuthorization: Bearer "


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard_limit), hard_limit))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.seconds)
    added = float(str(rows[1][4])) - float(str(rows[0][4]))
    kept = added <= LIMIT_MS and not any(row[2] for row in rows)
    notes = [
        f"added p99: {added:.1f} ms (limit {LIMIT_MS:.0f} ms): {'kept' if kept else 'missed'}",
        f"{IDLE:,} idle sockets, {SLOW} slow bodies with a token and an endless head; server, client and flood on the same machine",
        load,
    ]
    header = ["while", "searches", "failed", "p50 ms", "p99 ms", "max ms", "connections tried"]
    write_table("flood.md", "Searches during a flood of connections", header, rows, notes)


def measure(folder: Path, seconds: float) -> list[list[object]]:
    """A row for each phase."""
    state = folder / "state"
    server = Server(write_bundle_of(folder / "bundle", "texts"), state)
    token = (state / "token").read_text().strip()
    methods = multiprocessing.get_context("spawn")
    stop = methods.Event()
    tried = methods.Value("i", 0)
    attack = methods.Process(target=flood, args=(server.port, token, stop, tried))
    rows = []
    try:
        address = f"http://127.0.0.1:{server.port}"
        with Client(address, token=token, retries=0, timeout_s=60) as client:
            # A server that has just started is slow at times, which would flatter the flood.
            search(client, seconds)
            rows.append(["nothing else happens", *search(client, seconds), 0])
            attack.start()
            deadline = time.monotonic() + 60
            while tried.value < IDLE + SLOW + 1 and time.monotonic() < deadline:
                time.sleep(0.1)
            row = ["the flood lasts", *search(client, seconds)]
            rows.append([*row, tried.value])
            stop.set()
            attack.join()
            rows.append(["the flood is over", *search(client, seconds), 0])
    finally:
        stop.set()
        server.close()
    return rows


def search(client: Client, seconds: float) -> list[object]:
    """Searches at a fixed rate; returns their number, failures, and p50, p99 and largest time in ms."""
    times = []
    failed = 0
    began = time.monotonic()
    number = 0
    while time.monotonic() < began + seconds:
        due = began + number / PER_SECOND
        time.sleep(max(0.0, due - time.monotonic()))
        # From the moment that it was due, so that a wait for the one before counts too.
        try:
            client.search([TEXTS[number % len(TEXTS)]], 10)
        except ClientError:
            failed += 1
        times.append(1000 * (time.monotonic() - due))
        number += 1
    p50, p99, longest = np.percentile(times, (50, 99, 100))
    return [number, failed, f"{p50:.1f}", f"{p99:.1f}", f"{longest:.1f}"]


# --- the flood, in a process of its own


def flood(port: int, token: str, stop: Event, tried: Any) -> None:
    """Holds connections until `stop` is set; `tried` counts them."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard_limit), hard_limit))
    asyncio.run(hold_all(port, token, stop, tried))


async def hold_all(port: int, token: str, stop: Event, tried: Any) -> None:
    numbers = range(IDLE + SLOW + 1)
    tasks = [asyncio.create_task(hold(port, token, number, tried)) for number in numbers]
    while not stop.is_set():
        await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()


async def hold(port: int, token: str, number: int, tried: Any) -> None:
    """One connection, which comes back when it was closed."""
    while True:
        tried.value += 1
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sending = asyncio.create_task(send(writer, token, number))
            await reader.read()
            sending.cancel()
            writer.close()
        await asyncio.sleep(AGAIN_S)


async def send(writer: asyncio.StreamWriter, token: str, number: int) -> None:
    """Nothing, a byte of a body each second, or a head without an end."""
    if number < IDLE:
        return
    is_head = number == IDLE + SLOW
    piece = b"X-More: " + 100 * b"a" + b"\r\n" if is_head else b" "
    with contextlib.suppress(OSError):
        writer.write(HEAD if is_head else BODY + token.encode() + b"\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01 if is_head else 1.0)


if __name__ == "__main__":
    main()
