"""Folders that a command works in and that the same command goes on with: runs, sweeps, studies.

Unlike an artifact, such a folder grows while the command runs. Before anything is written, it must be
empty or hold earlier work of the same kind.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmcray.errors import RunError
from xmcray.storage.path_errors import check_path, disk_errors
from xmcray.storage.whole_files import open_without_waiting

LOCK = "lock"


@dataclass(frozen=True, slots=True)
class FolderKind:
    """What a command expects in its folder.

    Attributes:
        name: for messages, such as "run".
        mark: the file that makes a folder one of this kind; None if a command starts anew each time.
        parts: names of files and folders that may be there without the mark.
    """

    name: str
    mark: str | None
    parts: tuple[str, ...] = ()

    def refuse_other(self, path: Path) -> None:
        """Raises RunError if the folder holds something that is not of this kind."""
        if self.mark is not None and (path / self.mark).is_file():
            return
        for name in sorted(contents(path)):
            if not self._is_own(name):
                raise RunError(f"{path} holds {name} and no {self.name}; choose another --out")

    def _is_own(self, name: str) -> bool:
        if name.startswith("."):
            # A process that was killed while it wrote a file left it under a name of
            # `whole_files.aside`, such as .run.json.0123456789abcdef.
            name = name[1:].rpartition(".")[0]
        return name == self.mark or name in self.parts


@contextlib.contextmanager
def locked(path: Path, kind: FolderKind) -> Iterator[None]:
    """Holds a folder's lock, so that one process works in it at a time.

    The system frees the lock when the process dies. A folder that holds nothing but the lock
    afterwards is removed.

    Raises:
        RunError: the folder is in use or holds something else, which is left as it is.
        StorageError: it cannot be written, or its path is none that all libraries can open.
    """
    check_path(path)
    with disk_errors(path):
        kind.refuse_other(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RunError(f"{path} is a file; --out names a folder") from None
        with open(path / LOCK, "w", opener=open_without_waiting) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{path} is in use by another process; wait for it or choose another --out"
                ) from None
            try:
                yield
            finally:
                if not contents(path):
                    (path / LOCK).unlink()
                    path.rmdir()


def contents(path: Path) -> set[str]:
    """Names in a folder without its lock; none if there is no folder."""
    if not path.is_dir():
        return set()
    return {entry.name for entry in path.iterdir()} - {LOCK}
