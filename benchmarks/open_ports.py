"""Which ports Ray and xmcray listen on, and who reaches them, read from /proc while each of them runs.

python benchmarks/open_ports.py          # two minutes
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from common import new_parser, refuse_if_busy, set_options, write_table

from xmcray.doctor.sockets import Listener, listeners

# Helpers shared with the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from heads import free_ports, head
from planted import write_planted
from processes import descendants, kill, last_step

XMCRAY = str(Path(sys.executable).with_name("xmcray"))
SMALL = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "negatives.hard=3",
    "negatives.uniform=10",
    "log.every=1",
]
PATIENCE_S = 120


def main() -> None:
    parser = new_parser(__doc__, out="open_ports.md")
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    folder = Path(tempfile.mkdtemp(prefix="xp"))
    write_planted(folder / "raw", num_queries=200, num_labels=30)
    corpus = folder / "corpus"
    train = [XMCRAY, "train", "astra", "--data", str(corpus), "--no-evaluate"]
    train += set_options(SMALL)
    try:
        subprocess.run(
            [XMCRAY, "prepare", str(folder / "raw"), "--out", str(corpus)],
            check=True,
            capture_output=True,
        )
        subprocess.run(
            [*train, "--workers", "0", "--out", str(folder / "done")],
            check=True,
            capture_output=True,
        )
        rows: list[list[object]] = []
        many = ["--workers", "2"]
        many += set_options(["cluster.cpus_per_worker=0.5", "optim.epochs=2000"])
        with running(
            [*train, *many, "--out", str(folder / "run")], lambda _: last_step(folder / "run") > 0
        ) as found:
            rows += table("`xmcray train --workers 2`", found)
        for name, loopback in {
            "docs/jobs.md: one machine": True,
            "a node of cluster/*.yaml": False,
        }.items():
            with head(loopback=loopback) as own:
                time.sleep(5)  # for what starts after the dashboard
                rows += table(f"`ray start --head`, {name}", of({own.pid, *descendants(own.pid)}))
        for more in ([], ["--replicas", "2"]):
            port = free_ports(1)[0]
            serve = [
                XMCRAY,
                "serve",
                str(folder / "done" / "bundle"),
                "--port",
                str(port),
                "--state-dir",
                str(folder / "s"),
            ]
            command = " ".join(["xmcray serve BUNDLE", *more])
            # The proxy listens before the replicas do, so its port says nothing about theirs.
            with running([*serve, *more], functools.partial(is_serving, port)) as found:
                rows += table(f"`{command}`", found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    header = ["what runs", "process", "listens", "reached from", "ports"]
    write_table(
        arguments.out,
        "Open ports",
        header,
        rows,
        ["sockets that listen, by process, from /proc/net/tcp", load],
    )


def is_serving(port: int, printed: str) -> bool:
    """Whether a server has said that it serves, and answers."""
    if not printed.startswith("serving "):
        return False
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").is_success
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def running(command: list[str], ready: Callable[[str], bool]) -> Iterator[list[Listener]]:
    """What a command listens on once it is ready; it is ended afterwards, with all it started.

    Args:
        command: the command.
        ready: whether it is, by what it has printed so far.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not ready(Path(output.name).read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(command)} was not ready within {PATIENCE_S} s")
                time.sleep(0.2)
            yield of({process.pid, *descendants(process.pid)})
        finally:
            family = descendants(process.pid)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                kill([process.pid])
            for pid, line in family.items():
                if descendants_line(pid) == line:
                    kill([pid])


def descendants_line(pid: int) -> str:
    """Command line of a process, empty when it is gone."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def of(pids: set[int]) -> list[Listener]:
    """Listeners of some processes."""
    return [listener for listener in listeners() if listener.pid in pids]


def table(what: str, sockets: list[Listener]) -> list[list[object]]:
    """Rows of the table: one for each process name and reach."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for listener in sockets:
        groups.setdefault((listener.loopback, listener.name), []).append(listener.port)
    rows: list[list[object]] = []
    # Those that other machines reach come first.
    for (loopback, name), ports in sorted(groups.items()):
        reach = "this machine" if loopback else "**other machines**"
        rows.append([what, name, len(ports), reach, shown(ports)])
    return rows


def shown(ports: list[int]) -> str:
    """The ports that are not drawn by the system, which are the ones to write into a firewall."""
    fixed = sorted({port for port in ports if port in KNOWN})
    return ", ".join(f"{port} ({KNOWN[port]})" for port in fixed) or "any"


KNOWN = {
    6379: "GCS",
    8265: "dashboard",
    10001: "Ray client",
    44217: "autoscaler's metrics",
    44227: "dashboard's metrics",
    52365: "agent",
}


if __name__ == "__main__":
    main()
