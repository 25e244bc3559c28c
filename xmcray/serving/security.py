"""Bearer tokens in files that only their owner can read.

A token file has one token a line. All tokens are accepted. To rotate a token, put the new one first
and remove the old one when every client has changed; `TOKEN until 2026-12-31T00:00:00+00:00` is
accepted up to that time.

The file is read again every second. What it does not name any more is refused from then on: a file
that is missing, empty, open to others or not text revokes all of its tokens, and a line that cannot
be read revokes its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from xmcray.errors import ConfigError
from xmcray.storage.whole_files import fsync

MIN_LENGTH = 16
MAX_FILE = 1 << 20  # bytes; a file with more is not a list of tokens
CHECK_S = 1.0  # between two looks at the file

log = logging.getLogger("xmcray.serving")


def new_token_file(path: Path) -> Path:
    """Makes a file with a random token, mode 0600, unless it exists.

    Returns:
        The path.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: of several processes that start at the same time, one makes the file.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            fsync(path)
            fsync(path.parent)
        except BaseException:
            # An empty file would be refused at every later start.
            path.unlink()
            raise
    return path


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a file: its SHA-256, and the Unix time until which it is accepted."""

    digest: bytes
    until: float


class Tokens:
    """The tokens of one file.

    Raises:
        ConfigError: the file is missing, readable by others, or has a line that is no token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Problems that are in the log already.
        self._problems: list[str] = []
        self._checked = time.monotonic()
        self._tokens, problems = _read(path)
        # At the start a mistake in the file is an error; later it only revokes.
        if problems:
            raise ConfigError(problems[0])

    def accept(self, authorization: str | None, *, basic: bool = False) -> bool:
        """Whether a header carries one of the tokens; takes the same time whatever it carries.

        Args:
            authorization: "Bearer TOKEN".
            basic: also accept "Basic", with the token as password.
        """
        if time.monotonic() - self._checked > CHECK_S:
            self._refresh()
        digest = _digest(_token_in(authorization or "", basic))
        now = time.time()
        is_accepted = False
        for token in self._tokens:
            # No early exit: the time must not tell which token is nearly right.
            is_accepted |= hmac.compare_digest(digest, token.digest) & (now < token.until)
        return is_accepted

    def _refresh(self) -> None:
        """Reads the file again and logs problems that are new."""
        self._checked = time.monotonic()
        # The content is compared, not the time stamp: a restored file may have an old one.
        self._tokens, problems = _read(self._path)
        if problems == self._problems:
            return
        self._problems = problems
        for problem in problems:
            log.error("%s; tokens that it does not name are refused", problem)
        if not problems:
            log.info("token file %s is valid again", self._path)


def _read(path: Path) -> tuple[list[_Token], list[str]]:
    """The tokens that a file names now, and what is wrong with it."""
    try:
        text = _private_text(path)
    except ConfigError as error:
        return [], [str(error)]
    tokens = []
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            tokens.append(_parse(line))
        except ConfigError as error:
            problems.append(f"token file {path}, line {number}: {error}")
    if not tokens and not problems:
        problems.append(f"token file {path} is empty, expected a token a line")
    return tokens, problems


def _private_text(path: Path) -> str:
    """The text of a file that only its owner can read.

    Raises:
        ConfigError: it is missing, not a regular file, open to others, too large, or not UTF-8.
    """
    try:
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            # Mode and content are those of the same file, also if the path is replaced meanwhile.
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"token file {path} is not a file; make it with mode 0600")
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}; make it with mode 0600") from None
    permissions = stat.S_IMODE(mode)
    # Readable or writable by the group or by others.
    if permissions & 0o077:
        raise ConfigError(
            f"token file {path} has mode {permissions:04o}, expected 0600; run chmod 600 on it"
        )
    if len(content) > MAX_FILE:
        raise ConfigError(f"token file {path} has over {MAX_FILE:,} bytes, expected a token a line")
    try:
        return content.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path} is not UTF-8, expected a token a line") from None


def _token_in(authorization: str, basic: bool) -> str:
    """The token in a header; "" if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic" and basic:
        # ValueError: no base64, a letter beyond ASCII, or bytes that are no UTF-8.
        with contextlib.suppress(ValueError):
            credentials = base64.b64decode(value, validate=True).decode("utf-8")
            return credentials.partition(":")[2].strip()
    return ""


def _parse(line: str) -> _Token:
    """The token of a line; ConfigError, which never shows the token, if it is none."""
    # After the token may stand spaces or tabs.
    token, *others = line.split(maxsplit=1)
    rest = "".join(others).strip()
    if len(token) < MIN_LENGTH:
        raise ConfigError(f"a token of {len(token)} characters, expected at least {MIN_LENGTH}")
    if not all("!" <= letter <= "~" for letter in token):
        raise ConfigError("a token with characters other than visible ASCII, which no header has")
    if not rest:
        return _Token(_digest(token), float("inf"))
    try:
        until = datetime.fromisoformat(rest.removeprefix("until").strip())
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return _Token(_digest(token), until.timestamp())
    except (ValueError, OverflowError):
        raise ConfigError(
            f"after a token stands {rest[:40]!r}, expected `until TIME`; write it as"
            " 2026-12-31T00:00:00+00:00"
        ) from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
