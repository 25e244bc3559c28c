"""This machine's copies of remote artifacts.

A process holds the copies that it has opened until it ends, or until it releases them, as a server
does that loads one bundle after the other. Only copies that no process holds are ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
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
    copy is renamed to its final name only when every file has the hash of the manifest. What a
    killed process left behind is removed. CACHE is `cache_folder()`:

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
        with _locked(copy):
            if not copy.is_dir():
                # A killed process may have left a part behind.
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
        kind: only artifacts of this kind are removed.
        in_use: folders that this process goes on using; others than copies do no harm.
    """
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
                part = copy.with_name(f".{copy.name}.part")
                copy.rename(part)
                shutil.rmtree(part)


@contextlib.contextmanager
def _locked(copy: Path) -> Iterator[None]:
    """Keeps other processes from making, opening or removing a copy."""
    with copy.with_name(f".{copy.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when the process dies
        yield


def _hold(copy: Path) -> None:
    """Keeps other processes from removing a copy, which is locked meanwhile."""
    # Opened anew each time: the user may have emptied the cache since. Its time becomes now.
    # On NFS only files that can be read take a shared lock.
    used = copy.with_name(f".{copy.name}.used").open("w+")
    # Others lock this file for themselves for a moment at most.
    fcntl.flock(used, fcntl.LOCK_SH)
    os.utime(used.fileno())
    before = _held.get(copy)
    _held[copy] = used
    if before is not None:
        before.close()


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
        with copy.with_name(f".{copy.name}.used").open("a") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (StorageError, OSError):
        return False
    return True


def _last_used(copy: Path) -> float:
    return copy.with_name(f".{copy.name}.used").stat().st_mtime


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
        with reaching(source), disk_errors(folder):
            try:
                filesystem.get_file(f"{root}/{name}", str(target))
            except FileNotFoundError:
                raise StorageError(f"{source}/{name} is missing; make it again") from None
        if hash_file(target) != entry:
            raise StorageError(
                f"{source}/{name} was altered (SHA-256 differs from the manifest); make it again"
            )
        fsync(target)
