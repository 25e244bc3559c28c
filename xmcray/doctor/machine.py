"""Cores, threads, memory, shared memory, disk and GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from xmcray.doctor.finding import Finding

GIB = 2**30
SMALL_MEMORY, SMALL_SHM, SMALL_DISK = 2 * GIB, 1 * GIB, 5 * GIB
RAY_FULL = 0.95  # of a disk; above, Ray makes no objects on it. Of memory; above, it kills workers
SOCKET_PATH = 107  # longest path of a Unix socket
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
FILES = 4096


def cores(
    environment: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup")
) -> Iterator[Finding]:
    """Cores that this process may use, and threads per process."""
    seen, mine = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    allowed = min(mine, _quota(cgroup) or mine)
    if allowed < seen:
        yield Finding(
            "cores",
            "warning",
            f"{allowed:g} may be used of {seen} that libraries count",
            f"set cluster.threads_per_process and export OMP_NUM_THREADS={max(1, int(allowed))}",
        )
    else:
        yield Finding("cores", "ok", f"{seen}")
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > allowed:
        yield Finding(
            "OMP_NUM_THREADS",
            "warning",
            f"is {threads} on {allowed:g} cores: processes wait for each other",
            "lower it",
        )
    else:
        yield Finding(
            "OMP_NUM_THREADS", "ok", threads or "not set: cluster.threads_per_process decides"
        )


def memory(
    meminfo: Path = Path("/proc/meminfo"), shm: Path = Path("/dev/shm")
) -> Iterator[Finding]:
    """Memory, and shared memory, where Ray keeps its objects."""
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(meminfo)}
    total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    if total:
        text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
        if free < (1 - RAY_FULL) * total:
            yield Finding(
                "memory", "error", f"{text}: Ray kills workers at 95 %", "end other programs"
            )
        elif free < SMALL_MEMORY:
            yield Finding(
                "memory",
                "warning",
                text,
                "a run with 2 workers on Ray takes about 2 GiB; end other programs",
            )
        else:
            yield Finding("memory", "ok", text)
    if not shm.is_dir():
        yield Finding(
            "shared memory",
            "warning",
            f"{shm} is missing: Ray keeps objects on disk",
            "mount it as tmpfs",
        )
        return
    size = shutil.disk_usage(shm).free
    if size < SMALL_SHM:
        yield Finding(
            "shared memory",
            "warning",
            f"{size / 2**20:.0f} MiB are free in {shm}: Ray keeps objects on disk, which is slow",
            "give a container --shm-size=8g",
        )
    else:
        yield Finding("shared memory", "ok", f"{size / GIB:.1f} GiB are free in {shm}")


def disk(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Where runs are written, and where Ray keeps logs and spilled objects."""
    ray = Path(environment.get("RAY_TMPDIR") or tempfile.gettempdir())
    for name, folder in {"disk of this folder": Path.cwd(), "disk of Ray": ray}.items():
        usage = shutil.disk_usage(folder if folder.is_dir() else "/")
        text = f"{usage.free / GIB:.1f} GiB are free at {folder}"
        if name == "disk of Ray" and usage.free < (1 - RAY_FULL) * usage.total:
            yield Finding(
                name,
                "error",
                f"{text}: Ray makes no objects on a disk 95 % full",
                "free some, or set RAY_TMPDIR",
            )
        elif usage.free < SMALL_DISK:
            yield Finding(
                name,
                "warning",
                text,
                "a run keeps two checkpoints, with the state of its optimisers",
            )
        else:
            yield Finding(name, "ok", text)
    if len(f"{ray}{RAY_SOCKET}") > SOCKET_PATH:
        yield Finding(
            "RAY_TMPDIR",
            "error",
            f"{ray} is too long for the sockets of Ray",
            "choose a shorter folder",
        )


def limits() -> Iterator[Finding]:
    """Files that a process may open; Ray opens many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FILES
    do = "run `ulimit -n 65536` before Ray starts" if few else ""
    yield Finding("open files", "warning" if few else "ok", f"at most {soft}", do)


def devices(nvidia: Path = Path("/proc/driver/nvidia/gpus")) -> Iterator[Finding]:
    """GPUs that torch can use."""
    try:
        import torch
    except ImportError as error:
        yield Finding("GPU", "error", f"torch cannot be loaded ({error})", "install it again")
        return
    there = len(list(nvidia.glob("*"))) if nvidia.is_dir() else 0
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("GPU", "ok", ", ".join(names))
    elif there:
        build = (
            "was built without CUDA"
            if torch.version.cuda is None
            else f"expects CUDA {torch.version.cuda}"
        )
        yield Finding(
            "GPU",
            "warning",
            f"{there} in the machine, none that torch {torch.__version__} can use: it {build}",
            "install the CUDA build of torch and the extra gpu, and look at nvidia-smi",
        )
    else:
        yield Finding("GPU", "ok", "none; everything works on CPU")


def _quota(cgroup: Path) -> float | None:
    """Cores that a container may use."""
    text = (_lines(cgroup / "cpu.max") or [""])[0].split()
    return int(text[0]) / int(text[1]) if len(text) == 2 and text[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
