"""Answers requests: limits, deadlines and the steps of a search.

In the single mode a search runs in this process: the requests that wait for the thread of searches
are one batch. In the composed mode a `SearchBackend` encodes and searches elsewhere, and this
process names the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from xmcray.errors import DataError
from xmcray.retrieval.answers import FoundLabel, at_least
from xmcray.retrieval.calibration import Drift
from xmcray.serving import schema
from xmcray.serving.events import NOT_COLLECTED, FeedbackEvent, SearchEvent
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.problems import ProblemError
from xmcray.serving.request_checks import check_number, check_search, check_truncated
from xmcray.serving.search_batch import MAX_BATCH_TEXTS, PendingSearch, SearchHits, find_hits
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import EncodedTexts, Snapshot, SnapshotReference
from xmcray.serving.source import SnapshotSource
from xmcray.types import Float32Array

T = TypeVar("T")


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
        # torch uses `config.threads` inside, which get the priority of this one.
        self._thread = ThreadPoolExecutor(
            1, "search", initializer=_give_way, initargs=(config.search_nice,)
        )
        self._preparer = ThreadPoolExecutor(
            1, "prepare", initializer=_give_way, initargs=(config.search_nice,)
        )
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
        check_search(request, snapshot, self.config)
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
        label = await self.label(request.label, request.model)
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

    async def vectors(
        self, texts: list[str], name: str | None
    ) -> tuple[schema.Pinned, Float32Array, int]:
        """As `encode`: which model answered, float32 [texts, D], and the number of tokens.

        Args:
            texts: texts of queries.
            name: name of the model; the first one if None.
        Raises:
            ProblemError: as `search`.
        """
        snapshot = self.served.current(name)
        async with self._admitted(None) as deadline:
            encoded = await self._encode(deadline, snapshot, texts)
            num_tokens = await self._run(
                deadline, snapshot.num_tokens, texts, self.config.max_tokens
            )
        return schema.Pinned(**_pinned(snapshot)), encoded.query_BD, num_tokens

    async def score_documents(
        self, query: str, documents: list[str], name: str | None
    ) -> tuple[schema.Pinned, Float32Array]:
        """Which model answered, and float32 [documents], scores of texts as if they were labels.

        Raises:
            ProblemError: as `search`; or a document has no token.
        """
        snapshot = self.served.current(name)
        check_number(documents, self.config)
        max_tokens = self.config.max_tokens
        try:
            async with self._admitted(None) as deadline:
                if not snapshot.can_score:
                    # In another thread, so that searches go on. If the time is over before it ends,
                    # a later request finds it done.
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._preparer, snapshot.prepare_scores)
                scores, truncated = await self._run(
                    deadline, snapshot.score, query, documents, max_tokens
                )
        except DataError as error:
            raise ProblemError("invalid", str(error)) from None
        check_truncated([truncated], self.config, "the query")
        return schema.Pinned(**_pinned(snapshot)), scores

    async def _encode(self, deadline: float, snapshot: Snapshot, texts: list[str]) -> EncodedTexts:
        check_number(texts, self.config)
        # A static encoder takes less time than a call.
        if self._backend is None or snapshot.retriever.is_static:
            encoded = await self._run(deadline, snapshot.encode, texts, self.config.max_tokens)
        else:
            encoded = await self._backend.encode(snapshot.reference, texts)
        check_truncated(encoded.truncated, self.config)
        return encoded

    async def label(self, uid: str, name: str | None) -> schema.LabelResponse:
        """One label of a model.

        Args:
            uid: uid of the label.
            name: name of the model; the first one if None.
        Raises:
            ProblemError: there is none of that uid.
        """
        snapshot = self.served.current(name)
        if snapshot.exported is None:
            # In another thread, so that other requests are answered meanwhile.
            await asyncio.to_thread(snapshot.index_uids)
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
                compacted_from=snapshot.compacted_from,
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
        check_truncated(encoded.truncated, self.config)
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
        check_truncated(hits.truncated, self.config)
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
        """Adds the best answers of requests without a filter to what drifts are computed of.

        A reranker puts others first than those by which the curves were fitted, so nothing is added.
        """
        calibration = snapshot.retriever.calibration
        is_reranked = snapshot.retriever.reranker is not None
        if calibration is None or is_reranked or request.filter is not None:
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


def _give_way(nice: int) -> None:
    """Lets the event loop run before this thread where both want the same core."""
    if sys.platform == "linux":  # elsewhere threads have no priorities of their own
        thread = threading.get_native_id()
        highest = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, highest + nice))


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


def _answers(
    labels: Sequence[FoundLabel],
    snapshot: Snapshot,
    fields: set[schema.FieldName],
) -> list[schema.Answer]:
    """One text's labels with the fields that the request names."""
    retriever = snapshot.retriever
    # A reranker's scores are no votes.
    has_votes_alone = retriever.settings.predictor["kind"] == "memory" and not retriever.reranker
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
