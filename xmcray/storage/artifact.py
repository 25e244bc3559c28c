"""Artifacts are made under a temporary name, opened by their manifest, linked and locked."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmcray import hub
from xmcray.errors import StorageError
from xmcray.storage.cache import local_copy
from xmcray.storage.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_contents,
    files_below,
    finish_manifest,
    read_manifest,
)
from xmcray.storage.path_errors import check_path, disk_errors, read_errors
from xmcray.storage.remote import filesystem_of, is_url, reaching
from xmcray.storage.whole_files import exchange, publish


def refuse_existing(destination: str | Path) -> None:
    """Raises StorageError if something is already there: good data is never overwritten."""
    check_path(destination)
    advice = "remove it or choose another --out"
    if is_url(destination):
        exists = bool(_names_at(str(destination)))
        advice = f"{advice} (an interrupted upload leaves files without a {MANIFEST})"
    else:
        path = Path(destination)
        exists = any(path.iterdir()) if path.is_dir() else path.exists()
        # The finished folder is renamed, and nothing can take the place of these.
        if not exists and (path.is_symlink() or os.path.ismount(path)):
            raise StorageError(
                f"{destination} is a link or a mount point, expected a folder that can be made; name"
                " one inside it"
            )
        absolute = path.absolute()
        # The root has no parents.
        folders = absolute.parents or [absolute]
        nearest = next(folder for folder in folders if folder.exists())
        if not nearest.is_dir():
            raise StorageError(
                f"{destination} cannot be written: {nearest} is a file; choose another --out"
            )
    if exists:
        raise StorageError(f"{destination} exists and is not empty; {advice}")


def _names_at(url: str) -> set[str]:
    """What a file system has below a URL; a file's own name if the URL is one."""
    filesystem, root = filesystem_of(url)
    with reaching(url):
        # Another process may have written there since a file system listed it.
        filesystem.invalidate_cache()
        try:
            names = set(filesystem.ls(root, detail=False))
        except FileNotFoundError:
            return set()
    # The first is how object stores mark an empty folder. The second comes with a new repository of
    # the Hub.
    return names - {f"{root}/", f"{root}/.gitattributes"}


def refuse_artifact(folder: str | Path, option: str) -> None:
    """Raises StorageError if a folder is an artifact, so that nothing else is put into it.

    Args:
        folder: that a command is about to write in.
        option: that named it, for the message.
    """
    if (Path(folder) / MANIFEST).exists():
        raise StorageError(
            f"{folder} has a {MANIFEST}, so it is a corpus or a bundle; choose another {option}"
        )


