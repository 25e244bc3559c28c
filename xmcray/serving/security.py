"""Who may ask: bearer tokens from files that only their owner can read.

A token file has one token a line. All of them are accepted, so a token is rotated by putting the new one first and
taking the old one away when every client has changed; `TOKEN until 2026-12-31T00:00:00+00:00` ends its grace by itself.
The file is read again when it changes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

from xmcray.errors import ConfigError

MIN_LENGTH = 16
CHECK_S = 1.0  # between two looks at the file


def new_token_file(path: Path) -> Path:
    """Makes a file with a random token, mode 0600, unless it is there."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return path


class Tokens:
    """The tokens of one file.

    Raises:
        ConfigError: the file is missing, readable by others, or holds no good token.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known, self._stamp, self._checked = (
            path,
            list[tuple[bytes, float]](),
            -1,
            0.0,
        )
        self._read()

    def accept(self, authorization: str | None, *, basic: bool = False) -> bool:
        """Whether a header carries one of the tokens; takes the same time whatever it carries.

        Args:
            authorization: "Bearer TOKEN"; with `basic` also "Basic", with the token as password.
        """
        if time.monotonic() - self._checked > CHECK_S:
            with contextlib.suppress(
                ConfigError, OSError
            ):  # what was accepted stays while the file is being written
                self._read()
        scheme, _, given = (authorization or "").partition(" ")
        if basic and scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode("utf-8").partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                given = ""
        elif scheme.lower() != "bearer":
            given = ""
        digest, now, found = _digest(given.strip()), time.time(), False
        for known, until in self._known:
            found |= hmac.compare_digest(digest, known) & (now < until)
        return found

    def _read(self) -> None:
        self._checked = time.monotonic()
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(
                f"token file {self._path}: {error.strerror}; make it with mode 0600"
            ) from None
        if status.st_mtime_ns == self._stamp:
            return
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(
                f"token file {self._path} has mode {mode:04o}, expected 0600; run chmod 600 on it"
            )
        known = [
            _parse(line, self._path) for line in self._path.read_text().splitlines() if line.strip()
        ]
        if not known:
            raise ConfigError(f"token file {self._path} is empty, expected a token a line")
        self._known, self._stamp = known, status.st_mtime_ns


def _parse(line: str, path: Path) -> tuple[bytes, float]:
    token, _, rest = line.strip().partition(" ")
    if len(token) < MIN_LENGTH:
        raise ConfigError(
            f"token file {path}: a token of {len(token)} characters, expected at least {MIN_LENGTH}"
        )
    if not rest:
        return _digest(token), float("inf")
    try:
        until = datetime.fromisoformat(rest.removeprefix("until").strip())
    except ValueError:
        raise ConfigError(
            f"token file {path}: after a token stands {rest[:40]!r}, expected `until TIME`"
        ) from None
    return _digest(token), (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
