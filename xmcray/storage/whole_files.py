"""Files and folders that appear at once: a reader sees the old or the new content, never a part."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xmcray.errors import StorageError
from xmcray.storage.path_errors import disk_errors

# Arguments of the system call renameat2: paths start at the working folder; swap two names.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What the system says when a folder is renamed to a file, or to a folder that is not empty.
_TAKEN = (errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)


def fsync(path: Path) -> None:
    """Forces a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing; they survive a crash."""
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new_folders:
        fsync(folder.parent)


def aside(path: Path) -> Path:
    """A unique hidden name in the folder of `path`, for a file or folder that will replace it.

    It starts with a dot and does not end as `path` does, so no pattern for finished files finds it.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write; its file replaces `path` when the block ends.

    A reader of `path` sees the old or the new content, never a part. If the block fails, the
    temporary file is removed.

    Raises:
        StorageError: the disk is full, the folder is missing or forbidden, or `path` is a pipe or a
            device.
    """
    temporary = aside(path)
    with disk_errors(path):
        if _is_pipe_or_device(path) or _is_link_of_the_system(path):
            # Renaming a file to it would replace it for the whole machine.
            raise StorageError(
                f"{path} is a pipe or a device, expected a file; choose another path"
            )
        try:
            yield temporary
            fsync(temporary)
            temporary.replace(path)
            fsync(path.parent)
        finally:
            # Nothing is left to remove after a success.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, or is a pipe or a device, which may have no end.
    """
    if _is_pipe_or_device(path):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return path.read_bytes()


def open_without_waiting(path: str, flags: int) -> int:
    """Opens a path, as an `opener` of `open`; does not wait for the reader of a pipe.

    Raises:
        OSError: the path is a pipe without a reader, or cannot be opened.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _is_pipe_or_device(path: Path) -> bool:
    """Whether a path, or what it links to, is there and neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _is_link_of_the_system(path: Path) -> bool:
    """Whether a path is a link such as /dev/stdout, which may lead to a file."""
    folder = path.parent.resolve()
    is_of_the_system = folder.is_relative_to("/dev") or folder.is_relative_to("/proc")
    return path.is_symlink() and is_of_the_system


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError, RecursionError: it is no JSON, or something else than an object.
    """
    body = json.loads(read_bytes(path).decode("utf-8"))
    if not isinstance(body, dict):
        raise ValueError(f"found {type(body).__name__}, expected an object")
    return body


def write_json(path: Path, value: object) -> None:
    """Writes JSON as `write_text` writes text."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never a part of it.

    What UTF-8 cannot encode, such as half of a surrogate pair, is written as an escape.
    """
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def publish(folder: Path, destination: Path) -> None:
    """Renames a finished folder to its destination and syncs the parent.

    An empty folder at the destination is replaced.

    Raises:
        StorageError: a file or a folder with content is there.
    """
    try:
        folder.rename(destination)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise StorageError(
            f"{destination} exists and is not empty; remove it or choose another --out"
        ) from error
    fsync(destination.parent)


def exchange(folder: Path, destination: Path) -> None:
    """Swaps the names of two folders in one atomic step.

    A process that opens `destination` gets the old or the new folder, and keeps the files that it
    has open.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(destination))
    if rename is None or rename(*names, _RENAME_EXCHANGE) != 0:
        # Without the system call, `destination` does not exist for a moment.
        old = aside(destination)
        destination.rename(old)
        folder.rename(destination)
        old.rename(folder)
    fsync(destination.parent)
