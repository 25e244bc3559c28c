"""All claims: measures what is missing on a few processes of one thread each, and writes docs/claims.md.

python benchmarks/claims/all.py                   # `make claims`
python benchmarks/claims/all.py --only 5 6        # measures two; the page shows all that is measured
python benchmarks/claims/all.py --minutes 0       # the page alone
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from claim import (
    FAILS,
    FRESH,
    HOLDS,
    INCONCLUSIVE,
    MISSING,
    STORE,
    Claim,
    collect,
    due,
    mean,
    measured,
    packed,
    result_file,
    section,
)
from common import new_parser, provenance
from pictures import standalone
from variants import Result, Variant

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
# What one claim with a verdict does, and what several do.
COUNTED = {
    HOLDS: ("holds", "hold"),
    FAILS: ("fails", "fail"),
    INCONCLUSIVE: ("is inconclusive", "are inconclusive"),
    MISSING: ("is not measured", "are not measured"),
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="more for claims that have more")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER", help="claims to measure")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no measurement after so many"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="ignore measurements of other machines"
    )
    parser.add_argument("--full", action="store_true", help="sizes for a GPU")
    parser.add_argument(
        "--out", type=Path, default=DOCS, help="folder of claims.md and its pictures"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that measure
    if arguments.fresh:
        os.environ[FRESH] = "1"
    started = time.monotonic()
    claims = {name: importlib.import_module(name).make(arguments.full) for name in scripts()}
    wanted = {
        name: claim
        for name, claim in claims.items()
        if not arguments.only or claim.number in arguments.only
    }
    failed = (
        measure(wanted, arguments, started + 60 * arguments.minutes) if arguments.minutes else 0
    )
    write(claims, arguments)
    keep(claims, arguments.seeds)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    raise SystemExit(1 if failed else 0)


def scripts() -> list[str]:
    """Names of the scripts of single claims, in order."""
    return sorted(path.stem for path in HERE.glob("c[0-9][0-9]_*.py"))


def measure(claims: dict[str, Claim], arguments: argparse.Namespace, deadline: float) -> int:
    """Measures what is missing; returns how many measurements failed, each with a message."""
    jobs: dict[Path, tuple[str, str, int]] = {}  # claims that share a training name the same file
    for script, claim in claims.items():
        for variant, seed in due(claim, arguments.seeds):
            jobs.setdefault(result_file(claim.variants[variant], seed), (script, variant, seed))
    print(f"{len(jobs)} measurements", flush=True)
    failed = 0
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        tasks: dict[Future[str], tuple[str, str, int]] = {
            pool.submit(measure_one, *job, arguments.full, deadline): job for job in jobs.values()
        }
        for number, (task, (script, variant, seed)) in enumerate(tasks.items(), 1):
            try:
                outcome = task.result()
            except Exception as error:  # one failure must not take the other measurements with it
                failed += 1
                outcome = f"failed: {error!r}"
            print(f"{number}/{len(tasks)} {script}, {variant}, seed {seed}: {outcome}", flush=True)
    return failed


def measure_one(script: str, variant: str, seed: int, full: bool, deadline: float) -> str:
    """One measurement, in a process of the pool."""
    if time.monotonic() > deadline:
        return "not measured, the time is up"
    torch.set_num_threads(1)
    claim: Claim = importlib.import_module(script).make(full)
    result = measured(claim.variants[variant], seed)
    shown = [f"{m} {mean({seed: result}, m):.4g}" for m in claim.metrics if m in result]
    return f"{', '.join(shown)}; {result['cpu_s']:.0f} s"


def write(claims: dict[str, Claim], arguments: argparse.Namespace) -> None:
    """claims.md and a picture for each claim, from what is measured by now."""
    pictures: Path = arguments.out / "claims"
    pictures.mkdir(parents=True, exist_ok=True)
    table = []
    verdicts: Counter[str] = Counter()
    sections = []
    seconds = 0.0
    seen: set[Path] = set()
    for script, claim in claims.items():
        results = collect(claim, arguments.seeds)
        verdict = claim.verdict(results)
        verdicts[verdict] += 1
        anchor = f"claim-{claim.number}"
        table.append(f"| [{claim.number}](#{anchor}) | {claim.title} | {verdict} |")
        command = f"`python benchmarks/claims/{script}.py`"
        sections += [f'<a id="{anchor}"></a>', "", *section(claim, results), "", command, ""]
        if picture := standalone(claim.chart(results)):
            (pictures / f"{script}.svg").write_text(picture, encoding="utf-8")
            sections += [f"![{claim.title}](claims/{script}.svg)", ""]
        seconds += spent(claim.variants, results, seen)
    counts = ", ".join(
        f"{verdicts[name]} {one if verdicts[name] == 1 else several}"
        for name, (one, several) in COUNTED.items()
    )
    head = [
        "# The papers' claims on small data",
        "",
        "Each claim is an experiment that a laptop can run. `make claims` measures what is missing and writes this",
        "page; `python benchmarks/claims/all.py --fresh` measures everything again. Where a preset has changed since, a",
        "claim keeps the settings it was measured with: they are in `benchmarks/claims/settings`.",
        "",
        "A number is a mean over seeds; differences and ratios are paired by seed. Behind it is its 95 % interval. For",
        "P@1 and P@5 it is a two-level bootstrap over seeds and test queries, in which the spread of few seeds is widened",
        "as Student's t does, so it may exceed 100. For other measures it is Student's t over seeds, which leaves out how",
        "far other test queries would change them: their verdicts are of this test split.",
        "The verdict is read off the interval and nothing else: **holds** if it lies wholly inside what the claim says,",
        "**fails** if wholly outside, **inconclusive** otherwise. A claim fails if one of its lines does, and holds if",
        "all do. Below the table of an inconclusive claim is whether more seeds could decide it, or the test queries are",
        "too few. Shares are in percent on the test split, by exact search.",
        "",
        f"Of {len(claims)} claims {counts}.",
        "",
        "| | claim | verdict |",
        "|---|---|---|",
        *table,
        "",
    ]
    foot = [
        f"- {line}"
        for line in [
            f"{seconds / 60:.0f} minutes of CPU time for all {len(seen)} measurements",
            *provenance(),
        ]
    ]
    (arguments.out / "claims.md").write_text(
        "\n".join([*head, *sections, *foot]) + "\n", encoding="utf-8"
    )
    print("\n".join(table))


def keep(claims: dict[str, Claim], seeds: int) -> None:
    """Writes every measurement behind the page to the file of the first claim that needs it."""
    results_by_script: dict[str, dict[str, Result]] = {}
    # Claims that share a training compare different measures of it.
    compared: dict[str, set[str]] = {}
    for script, claim in claims.items():
        results_by_script[script] = {}
        for name, by_seed in collect(claim, seeds).items():
            for seed, result in by_seed.items():
                key = result_file(claim.variants[name], seed).stem
                if key not in compared:
                    results_by_script[script][key] = result
                compared.setdefault(key, set()).update(claim.compared(name))
    for script, results in results_by_script.items():
        # One measurement per line, so that a change of one shows as one line.
        lines = []
        for key in sorted(results):
            line = packed(results[key], compared[key])
            lines.append(f"{json.dumps(key)}: {json.dumps(line)}")
        if lines:
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            (STORE / f"{script}.json").write_text(text, encoding="utf-8")


def spent(
    variants: dict[str, Variant], results: dict[str, dict[int, dict[str, float]]], seen: set[Path]
) -> float:
    """CPU seconds of a claim's measurements that no claim before it had."""
    total = 0.0
    for name, by_seed in results.items():
        for seed, result in by_seed.items():
            path = result_file(variants[name], seed)
            total += 0.0 if path in seen else result["cpu_s"]
            seen.add(path)
    return total


if __name__ == "__main__":
    main()
