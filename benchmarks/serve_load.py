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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Server:
    """A running server, and what is known about its bundle.

    Attributes:
        port: on the loopback address.
        token: opens it.
        mode: "single" or "composed".
        queries: texts for requests.
        baseline: what `served_bundles.in_process` measured.
    """

    port: int
    token: str
    mode: str
    queries: list[str]
    baseline: dict[str, Any]

    def requests(self, groups: Sequence[Sequence[str]]) -> list[bytes]:
        """Whole HTTP requests, one for each group of texts, made beforehand."""
        requests = []
        for texts in groups:
            body = json.dumps({"texts": list(texts), "k": K}).encode()
            lines = [
                "POST /v1/search HTTP/1.1",
                f"Host: 127.0.0.1:{self.port}",
                f"Authorization: Bearer {self.token}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]
            head = "\r\n".join(lines) + "\r\n\r\n"
            requests.append(head.encode() + body)
        return requests


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
    server_cores = client_cores = os.sched_getaffinity(0)
    if options.overload:
        client_cores = {max(server_cores)}
        server_cores = server_cores - client_cores or server_cores
    measure = overload if options.overload else usual
    rows: list[dict[str, object]] = []
    for name, folder in folders.items():
        baseline = in_process_alone(folder, options.threads)
        for mode in options.modes:
            command = shlex.split(options.server)
            with (
                cores(server_cores),
                served(command, folder / "bundle", mode, options.threads) as (port, token),
                cores(client_cores),
            ):
                server = Server(port, token, mode, read_queries(folder), baseline)
                figures = uvloop.run(measure(server, options))
            rows.append({"bundle": f"{name}: {baseline['size']}", "mode": mode, **figures})
    header = list(rows[0])
    cells = [list(row.values()) for row in rows]
    if options.overload:
        out = options.out or "serve_overload.md"
        write_table(out, "Serving: overload", header, cells, [*overload_notes(options), load])
    else:
        out = options.out or "serve_load.md"
        title = "Serving: what HTTP adds"
        write_table(out, title, header, cells, [*usual_notes(options), load])


def in_process_alone(folder: Path, threads: int) -> dict[str, Any]:
    """Measures `served_bundles.in_process` by a process of its own."""
    words = ["--baseline", str(folder), "--threads", str(threads)]
    command = [sys.executable, __file__, *words]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    last_line = output.splitlines()[-1]
    baseline: dict[str, Any] = json.loads(last_line)
    return baseline


@contextlib.contextmanager
def cores(numbers: set[int]) -> Iterator[None]:
    """Runs this program, and what it starts, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    yield
    os.sched_setaffinity(0, before)


async def usual(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """A row: one text a request at half of the peak rate, and 32 texts a request."""
    baseline = server.baseline
    requests = server.requests([[query] for query in server.queries])
    await check(server.port, requests, baseline["uids"])
    peak_s = max(1.0, options.seconds / 6)
    peak_rate, connections = await peak(server.port, requests, CLOSED, peak_s)
    rate = peak_rate / 2
    due = due_times([(rate, options.warmup + options.seconds)], options.arrivals)
    whole_log = await open_loop(server.port, requests, due)
    log = whole_log.part(options.warmup)
    p50, p99 = np.percentile(log.latency_ms(), [50, 99])
    null_p50, null_p99, cost_ms = await generator(requests, rate, options)
    starts = range(0, len(server.queries), BATCH)
    batches = [server.queries[start : start + BATCH] for start in starts]
    batch_requests = server.requests(batches)
    batch_rate, _ = await peak(server.port, batch_requests, CLOSED_BATCH, peak_s)

    share = BATCH * batch_rate / baseline["batch_texts_per_s"]
    added_p50 = p50 - baseline["p50"]
    added_p99 = p99 - baseline["p99"]
    limit_p50, limit_p99 = LIMITS[server.mode]
    missed = []
    if added_p50 > limit_p50:
        missed.append("p50")
    if added_p99 > limit_p99:
        missed.append("p99")
    if share < LIMIT_SHARE:
        missed.append("throughput")
    if set(log.statuses) != {200}:
        missed.append(f"answers ({others(log.statuses, {200})})")
    return {
        "in process p50 / p99, ms": f"{baseline['p50']:.2f} / {baseline['p99']:.2f}",
        "peak/s (connections)": f"{peak_rate:.0f} ({connections})",
        "HTTP p50 / p99, ms": f"{p50:.2f} / {p99:.2f}",
        "added p50 / p99, ms": f"{added_p50:.2f} / {added_p99:.2f}",
        "generator alone p50 / p99, ms": f"{null_p50:.2f} / {null_p99:.2f}",
        "its CPU a request, ms": f"{cost_ms:.3f}",
        "sent late, p99, ms": f"{log.lag_ms():.2f}",
        "texts/s in process, 32 (all) at once": (
            f"{baseline['batch_texts_per_s']:.0f} ({baseline['all_texts_per_s']:.0f})"
        ),
        "texts/s over HTTP, 32 a request": f"{BATCH * batch_rate:.0f}",
        "share": f"{share:.2f}",
        "recall@10": f"{baseline['recall']:.3f}",
        "limits": f"missed: {', '.join(missed)}" if missed else "kept",
    }


def usual_notes(options: argparse.Namespace) -> list[str]:
    """What is measured, and the limits."""
    return [
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


async def overload(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """A row: some times the peak rate for a while, then half of it again."""
    requests = server.requests([[query] for query in server.queries])
    await check(server.port, requests, server.baseline["uids"])
    peak_rate, _ = await peak(server.port, requests, CLOSED, max(1.0, options.seconds / 6))
    begin_s = options.warmup + options.seconds
    overload_s = options.overload_seconds
    end_s = begin_s + overload_s
    phases = [
        (peak_rate / 2, begin_s),
        (options.times * peak_rate, overload_s),
        (peak_rate / 2, max(options.seconds, 2 * NORMAL_S + 1)),
    ]
    due = due_times(phases, options.arrivals)
    started_cpu_s = time.process_time()
    whole_log = await open_loop(server.port, requests, due)
    client_cpu_s = time.process_time() - started_cpu_s
    before = whole_log.part(options.warmup, begin_s)
    during = whole_log.part(begin_s, end_s)
    after = whole_log.part(end_s)

    accepted_ms = during.with_status(200).latency_ms()
    refused = during.with_status(429, 503)
    refused_ms = refused.latency_ms()
    has_retry_after = [exchange.retry_after for exchange in refused.exchanges]
    other_statuses = others(during.statuses, {200, 429, 503})
    normal_s = recovery(before, after)
    limit_ms = 1000 * IN_FLIGHT / peak_rate
    missed = []
    if not (p99_is_at_most(refused_ms, REFUSED_MS) and all(has_retry_after)):
        missed.append("refusals")
    if not p99_is_at_most(accepted_ms, ACCEPTED_LIMITS * limit_ms):
        missed.append("accepted")
    if other_statuses:
        missed.append("answers")
    if normal_s is None or normal_s > NORMAL_S:
        missed.append("recovery")
    return {
        "peak/s": f"{peak_rate:.0f}",
        "limit, ms": f"{limit_ms:.0f}",
        "offered/s": f"{len(during.exchanges) / overload_s:.0f}",
        "before, p50 / p99, ms": percentiles(before.latency_ms()),
        "accepted/s": f"{len(accepted_ms) / overload_s:.0f}",
        "accepted p50 / p99, ms": percentiles(accepted_ms),
        "refused/s": f"{len(refused_ms) / overload_s:.0f}",
        "refused p50 / p99, ms": percentiles(refused_ms),
        f"refused within {REFUSED_MS} ms": part_of(refused_ms <= REFUSED_MS),
        "with Retry-After": part_of(has_retry_after),
        "anything else": other_statuses or "none",
        "client's CPU a request, ms": f"{1000 * client_cpu_s / len(due):.3f}",
        "sent late, p99, ms": f"{during.lag_ms():.1f}",
        "normal after, s": "not seen" if normal_s is None else str(normal_s),
        "limits": f"missed: {', '.join(missed)}" if missed else "kept",
    }


def others(status: Sequence[int], expected: set[int]) -> str:
    """How often there was another status."""
    failures = Counter(code or "no answer" for code in status if code not in expected)
    return ", ".join(f"{number} x {code}" for code, number in failures.items())


def p99_is_at_most(latency_ms: np.ndarray, limit_ms: float) -> bool:
    """False without any request."""
    return len(latency_ms) > 0 and bool(np.percentile(latency_ms, 99) <= limit_ms)


def percentiles(latency_ms: np.ndarray) -> str:
    if not len(latency_ms):
        return "-"
    p50, p99 = np.percentile(latency_ms, [50, 99])
    return f"{p50:.1f} / {p99:.1f}"


def part_of(flags: np.ndarray | list[bool]) -> str:
    return f"{100 * np.mean(flags):.2f} %" if len(flags) else "-"


def recovery(before: Log, after: Log) -> int | None:
    """Seconds from the end of the overload until all is as before: no refusal, and at most twice the p99."""
    due_s = [exchange.due_s for exchange in after.exchanges]
    begin_s = min(due_s)
    # At least half of the time must remain, to judge by.
    last_start_s = int(max(due_s) - begin_s) // 2
    normal_ms = 2 * np.percentile(before.latency_ms(), 99)
    for seconds in range(last_start_s + 1):
        rest = after.part(begin_s + seconds)
        if set(rest.statuses) == {200} and p99_is_at_most(rest.latency_ms(), normal_ms):
            return seconds
    return None


def overload_notes(options: argparse.Namespace) -> list[str]:
    """What is measured, and the limits."""
    return [
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
        due = due_times([(rate, min(10.0, options.seconds))], options.arrivals)
        log = await open_loop(port, requests, due)
        after = resource.getrusage(resource.RUSAGE_SELF)
        pool.close()
    finally:
        stop(process)
    user_s = after.ru_utime - before.ru_utime
    system_s = after.ru_stime - before.ru_stime
    p50, p99 = np.percentile(log.latency_ms(), [50, 99])
    return p50, p99, 1000 * (user_s + system_s) / len(log.exchanges)


if __name__ == "__main__":
    main()
