"""What HTTP adds to `Retriever.search`: latency at half of the peak rate, throughput with 32 texts, and overload.

    python benchmarks/serve_load.py                       # the sample and a synthetic bundle of 10^6 x 256, both modes
    python benchmarks/serve_load.py --overload            # 5 x the peak rate for a minute, and how it ends
    python benchmarks/serve_load.py --quick               # does it work?

Starts `xmcray serve` itself. The peak is found with closed loops, a new request whenever one is answered; latency is
measured with an open one, whose requests have intended start times drawn beforehand, as a Poisson process. It counts
from the intended start, so a request that had to wait because the server, or this program, was late is not flattered.
This program takes its share of the cores that the server runs on: what it costs is measured against a server that
does nothing, and stands in the table. With --overload it has a core of its own. The same texts are asked in process,
by a program of its own, on as many threads as the server has; the first answers must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from common import new_parser, refuse_if_busy, write_table
from load import (
    MAX_CONNECTIONS,
    Connections,
    Log,
    due_times,
    free_port,
    null_server,
    open_loop,
    peak,
)
from served_bundles import BATCH, K, bundle_folder, in_process, read_queries
from xmcray_serve import served, stop

from xmcray.serving.settings import ServeConfig

BUNDLES = ("sample", "synthetic")
LIMITS = {"single": (8.0, 50.0), "composed": (18.0, float("inf"))}  # added p50 and p99, ms
LIMIT_SHARE = 0.7  # of the in-process throughput
IN_FLIGHT = ServeConfig(bundles={"any": "bundle"}).in_flight
# under overload
REFUSED_MS = 100
ACCEPTED_LIMITS = 3
NORMAL_S = 10
# connections of the closed loops
CLOSED = (1, 2, 4, 8, 16, 32)
CLOSED_BATCH = (1, 2, 4)


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument(
        "--bundle", dest="bundles", nargs="+", default=list(BUNDLES), choices=BUNDLES
    )
    parser.add_argument(
        "--mode", dest="modes", nargs="+", choices=list(LIMITS), default=list(LIMITS)
    )
    parser.add_argument("--labels", type=int, default=1_000_000, help="of the synthetic bundle")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a measurement")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds before it, not counted")
    parser.add_argument("--arrivals", choices=["poisson", "constant"], default="poisson")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the server's process, and in process"
    )
    parser.add_argument("--overload", action="store_true", help="measure overload instead")
    parser.add_argument("--times", type=float, default=5.0, help="the peak rate, with --overload")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument(
        "--server",
        default=f"{Path(sys.executable).parent / 'xmcray'} serve",
        help="command to start",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="short, the sample in one process, printed only"
    )
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--null", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline:
        print(json.dumps(in_process(options.baseline, options.threads)))
        return
    if options.null:
        uvloop.run(null_server(options.null))
        return
    if options.quick:
        options.bundles = ["sample"]
        options.modes = ["single"]
        options.out = Path(os.devnull)
        options.seconds = 3.0
        options.warmup = 1.0
        options.overload_seconds = 5.0
    folders = {name: bundle_folder(name, options.labels) for name in options.bundles}
    load = refuse_if_busy(options.anyway or options.quick)
    all_cores = os.sched_getaffinity(0)
    last_core = max(all_cores)
    server_cores = all_cores - {last_core} or all_cores
    measure, tell = (overload, run_overload) if options.overload else (usual, run_usual)
    rows = []
    for name, folder in folders.items():
        command = [
            sys.executable,
            __file__,
            "--baseline",
            str(folder),
            "--threads",
            str(options.threads),
        ]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        alone = json.loads(output.splitlines()[-1])
        for mode in options.modes:
            command = shlex.split(options.server)
            with (
                cores(server_cores if options.overload else all_cores),
                served(command, folder / "bundle", mode, options.threads) as (port, token),
                cores({last_core} if options.overload else all_cores),
            ):
                figures = uvloop.run(measure(port, token, mode, folder, alone, options))
            rows.append({"bundle": f"{name}: {alone['size']}", "mode": mode, **figures})
    title, notes = tell(options)
    header = list(rows[0])
    name = "serve_overload.md" if options.overload else "serve_load.md"
    write_table(
        options.out or name, title, header, [list(row.values()) for row in rows], [*notes, load]
    )


@contextlib.contextmanager
def cores(numbers: set[int]) -> Iterator[None]:
    """Runs this program, and what it starts, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    yield
    os.sched_setaffinity(0, before)


