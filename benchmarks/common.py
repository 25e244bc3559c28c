"""What every benchmark needs: a description of the machine, a refusal to measure on a busy one, a Markdown table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import scipy.stats
import torch

RESULTS = Path(__file__).parent / "results"
MAX_LOAD_PER_CORE = 0.5
Value = TypeVar("Value")
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


def new_parser(
    about: str | None,
    *,
    out: str = "",
    threads: int = 0,
    minutes: bool = False,
    anyway: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options that several benchmarks have.

    Args:
        about: text of the script.
        out: --out has this page of results as its default; "" leaves the option out.
        threads: --threads has this default; 0 leaves it out.
        minutes: --minutes ends a long measurement between two trainings.
        anyway: --anyway measures on a busy machine.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        parser.add_argument("--out", type=Path, default=Path(out))
    if threads:
        parser.add_argument("--threads", type=int, default=threads)
    if minutes:
        about_minutes = "start no training after so many"
        parser.add_argument("--minutes", type=float, default=math.inf, help=about_minutes)
    if anyway:
        parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    return parser


def set_options(settings: Iterable[str]) -> list[str]:
    """Settings such as `optim.epochs=1` as options of a command."""
    words = []
    for setting in settings:
        words += ["--set", setting]
    return words


def cpu_timed(function: Callable[[], Value]) -> tuple[Value, float]:
    """What the function returns, and the CPU seconds of this process that it took."""
    begin = time.process_time()
    value = function()
    return value, time.process_time() - begin


def recall_of(ids: Iterable[np.ndarray], exact_ids: Iterable[np.ndarray], k: int) -> float:
    """The mean share of the k exact answers to a query that are among other answers to it."""
    hits = []
    for ids_of_query, exact_ids_of_query in zip(ids, exact_ids, strict=True):
        common_ids = np.intersect1d(ids_of_query, exact_ids_of_query)
        hits.append(len(common_ids))
    return sum(hits) / (k * len(hits))


def machine() -> str:
    """Processor, cores, memory, GPUs, operating system and versions of the main packages, in one line."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    versions = []
    for package in PACKAGES:
        version = _version(package)
        if version is not None:
            versions.append(f"{package} {version}")
    parts = [f"{processor()}, {cores} cores, {memory_gib:.0f} GiB", *_gpus(), system]
    return "; ".join([*parts, ", ".join(versions)])


def refuse_if_busy(anyway: bool) -> str:
    """The load average as a sentence for the table.

    Raises:
        SystemExit: (code 2) the load is above 0.5 per core and `anyway` is false.
    """
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    if load <= MAX_LOAD_PER_CORE * cores:
        return f"load average {load:.2f} on {cores} cores at the start"
    if not anyway:
        print(
            f"error: the load average is {load:.2f} on {cores} cores, expected at most"
            f" {MAX_LOAD_PER_CORE} per core; wait for an idle machine or pass --anyway",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return f"**busy machine**: load average {load:.2f} on {cores} cores at the start (run with --anyway)"


def cuda_device(anyway: bool) -> torch.device:
    """The CUDA device; the CPU if there is none and `anyway` is true.

    Raises:
        SystemExit: (code 2) there is none and `anyway` is false.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not anyway:
        print(
            "error: no CUDA device found, expected one; run it on a GPU machine or pass --anyway",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return torch.device("cpu")


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and half the width of its 95 % interval (Student's t); infinite for one value."""
    mean = float(np.mean(values))
    count = len(values)
    if count < 2:
        return mean, math.inf
    quantile = float(scipy.stats.t.ppf(0.975, count - 1))
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return mean, quantile * standard_error


def write_table(
    path: str | Path,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str],
) -> None:
    """Writes a Markdown page with one table and prints it.

    Args:
        path: a relative one is taken from benchmarks/results.
        title: heading of the page.
        header: column names.
        rows: cells; floats are printed with four significant digits.
        notes: lines under the table: settings, load, what was not run. Machine, commit, date and command are added.
    """
    table = [list(header), ["---"] * len(header)]
    table += [[_cell(value) for value in row] for row in rows]
    lines = [f"# {title}", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in table]
    lines.append("")
    lines += [f"- {note}" for note in [*notes, *provenance()]]
    page = "\n".join(lines)
    target = RESULTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page + "\n", encoding="utf-8")
    print(page)


def provenance() -> list[str]:
    """Machine, commit, date and command, as notes."""
    script = os.path.relpath(sys.argv[0], Path(__file__).parents[1])
    command = " ".join(["python", script, *sys.argv[1:]])
    return [f"machine: {machine()}", f"commit {commit()}, {datetime.date.today()}, `{command}`"]


def commit() -> str:
    """The commit that is measured, and whether tracked files differ from it; tables of other benchmarks do not count."""
    git = ["git", "-C", str(Path(__file__).parent)]
    name = _run([*git, "rev-parse", "--short", "HEAD"]).strip()
    paths = [".", "..", ":!results"]
    changed = _run([*git, "status", "--porcelain", "--untracked-files=no", "--", *paths]).strip()
    return (name or "unknown") + (" with local changes" if changed else "")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    output = _run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return [line.strip() for line in output.splitlines() if line.strip()]


def _run(command: list[str]) -> str:
    """Standard output of a command; empty if it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout
