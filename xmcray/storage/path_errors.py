"""Turns the system's errors about a path into a StorageError that names it and says what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from xmcray.errors import StorageError, one_line
from xmcray.storage.remote import is_url

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# The disk or the network file system itself fails.
_FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)
# What neither sockets nor processes fail with.
_OF_DISKS = (*_FULL, errno.EROFS, errno.EIO, errno.ESTALE, errno.EREMOTEIO)
_LONGEST_PATH = 3_900  # of Linux, 4,095, less what artifacts add
_LONGEST_NAME = 230  # of Linux, 255, less what temporary names add


class MissingPathError(StorageError, FileNotFoundError):
    """A file, or the folder to write into, does not exist (any more).

    It is a FileNotFoundError too, for callers that expect it to vanish.
    """


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Turns whatever the system raises while `path` is read into a StorageError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingPathError(f"{path} is missing; put a copy of it back") from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); check its rights and the disk"
        ) from error


@contextlib.contextmanager
def disk_errors(path: str | Path, inside: Path | None = None) -> Iterator[None]:
    """Turns a full disk, or a path that is forbidden or missing, into a StorageError that names it.

    An error about another file, such as one that the block reads, is raised unchanged.

    Args:
        path: is written.
        inside: the folder that the block writes in, if it also does other work. Then errors that name
            no file are raised unchanged too, unless only disks have them.
    """
    try:
        yield
    except SafetensorError as error:
        # safetensors raises no OSError: the system's error number stands only in its message.
        message = str(error)
        full = any(f"(os error {code})" in message for code in _FULL)
        if full or "No space left" in message:
            raise disk_full(path) from error
        raise
    except shutil.Error as error:
        # copytree collects what went wrong as texts, each with the system's error number.
        message = str(error)
        if any(f"[Errno {code}]" in message for code in _FULL):
            raise disk_full(path) from error
        raise StorageError(
            f"{path} cannot be written ({one_line(message)}); choose another folder"
        ) from error
    except OSError as error:
        if inside is not None and not _is_inside(error, inside):
            raise
        storage_error = _storage_error(error, path)
        if storage_error is None:
            raise
        raise storage_error from error


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Turns whatever the system says of any path into a StorageError; for whole commands.

    It names the paths that nothing else has named: loops of links, names that are too long, and so on.
    """
    try:
        yield
    except OSError as error:
        # A closed pipe has no name.
        if error.filename is None:
            raise
        raise StorageError(
            f"{one_line(error.filename)} cannot be used ({error.strerror}); check the path, its rights"
            " and the disk"
        ) from error


def _storage_error(error: OSError, path: str | Path) -> StorageError | None:
    """The error to raise instead of the system's; None if it does not concern `path`."""
    if error.errno in _FULL:
        return disk_full(path)
    message = f"{path} cannot be written ({error.strerror}); choose another folder"
    if error.errno in _FORBIDDEN:
        return StorageError(message)
    if error.errno in _FAILING:
        return StorageError(
            f"{path} cannot be written ({error.strerror}): the disk fails; look at the system's log"
        )
    if not _concerns(error.filename, Path(path)):
        return None
    if error.errno == errno.ENOENT:
        return MissingPathError(message)
    # A file exists where a folder should be made.
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return StorageError(message)
    return None


def _is_inside(error: OSError, folder: Path) -> bool:
    """Whether an error is about a file in a folder, or about a disk and no file."""
    # A copy names both of its files.
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | Path)]
    if not names:
        return error.errno in _OF_DISKS
    return any(Path(name).absolute().is_relative_to(folder.absolute()) for name in names)


def disk_full(path: str | Path) -> StorageError:
    """The error of a write for which the disk has no room."""
    return StorageError(
        f"no space left while writing {path}: the disk is full; free some space or choose another folder"
    )


def _concerns(filename: object, path: Path) -> bool:
    """Whether `filename` is `path`, a folder above it, or a file in the same folder.

    New files are first written in the same folder, under another name.
    """
    if not isinstance(filename, str | Path):
        return False
    named_path = Path(filename).absolute()
    path = path.absolute()
    return named_path == path or named_path in path.parents or named_path.parent == path.parent


def check_path(path: str | Path) -> None:
    """Raises StorageError for a path that no file can have, or that a library cannot open."""
    try:
        # Linux takes any bytes as a name, but safetensors and JSON do not.
        encoded = str(path).encode("utf-8")
    except UnicodeError:
        raise StorageError(
            f"{str(path)[:80]!a} cannot be used: it is not UTF-8; choose another name"
        ) from None
    if b"\0" in encoded:
        raise StorageError(
            f"{str(path)[:80]!a} is no path: it has a null character; choose another name"
        )
    longest = max(map(len, encoded.split(b"/")))
    # A file is first written under a name that is 18 characters longer.
    if not is_url(path) and (len(encoded) > _LONGEST_PATH or longest > _LONGEST_NAME):
        raise StorageError(
            f"{one_line(path, 80)}... is {len(encoded)} bytes long with a name of {longest}, expected at"
            f" most {_LONGEST_PATH} and {_LONGEST_NAME}; choose a shorter path"
        )


def check_file(path: str | Path) -> None:
    """Raises StorageError if a file cannot be written there; for checks before long work."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise StorageError(
            f"{path} cannot be written: folder {folder} {state}; make it or choose another"
        )
    if Path(path).is_dir():
        raise StorageError(f"{path} is a folder, expected a file; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES)
        raise StorageError(f"{path} cannot be written ({reason}); choose another folder")
