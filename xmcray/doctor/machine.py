"""Checks cores, threads, memory, shared memory, disk and GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from xmcray.doctor.finding import Finding

GIB = 2**30
SMALL_MEMORY_BYTES = 2 * GIB
SMALL_SHM_BYTES = 1 * GIB
SMALL_DISK_BYTES = 5 * GIB
# Above this share of a disk, Ray creates no objects on it; above this share of memory, it kills
# workers.
RAY_FULL = 0.95
LONGEST_SOCKET_PATH = 107  # the limit of Linux for Unix sockets
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
MIN_OPEN_FILES = 4096
MIN_MAPPINGS = 65_530  # the default of Linux


def cores(
    environment: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup")
) -> Iterator[Finding]:
    """Checks the cores that this process may use, and the threads per process.

    Args:
        environment: variables of this process.
        cgroup: folder with the limits of a container.
    """
    # Libraries count the cores of the machine, even if a container or taskset allows fewer.
    visible = os.cpu_count() or 1
    allowed: float = len(os.sched_getaffinity(0))
    container_cores = _container_cores(cgroup)
    if container_cores:
        allowed = min(allowed, container_cores)
    if allowed < visible:
        yield Finding(
            "cores",
            "warning",
            f"{allowed:g} may be used of {visible} that libraries count",
            f"set cluster.threads_per_process and export OMP_NUM_THREADS={max(1, int(allowed))}",
        )
    else:
        yield Finding("cores", "ok", f"{visible}")
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > allowed:
        text = f"is {threads} on {allowed:g} cores: processes wait for each other"
        yield Finding("OMP_NUM_THREADS", "warning", text, "lower it")
    else:
        text = threads or "not set: cluster.threads_per_process decides"
        yield Finding("OMP_NUM_THREADS", "ok", text)


def memory(total_bytes: int, free_bytes: int) -> Finding:
    """Checks the memory of this machine.

    Args:
        total_bytes: memory in all.
        free_bytes: memory that programs can still take.
    """
    text = f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB are free"
    if free_bytes < (1 - RAY_FULL) * total_bytes:
        text = f"{text}: Ray kills workers at 95 %"
        return Finding("memory", "error", text, "end other programs")
    if free_bytes < SMALL_MEMORY_BYTES:
        remedy = "a run with 2 workers on Ray takes about 2 GiB; end other programs"
        return Finding("memory", "warning", text, remedy)
    return Finding("memory", "ok", text)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Checks shared memory, where Ray keeps its objects."""
    if not folder.is_dir():
        text = f"{folder} is missing: Ray keeps objects on disk"
        return Finding("shared memory", "warning", text, "mount it as tmpfs")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < SMALL_SHM_BYTES:
        return Finding(
            "shared memory",
            "warning",
            f"{free_bytes / 2**20:.0f} MiB are free in {folder}:"
            " Ray keeps objects on disk, which is slow",
            "give a container --shm-size=8g",
        )
    return Finding("shared memory", "ok", f"{free_bytes / GIB:.1f} GiB are free in {folder}")


def disk(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the disks for runs, and for logs and spilled objects of Ray."""
    ray_folder = Path(environment.get("RAY_TMPDIR") or tempfile.gettempdir())
    yield _free_disk("disk of this folder", Path.cwd(), full_share=1.0)
    yield _free_disk("disk of Ray", ray_folder, full_share=RAY_FULL)
    if len(f"{ray_folder}{RAY_SOCKET}") > LONGEST_SOCKET_PATH:
        text = f"{ray_folder} is too long for the sockets of Ray"
        yield Finding("RAY_TMPDIR", "error", text, "choose a shorter folder")


def _free_disk(check: str, folder: Path, full_share: float) -> Finding:
    # Ray creates its folder when it starts. Before that, the one that it will be in is checked.
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
    usage = shutil.disk_usage(existing)
    text = f"{usage.free / GIB:.1f} GiB are free at {folder}"
    if usage.free < (1 - full_share) * usage.total:
        text = f"{text}: Ray creates no objects on a disk 95 % full"
        return Finding(check, "error", text, "free some, or set RAY_TMPDIR")
    if usage.free < SMALL_DISK_BYTES:
        remedy = "a run keeps two checkpoints, with the state of its optimisers"
        return Finding(check, "warning", text, remedy)
    return Finding(check, "ok", text)


def limits() -> Finding:
    """Checks how many files a process may open; Ray opens many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {limit}"
    if 0 <= limit < MIN_OPEN_FILES:  # unlimited is negative
        return Finding("open files", "warning", text, "run `ulimit -n 65536` before Ray starts")
    return Finding("open files", "ok", text)


def mappings(file: Path = Path("/proc/sys/vm/max_map_count")) -> Finding:
    """Checks how many mapped files a process may have; corpora and bundles are mapped.

    Args:
        file: the file with the system's limit, which only Linux has.
    """
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):
        return Finding("mapped files", "ok", "no limit is known")
    text = f"at most {limit}"
    if limit < MIN_MAPPINGS:
        remedy = (
            f"run `sysctl vm.max_map_count={MIN_MAPPINGS}`; a corpus may map thousands of files"
        )
        return Finding("mapped files", "warning", text, remedy)
    return Finding("mapped files", "ok", text)


def devices(nvidia: Path = Path("/proc/driver/nvidia/gpus")) -> Finding:
    """Checks the GPUs that torch can use.

    Args:
        nvidia: folder with an entry for each GPU that the driver sees.
    """
    try:
        import torch
    except ImportError as error:
        return Finding("GPU", "error", f"torch cannot be loaded ({error})", "install it again")
    if torch.cuda.is_available():
        numbers = range(torch.cuda.device_count())
        names = [torch.cuda.get_device_name(number) for number in numbers]
        return Finding("GPU", "ok", ", ".join(names))
    # torch sees none. The driver's own list tells a machine without GPUs from a wrong build.
    num_gpus = len(list(nvidia.glob("*")))
    if not num_gpus:
        return Finding("GPU", "ok", "none; everything works on CPU")
    build = "was built without CUDA"
    if torch.version.cuda is not None:
        build = f"expects CUDA {torch.version.cuda}"
    return Finding(
        "GPU",
        "warning",
        f"{num_gpus} in the machine, none that torch {torch.__version__} can use: it {build}",
        "install the CUDA build of torch and the extra gpu, and look at nvidia-smi",
    )


def _container_cores(cgroup: Path) -> float | None:
    """Cores that a container may use; None if it is not limited."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    if not quota.isdigit():
        return None  # "max" is no limit
    return int(quota) / int(period)
