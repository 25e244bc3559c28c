"""A typed client of `xmcray serve`, for programs that have neither torch nor Ray.

    with Client("http://127.0.0.1:8000", token_file="token") as client:
        print(client.search(["find peaks in a signal"], k=3).results[0].answers)

Retries, until the time of the whole call is over:

    reads   search, encode, label, models,  no connection, a lost one, and 408, 429, 500, 502, 503,
            and feedback                    504
    writes  swap, change_labels, compact    no connection, and 503 overloaded or not-ready:
                                            nothing was done
    both    once, at once                   401, if the token's file has another token by now: it
                                            was rotated

Waits are random between 0 and a bound that doubles from 0.1 s to 2 s, on top of Retry-After.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import ipaddress
import math
import os
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
)
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from xmcray import __version__
from xmcray.client.call import CONNECT_S, AnswerT, Call, ClientError, Token, first_error
from xmcray.errors import ConfigError
from xmcray.serving import schema

__all__ = ["AsyncClient", "Client", "ClientError"]

TOKEN = "XMCRAY_TOKEN"
LONG_S = 600.0  # a swap loads a bundle, a compaction writes one
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class SearchOptions(TypedDict, total=False):
    """Options of a search; see SearchRequest."""

    fields: list[schema.FieldName]
    model: str | None
    filter: schema.Filter | None
    memory: schema.MemorySettings | None
    explain: bool
    min_probability: float | None
    timeout_ms: int | None


class SwapOptions(TypedDict, total=False):
    """Options of a swap; see SwapRequest."""

    model: str | None
    recall_floor: float | None
    version: str | None


@dataclass(frozen=True)
class _Route(Generic[AnswerT]):
    path: str
    request: type[schema.Schema]
    answer: type[AnswerT]


SEARCH = _Route("/v1/search", schema.SearchRequest, schema.SearchResponse)
FEEDBACK = _Route("/v1/feedback", schema.FeedbackRequest, schema.FeedbackResponse)
ENCODE = _Route("/v1/encode", schema.EncodeRequest, schema.EncodeResponse)
SWAP = _Route("/admin/v1/swap", schema.SwapRequest, schema.SwapResponse)
LABELS = _Route("/admin/v1/labels", schema.OperationsRequest, schema.OperationsResponse)
COMPACT = _Route("/admin/v1/compact", schema.CompactRequest, schema.CompactResponse)


class _BaseClient(abc.ABC):
    """Address, tokens and calls of both clients."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        token_file: str | Path | None = None,
        admin_token: str | None = None,
        admin_token_file: str | Path | None = None,
        timeout_s: float = 10.0,
        retries: int | None = None,
        transport: Any = None,
    ) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s)) or (
            retries is not None and retries < 0
        ):
            raise ConfigError(
                f"timeout_s={timeout_s}, retries={retries}: expected a time above 0 and 0 or more retries"
            )
        address = server_address(url)
        self._url = str(address).rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        reading = _find_token("token", token, token_file)
        # The environment comes last: what the caller passes wins.
        if reading is None and os.environ.get(TOKEN):
            reading = Token(os.environ[TOKEN].strip(), TOKEN)
        self._tokens = (reading, _find_token("admin_token", admin_token, admin_token_file))
        # On this machine no one else can read along.
        loopback = _is_loopback(address.host)
        if any(self._tokens) and address.scheme != "https" and not loopback:
            warnings.warn(f"the token goes to {address.host} unencrypted; use https", stacklevel=2)
        # A proxy that the environment names must not get what is meant for this machine.
        self._connect(
            trust_env=not loopback,
            transport=transport,
            headers={"User-Agent": f"xmcray/{__version__}"},
        )

    @abc.abstractmethod
    def _connect(self, **settings: Any) -> None:
        """Creates the httpx client."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def _get(self, answer: type[AnswerT], path: str) -> Call[AnswerT]:
        return self._call(path, answer, None, self._timeout_s)

    def _post(
        self,
        route: _Route[AnswerT],
        timeout_s: float | None = None,
        /,
        **values: object,
    ) -> Call[AnswerT]:
        try:
            # Only what was given: the server's own defaults hold for the rest.
            content = route.request(**values).model_dump_json(exclude_unset=True).encode()
        except ValidationError as error:
            raise ConfigError(f"{route.request.__name__}: {first_error(error)}") from None
        return self._call(route.path, route.answer, content, timeout_s or self._timeout_s)

    def _call(
        self,
        path: str,
        answer: type[AnswerT],
        content: bytes | None,
        timeout_s: float,
    ) -> Call[AnswerT]:
        # Before anything is sent: the server would answer 401.
        if path.startswith("/admin/") and self._tokens[1] is None:
            raise ConfigError(
                f"{path} needs the administrator's token, none was given; pass admin_token=... or"
                " admin_token_file=..."
            )
        url = self._url + path
        return Call(url, answer, content, self._tokens, timeout_s, self._retries)


class Client(_BaseClient):
    """A synchronous client; threads may share it.

    Args:
        url: URL of the server, with the path prefix if it has one.
        token: the reader's token; the environment variable XMCRAY_TOKEN if no token is given.
        token_file: a file whose first line is the reader's token; it is read again when the token
            is refused.
        admin_token: the token for swap, change_labels and compact.
        admin_token_file: a file whose first line is that token.
        timeout_s: seconds of a whole call with all its attempts. A server that sends its answer
            byte by byte can hold a call of this class up to twice as long.
        retries: attempts after the first; None for as many as there is time for.
        transport: httpx transport, for a proxy or a test.
    Raises:
        ConfigError: an argument is not as described here.
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

    def search(
        self,
        texts: Sequence[str],
        k: int = 10,
        **options: Unpack[SearchOptions],
    ) -> schema.SearchResponse:
        """The k best labels of each text. All methods except `healthy` raise ClientError.

        Args:
            texts: what to search for; an empty text is legal.
            k: labels per text.
            options: see SearchRequest.
        Returns:
            One result per text, in the same order.
        Raises:
            ClientError: the server refused, or did not answer in time.
            ConfigError: an argument is out of range.
        """
        return self._run(self._post(SEARCH, texts=texts, k=k, **options))

    def feedback(
        self,
        request_id: str,
        label: str,
        event: schema.EventName,
        text: int = 0,
        model: str | None = None,
    ) -> schema.FeedbackResponse:
        """Says what a user did with an answer; a server with `--collect-events` keeps it.

        It may be sent again: an event that comes twice counts once.

        Args:
            request_id: of the search's answer.
            label: uid of the label.
            event: what the user did.
            text: place of the text in the search.
            model: name of the model; the first one if None.
        """
        values = {"request_id": request_id, "label": label, "event": event, "text": text}
        return self._run(self._post(FEEDBACK, **values, model=model))

    def encode(self, texts: Sequence[str], model: str | None = None) -> schema.EncodeResponse:
        """The vectors by which labels are searched.

        Args:
            texts: what to encode.
            model: name of the model; the first one if None.
        Returns:
            Vectors float32 [texts, dim].
        """
        return self._run(self._post(ENCODE, texts=texts, model=model))

    def label(self, uid: str, model: str | None = None) -> schema.LabelResponse:
        """Text and attributes of a label.

        Args:
            uid: uid of the label.
            model: name of the model; the first one if None.
        """
        return self._run(self._get(schema.LabelResponse, _label_path(uid, model)))

    def models(self) -> list[schema.Model]:
        """The bundles that are served; the first one answers where a request names none."""
        return self._run(self._get(schema.ModelsResponse, "/v1/models")).models

    def healthy(self) -> bool:
        """Whether the server answers and all its models are ready; one attempt."""
        try:
            return self._http.get(f"{self._url}/healthz", timeout=CONNECT_S).is_success
        except httpx.RequestError:
            return False

    def swap(
        self,
        bundle: str,
        timeout_s: float = LONG_S,
        **options: Unpack[SwapOptions],
    ) -> schema.SwapResponse:
        """Lets the server answer from another bundle.

        Args:
            bundle: folder or URL, as the server reaches it.
            timeout_s: seconds for the whole call.
            options: see SwapRequest.
        """
        return self._run(self._post(SWAP, timeout_s, bundle=bundle, **options))

    def change_labels(
        self, operations: Sequence[schema.Operation], model: str | None = None
    ) -> schema.OperationsResponse:
        """Adds, updates and deletes labels, all of these operations or none.

        Args:
            operations: the changes, in order.
            model: name of the model; the first one if None.
        Returns:
            The number of the last operation, which is durable now.
        """
        return self._run(self._post(LABELS, operations=operations, model=model))

    def compact(
        self,
        out: str,
        timeout_s: float = LONG_S,
        model: str | None = None,
    ) -> schema.CompactResponse:
        """Writes the labels as they are now into a new bundle at `out`.

        Args:
            out: folder or URL, as the server reaches it.
            timeout_s: seconds for the whole call.
            model: name of the model; the first one if None.
        """
        return self._run(self._post(COMPACT, timeout_s, out=out, model=model))

    def _run(self, call: Call[AnswerT]) -> AnswerT:
        while True:
            try:
                with self._http.stream(**call.send()) as response:
                    content = bytearray()
                    for part in response.iter_bytes():  # httpx limits each wait, but not their sum
                        content += part
                        if call.left_s() <= 0:
                            raise call.expired()
                outcome = call.answered(response, bytes(content))
            except httpx.RequestError as error:
                outcome = call.failed(error)
            if not isinstance(outcome, float):
                return outcome
            time.sleep(outcome)


