"""One call of a client without its input and output: tokens, time, and what is tried again."""

from __future__ import annotations

import contextlib
import email.utils
import math
import random
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from xmcray.errors import ConfigError, XmcrayError
from xmcray.serving import schema

FIRST_WAIT_S, MAX_WAIT_S, CONNECT_S = 0.1, 2.0, 3.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
NOTHING_DONE = frozenset({"overloaded", "not-ready"})  # of the 503s of a write
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
LOST = (*UNSENT, httpx.NetworkError, httpx.RemoteProtocolError)
URN = "urn:xmcray:"

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ClientError(XmcrayError):
    """The server refused, or gave no answer.

    Attributes:
        kind: of the server's problem, such as "overloaded" or "not-found"; otherwise "unreachable", "deadline",
            "malformed" (not an answer of this API) or "http" (a refusal that is no problem of this API).
        status: of the answer, if there was one.
        request_id: names the request in the server's log.
    """

    def __init__(
        self, message: str, kind: str = "", status: int | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.status, self.request_id = kind, status, request_id


class Secret(str):
    """A token that no log and no traceback with local variables shows."""

    def __repr__(self) -> str:
        return "'***'"


class Token:
    """A token, or what a file's first line is by now.

    Raises:
        ConfigError: there is no such file, or its first line is no token.
    """

    def __init__(self, token: str, name: str, path: Path | None = None) -> None:
        self._path, self.value = path, _checked(token, name)

    @classmethod
    def of_file(cls, path: Path, name: str) -> Token:
        """The token in a file."""
        return cls(_first_word(path, name), f"the first line of {path}", path)

    def renewed(self, refused: Secret) -> bool:
        """Whether there is another token than the one that was refused; a file is read again."""
        if self._path is not None and self.value == refused:  # if not, another thread has read it
            with contextlib.suppress(ConfigError):  # it is being written: what was known stays
                self.value = _checked(_first_word(self._path, "token"), "token")
        return self.value != refused


class Call(Generic[AnswerT]):
    """One call without its input and output: what to send next, and whether what came back ends it."""

    def __init__(
        self,
        method: str,
        url: str,
        answer: type[AnswerT],
        *,
        tokens: Sequence[Token | None],
        timeout_s: float,
        retries: int | None,
        content: bytes | None = None,
        write: bool = False,
    ) -> None:
        self._method, self._url, self._answer, self._content, self._write = (
            method,
            url,
            answer,
            content,
            write,
        )
        self._tokens, self._timeout_s, self._retries = tokens, timeout_s, retries
        self._started, self._attempts, self._request_id = time.monotonic(), 0, uuid.uuid4().hex
        self._headers = httpx.Headers(
            {"Accept": "application/json", "X-Request-ID": self._request_id}
        )
        if content is not None:
            self._headers["Content-Type"] = "application/json"
        self._token, self._renewed = tokens[1 if write else 0], False
        self._authorize()

    def _authorize(self) -> None:
        self._sent = Secret() if self._token is None else self._token.value
        if self._sent:
            self._headers["Authorization"] = f"Bearer {self._sent}"

    def left_s(self) -> float:
        """Seconds until the call must have ended."""
        return self._started + self._timeout_s - time.monotonic()

    def send(self) -> dict[str, Any]:
        """What the next attempt sends, as arguments of httpx."""
        self._attempts += 1
        left = max(self.left_s(), 0.001)  # httpx takes 0 for an error of its own
        timeout = httpx.Timeout(left, connect=min(left, CONNECT_S))
        sent = {
            "method": self._method,
            "url": self._url,
            "headers": self._headers,
            "content": self._content,
        }
        return {**sent, "timeout": timeout}

    def answered(self, response: httpx.Response, content: bytes) -> AnswerT | float:
        """The answer, or the seconds to wait before the next attempt.

        Raises:
            ClientError: it is an error that another attempt cannot mend, or there is no time for one.
        """
        status = response.status_code
        self._request_id = response.headers.get("X-Request-ID", self._request_id)
        if status == httpx.codes.OK:
            try:
                return self._answer.model_validate_json(content)
            except ValidationError as error:
                found = f"the answer is no {self._answer.__name__} ({first_error(error)}), expected one of xmcray serve"
            raise self._error(
                f"{found}; compare the versions of client and server", "malformed", status
            ) from None
        try:
            problem = schema.Problem.model_validate_json(content)
            known = problem.type.startswith(URN)
        except ValidationError:
            known = False
        kind = problem.type.removeprefix(URN) if known else "http"
        detail = (
            f"{kind}: {problem.detail}" if known else response.reason_phrase or "no reason given"
        )
        refused = self._error(f"{status} {detail}", kind, status)
        if (
            status == httpx.codes.UNAUTHORIZED
            and self._token
            and not self._renewed
            and self._token.renewed(self._sent)
        ):
            self._renewed = True
            self._authorize()
            return 0.0
        safe = not self._write or (
            status == httpx.codes.SERVICE_UNAVAILABLE and kind in NOTHING_DONE
        )
        if status in RETRIED and safe:
            return self._wait_s(refused, _retry_after_s(response.headers.get("Retry-After")))
        raise refused

    def failed(self, error: httpx.RequestError) -> float:
        """The seconds to wait after an attempt that got no answer.

        Raises:
            ClientError: as `answered`.
        """
        unsent = isinstance(error, UNSENT)
        if isinstance(error, httpx.TimeoutException) and not unsent:
            raise self.expired() from None
        reason = str(error) or type(error).__name__
        found = (
            f"no connection ({reason}); is the server running?"
            if unsent
            else f"connection lost ({reason})"
        )
        lost = self._error(found + ("" if unsent else self._doubt()), "unreachable")
        if isinstance(error, LOST) and (unsent or not self._write):
            return self._wait_s(lost)
        raise lost from None

    def expired(self) -> ClientError:
        """The error of a call whose time is over."""
        return self._error(f"no answer within {self._timeout_s:g} s{self._doubt()}", "deadline")

    def _wait_s(self, error: ClientError, at_least: float = 0.0) -> float:
        bound = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._attempts - 1, 10))
        wait = at_least + random.uniform(
            0.0, bound
        )  # full jitter: those who failed together return apart
        if (self._retries is not None and self._attempts > self._retries) or wait >= self.left_s():
            raise error from None
        return wait

    def _doubt(self) -> str:
        return (
            "; it may have been done all the same: look before you repeat it" if self._write else ""
        )

    def _error(self, found: str, kind: str, status: int | None = None) -> ClientError:
        tried = f", {self._attempts} attempts" if self._attempts > 1 else ""
        message = f"{self._method} {self._url[:200]}: {found[:1000]} (request {self._request_id[:100]}{tried})"
        known = [self._sent, *(token.value for token in self._tokens if token)]
        for secret in filter(None, known):  # whatever the other side wrote into its answer
            message = message.replace(secret, "***")
        return ClientError(" ".join(message.split()), kind, status, self._request_id)


def first_error(error: ValidationError) -> str:
    """The first complaint, without the value: that may be long, or not for everybody's eyes."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'value'}: {found['msg'][:200]}"


def _first_word(path: Path, name: str) -> str:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} cannot be read ({type(error).__name__})") from None
    return words[0] if words else ""


def _checked(token: str, name: str) -> Secret:
    """A token that fits into a header: httpx would name any other one in its error."""
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(
            f"{name} is empty or has characters other than visible ASCII, expected a token; not shown"
        )
    return Secret(token)


def _retry_after_s(value: str | None) -> float:
    """Seconds from now; 0 where the header is missing or unreadable."""
    try:
        seconds = float(value or 0)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value or "").timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
