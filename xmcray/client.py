"""A typed client of `xmcray serve`, for programs that have neither torch nor Ray.

    with Client("http://127.0.0.1:8000", token_file="token") as client:
        print(client.search(["find peaks in a signal"], k=3).results[0].answers)

What is tried again, until the time of the whole call is over:

    reads   search, encode, label, models   no connection, a lost one, and 408, 429, 500, 502, 503, 504
    writes  swap, change_labels, compact    no connection, and 503 overloaded or not-ready: nothing was done

Waits are random between 0 and a bound that doubles from 0.1 s to 2 s, on top of what Retry-After asks for.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import email.utils
import ipaddress
import math
import os
import random
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from xmcray import __version__
from xmcray.errors import ConfigError, XmcrayError
from xmcray.serving import schema

TOKEN = "XMCRAY_TOKEN"
FIRST_WAIT_S, MAX_WAIT_S, CONNECT_S = 0.1, 2.0, 3.0
LONG_S = 600.0  # a swap loads a bundle, a compaction writes one
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

    def __init__(self, message: str, kind: str = "", status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.status, self.request_id = kind, status, request_id


class SearchOptions(TypedDict, total=False):
    """What a search can be given besides texts and k; see SearchRequest."""

    fields: list[schema.FieldName]
    model: str | None
    filter: schema.Filter | None
    memory: schema.MemorySettings | None
    explain: bool
    timeout_ms: int | None


class SwapOptions(TypedDict, total=False):
    """What a swap can be given besides the bundle; see SwapRequest."""

    model: str | None
    recall_floor: float | None
    version: str | None


class _Secret(str):
    """A token that no log and no traceback with local variables shows."""

    def __repr__(self) -> str:
        return "'***'"


class _Call(Generic[AnswerT]):
    """One call without its input and output: what to send next, and whether what came back ends it."""

    def __init__(
        self,
        method: str,
        url: str,
        answer: type[AnswerT],
        *,
        tokens: Sequence[_Secret | None],
        timeout_s: float,
        retries: int | None,
        content: bytes | None = None,
        write: bool = False,
    ) -> None:
        self._method, self._url, self._answer, self._content, self._write = method, url, answer, content, write
        self._tokens, self._timeout_s, self._retries = tokens, timeout_s, retries
        self._started, self._attempts, self._request_id = time.monotonic(), 0, uuid.uuid4().hex
        self._headers = httpx.Headers({"Accept": "application/json", "X-Request-ID": self._request_id})
        if content is not None:
            self._headers["Content-Type"] = "application/json"
        if (token := tokens[1 if write else 0]) is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def left_s(self) -> float:
        """Seconds until the call must have ended."""
        return self._started + self._timeout_s - time.monotonic()

    def send(self) -> dict[str, Any]:
        """What the next attempt sends, as arguments of httpx."""
        self._attempts += 1
        left = max(self.left_s(), 0.001)  # httpx takes 0 for an error of its own
        timeout = httpx.Timeout(left, connect=min(left, CONNECT_S))
        sent = {"method": self._method, "url": self._url, "headers": self._headers, "content": self._content}
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
                found = f"the answer is no {self._answer.__name__} ({_first(error)}), expected one of xmcray serve"
            raise self._error(f"{found}; compare the versions of client and server", "malformed", status) from None
        try:
            problem = schema.Problem.model_validate_json(content)
            known = problem.type.startswith(URN)
        except ValidationError:
            known = False
        kind = problem.type.removeprefix(URN) if known else "http"
        detail = f"{kind}: {problem.detail}" if known else response.reason_phrase or "no reason given"
        refused = self._error(f"{status} {detail}", kind, status)
        safe = not self._write or (status == httpx.codes.SERVICE_UNAVAILABLE and kind in NOTHING_DONE)
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
        found = f"no connection ({reason}); is the server running?" if unsent else f"connection lost ({reason})"
        lost = self._error(found + ("" if unsent else self._doubt()), "unreachable")
        if isinstance(error, LOST) and (unsent or not self._write):
            return self._wait_s(lost)
        raise lost from None

    def expired(self) -> ClientError:
        """The error of a call whose time is over."""
        return self._error(f"no answer within {self._timeout_s:g} s{self._doubt()}", "deadline")

    def _wait_s(self, error: ClientError, at_least: float = 0.0) -> float:
        bound = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._attempts - 1, 10))
        wait = at_least + random.uniform(0.0, bound)  # full jitter: those who failed together return apart
        if (self._retries is not None and self._attempts > self._retries) or wait >= self.left_s():
            raise error from None
        return wait

    def _doubt(self) -> str:
        return "; it may have been done all the same: look before you repeat it" if self._write else ""

    def _error(self, found: str, kind: str, status: int | None = None) -> ClientError:
        tried = f", {self._attempts} attempts" if self._attempts > 1 else ""
        message = f"{self._method} {self._url[:200]}: {found[:1000]} (request {self._request_id[:100]}{tried})"
        for token in filter(None, self._tokens):  # whatever the other side wrote into its answer
            message = message.replace(token, "***")
        return ClientError(" ".join(message.split()), kind, status, self._request_id)


@dataclass(frozen=True)
class _Route(Generic[AnswerT]):
    path: str
    request: type[schema.Schema]
    answer: type[AnswerT]


SEARCH = _Route("/v1/search", schema.SearchRequest, schema.SearchResponse)
ENCODE = _Route("/v1/encode", schema.EncodeRequest, schema.EncodeResponse)
SWAP = _Route("/admin/v1/swap", schema.SwapRequest, schema.SwapResponse)
LABELS = _Route("/admin/v1/labels", schema.OperationsRequest, schema.OperationsResponse)
COMPACT = _Route("/admin/v1/compact", schema.CompactRequest, schema.CompactResponse)


class _Asker(abc.ABC):
    """What both clients have in common: where the server is, who asks, how a call is made."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        token_file: str | Path | None = None,
        admin_token: str | None = None,
        timeout_s: float = 10.0,
        retries: int | None = None,
        transport: Any = None,
    ) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or (retries is not None and retries < 0):
            raise ConfigError(
                f"timeout_s={timeout_s}, retries={retries}: expected a time above 0 and 0 or more retries"
            )
        self._url, host, encrypted = _address(url)
        self._timeout_s, self._retries = timeout_s, retries
        admin = None if admin_token is None else _checked(admin_token, "admin_token")
        self._tokens = (_find_token(token, token_file), admin)
        loopback = _is_loopback(host)
        if any(self._tokens) and not encrypted and not loopback:
            warnings.warn(f"the token goes to {host} unencrypted; use https", stacklevel=2)
        # A proxy that the environment names must not get what is meant for this machine.
        self._connect(trust_env=not loopback, transport=transport, headers={"User-Agent": f"xmcray/{__version__}"})

    @abc.abstractmethod
    def _connect(self, **settings: Any) -> None:
        """Makes the client of httpx."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def _get(self, answer: type[AnswerT], path: str) -> _Call[AnswerT]:
        return self._call("GET", path, answer, None, self._timeout_s)

    def _post(self, route: _Route[AnswerT], timeout_s: float | None = None, /, **values: object) -> _Call[AnswerT]:
        try:
            content = route.request(**values).model_dump_json(exclude_unset=True).encode()
        except ValidationError as error:
            raise ConfigError(f"{route.request.__name__}: {_first(error)}") from None
        return self._call("POST", route.path, route.answer, content, timeout_s or self._timeout_s)

    def _call(
        self, method: str, path: str, answer: type[AnswerT], content: bytes | None, timeout_s: float
    ) -> _Call[AnswerT]:
        write = path.startswith("/admin/")
        if write and self._tokens[1] is None:
            raise ConfigError(f"{path} needs the administrator's token, none was given; pass admin_token=...")
        return _Call(
            method,
            self._url + path,
            answer,
            content=content,
            write=write,
            tokens=self._tokens,
            timeout_s=timeout_s,
            retries=self._retries,
        )


class Client(_Asker):
    """Asks a server; one client may be shared by threads.

    Args:
        url: of the server, with the path prefix if it has one.
        token, token_file: the reader's token, or a file whose first line it is; the environment variable XMCRAY_TOKEN
            if neither is given.
        admin_token: for swap, change_labels and compact.
        timeout_s: of a whole call with all its attempts. (A server that sends its answer in dribs can hold a call of
            this class up to twice as long.)
        retries: attempts after the first; as many as there is time for if not given, 0 for none.
        transport: of httpx, for a proxy or a test.
    Raises:
        ConfigError: url, a token or a number is not what is described here.
    """

    def _connect(self, **settings: Any) -> None:
        self._http = httpx.Client(**settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def search(self, texts: Sequence[str], k: int = 10, **options: Unpack[SearchOptions]) -> schema.SearchResponse:
        """The k best labels of each text. This and every other method but `healthy` raises ClientError."""
        return self._run(self._post(SEARCH, texts=texts, k=k, **options))

    def encode(self, texts: Sequence[str], model: str | None = None) -> schema.EncodeResponse:
        """The vectors by which labels are searched."""
        return self._run(self._post(ENCODE, texts=texts, model=model))

    def label(self, uid: str, model: str | None = None) -> schema.LabelResponse:
        """Text and attributes of a label."""
        return self._run(self._get(schema.LabelResponse, _label_path(uid, model)))

    def models(self) -> list[schema.Model]:
        """The bundles that are served; the first one answers where a request names none."""
        return self._run(self._get(schema.ModelsResponse, "/v1/models")).models

    def healthy(self) -> bool:
        """Whether the server is there and every model answers; asked once."""
        with contextlib.suppress(httpx.RequestError):
            return self._http.get(f"{self._url}/healthz", timeout=CONNECT_S).status_code == httpx.codes.OK
        return False

    def swap(self, bundle: str, timeout_s: float = LONG_S, **options: Unpack[SwapOptions]) -> schema.SwapResponse:
        """Lets the server answer from another bundle."""
        return self._run(self._post(SWAP, timeout_s, bundle=bundle, **options))

    def change_labels(
        self, operations: Sequence[schema.Operation], model: str | None = None
    ) -> schema.OperationsResponse:
        """Adds, updates and deletes labels, all of these operations or none."""
        return self._run(self._post(LABELS, operations=operations, model=model))

    def compact(self, out: str, timeout_s: float = LONG_S, model: str | None = None) -> schema.CompactResponse:
        """Writes the labels as they are now into a new bundle at `out`."""
        return self._run(self._post(COMPACT, timeout_s, out=out, model=model))

    def _run(self, call: _Call[AnswerT]) -> AnswerT:
        while True:
            try:
                with self._http.stream(**call.send()) as response:
                    content = bytearray()
                    for part in response.iter_bytes():  # httpx limits each wait, nobody their sum
                        content += part
                        if call.left_s() <= 0:
                            raise call.expired()
                outcome = call.answered(response, bytes(content))
            except httpx.RequestError as error:
                outcome = call.failed(error)
            if not isinstance(outcome, float):
                return outcome
            time.sleep(outcome)


class AsyncClient(_Asker):
    """As `Client`, for asyncio."""

    def _connect(self, **settings: Any) -> None:
        self._http = httpx.AsyncClient(**settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def search(
        self, texts: Sequence[str], k: int = 10, **options: Unpack[SearchOptions]
    ) -> schema.SearchResponse:
        """As `Client.search`."""
        return await self._run(self._post(SEARCH, texts=texts, k=k, **options))

    async def encode(self, texts: Sequence[str], model: str | None = None) -> schema.EncodeResponse:
        """As `Client.encode`."""
        return await self._run(self._post(ENCODE, texts=texts, model=model))

    async def label(self, uid: str, model: str | None = None) -> schema.LabelResponse:
        """As `Client.label`."""
        return await self._run(self._get(schema.LabelResponse, _label_path(uid, model)))

    async def models(self) -> list[schema.Model]:
        """As `Client.models`."""
        return (await self._run(self._get(schema.ModelsResponse, "/v1/models"))).models

    async def healthy(self) -> bool:
        """As `Client.healthy`."""
        with contextlib.suppress(httpx.RequestError):
            return (await self._http.get(f"{self._url}/healthz", timeout=CONNECT_S)).status_code == httpx.codes.OK
        return False

    async def swap(self, bundle: str, timeout_s: float = LONG_S, **options: Unpack[SwapOptions]) -> schema.SwapResponse:
        """As `Client.swap`."""
        return await self._run(self._post(SWAP, timeout_s, bundle=bundle, **options))

    async def change_labels(
        self, operations: Sequence[schema.Operation], model: str | None = None
    ) -> schema.OperationsResponse:
        """As `Client.change_labels`."""
        return await self._run(self._post(LABELS, operations=operations, model=model))

    async def compact(self, out: str, timeout_s: float = LONG_S, model: str | None = None) -> schema.CompactResponse:
        """As `Client.compact`."""
        return await self._run(self._post(COMPACT, timeout_s, out=out, model=model))

    async def _run(self, call: _Call[AnswerT]) -> AnswerT:
        while True:
            try:
                async with asyncio.timeout(call.left_s()):
                    response = await self._http.request(**call.send())
                outcome = call.answered(response, response.content)
            except TimeoutError:
                raise call.expired() from None
            except httpx.RequestError as error:
                outcome = call.failed(error)
            if not isinstance(outcome, float):
                return outcome
            await asyncio.sleep(outcome)


def _label_path(uid: str, model: str | None) -> str:
    if not uid:
        raise ConfigError("label was given an empty uid, expected that of a label")
    name = quote(uid, safe="").replace(".", "%2E")  # a bare ".." would be taken for a step up
    return f"/v1/labels/{name}" + ("" if model is None else f"?model={quote(model, safe='')}")


def _first(error: ValidationError) -> str:
    """The first complaint, without the value: that may be long, or not for everybody's eyes."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'value'}: {found['msg'][:200]}"