def _awaitable(
    method: Callable[Concatenate[Client, Arguments], Returned],
) -> Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Returned]]:
    """A method of `Client` for `AsyncClient`, whose `_run` returns a coroutine."""
    return method  # type: ignore[return-value]


class AsyncClient(_BaseClient):
    """An asynchronous client: `Client` for asyncio, with the same arguments and methods."""

    search = _awaitable(Client.search)
    feedback = _awaitable(Client.feedback)
    encode = _awaitable(Client.encode)
    label = _awaitable(Client.label)
    swap = _awaitable(Client.swap)
    change_labels = _awaitable(Client.change_labels)
    compact = _awaitable(Client.compact)

    def _connect(self, **settings: Any) -> None:
        self._http = httpx.AsyncClient(**settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def models(self) -> list[schema.Model]:
        """As `Client.models`."""
        return (await self._run(self._get(schema.ModelsResponse, "/v1/models"))).models

    async def healthy(self) -> bool:
        """As `Client.healthy`."""
        try:
            return (await self._http.get(f"{self._url}/healthz", timeout=CONNECT_S)).is_success
        except httpx.RequestError:
            return False

    async def _run(self, call: Call[AnswerT]) -> AnswerT:
        while True:
            try:
                # The limit of all attempts; httpx limits single waits.
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
    # A bare ".." would mean the folder above.
    path = "/v1/labels/" + quote(uid, safe="").replace(".", "%2E")
    return path if model is None else f"{path}?model={quote(model, safe='')}"


def server_address(url: str) -> httpx.URL:
    """The parts of a server's URL.

    Raises:
        ConfigError: it is not such a URL, or holds a password.
    """
    expected = "expected http://HOST:PORT or https://HOST"
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the URL is malformed ({error}), {expected}") from None
    # A password in a URL would show up in logs and messages.
    if address.userinfo:
        raise ConfigError(
            f"the URL of {address.host} holds a user or password, {expected}; pass token=... instead"
        )
    is_http = address.scheme in ("http", "https") and bool(address.host)
    if not is_http or address.query or address.fragment:
        raise ConfigError(f"the URL is {url!r}, {expected}")
    return address


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _find_token(name: str, token: str | None, path: str | Path | None) -> Token | None:
    if token is not None and path is not None:
        raise ConfigError(f"{name} and {name}_file were both given, expected one of them")
    # The file is read now, so that a wrong path fails at once.
    if path is not None:
        return Token.of_file(Path(path), f"{name}_file")
    return None if token is None else Token(token, name)
