"""This machine's copies of remote artifacts.

A process holds the copies that it has opened until it ends, or until it releases them, as a server
does that loads one bundle after the other. Only copies that no process holds are ever removed. Their age
counts from when they were released.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from xmcray.errors import StorageError
from xmcray.storage.manifest import MANIFEST, FileEntry, hash_file, made_by, parse_manifest
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.remote import filesystem_of, reaching
from xmcray.storage.whole_files import fsync, publish

NUM_UNUSED = 4  # copies of a kind that `release_copies` leaves though no process holds them
_held: dict[Path, IO[str]] = {}  # copies that this process holds, and their locked files


def cache_folder() -> Path:
    """This user's folder for what can be made again: XMCRAY_CACHE or ~/.cache/xmcray."""
    if "XMCRAY_CACHE" in os.environ:
        return Path(os.environ["XMCRAY_CACHE"])
    return Path.home() / ".cache" / "xmcray"


def local_copy(source: str, kind: str) -> Path:
    """An artifact of a URL or a folder, copied to this machine's cache if it is not there yet.

    All processes of a machine share one copy. The first one makes it while the others wait. The
    copy is renamed to its final name only when every file has the hash of the manifest. What killed
    processes left behind is removed before another copy is made. CACHE is `cache_folder()`:

        CACHE/0123abcd...          a complete copy, named by the hash of its manifest
        CACHE/.0123abcd....part    a copy in progress; CACHE/.0123abcd....lock is held meanwhile
        CACHE/.0123abcd....used    locked by every process that holds the copy

    Raises:
        StorageError: not an artifact, altered, or no room for it.
    """
    filesystem, root = filesystem_of(source)
    with reaching(source):
        try:
            content = filesystem.cat_file(f"{root}/{MANIFEST}")
        except FileNotFoundError:
            raise StorageError(
                f"{source} has no {MANIFEST}: it is not a complete {kind}; {made_by(kind)}"
            ) from None
    files = parse_manifest(content, source, kind).files
    key = _copy_name(content)
    cache = cache_folder()
    copy = cache / key
    with disk_errors(copy):
        cache.mkdir(parents=True, exist_ok=True)
        if not copy.is_dir():
            # Before the room on the disk is looked at.
            _remove_leftovers(cache)
        with _locked(copy):
            if not copy.is_dir():
                part = cache / f".{key}.part"
                shutil.rmtree(part, ignore_errors=True)
                try:
                    _copy_files(filesystem, root, source, files, part)
                    (part / MANIFEST).write_bytes(content)
                    fsync(part / MANIFEST)
                    publish(part, copy)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
            _hold(copy)
    return copy


def release_copies(kind: str, in_use: Collection[Path]) -> None:
    """Holds only some copies from now on, and removes old ones that no process holds.

    The newest ones stay, because they may be opened again.

    Args:
        kind: only artifacts of this kind are removed. Those of any kind are no longer held.
        in_use: folders that this process goes on using, of artifacts of any kind; others than
            copies do no harm.
    """
    # In the order in which they were opened.
    for copy in list(_held):
        # Those that stay too, because a process may be killed before it releases them.
        _note_use(copy)
    for copy in _held.keys() - set(in_use):
        with contextlib.suppress(KeyError):  # another thread was first
            _held.pop(copy).close()
    try:
        cache = cache_folder()
    except RuntimeError:  # a user without a home folder has no copies
        return
    for copy in in_use:
        # One that was released between its load and its use is held again.
        if copy.parent == cache and copy not in _held:
            with contextlib.suppress(OSError), _locked(copy):
                _hold(copy)
    unused = []
    # The user may empty the cache meanwhile.
    with contextlib.suppress(OSError):
        copies = [copy for copy in cache.iterdir() if _is_unused(copy, kind)]
        unused = sorted(copies, key=_last_used)
    for copy in unused[:-NUM_UNUSED]:
        # What cannot be removed is tried again another time.
        with contextlib.suppress(OSError), _locked(copy):
            # Another process may have opened it meanwhile.
            if _is_unused(copy, kind):
                copy.rename(_beside(copy, "part"))
    with contextlib.suppress(OSError):
        _remove_leftovers(cache)