def _address(url: str) -> tuple[str, str, bool]:
    """Base URL, host, and whether the connection is encrypted."""
    expected = "expected http://HOST:PORT or https://HOST"
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the URL is malformed ({error}), {expected}") from None
    if found.userinfo:
        raise ConfigError(f"the URL of {found.host} holds a user or password, {expected}; pass token=... instead")
    if found.scheme not in ("http", "https") or not found.host or found.query or found.fragment:
        raise ConfigError(f"the URL is {url!r}, {expected}")
    return str(found).rstrip("/"), found.host, found.scheme == "https"


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _find_token(token: str | None, token_file: str | Path | None) -> _Secret | None:
    if token is not None and token_file is not None:
        raise ConfigError("token and token_file were both given, expected one of them")
    if token_file is not None:
        try:
            lines = Path(token_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file {token_file} cannot be read ({type(error).__name__})") from None
        return _checked(lines[0] if lines else "", f"the first line of {token_file}")
    if token is not None:
        return _checked(token, "token")
    return _checked(os.environ[TOKEN].strip(), TOKEN) if os.environ.get(TOKEN) else None


def _checked(token: str, name: str) -> _Secret:
    """A token that fits into a header: httpx would name any other one in its error."""
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{name} is empty or has characters other than visible ASCII, expected a token; not shown")
    return _Secret(token)


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
