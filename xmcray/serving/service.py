"""Requests become answers: limits, deadlines, and the three steps of a search, here or in other deployments."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import ALL_SHARDS, ShardSubset
from xmcray.serving import schema
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot
from xmcray.types import Float32Array

T = TypeVar("T")
TOGETHER = 64  # texts of several requests that are searched at once


@dataclass(frozen=True, slots=True)
class Pin:
    """What a request began with: every part of its answer comes from there."""

    model: str
    version: str
    number: int


class Near(NamedTuple):
    """What lies near the texts of a request, and which of them were too long to be read to their end."""

    found: Neighbours
    longer: list[bool]


@dataclass(frozen=True, slots=True)
class Asked:
    """A search as the thread of searches sees it.

    Attributes:
        query_BD: the texts' vectors, where they were made elsewhere.
    """

    snapshot: Snapshot
    request: schema.SearchRequest
    k: int
    query_BD: Float32Array | None = None

    @property
    def alike(self) -> tuple[Snapshot, int, str]:
        """Equal for searches that can be one: all but the texts, and the time there is."""
        return self.snapshot, self.k, self.request.model_dump_json(exclude={"texts", "timeout_ms"})


class Models(Protocol):
    """Who holds what is served: a follower, or the coordinator itself."""

    @property
    def ready(self) -> bool:
        """Whether every model can be asked."""

    def resolve(self, name: str | None) -> str:
        """The model that a request means."""

    def current(self, name: str | None) -> Snapshot:
        """What a request that begins now is answered from."""


class Parts(Protocol):
    """Encoder and searchers that run elsewhere (composed mode)."""

    async def encode(self, pin: Pin, texts: list[str]) -> tuple[Float32Array, list[bool]]:
        """As `Snapshot.encode`."""

    async def find(
        self, pin: Pin, request: schema.SearchRequest, k: int, query_BD: Float32Array | None
    ) -> Near:
        """As `find`, over all shards."""


class Service:
    """Answers requests about models.

    Args:
        models: what is served; started.
        parts: who encodes and searches; this process if not given.
    """

    def __init__(self, config: ServeConfig, models: Models, parts: Parts | None = None) -> None:
        self.config, self.served, self._parts = config, models, parts
        self.working = 0
        self._thread = ThreadPoolExecutor(1, "search")  # torch uses `config.threads` inside
        self._searches = MicroBatcher[Asked, list[schema.Result]](
            self._thread, self._search, TOGETHER
        )

    def check_room(self) -> None:
        """Raises ProblemError when so many requests are worked on that another one is refused.

        To be asked before a request is parsed: under overload most of the time would go there.
        """
        if self.working >= self.config.in_flight:
            raise ProblemError(
                "overloaded",
                f"{self.working} requests are being worked on; ask again a little later",
            )

    async def search(self, request: schema.SearchRequest, request_id: str) -> schema.SearchResponse:
        """The best labels of each text.

        Raises:
            ProblemError: the request is refused, or there was no time.
        """
        begin, snapshot, model = (
            time.perf_counter(),
            self.served.current(request.model),
            self._name(request.model),
        )
        self._check(request, snapshot)
        k = min(request.k, snapshot.retriever.num_labels)
        async with self._admitted(request.timeout_ms) as until:
            if self._parts is None:
                asked = Asked(snapshot, request, k)
                found = await self._searches.run(asked.alike, len(request.texts), asked)
            else:
                pin, query_BD, longer = (
                    Pin(model, snapshot.version, snapshot.number),
                    None,
                    list[bool](),
                )
                if not snapshot.retriever.query_encoder.is_static:
                    query_BD, longer = await self._parts.encode(pin, request.texts)
                    self._refuse_long(longer)
                near = await self._parts.find(pin, request, k, query_BD)
                found = await self._run(
                    until,
                    self._results,
                    snapshot,
                    request,
                    k,
                    Near(near.found, longer or near.longer),
                )
        return schema.SearchResponse(
            **pinned(model, snapshot),
            request_id=request_id,
            took_ms=round(1000 * (time.perf_counter() - begin), 3),
            results=found,
        )

    async def encode(self, request: schema.EncodeRequest, request_id: str) -> schema.EncodeResponse:
        """The vectors of texts.

        Raises:
            ProblemError: as `search`.
        """
        snapshot, model = self.served.current(request.model), self._name(request.model)
        self._check_number(request.texts)
        async with self._admitted(None) as until:
            pin = Pin(model, snapshot.version, snapshot.number)
            query_BD, longer = await self._encoded(until, pin, snapshot, request.texts)
        self._refuse_long(longer)
        return schema.EncodeResponse(
            **pinned(model, snapshot),
            request_id=request_id,
            dim=query_BD.shape[1],
            vectors=query_BD.tolist(),
        )

    def label(self, uid: str, name: str | None) -> schema.LabelResponse:
        """One label.

        Raises:
            ProblemError: there is none of that uid.
        """
        snapshot = self.served.current(name)
        label = snapshot.label_id(uid)
        if label is None:
            raise ProblemError(
                "not-found", f"label {uid[:80]!r} is not in model {self._name(name)!r}"
            )
        return schema.LabelResponse(
            **pinned(self._name(name), snapshot),
            uid=uid,
            text=snapshot.text(label),
            label_id=label,
            attributes=snapshot.attributes.of([label])[0],
        )

    def models(self) -> schema.ModelsResponse:
        """What is served."""
        found = []
        for name in self.config.bundles:
            snapshot = self.served.current(name)
            retriever = snapshot.retriever
            found.append(
                schema.Model(
                    **pinned(name, snapshot),
                    method=retriever.settings.method,
                    predictor=str(retriever.settings.predictor["kind"]),
                    num_labels=retriever.num_labels,
                    dim=retriever.settings.dim,
                    max_len=retriever.tokenizer.max_len,
                    attributes=list(snapshot.attributes.names),
                )
            )
        return schema.ModelsResponse(models=found)

    async def _encoded(
        self, until: float, pin: Pin, snapshot: Snapshot, texts: list[str]
    ) -> tuple[Float32Array, list[bool]]:
        """As `Snapshot.encode`, here or by the encoder's own processes, whichever is sooner."""
        if self._parts is None or snapshot.retriever.query_encoder.is_static:
            return await self._run(until, snapshot.encode, texts, self.config.max_tokens)
        return await self._parts.encode(pin, texts)

    def _search(self, asked: Sequence[Asked]) -> list[list[schema.Result]]:
        """The results of each of some searches that are alike."""
        near = find(asked, self.config.max_tokens)
        return [
            self._results(one.snapshot, one.request, one.k, its)
            for one, its in zip(asked, near, strict=True)
        ]

    def _results(
        self, snapshot: Snapshot, request: schema.SearchRequest, k: int, near: Near
    ) -> list[schema.Result]:
        self._refuse_long(near.longer)
        retriever, fields = snapshot.view(request.filter), set(request.fields)
        plain, voting = fields - {"attributes"}, snapshot.voting(request.memory)
        found = retriever.name_answers(near.found, k, memory=voting, explain=request.explain)
        results = []
        for answers, truncated in zip(found, near.longer, strict=True):
            attributes = (
                snapshot.attributes.of([a.label_id for a in answers])
                if "attributes" in fields
                else None
            )
            shown = []
            for place, answer in enumerate(answers):
                values: dict[str, Any] = {name: getattr(answer, name) for name in plain}
                if attributes is not None:
                    values["attributes"] = attributes[place]
                if retriever.memory is not None:
                    values["completed"] = answer.score < 0
                if answer.voters is not None:
                    values["voters"] = [
                        {"uid": v.uid, "text": v.text, "weight": v.weight} for v in answer.voters
                    ]
                shown.append(schema.Answer.model_validate(values))
            results.append(schema.Result(answers=shown, truncated=truncated))
        return results

    def _check(self, request: schema.SearchRequest, snapshot: Snapshot) -> None:
        self._check_number(request.texts)
        if request.k > self.config.max_k:
            raise ProblemError("invalid", f"k is {request.k}, expected at most {self.config.max_k}")
        memory = snapshot.retriever.memory
        if memory is None and (request.explain or request.memory is not None):
            raise ProblemError(
                "invalid",
                "this model has no memory of training queries; leave `explain` and `memory` out",
            )
        names = set(request.filter.attributes if request.filter else ()) - set(
            snapshot.attributes.names
        )
        if names:
            known = ", ".join(snapshot.attributes.names) or "none"
            raise ProblemError(
                "invalid", f"no label has an attribute {min(names)[:80]!r}; there are: {known}"
            )

    def _check_number(self, texts: list[str]) -> None:
        if len(texts) > self.config.max_texts:
            raise ProblemError(
                "invalid",
                f"{len(texts)} texts in one request, expected at most {self.config.max_texts}",
            )

    def _refuse_long(self, longer: list[bool]) -> None:
        if self.config.long_texts == "refuse" and any(longer):
            raise ProblemError(
                "too-long",
                f"text {longer.index(True)} has more tokens than the model reads; shorten or split it",
            )

    @contextlib.asynccontextmanager
    async def _admitted(self, timeout_ms: int | None) -> AsyncIterator[float]:
        """A place among those that are worked on, for a limited time; yields the moment at which it ends.

        Raises:
            ProblemError: there is no place, or the time is over.
        """
        self.check_room()
        wait_s = min(timeout_ms or self.config.deadline_ms, self.config.deadline_ms) / 1000
        self.working += 1
        try:
            async with asyncio.timeout(wait_s):
                yield time.monotonic() + wait_s
        except TimeoutError:
            raise ProblemError(
                "timeout", f"no answer within {1000 * wait_s:.0f} ms; ask for less, or later"
            ) from None
        finally:
            self.working -= 1

    async def _run(self, until: float, function: Callable[..., T], *arguments: Any) -> T:
        """In the thread of searches; not at all if the request's time is over before its turn comes."""

        def work() -> T:
            if time.monotonic() > until:
                raise TimeoutError
            return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _name(self, name: str | None) -> str:
        return self.served.resolve(name)


def find(asked: Sequence[Asked], max_tokens: int, subset: ShardSubset = ALL_SHARDS) -> list[Near]:
    """What lies near the queries of some searches that are alike, in a part of the shards, of what their filter lets
    pass. Texts that are not encoded yet are encoded here.
    """
    snapshot, request, k = asked[0].snapshot, asked[0].request, asked[0].k
    known = [one.query_BD for one in asked if one.query_BD is not None]
    if known:
        query_BD, longer = np.concatenate(known), [False] * sum(map(len, known))
    else:
        query_BD, longer = snapshot.encode(
            [text for one in asked for text in one.request.texts], max_tokens
        )
    found = snapshot.view(request.filter).find_neighbours(
        query_BD, k, memory=snapshot.voting(request.memory), subset=subset
    )
    ends = itertools.accumulate((len(one.request.texts) for one in asked), initial=0)
    return [
        Near(found.slice(first, last), longer[first:last])
        for first, last in itertools.pairwise(ends)
    ]


def pinned(model: str, snapshot: Snapshot) -> dict[str, Any]:
    """The fields of `schema.Pinned`."""
    return {"model": model, "version": snapshot.version, "label_log": snapshot.number}
