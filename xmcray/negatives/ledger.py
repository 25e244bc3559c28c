"""The negatives' files inside a run: what is needed to survive a kill at any moment of a refresh.

Each attempt at a version has a folder: RUN/negatives/v00002-0000 is the first one at version 2, and
version_folder.py says what is in it.

Files are written under another name and renamed, so a file that exists is whole, and two actors
that do the same work do no harm. A checkpoint lists the inputs that existed at its step. On resume,
a version that had not been published by then starts a new attempt with the listed query blocks. An
index actor that is still busy with the old attempt finds its folder gone and stops. All other files
stay. Once a version is complete, and published at every kept checkpoint, its inputs are removed.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from xmcray.errors import StorageError
from xmcray.negatives.version_folder import VersionFolder
from xmcray.storage.manifest import hash_file


class Ledger:
    """All versions of a run. Only rank 0 starts, restores and retires them; all ranks add to them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def versions(self) -> list[VersionFolder]:
        """Lists the newest attempt at each version, by version."""
        newest = {}
        for folder in self._folders():  # by attempt, so that the newest one stays
            newest[folder.version] = folder
        return list(newest.values())

    def version(self, version: int) -> VersionFolder:
        """Returns the newest attempt at a version; without one, makes the folder of the first."""
        for folder in self.versions():
            if folder.version == version:
                return folder
        return self._start(version, 0)

    def newest_complete(self) -> VersionFolder | None:
        """Returns the finished version with the highest number."""
        for folder in reversed(self.versions()):
            if folder.complete:
                return folder
        return None

    def restore(self, inputs: Mapping[str, str], published: Sequence[int], oldest: int = 0) -> None:
        """Brings the files to the state of a checkpoint.

        Args:
            inputs: SHA-256 of the query blocks, rows and marks that existed then, by path relative
                to the ledger.
            published: versions that were published then; later ones start anew.
            oldest: version that was in use then; older ones may have been removed.
        Raises:
            StorageError: a version is missing, or an input of one that is not complete is missing
                or altered.
        """
        names_of: defaultdict[int, list[str]] = defaultdict(list)
        for name in inputs:
            names_of[version_of(name)].append(name)
        folders = self.versions()
        found = {folder.version for folder in folders}
        for version in sorted({*names_of, *published} - found):
            if version >= oldest:
                raise StorageError(
                    f"{self.path} lacks version {version} of the negatives; resume from an earlier copy of the run"
                )
        for folder in folders:
            names = names_of[folder.version]
            if folder.version not in published:
                self._start_again(folder, names, inputs)
            elif not folder.complete:
                self._check(names, inputs)
        # Older attempts go last, because new ones link to their query blocks.
        newest = {folder.path for folder in self.versions()}
        for folder in self._folders():
            if folder.path not in newest:
                shutil.rmtree(folder.path, ignore_errors=True)

    def name_of(self, path: Path) -> str:
        """Returns a file's path relative to the ledger."""
        return path.relative_to(self.path).as_posix()

    def retire(self, before: int) -> None:
        """Removes versions lower than `before`."""
        for folder in self._folders():
            if folder.version < before:
                shutil.rmtree(folder.path, ignore_errors=True)

    def _start(self, version: int, attempt: int) -> VersionFolder:
        folder = VersionFolder(self.path / f"v{version:05d}-{attempt:04d}")
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def _start_again(
        self,
        folder: VersionFolder,
        names: Sequence[str],
        inputs: Mapping[str, str],
    ) -> None:
        """Starts the next attempt at a version with the query blocks that a checkpoint lists."""
        attempt = self._start(folder.version, folder.attempt + 1)
        for name in names:
            if "/queries/" in name:
                block = Path(name).name
                source = self._find_block(folder.version, block, inputs[name])
                target = attempt.path / "queries" / block
                target.parent.mkdir(exist_ok=True)
                # A hard link costs no space, and stays when the older attempt is removed.
                os.link(source, target)

    def _find_block(self, version: int, block: str, sha256: str) -> Path:
        """Finds a query block in any attempt, because an earlier restore may have moved it on."""
        for path in sorted(self.path.glob(f"v{version:05d}-*/queries/{block}")):
            if hash_file(path).sha256 == sha256:
                return path
        raise StorageError(
            f"{self.path} lacks {block} of version {version}; resume from an earlier copy of the run"
        )

    def _check(self, names: Sequence[str], inputs: Mapping[str, str]) -> None:
        for name in names:
            path = self.path / name
            if not path.is_file() or hash_file(path).sha256 != inputs[name]:
                raise StorageError(
                    f"{path} is missing or altered; resume from an earlier copy of the run"
                )

    def _folders(self) -> list[VersionFolder]:
        """Lists all attempts by version, then by attempt."""
        folders = [VersionFolder(path) for path in self.path.glob("v*-*")]
        return sorted(folders, key=lambda folder: (folder.version, folder.attempt))


def version_of(name: str) -> int:
    """Returns the version of a file from its path relative to the ledger."""
    folder = Path(name).parts[0]
    return VersionFolder(Path(folder)).version
