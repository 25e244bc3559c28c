"""Answers requests: limits, deadlines and the steps of a search.

In the single mode a search runs in this process: the requests that wait for the thread of searches
are one batch. In the composed mode a `SearchBackend` encodes and searches elsewhere, and this
process names the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from xmcray.errors import ConfigError, DataError
from xmcray.retrieval.answers import FoundLabel, at_least
from xmcray.retrieval.calibration import Drift
from xmcray.retrieval.fused import fixed_parts
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import ALL_SHARDS, SearchScope, ShardSubset
from xmcray.serving import schema
from xmcray.serving.events import NOT_COLLECTED, FeedbackEvent, SearchEvent
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import EncodedTexts, Snapshot, SnapshotReference
from xmcray.serving.source import SnapshotSource
from xmcray.types import Float32Array

T = TypeVar("T")
MAX_BATCH_TEXTS = 64  # of several requests that are searched at once


@dataclass(frozen=True, slots=True)
class SearchHits:
    """What a search of some texts found.

    Attributes:
        neighbours: the rows nearest to each text.
        truncated: for each text, whether it was too long to be read to its end.
    """

    neighbours: Neighbours
    truncated: list[bool]


@dataclass(frozen=True, slots=True)
class PendingSearch:
    """A search that waits for the thread of searches.

    Attributes:
        snapshot: where to search.
        request: the request.
        k: labels per text, at most as many as there are.
        query_BD: vectors of the texts; None if they are to be encoded with the search.
    """

    snapshot: Snapshot
    request: schema.SearchRequest
    k: int
    query_BD: Float32Array | None = None

    @property
    def batch_key(self) -> tuple[Snapshot, int, str]:
        """Equal for searches that can be one batch: everything but the queries and the deadline."""
        options = self.request.model_dump_json(exclude={"texts", "vectors", "timeout_ms"})
        return self.snapshot, self.k, options

    @property
    def num_answers(self) -> int:
        """Number of labels in the whole answer, at most."""
        return len(self.request.texts) * self.k


class EventSink(Protocol):
    """Where events go: the coordinator, in this process or in another one."""

    def note_searches(self, name: str, events: Sequence[SearchEvent]) -> None:
        """Queues searches of a model; never blocks or fails."""

    async def add_feedback(self, name: str, event: FeedbackEvent) -> int:
        """Makes feedback about a search of a model durable; returns the number of the event."""


class SearchBackend(Protocol):
    """Encoder, searchers and reranker in other processes (composed mode)."""

    async def encode(self, reference: SnapshotReference, texts: list[str]) -> EncodedTexts:
        """Vectors of the texts, by the encoder of the snapshot."""

    async def find(
        self,
        reference: SnapshotReference,
        request: schema.SearchRequest,
        k: int,
        query_BD: Float32Array | None,
    ) -> SearchHits:
        """Searches all shards; encodes the texts if their vectors are not given.

        Args:
            reference: names the snapshot.
            request: the request.
            k: labels per text, at most as many as there are.
            query_BD: vectors of the texts, float32 [B, D].
        """

    async def score_pairs(self, pairs: list[tuple[str, str]]) -> Float32Array:
        """float32 [pairs], the reranker's scores of a query and a label's text."""


class Service:
    """Answers requests about models.

    Args:
        config: limits.
        served: the snapshots; started.
        backend: encodes and searches; this process if None.
        events: where events go, if they are collected.
    """

    def __init__(
        self,
        config: ServeConfig,
        served: SnapshotSource,
        backend: SearchBackend | None = None,
        events: EventSink | None = None,
    ) -> None:
        self.config = config
        self.served = served
        self._events = events if config.collect_events else None
        self.working = 0  # requests in progress
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "search")  # torch uses `config.threads` inside
        self._drifts: dict[str, Drift] = {}
        self._batcher = MicroBatcher[PendingSearch, list[schema.Result]](
            self._thread, self._search_batch, MAX_BATCH_TEXTS
        )

    def check_room(self) -> None:
        """Refuses a request if too many are in progress.

        To be called before a request is parsed: under overload, parsing takes most of the time.

        Raises:
            ProblemError: `overloaded`.
        """
        if self.working >= self.config.in_flight:
            message = f"{self.working} requests are being worked on; ask again a little later"
            raise ProblemError("overloaded", message)

    async def search(self, request: schema.SearchRequest, request_id: str) -> schema.SearchResponse:
        """The best labels of each text.

        Args:
            request: checked against the schema, but not yet against the limits.
            request_id: returned with the answer.
        Raises:
            ProblemError: the request is refused, or the time is over.
        """
        begin = time.perf_counter()
        snapshot = self.served.current(request.model)
        # Before a place is taken: an invalid request costs nothing.
        self._check(request, snapshot)
        k = min(request.k, snapshot.retriever.num_labels)
        async with self._admitted(request.timeout_ms) as deadline:
            if self._backend is None:
                search = PendingSearch(snapshot, request, k)
                results = await self._batcher.run(
                    search.batch_key,
                    len(request.texts),
                    search,
                    search.num_answers,
                )
            else:
                hits = await self._find(self._backend, snapshot, request, k)
                # In the thread of searches: names and texts are read from files.
                scores = None
                if snapshot.retriever.reranker is not None:
                    pairs = await self._run(deadline, _pairs, snapshot, request, k, hits)
                    scores = await self._backend.score_pairs(pairs)
                results = await self._run(
                    deadline, self._results, snapshot, request, k, hits, scores
                )
        response = schema.SearchResponse(
            **_pinned(snapshot),
            request_id=request_id,
            took_ms=round(1000 * (time.perf_counter() - begin), 3),
            results=results,
        )
        if self._events is not None:
            # Before the answer goes out: feedback may come at once.
            self._events.note_searches(snapshot.model, [SearchEvent.of(request.texts, response)])
        return response

    async def feedback(self, request: schema.FeedbackRequest) -> schema.FeedbackResponse:
        """Makes feedback about an answer durable.

        Raises:
            ProblemError: events are not collected, the label or the search is unknown, or the disk
                is full.
        """
        if self._events is None:
            raise ProblemError("not-found", NOT_COLLECTED)
        label = self.label(request.label, request.model)
        event = FeedbackEvent(
            request=request.request_id,
            text=request.text,
            label=request.label,
            label_text=label.text,
            event=request.event,
        )
        async with self._admitted(None):
            number = await self._events.add_feedback(label.model, event)
        return schema.FeedbackResponse(model=label.model, number=number)

    async def encode(self, request: schema.EncodeRequest, request_id: str) -> schema.EncodeResponse:
        """The vectors of texts.

        Raises:
            ProblemError: as `search`.
        """
        snapshot = self.served.current(request.model)
        async with self._admitted(None) as deadline:
            encoded = await self._encode(deadline, snapshot, request.texts)
        return schema.EncodeResponse(
            **_pinned(snapshot),
            request_id=request_id,
            dim=encoded.query_BD.shape[1],
            vectors=encoded.query_BD.tolist(),
        )

    async def vectors(self, texts: list[str], name: str | None) -> tuple[str, Float32Array, int]:
        """As `encode`: the model's name, float32 [texts, D], and the number of tokens.

        Args:
            texts: texts of queries.
            name: name of the model; the first one if None.
        Raises:
            ProblemError: as `search`.
        """
        snapshot = self.served.current(name)
        async with self._admitted(None) as deadline:
            encoded = await self._encode(deadline, snapshot, texts)
            num_tokens = await self._run(deadline, snapshot.num_tokens, texts)
        return snapshot.model, encoded.query_BD, num_tokens

    async def score_documents(
        self, query: str, documents: list[str], name: str | None
    ) -> tuple[str, Float32Array]:
        """The model's name and float32 [documents], scores of texts as if they were labels.

        Raises:
            ProblemError: as `search`; or a document has no token.
        """
        snapshot = self.served.current(name)
        self._check_number(documents)
        max_tokens = self.config.max_tokens
        try:
            async with self._admitted(None) as deadline:
                scores, truncated = await self._run(
                    deadline, snapshot.score, query, documents, max_tokens
                )
        except DataError as error:
            raise ProblemError("invalid", str(error)) from None
        self._refuse_truncated([truncated], "the query")
        return snapshot.model, scores

    async def _encode(self, deadline: float, snapshot: Snapshot, texts: list[str]) -> EncodedTexts:
        self._check_number(texts)
        # A static encoder takes less time than a call.
        if self._backend is None or snapshot.retriever.is_static:
            encoded = await self._run(deadline, snapshot.encode, texts, self.config.max_tokens)
        else:
            encoded = await self._backend.encode(snapshot.reference, texts)
        self._refuse_truncated(encoded.truncated)
        return encoded

    def label(self, uid: str, name: str | None) -> schema.LabelResponse:
        """One label of a model.

        Args:
            uid: uid of the label.
            name: name of the model; the first one if None.
        Raises:
            ProblemError: there is none of that uid.
        """
        snapshot = self.served.current(name)
        label_id = snapshot.label_id(uid)
        if label_id is None:
            message = f"label {uid[:80]!r} is not in model {snapshot.model!r}"
            raise ProblemError("not-found", message)
        return schema.LabelResponse(
            **_pinned(snapshot),
            uid=uid,
            text=snapshot.text(label_id),
            label_id=label_id,
            attributes=snapshot.attributes.of([label_id])[0],
        )

    def models(self) -> schema.ModelsResponse:
        """The bundles that are served."""
        models = []
        for name in self.config.bundles:
            snapshot = self.served.current(name)
            settings = snapshot.retriever.settings
            model = schema.Model(
                **_pinned(snapshot),
                method=settings.method,
                predictor=str(settings.predictor["kind"]),
                num_labels=snapshot.retriever.num_labels,
                dim=snapshot.retriever.dim,
                max_len=snapshot.retriever.tokenizer.max_len,
                attributes=list(snapshot.attributes.names),
                calibrated=snapshot.retriever.calibration is not None,
                feedback=self._events is not None,
                side_width=snapshot.retriever.side_width,
            )
            models.append(model)
        return schema.ModelsResponse(models=models)

    async def _find(
        self,
        backend: SearchBackend,
        snapshot: Snapshot,
        request: schema.SearchRequest,
        k: int,
    ) -> SearchHits:
        """Searches in the composed mode."""
        # This process orders the answers; the searchers only find them.
        k = snapshot.retriever.num_ranked(k)
        if snapshot.retriever.is_static or request.vectors is not None:
            # Encoding takes less time than a call: the searchers do it themselves. So they do with
            # side vectors, which the encoder's deployment does not take.
            return await backend.find(snapshot.reference, request, k, None)
        encoded = await backend.encode(snapshot.reference, request.texts)
        self._refuse_truncated(encoded.truncated)
        hits = await backend.find(snapshot.reference, request, k, encoded.query_BD)
        return SearchHits(hits.neighbours, encoded.truncated)

    def _search_batch(self, searches: Sequence[PendingSearch]) -> list[list[schema.Result]]:
        """The results of each search of a batch."""
        all_results = []
        all_hits = find_hits(searches, self.config.max_tokens)
        for search, hits in zip(searches, all_hits, strict=True):
            all_results.append(self._results(search.snapshot, search.request, search.k, hits))
        return all_results

    def _results(
        self,
        snapshot: Snapshot,
        request: schema.SearchRequest,
        k: int,
        hits: SearchHits,
        pair_scores: Float32Array | None = None,
    ) -> list[schema.Result]:
        self._refuse_truncated(hits.truncated)
        retriever = snapshot.view(request.filter)
        memory = snapshot.memory_config(request.memory)
        all_labels = retriever.name_answers(
            hits.neighbours,
            k,
            memory=memory,
            explain=request.explain,
            texts=request.texts,
            pair_scores=pair_scores,
        )
        self._note_probabilities(snapshot, request, all_labels)
        results = []
        for labels, truncated in zip(all_labels, hits.truncated, strict=True):
            # After the note, which needs the best answers whatever a request leaves out.
            if request.min_probability is not None:
                labels = at_least(labels, request.min_probability)
            fields = set(request.fields)
            if self._events is not None:
                # Feedback names labels by uid.
                fields.add("uid")
            answers = _answers(labels, snapshot, fields)
            results.append(schema.Result(answers=answers, truncated=truncated))
        return results

    def _note_probabilities(
        self,
        snapshot: Snapshot,
        request: schema.SearchRequest,
        all_labels: Sequence[Sequence[FoundLabel]],
    ) -> None:
        """Adds the best answers of requests without a filter to what drifts are computed of."""
        calibration = snapshot.retriever.calibration
        if calibration is None or request.filter is not None:
            return
        drift = self._drifts.get(snapshot.model)
        # Another bundle begins anew.
        if drift is None or drift.expected != calibration.curves.best_answers:
            drift = Drift(calibration.curves.best_answers)
            self._drifts[snapshot.model] = drift
        for labels in all_labels:
            if labels and labels[0].probability is not None:
                drift.add(labels[0].probability)

    def drifts(self) -> dict[str, float]:
        """By model, how far the probabilities of best answers are from the held-out queries'."""
        values: dict[str, float] = {}
        for name, drift in self._drifts.items():
            index = drift.index()
            if index is not None:
                values[name] = index
        return values

    def _check(self, request: schema.SearchRequest, snapshot: Snapshot) -> None:
        self._check_number(request.texts)
        if request.k > self.config.max_k:
            raise ProblemError("invalid", f"k is {request.k}, expected at most {self.config.max_k}")
        num_answers = len(request.texts) * request.k
        if num_answers > self.config.max_answers:
            raise ProblemError(
                "invalid",
                f"{len(request.texts)} texts times k {request.k} is {num_answers:,}, expected at most"
                f" {self.config.max_answers:,}; send fewer texts at once",
            )
        retriever = snapshot.retriever
        if (request.explain or request.memory is not None) and not retriever.explains:
            raise ProblemError(
                "invalid",
                "this model has no memory of training queries; leave `explain` and `memory` out",
            )
        if request.memory is not None and retriever.fusion is not None:
            raise ProblemError("invalid", str(fixed_parts()))
        try:
            memory = snapshot.memory_config(request.memory)
            retriever.check_min_probability(request.min_probability, memory)
            retriever.check_vectors(_vectors_of(request), len(request.texts))
        except ConfigError as error:
            raise ProblemError("invalid", str(error)) from None
        conditions = request.filter.attributes if request.filter else {}
        # Otherwise a typing error would look like a filter that no label passes.
        unknown = conditions.keys() - set(snapshot.attributes.names)
        if unknown:
            names = ", ".join(snapshot.attributes.names) or "none"
            raise ProblemError(
                "invalid", f"no label has an attribute {min(unknown)[:80]!r}; there are: {names}"
            )

    def _check_number(self, texts: list[str]) -> None:
        if len(texts) > self.config.max_texts:
            raise ProblemError(
                "invalid",
                f"{len(texts)} texts in one request, expected at most {self.config.max_texts}",
            )

    def _refuse_truncated(self, truncated: list[bool], name: str = "") -> None:
        """Refuses texts that were not read to their end, if the settings say so."""
        if self.config.long_texts == "refuse" and any(truncated):
            name = name or f"text {truncated.index(True)}"
            raise ProblemError(
                "too-long", f"{name} has more tokens than the model reads; shorten or split it"
            )

    @contextlib.asynccontextmanager
    async def _admitted(self, timeout_ms: int | None) -> AsyncIterator[float]:
        """Counts a request as in progress and limits its time; yields its deadline (monotonic).

        Raises:
            ProblemError: too many requests are in progress, or the time is over.
        """
        # Again: requests may have come while this one was parsed.
        self.check_room()
        wait_ms = min(timeout_ms or self.config.deadline_ms, self.config.deadline_ms)
        self.working += 1
        try:
            async with asyncio.timeout(wait_ms / 1000):
                yield time.monotonic() + wait_ms / 1000
        except TimeoutError:
            message = f"no answer within {wait_ms} ms; ask for less, or later"
            raise ProblemError("timeout", message) from None
        finally:
            self.working -= 1

    async def _run(self, deadline: float, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread of searches, unless the deadline is over by then."""

        def work() -> T:
            if time.monotonic() > deadline:
                raise TimeoutError
            return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _pinned(snapshot: Snapshot) -> dict[str, Any]:
    """The fields of `schema.Pinned`."""
    return {"model": snapshot.model, "version": snapshot.version, "label_log": snapshot.number}


def _pairs(
    snapshot: Snapshot, request: schema.SearchRequest, k: int, hits: SearchHits
) -> list[tuple[str, str]]:
    """What the reranker reads before the answers of a request are named."""
    memory = snapshot.memory_config(request.memory)
    view = snapshot.view(request.filter)
    return view.pairs_to_read(hits.neighbours, k, request.texts, memory)


def find_hits(
    searches: Sequence[PendingSearch],
    max_tokens: int,
    subset: ShardSubset = ALL_SHARDS,
) -> list[SearchHits]:
    """Searches for a batch of requests with equal keys; texts without vectors are encoded here.

    Args:
        searches: the batch.
        max_tokens: tokens that are read of a text.
        subset: the shards to search.
    Returns:
        The hits of each request.
    """
    # All but the texts is equal in all of them.
    snapshot = searches[0].snapshot
    request = searches[0].request
    vectors = [search.query_BD for search in searches if search.query_BD is not None]
    if vectors:
        query_BD = np.concatenate(vectors)
        encoded = EncodedTexts(query_BD, [False] * len(query_BD))
    else:
        texts = [text for search in searches for text in search.request.texts]
        encoded = snapshot.encode(texts, max_tokens, _side_vectors(searches))
    # One search for the whole batch: most of its time does not depend on the number of texts.
    neighbours = snapshot.view(request.filter).find_neighbours(
        encoded.query_BD,
        searches[0].k,
        memory=snapshot.memory_config(request.memory),
        scope=SearchScope(subset=subset),
    )
    results = []
    start = 0
    for search in searches:
        # Each request gets back the rows of its own texts, in the order of the concatenation.
        stop = start + len(search.request.texts)
        results.append(SearchHits(neighbours.slice(start, stop), encoded.truncated[start:stop]))
        start = stop
    return results


def _side_vectors(searches: Sequence[PendingSearch]) -> Float32Array | None:
    """float32 [texts, W] of a batch, zeros where a request has none; None if the model uses none."""
    width = searches[0].snapshot.retriever.side_width
    if not width:
        return None
    all_vectors = []
    for search in searches:
        vectors = _vectors_of(search.request)
        if vectors is None:
            vectors = np.zeros((len(search.request.texts), width), np.float32)
        all_vectors.append(vectors)
    return np.concatenate(all_vectors)


def _vectors_of(request: schema.SearchRequest) -> Float32Array | None:
    """float32 [texts, W], the side vectors of a request; None if it has none.

    Raises:
        ConfigError: they differ in width.
    """
    if request.vectors is None:
        return None
    widths = {len(vector) for vector in request.vectors}
    if len(widths) > 1:
        raise ConfigError(
            f"found side vectors of {min(widths)} and of {max(widths)} numbers, expected one width;"
            " send those that the model was trained with"
        )
    # What no float32 holds becomes infinity, which is refused where vectors are checked.
    with np.errstate(over="ignore"):
        vectors: Float32Array = np.array(request.vectors, np.float32)
    return vectors


def _answers(
    labels: Sequence[FoundLabel],
    snapshot: Snapshot,
    fields: set[schema.FieldName],
) -> list[schema.Answer]:
    """One text's labels with the fields that the request names."""
    has_votes_alone = snapshot.retriever.settings.predictor["kind"] == "memory"
    all_attributes: list[schema.Attributes] = []
    if "attributes" in fields:
        all_attributes = snapshot.attributes.of([label.label_id for label in labels])
    answers = []
    for place, label in enumerate(labels):
        answer = schema.Answer()
        for name in fields - {"attributes"}:
            setattr(answer, name, getattr(label, name))
        if all_attributes:
            answer.attributes = all_attributes[place]
        if has_votes_alone:
            # Votes are probabilities. A label without votes that only fills the list has its inner
            # product minus 2 as its score, which is negative.
            answer.completed = label.score < 0
        if label.voters is not None:
            answer.voters = [
                schema.Voter(uid=voter.uid, text=voter.text, weight=voter.weight)
                for voter in label.voters
            ]
        if label.parts is not None:
            answer.parts = dict(label.parts)
        answers.append(answer)
    return answers
