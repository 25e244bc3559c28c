"""One call of a client: tokens, time limits and retries, without input and output."""

from __future__ import annotations

import contextlib
import email.utils
import math
import random
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from xmcray.errors import ConfigError, XmcrayError
from xmcray.serving import schema

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 2.0
CONNECT_S = 3.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
NOTHING_DONE = frozenset({"overloaded", "not-ready"})  # of the 503s of a write
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
LOST = (*UNSENT, httpx.NetworkError, httpx.RemoteProtocolError)
URN = "urn:xmcray:"

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ClientError(XmcrayError):
    """The server refused, or gave no answer.

    Attributes:
        kind: of the server's problem, such as "overloaded" or "not-found"; otherwise "unreachable",
            "deadline", "malformed" (not an answer of this API) or "http" (a refusal that is no
            problem of this API).
        status: of the answer, if there was one.
        request_id: names the request in the server's log.
    """

    def __init__(
        self,
        message: str,
        kind: str = "",
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.request_id = request_id


# A `str`, so that httpx takes it; only its representation differs.
class Secret(str):
    """A token that no log and no traceback with local variables shows."""

    def __repr__(self) -> str:
        return "'***'"


class Token:
    """A token, given or read from the first line of a file.

    Args:
        token: the token.
        name: name of the argument that gave it, for messages.
        path: the file from which it was read.
    Raises:
        ConfigError: there is no such file, or its first line is no token.
    """

    def __init__(self, token: str, name: str, path: Path | None = None) -> None:
        self._path = path
        self.value = _checked(token, name)

    @classmethod
    def of_file(cls, path: Path, name: str) -> Token:
        """The token in a file."""
        return cls(_first_word(path, name), f"the first line of {path}", path)

    def renewed(self, refused: Secret) -> bool:
        """Reads the file again; whether there is another token now than the one that was
        refused.
        """
        # If the values differ, another thread has read the file already.
        if self._path is not None and self.value == refused:
            with contextlib.suppress(ConfigError):  # the file is being written: keep the token
                self.value = _checked(_first_word(self._path, "token"), "token")
        return self.value != refused


@dataclass
class Call(Generic[AnswerT]):
    """The state of one call, without input and output: what to send next, and whether a reply ends
    it.

    Attributes:
        url: URL of the route.
        answer: schema of the answer.
        content: body of the request; None for a GET.
        tokens: the reader's and the administrator's.
        timeout_s: seconds for all attempts.
        retries: attempts after the first; None for as many as there is time for.
    """

    url: str
    answer: type[AnswerT]
    content: bytes | None
    tokens: tuple[Token | None, Token | None]
    timeout_s: float
    retries: int | None

    def __post_init__(self) -> None:
        self._method = "GET" if self.content is None else "POST"
        self._write = "/admin/v1/" in self.url
        self._token = self.tokens[1 if self._write else 0]
        self._renewed = False
        self._started = time.monotonic()
        self._attempts = 0
        self._request_id = uuid.uuid4().hex
        # One id for all attempts: the server's log shows them as one request.
        self._headers = httpx.Headers(
            {"Accept": "application/json", "X-Request-ID": self._request_id}
        )
        if self.content is not None:
            self._headers["Content-Type"] = "application/json"
        self._authorize()

    def _authorize(self) -> None:
        self._sent = Secret() if self._token is None else self._token.value
        if self._sent:
            self._headers["Authorization"] = f"Bearer {self._sent}"

    def left_s(self) -> float:
        """Seconds until the call must have ended."""
        return self._started + self.timeout_s - time.monotonic()

    def send(self) -> dict[str, Any]:
        """The arguments for `httpx.request` of the next attempt."""
        self._attempts += 1
        left_s = max(self.left_s(), 0.001)  # httpx takes 0 for an error of its own
        return {
            "method": self._method,
            "url": self.url,
            "headers": self._headers,
            "content": self.content,
            "timeout": httpx.Timeout(left_s, connect=min(left_s, CONNECT_S)),
        }

    def answered(self, response: httpx.Response, content: bytes) -> AnswerT | float:
        """The answer, or the seconds to wait before the next attempt.

        Args:
            response: status and headers.
            content: the body.
        Raises:
            ClientError: another attempt cannot help, or there is no time for one.
        """
        status = response.status_code
        self._request_id = response.headers.get("X-Request-ID", self._request_id)
        if status == httpx.codes.OK:
            return self._parse(content)
        kind = "http"
        detail = response.reason_phrase or "no reason given"
        with contextlib.suppress(ValidationError):
            problem = schema.Problem.model_validate_json(content)
            if problem.type.startswith(URN):
                kind = problem.type.removeprefix(URN)
                detail = f"{kind}: {problem.detail}"
        refusal = self._error(f"{status} {detail}", kind, status)
        # The token was rotated: once more at once, with the new one.
        if status == httpx.codes.UNAUTHORIZED and self._renew_token():
            return 0.0
        # A write is tried again only if the server says that it did nothing.
        nothing_done = status == httpx.codes.SERVICE_UNAVAILABLE and kind in NOTHING_DONE
        if status in RETRIED and (nothing_done or not self._write):
            return self._wait_s(refusal, _retry_after_s(response.headers.get("Retry-After")))
        raise refusal

    def _parse(self, content: bytes) -> AnswerT:
        try:
            return self.answer.model_validate_json(content)
        except ValidationError as error:
            message = (
                f"the answer is no {self.answer.__name__} ({first_error(error)}), expected one of"
                " xmcray serve; compare the versions of client and server"
            )
        raise self._error(message, "malformed", httpx.codes.OK)

    def _renew_token(self) -> bool:
        """Reads the token's file again, once in a call; whether it has another token now."""
        if self._token is None or self._renewed:
            return False
        if not self._token.renewed(self._sent):
            return False
        self._renewed = True
        self._authorize()
        return True

    def failed(self, error: httpx.RequestError) -> float:
        """The seconds to wait after an attempt that got no answer.

        Args:
            error: the error of httpx.
        Raises:
            ClientError: as `answered`.
        """
        # No byte was sent: also a write may be tried again.
        unsent = isinstance(error, UNSENT)
        # The time of each attempt is all that is left: nothing remains for another one.
        if isinstance(error, httpx.TimeoutException) and not unsent:
            raise self.expired() from None
        reason = str(error) or type(error).__name__
        message = f"connection lost ({reason}){self._doubt()}"
        if unsent:
            message = f"no connection ({reason}); is the server running?"
        lost = self._error(message, "unreachable")
        if isinstance(error, LOST) and (unsent or not self._write):
            return self._wait_s(lost)
        raise lost from None

    def expired(self) -> ClientError:
        """The error of a call whose time is over."""
        return self._error(f"no answer within {self.timeout_s:g} s{self._doubt()}", "deadline")

    def _wait_s(self, error: ClientError, at_least: float = 0.0) -> float:
        # The bound doubles with each attempt; its exponent is limited against overflow.
        doublings = min(self._attempts - 1, 10)
        bound = min(MAX_WAIT_S, FIRST_WAIT_S * 2**doublings)
        # Full jitter: clients that failed at the same time come back at different times.
        wait_s = at_least + random.uniform(0.0, bound)
        has_retries = self.retries is None or self._attempts <= self.retries
        if not has_retries or wait_s >= self.left_s():
            raise error from None
        return wait_s

    def _doubt(self) -> str:
        return (
            "; it may have been done all the same: look before you repeat it" if self._write else ""
        )

    def _error(self, reason: str, kind: str, status: int | None = None) -> ClientError:
        request = f"request {self._request_id[:100]}"
        if self._attempts > 1:
            request += f", {self._attempts} attempts"
        message = f"{self._method} {self.url[:200]}: {reason[:1000]} ({request})"
        # The other side may have written the token into its answer.
        for secret in (self._sent, *(token.value for token in self.tokens if token)):
            if secret:
                message = message.replace(secret, "***")
        return ClientError(" ".join(message.split()), kind, status, self._request_id)


def first_error(error: ValidationError) -> str:
    """The first error of a validation, without the value, which may be long or secret."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"][:200]
    return f"{place}: {message}" if place else message


def _first_word(path: Path, name: str) -> str:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name} {path} cannot be read ({type(error).__name__}); name the file of a token of the"
            " server"
        ) from None
    return words[0] if words else ""


def _checked(token: str, name: str) -> Secret:
    """Refuses a token that does not fit into a header, because httpx would show it in its error."""
    # Spaces and control characters could end the header.
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
            # Retry-After may also be a date.
            seconds = email.utils.parsedate_to_datetime(value or "").timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