async def usual(
    port: int,
    token: str,
    mode: str,
    folder: Path,
    alone: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, object]:
    """A row: one text a request at half of the peak rate, and 32 texts a request."""
    queries = read_queries(folder)
    requests = requests_of([[query] for query in queries], token, port)
    await check(port, requests, alone["uids"])
    best, connections = await peak(port, requests, CLOSED, max(1.0, options.seconds / 6))
    due = due_times([(best / 2, options.warmup + options.seconds)], options.arrivals)
    log = (await open_loop(port, requests, due)).part(options.warmup)
    p50, p99 = np.percentile(log.latency_ms(), [50, 99])
    null_p50, null_p99, cost_ms = await generator(requests, best / 2, options)
    batches = requests_of(
        [queries[i : i + BATCH] for i in range(0, len(queries), BATCH)], token, port
    )
    batch_rate, _ = await peak(port, batches, CLOSED_BATCH, max(1.0, options.seconds / 6))
    reached = BATCH * batch_rate / alone["batch_texts_per_s"]
    added = (p50 - alone["p50"], p99 - alone["p99"])
    limits = LIMITS[mode]
    missed = [
        name
        for name, value, limit in zip(("p50", "p99"), added, limits, strict=True)
        if value > limit
    ]
    missed += ["throughput"] * (reached < LIMIT_SHARE)
    missed += [f"answers ({others(log.status, {200})})"] * (set(log.status) != {200})
    return {
        "in process p50 / p99, ms": f"{alone['p50']:.2f} / {alone['p99']:.2f}",
        "peak/s (connections)": f"{best:.0f} ({connections})",
        "HTTP p50 / p99, ms": f"{p50:.2f} / {p99:.2f}",
        "added p50 / p99, ms": f"{added[0]:.2f} / {added[1]:.2f}",
        "generator alone p50 / p99, ms": f"{null_p50:.2f} / {null_p99:.2f}",
        "its CPU a request, ms": f"{cost_ms:.3f}",
        "sent late, p99, ms": f"{log.lag_ms():.2f}",
        "texts/s in process, 32 (all) at once": f"{alone['batch_texts_per_s']:.0f} ({alone['all_texts_per_s']:.0f})",
        "texts/s over HTTP, 32 a request": f"{BATCH * batch_rate:.0f}",
        "share": f"{reached:.2f}",
        "recall@10": f"{alone['recall']:.3f}",
        "limits": f"missed: {', '.join(missed)}" if missed else "kept",
    }


