"""This machine's copies of remote artifacts."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmcray.errors import StorageError
from xmcray.storage.manifest import MANIFEST, FileEntry, hash_file, made_by, parse_manifest
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.remote import filesystem_of, reaching
from xmcray.storage.whole_files import fsync, publish


def cache_folder() -> Path:
    """This user's folder for what can be made again: XMCRAY_CACHE or ~/.cache/xmcray."""
    return Path(os.environ.get("XMCRAY_CACHE", Path.home() / ".cache" / "xmcray"))


def local_copy(source: str, kind: str) -> Path:
    """An artifact of a URL or a folder, copied to this machine's cache if it is not there yet.

    All processes of a machine share one copy. The first one makes it while the others wait. The
    copy is renamed to its final name only when every file has the hash of the manifest. What a
    killed process left behind is removed. CACHE is `cache_folder()`:

        CACHE/0123abcd...          a complete copy, named by the hash of its manifest
        CACHE/.0123abcd....part    a copy in progress; CACHE/.0123abcd....lock is held meanwhile

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
    key = hashlib.sha256(content).hexdigest()[:32]
    cache = cache_folder()
    copy = cache / key
    with disk_errors(copy):
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when the process dies
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
    return copy


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