@contextlib.contextmanager
def new_artifact(
    destination: str | Path,
    kind: str,
    about: Mapping[str, Any],
    hashed_files: Mapping[str, FileEntry] | None = None,
    replacing: bool = False,
    finished: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """A folder to fill; when the block ends it is hashed, synced and renamed to `destination`.

    `about` and `hashed_files` are read at the end, so the block may still add to them. If the block
    fails nothing is left behind; what a killed process left is removed by the next one.

    Args:
        hashed_files: entries of files that need no hashing and syncing, from `link_files`.
        replacing: the destination, a local folder, exists; the new folder takes its place in one
            atomic step.
        finished: called with the folder when its manifest is written, and before it is renamed or
            uploaded; files that it adds are not part of the artifact.
    Raises:
        StorageError: the destination exists and is not empty, or the disk is full.
    """
    if not replacing:
        refuse_existing(destination)
    remote = is_url(destination)
    parent = Path(tempfile.gettempdir()) if remote else Path(destination).absolute().parent
    with contextlib.ExitStack() as stack:
        with disk_errors(destination):
            parent.mkdir(parents=True, exist_ok=True)
            name = str(destination).rstrip("/").rsplit("/", 1)[-1]
            folder = stack.enter_context(unfinished_folder(parent, name))
            folder.chmod(0o755)
        # The block may also call other machines and start processes.
        with disk_errors(destination, inside=folder):
            yield folder
        with disk_errors(destination):
            finish_manifest(folder, kind, about, hashed_files or {})
            if finished is not None:
                finished(folder)
            if replacing:
                exchange(folder, Path(destination).absolute())
            elif not remote:
                publish(folder, Path(destination).absolute())
        if remote:
            # Another process may have written there meanwhile.
            refuse_existing(destination)
            # An object store has no rename; the manifest, uploaded last, completes it.
            _upload(folder, str(destination))


@contextlib.contextmanager
def unfinished_folder(parent: Path, name: str) -> Iterator[Path]:
    """Makes a hidden folder, which is removed at the end, and removes those of killed processes.

    Folders of the same name are those of the same work.

    A process holds the lock of its folder, so the process of an unlocked one is dead.
    """
    prefix = f".{name}.unfinished-"
    for old in parent.glob(f"{glob.escape(prefix)}*"):
        # Another process may remove it first, and some file systems cannot say whether it is locked.
        with contextlib.suppress(OSError):
            if not is_locked(old):
                shutil.rmtree(old)
    with contextlib.ExitStack() as lock:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        # Some network file systems lock no folders. Then the name stays one that is never removed.
        with contextlib.suppress(OSError):
            lock.enter_context(exclusive(folder))
            # Other processes must not see this prefix before the folder is locked.
            folder = folder.rename(parent / (prefix + folder.name.rpartition(".")[2]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _upload(folder: Path, url: str) -> None:
    """Copies an artifact to a URL; the manifest comes last and makes it complete."""
    if url.startswith(hub.PREFIX):
        hub.commit_folder(folder, url, f"Add {url.rsplit('/', 1)[-1]}")
        return
    filesystem, root = filesystem_of(url)
    names = [name for name, _ in files_below(folder)]
    for name in [*names, MANIFEST]:
        target = f"{root}/{name}"
        with reaching(url):
            filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            filesystem.put_file(str(folder / name), target)


def open_artifact(path: str | Path, kind: str, contents: bool = True) -> tuple[Path, Manifest]:
    """A local folder whose files are those of its manifest; a URL is first copied to a cache folder.

    Args:
        contents: also compare every SHA-256; without it only presence and sizes.
    Raises:
        StorageError: naming the file that is missing or altered.
    """
    check_path(path)
    folder = local_copy(str(path), kind) if is_url(path) else Path(path).absolute()
    manifest = read_manifest(folder, kind)
    for name, entry in manifest.files.items():
        file = folder / name
        with read_errors(file):
            is_file = file.is_file()
            size = file.stat().st_size if is_file else 0
        if not is_file:
            raise StorageError(f"{path}/{name} is missing; make the {kind} again")
        # The size is compared first, because it costs nothing.
        if size != entry.size:
            raise StorageError(
                f"{path}/{name} has {size} bytes, expected {entry.size}: it is damaged; make the {kind} again"
            )
    if contents:
        check_contents(folder, manifest, manifest.files, source=path)
    return folder, manifest


def folder_identity(path: str | Path) -> tuple[int, int] | None:
    """Which folder is at a path, as device and inode: another one when the artifact was changed.

    None at a URL, or if nothing is there.
    """
    if is_url(path):
        return None
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def link_files(
    source: Path,
    manifest: Manifest,
    folder: Path,
    without: Collection[str],
) -> dict[str, FileEntry]:
    """Gives `folder` the files of a verified artifact under a second name; never write into those.

    Args:
        without: names of files to leave out.
    Returns:
        The entries of files that were linked and so are as safe on disk as those of `source`. Files
        on another disk are copied and have no entry.
    """
    linked: dict[str, FileEntry] = {}
    for name in manifest.files.keys() - set(without):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target)
            # The same bytes on the same disk: verified and synced already.
            linked[name] = manifest.files[name]
        except OSError:
            shutil.copyfile(source / name, target)
    return linked


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other processes from changing an artifact while the block runs; readers are not affected.

    The system releases the lock when the process dies.

    Raises:
        StorageError: another process is changing it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(descriptor, folder):
            raise StorageError(
                f"{folder} is being changed by another process; try again when that is done"
            )
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether another process is changing an artifact."""
    try:
        with exclusive(folder):
            return False
    except StorageError:
        return True


def _locked(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Another process may have exchanged the folder between opening and locking it.
    return os.path.samestat(os.fstat(descriptor), folder.stat())