def _beside(copy: Path, role: str) -> Path:
    """The file or folder of a copy with this role; see `local_copy`."""
    return copy.with_name(f".{copy.name}.{role}")


@contextlib.contextmanager
def _locked(copy: Path, *, waits: bool = True) -> Iterator[None]:
    """Keeps other processes from making, opening or removing a copy.

    Raises:
        BlockingIOError: another process does one of these, and it is not waited for.
    """
    path = _beside(copy, "lock")
    while True:
        with path.open("w") as lock:
            # The system frees it when the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file between opening and locking it.
            if _is_there(lock, path):
                yield
                return


def _is_there(file: IO[str], path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_leftovers(cache: Path) -> None:
    """Removes what belongs to no copy: parts that killed processes left, and empty files."""
    names = set()
    for path in cache.iterdir():
        if match := re.fullmatch(r"\.([0-9a-f]{32})\.(part|lock|used)", path.name):
            names.add(match[1])
    for name in names:
        copy = cache / name
        # A copy in progress is locked. What cannot be removed is tried again another time.
        with contextlib.suppress(OSError):
            if not copy.exists():
                with _locked(copy, waits=False):
                    _remove_beside(copy)


def _remove_beside(copy: Path) -> None:
    """Removes everything of a copy that is not there; it is locked."""
    # Another process may have finished it before the lock was free.
    if not copy.exists():
        part = _beside(copy, "part")
        if part.exists():
            shutil.rmtree(part)
        _beside(copy, "used").unlink(missing_ok=True)
        # Last: from now on others may lock a file of their own.
        _beside(copy, "lock").unlink()


def _hold(copy: Path) -> None:
    """Keeps other processes from removing a copy, which is locked meanwhile."""
    # Opened anew each time: the user may have emptied the cache since.
    # On NFS only files that can be read take a shared lock.
    used = _beside(copy, "used").open("w+")
    # Others lock this file for themselves for a moment at most.
    fcntl.flock(used, fcntl.LOCK_SH)
    # Dictionaries keep the order of insertion: this one is the newest now.
    before = _held.pop(copy, None)
    _held[copy] = used
    if before is not None:
        before.close()
    _note_use(copy)


def _note_use(copy: Path) -> None:
    """Makes the age of a copy that this process holds count from now."""
    # The user may have emptied the cache, and another thread may have released the copy.
    with contextlib.suppress(OSError):
        # The system's own time has steps of some milliseconds, within which there would be no order.
        now = time.time_ns()
        os.utime(_beside(copy, "used"), ns=(now, now))


def _copy_name(content: bytes) -> str:
    """Name of the copy of an artifact whose manifest has this content."""
    return hashlib.sha256(content).hexdigest()[:32]


def _is_unused(copy: Path, kind: str) -> bool:
    """Whether a folder is a copy of a kind that no process holds."""
    try:
        content = (copy / MANIFEST).read_bytes()
        # XMCRAY_CACHE may be a folder in which the user keeps artifacts under names of their own.
        if copy.name != _copy_name(content):
            return False
        parse_manifest(content, copy, kind)
        with _beside(copy, "used").open("a") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (StorageError, OSError):
        return False
    return True


def _last_used(copy: Path) -> int:
    return _beside(copy, "used").stat().st_mtime_ns


def _copy_files(
    filesystem: Any,
    root: str,
    source: str,
    files: Mapping[str, FileEntry],
    folder: Path,
) -> None:
    """Downloads the files of an artifact into `folder` and compares their hashes."""
    folder.mkdir()
    needed = sum(entry.size for entry in files.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{source} has {needed / 1e9:.1f} GB, {folder.parent} has room for {free / 1e9:.1f} GB; remove old copies"
            " there or set XMCRAY_CACHE to a folder on another disk"
        )
    for name, entry in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with reaching(source), disk_errors(folder, inside=folder):
            try:
                filesystem.get_file(f"{root}/{name}", str(target))
            except FileNotFoundError:
                raise StorageError(f"{source}/{name} is missing; make it again") from None
        if hash_file(target) != entry:
            raise StorageError(
                f"{source}/{name} was altered (SHA-256 differs from the manifest); make it again"
            )
        fsync(target)
