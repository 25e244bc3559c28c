"""Each node hashes a finished version once, while training goes on, before any rank reads it.

Rank 0 sees that a version is complete. A network file system may hide its new files from other nodes
for a minute, so they wait for them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from xmcray.errors import ShortlistError, XmcrayError
from xmcray.negatives.version_folder import VersionFolder
from xmcray.parallel import collectives

_POLL_S = 1.0  # of what is only looked for
_WAITING_POLL_S = 0.1
_HIDDEN_S = 90.0  # by default NFS asks for changes of a folder after 60 s at the latest


class VersionChecks:
    """Compares versions with their hashes on the first rank of each node."""

    def __init__(self) -> None:
        self._checks: dict[Path, _Check] = {}

    def expect(self, folder: VersionFolder) -> None:
        """Checks a version in the background, as soon as it is complete."""
        if collectives.is_first_of_node():
            self._checks[folder.path] = _Check(folder)

    def checked(self, folder: VersionFolder) -> VersionFolder:
        """Returns a complete version after its check; collective.

        Raises:
            ShortlistError: the version was altered; on every rank, whichever found it.
        """
        message = None
        if collectives.is_first_of_node():
            if folder.path not in self._checks:
                self.expect(folder)
            message = self._checks[folder.path].result()
            self._forget_before(folder.version)
        for message_of_rank in collectives.gather_objects(message):
            if message_of_rank is not None:
                raise ShortlistError(message_of_rank)
        return folder

    def _forget_before(self, version: int) -> None:
        """Drops the checks of older versions, to which training never goes back."""
        for path in list(self._checks):
            if VersionFolder(path).version < version:
                del self._checks[path]


class _Check(threading.Thread):
    """Checks one version once it is complete."""

    def __init__(self, folder: VersionFolder) -> None:
        # A daemon thread does not keep an interrupted process alive.
        super().__init__(name="xmcray-version-check", daemon=True)
        self._folder = folder
        # Rank 0 was the one to see the version, or nothing is there that could be hidden.
        self._hidden_s = _HIDDEN_S if collectives.rank() > 0 else 0.0
        self._is_due = threading.Event()
        self._message: str | None = None
        self.start()

    def result(self) -> str | None:
        """What is wrong with the version, which is complete; None if nothing is."""
        self._is_due.set()
        self.join()
        return self._message

    def run(self) -> None:
        while not (self._folder.complete or self._is_due.wait(_POLL_S)):
            if self._folder.withdrawn:
                return
        self._wait_for_hidden()
        try:
            self._folder.check()
        except (XmcrayError, OSError) as error:
            self._message = str(error)

    def _wait_for_hidden(self) -> None:
        """Waits until this node sees a version that another one has seen to be complete."""
        deadline = time.monotonic() + self._hidden_s
        while not self._folder.complete and time.monotonic() < deadline:
            time.sleep(_WAITING_POLL_S)