def run_usual(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Title and notes."""
    notes = [
        f"k = {K}; static encoder",
        f"HTTP: one text a request at half of the peak rate, {options.arrivals} arrivals, {options.seconds:g} s after"
        f" {options.warmup:g} s of warm-up; latency from the intended start of each request",
        "added: less the same percentile in process; nothing is subtracted for the generator, which shares the cores;"
        " its own part was measured at the same rate against a server that does nothing",
        f"limits: added p50 {LIMITS['single'][0]:g} ms and p99 {LIMITS['single'][1]:g} ms in one process, added p50"
        f" {LIMITS['composed'][0]:g} ms composed;"
        f" share of the in-process throughput (32 at once) {LIMIT_SHARE}",
        f"threads in each process of the server, and in process: {options.threads}",
    ]
    return "Serving: what HTTP adds", notes


async def overload(
    port: int,
    token: str,
    mode: str,
    folder: Path,
    alone: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, object]:
    """A row: some times the peak rate for a while, then half of it again."""
    requests = requests_of([[query] for query in read_queries(folder)], token, port)
    await check(port, requests, alone["uids"])
    best, _ = await peak(port, requests, CLOSED, max(1.0, options.seconds / 6))
    seconds = options.overload_seconds
    begin = options.warmup + options.seconds
    phases = [
        (best / 2, begin),
        (options.times * best, seconds),
        (best / 2, max(options.seconds, 2 * NORMAL_S + 1)),
    ]
    due = due_times(phases, options.arrivals)
    started_cpu_s = time.process_time()
    whole = await open_loop(port, requests, due)
    client_cpu_s = time.process_time() - started_cpu_s
    before = whole.part(options.warmup, begin)
    after = whole.part(begin + seconds)
    log = whole.part(begin, begin + seconds)
    status = np.asarray(log.status)
    accepted = status == 200
    refused = np.isin(status, (429, 503))
    accepted_ms = log.latency_ms(accepted)
    refused_ms = log.latency_ms(refused)
    has_retry_after = np.asarray(log.retry_after)[refused]
    other_statuses = others(log.status, {200, 429, 503})
    normal = recovery(before, after)
    limit_ms = 1000 * IN_FLIGHT / best
    kept = {
        "refusals": len(refused_ms) > 0
        and np.percentile(refused_ms, 99) <= REFUSED_MS
        and all(has_retry_after),
        "accepted": len(accepted_ms) > 0
        and np.percentile(accepted_ms, 99) <= ACCEPTED_LIMITS * limit_ms,
        "answers": not other_statuses,
        "recovery": normal is not None and normal <= NORMAL_S,
    }
    missed = [name for name, good in kept.items() if not good]
    return {
        "peak/s": f"{best:.0f}",
        "limit, ms": f"{limit_ms:.0f}",
        "offered/s": f"{len(status) / seconds:.0f}",
        "before, p50 / p99, ms": percentiles(before.latency_ms()),
        "accepted/s": f"{accepted.sum() / seconds:.0f}",
        "accepted p50 / p99, ms": percentiles(accepted_ms),
        "refused/s": f"{refused.sum() / seconds:.0f}",
        "refused p50 / p99, ms": percentiles(refused_ms),
        f"refused within {REFUSED_MS} ms": part_of(refused_ms <= REFUSED_MS),
        "with Retry-After": part_of(has_retry_after),
        "anything else": other_statuses or "none",
        "client's CPU a request, ms": f"{1000 * client_cpu_s / len(due):.3f}",
        "sent late, p99, ms": f"{log.lag_ms():.1f}",
        "normal after, s": "not seen" if normal is None else str(normal),
        "limits": f"missed: {', '.join(missed)}" if missed else "kept",
    }


def others(status: Sequence[int], expected: set[int]) -> str:
    """How often there was another status."""
    failures = Counter(code or "no answer" for code in status if code not in expected)
    return ", ".join(f"{number} x {code}" for code, number in failures.items())


def percentiles(latency_ms: np.ndarray) -> str:
    return (
        " / ".join(f"{value:.1f}" for value in np.percentile(latency_ms, [50, 99]))
        if len(latency_ms)
        else "-"
    )


def part_of(flags: np.ndarray) -> str:
    return f"{100 * np.mean(flags):.2f} %" if len(flags) else "-"


def recovery(before: Log, after: Log) -> int | None:
    """Seconds from the end of the overload until all is as before: no refusal, and at most twice the p99."""
    begin = min(after.due)
    end = max(after.due)
    normal_ms = 2 * np.percentile(before.latency_ms(), 99)
    for seconds in range(int(end - begin) // 2 + 1):
        rest = after.part(begin + seconds)
        if set(rest.status) == {200} and np.percentile(rest.latency_ms(), 99) <= normal_ms:
            return seconds
    return None


def run_overload(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Title and notes."""
    notes = [
        f"{options.times:g} x the peak rate of a closed loop for {options.overload_seconds:g} s, {options.arrivals}"
        f" arrivals, one text a request, at most {MAX_CONNECTIONS:,} connections; before and after: half of the peak",
        "this program runs on the last core, the server on the others; latency from the intended start of each"
        " request, so it includes what this program was late",
        f"limit: how long a full gateway works, its `in_flight` ({IN_FLIGHT}) by the peak"
        f" rate; kept where the p99 of what is accepted is at most {ACCEPTED_LIMITS} times that, the p99 of refusals at"
        f" most {REFUSED_MS} ms, all of them with Retry-After, and all is normal within {NORMAL_S} s",
        "normal: from then on no refusal, and a p99 of at most twice that before",
        f"threads in each process of the server: {options.threads}",
    ]
    return "Serving: overload", notes


def requests_of(texts: Sequence[Sequence[str]], token: str, port: int) -> list[bytes]:
    """Whole HTTP requests, made beforehand."""
    encoded = []
    for group in texts:
        body = json.dumps({"texts": list(group), "k": K}).encode()
        head = f"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        encoded.append(head.encode() + body)
    return encoded


async def check(port: int, requests: Sequence[bytes], uids: Sequence[Sequence[str]]) -> None:
    """The server must answer what `Retriever.search` answers."""
    pool = Connections(port)
    for request, wanted in zip(requests, uids, strict=False):
        answer = await pool.ask(request)
        if answer.status != 200:
            raise SystemExit(
                f"error: the server answers {answer.status} {answer.body[:300]!r}, expected 200"
            )
        answered = [label["uid"] for label in json.loads(answer.body)["results"][0]["answers"]]
        if answered != wanted:
            raise SystemExit(
                f"error: the server answers {answered}, in process it is {wanted}; not the same bundle?"
            )
    pool.close()


async def generator(
    requests: Sequence[bytes], rate: float, options: argparse.Namespace
) -> tuple[float, float, float]:
    """This program alone, at the same rate against a server that does nothing: p50, p99 and processor time, in ms."""
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, "--null", str(port)])
    try:
        pool = Connections(port)
        while (await pool.ask(requests[0])).status != 200:
            await asyncio.sleep(0.1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        log = await open_loop(
            port, requests, due_times([(rate, min(10.0, options.seconds))], options.arrivals)
        )
        after = resource.getrusage(resource.RUSAGE_SELF)
        pool.close()
    finally:
        stop(process)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    p50, p99 = np.percentile(log.latency_ms(), [50, 99])
    return p50, p99, 1000 * used / len(log.due)


if __name__ == "__main__":
    main()
