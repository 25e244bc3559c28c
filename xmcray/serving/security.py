"""Bearer tokens in files that only their owner can read.

A token file has one token a line. All tokens are accepted. To rotate a token, put the new one first
and remove the old one when every client has changed; `TOKEN until 2026-12-31T00:00:00+00:00` is
accepted up to that time. The file is read again when it changes.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from xmcray.errors import ConfigError

MIN_LENGTH = 16
CHECK_S = 1.0  # between two looks at the file


def new_token_file(path: Path) -> Path:
    """Makes a file with a random token, mode 0600, unless it exists.

    Returns:
        The path.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a file: its SHA-256, and the Unix time until which it is accepted."""

    digest: bytes
    until: float


class Tokens:
    """The tokens of one file.

    Raises:
        ConfigError: the file is missing, readable by others, or has no valid token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens: list[_Token] = []
        self._modified_ns = -1
        self._checked = 0.0
        self._read()

    def accept(self, authorization: str | None, *, basic: bool = False) -> bool:
        """Whether a header carries one of the tokens; takes the same time whatever it carries.

        Args:
            authorization: "Bearer TOKEN".
            basic: also accept "Basic", with the token as password.
        """
        if time.monotonic() - self._checked > CHECK_S:
            # While the file is being written, the tokens that were read before are accepted.
            with contextlib.suppress(ConfigError, OSError):
                self._read()
        digest = _digest(_token_in(authorization or "", basic))
        now = time.time()
        is_accepted = False
        for token in self._tokens:
            # No early exit: the time must not tell which token is nearly right.
            is_accepted |= hmac.compare_digest(digest, token.digest) & (now < token.until)
        return is_accepted

    def _read(self) -> None:
        self._checked = time.monotonic()
        try:
            status = self._path.stat()
        except OSError as error:
            raise ConfigError(
                f"token file {self._path}: {error.strerror}; make it with mode 0600"
            ) from None
        if status.st_mtime_ns == self._modified_ns:
            return
        mode = stat.S_IMODE(status.st_mode)
        # Readable or writable by the group or by others.
        if mode & 0o077:
            raise ConfigError(
                f"token file {self._path} has mode {mode:04o}, expected 0600; run chmod 600 on it"
            )
        lines = self._path.read_text().splitlines()
        tokens = [_parse(line, self._path) for line in lines if line.strip()]
        if not tokens:
            raise ConfigError(f"token file {self._path} is empty, expected a token a line")
        self._tokens = tokens
        self._modified_ns = status.st_mtime_ns


def _token_in(authorization: str, basic: bool) -> str:
    """The token in a header; "" if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic" and basic:
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            credentials = base64.b64decode(value, validate=True).decode("utf-8")
            return credentials.partition(":")[2].strip()
    return ""


def _parse(line: str, path: Path) -> _Token:
    token, _, rest = line.strip().partition(" ")
    if len(token) < MIN_LENGTH:
        raise ConfigError(
            f"token file {path}: a token of {len(token)} characters, expected at least {MIN_LENGTH}"
        )
    if not rest:
        return _Token(_digest(token), float("inf"))
    try:
        until = datetime.fromisoformat(rest.removeprefix("until").strip())
    except ValueError:
        raise ConfigError(
            f"token file {path}: after a token stands {rest[:40]!r}, expected `until TIME`"
        ) from None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return _Token(_digest(token), until.timestamp())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
