"""What every benchmark needs: the machine in words, a refusal to measure on a busy one, a Markdown table."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.stats

RESULTS = Path(__file__).parent / "results"
MAX_LOAD_PER_CORE = 0.5
PACKAGES = (
    "ray",
    "torch",
    "transformers",
    "tokenizers",
    "faiss-cpu",
    "faiss-gpu",
    "numpy",
    "pyarrow",
)


def machine() -> str:
    """Processor, cores, memory, GPUs, operating system and versions of the packages that matter, in one line."""
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines(Path("/proc/cpuinfo"))
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    return "; ".join(
        [
            f"{processor}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB",
            *_gpus(),
            f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            ", ".join(versions),
        ]
    )


def refuse_if_busy(anyway: bool) -> str:
    """The load average as a sentence for the table.

    Raises:
        SystemExit: (code 2) the load is above 0.5 per core and `anyway` is false.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= MAX_LOAD_PER_CORE * cores:
        return f"load average {load:.2f} on {cores} cores at the start"
    if not anyway:
        print(
            f"error: the load average is {load:.2f} on {cores} cores, expected at most {MAX_LOAD_PER_CORE} per core;"
            " wait for an idle machine or pass --anyway",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return f"**busy machine**: load average {load:.2f} on {cores} cores at the start (run with --anyway)"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and the half width of its 95 % interval (Student's t); infinite for a single value."""
    mean, number = float(np.mean(values)), len(values)
    if number < 2:
        return mean, math.inf
    quantile = float(scipy.stats.t.ppf(0.975, number - 1))
    return mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(number)


def write_table(
    path: str | Path,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str],
) -> None:
    """Writes a Markdown page with one table and prints it; relative paths lie in benchmarks/results.

    Args:
        header: column names.
        rows: cells; floats are printed with four significant digits.
        notes: lines under the table: settings, load, what was not run. Machine, commit, date and command are added.
    """
    table = [header, ["---"] * len(header), *[[_cell(value) for value in row] for row in rows]]
    about = [*notes, *provenance()]
    lines = [
        f"# {title}",
        "",
        *["| " + " | ".join(row) + " |" for row in table],
        "",
        *[f"- {note}" for note in about],
    ]
    target = RESULTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def provenance() -> list[str]:
    """Machine, commit, date and command, as notes."""
    command = " ".join(
        ["python", os.path.relpath(sys.argv[0], Path(__file__).parents[1]), *sys.argv[1:]]
    )
    return [f"machine: {machine()}", f"commit {_commit()}, {datetime.date.today()}, `{command}`"]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    output = _run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return [line.strip() for line in output.splitlines() if line.strip()]


def _commit() -> str:
    commit = _run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]).strip()
    status = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "status",
        "--porcelain",
        "--untracked-files=no",
    ]
    changed = _run(
        [*status, "--", ".", "..", ":!results"]
    ).strip()  # another benchmark's table changes nothing
    return (commit or "unknown") + (" with local changes" if changed else "")


def _run(command: list[str]) -> str:
    """Standard output of a command, empty when it is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
