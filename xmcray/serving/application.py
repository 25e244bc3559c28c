"""The application on Ray Serve. `build` makes it from settings.

    Coordinator    one replica: what is served, and the log of label operations
    Gateway        the ingress. "single": encodes and searches itself. "composed": calls
    Encoder          texts -> vectors of a transformer; a static encoder takes less time than
                     a call, so the searchers encode themselves
    Searcher0 ...    one for each subset of the index shards; the gateway merges what they find
    Reranker       reads the best answers again, if the settings name a cross-encoder

The classes here only connect; what they do is in coordinator.py, follower.py, service.py and
http.py. Serve awaits their constructors, which type checkers do not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from xmcray.config import build as build_config
from xmcray.ray_adapter.private import HEAD_RESOURCE, is_task_or_actor
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import ALL_SHARDS, NO_SHARDS, ShardSubset
from xmcray.serving import http, metrics, rpc, schema
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.event_sender import EventSender
from xmcray.serving.follower import Follower
from xmcray.serving.local import listening, tokens_of, use_one_allocator
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.problems import RETRY_AFTER_S, ProblemError
from xmcray.serving.search_batch import MAX_BATCH_TEXTS, PendingSearch, SearchHits, find_hits
from xmcray.serving.search_pb2 import SearchRequest, SearchResponse
from xmcray.serving.service import Service
from xmcray.serving.settings import (
    ServeConfig,
    check_absolute_paths,
    num_searchers,
    with_absolute_paths,
)
from xmcray.serving.snapshot import EncodedTexts, Snapshot, SnapshotReference
from xmcray.types import Float32Array

if TYPE_CHECKING:
    from xmcray.nn.cross_encoder import CrossEncoder

NAME = "xmcray"
Handle = DeploymentHandle[Any]
Address = tuple[str, int, int]  # host, port, port of gRPC or 0
STATUS_S = 2.0
NUM_CPUS = 0.1  # reserved by each process; `options` sets others
# A text to encode takes its turn as a search for so many labels does.
ENCODED_AS_ANSWERS = 100


def build(args: Mapping[str, Any], address: Address | None = None) -> Application:
    """The application for `serve run` and for `args` of a Serve config file: the fields of
    ServeConfig.

    Args:
        args: values of the fields.
        address: where the ingress, of one replica then, listens itself; Ray Serve's proxy listens
            if None.
    """
    config = build_config(ServeConfig, dict(args))
    # A task of the cluster builds what `serve deploy` was given.
    if is_task_or_actor():
        check_absolute_paths(config)
    config = with_absolute_paths(config)
    coordinator = _deployment(
        config,
        CoordinatorDeployment,
        "Coordinator",
        # Each replica has one call that waits for updates.
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=1,
    ).bind(config)
    encoder = None
    reranker = None
    searchers = []
    count = num_searchers(config)
    if count:
        encoder = _deployment(config, EncoderDeployment, "Encoder").bind(config, coordinator)
        for i in range(count):
            searcher = _deployment(config, SearcherDeployment, f"Searcher{i}")
            searchers.append(searcher.bind(config, coordinator, ShardSubset(i, count)))
    if count and config.rerank:
        reranker = _deployment(config, RerankerDeployment, "Reranker").bind(config)
    application: Application = _ingress(config, address).bind(
        config,
        coordinator,
        encoder,
        searchers,
        reranker,
        address,
    )
    return application


class CoordinatorDeployment(SnapshotCoordinator):
    """The coordinator behind a handle."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        _log_with_serve()
        use_one_allocator()
        super().__init__(config, has_replicas=True)
        await self.start()

    def __del__(self) -> None:
        self.close()


class _FollowingReplica:
    """A replica that holds what the coordinator decided; ready when all of it is loaded."""

    async def _start(self, config: ServeConfig, coordinator: Handle, subset: ShardSubset) -> None:
        _log_with_serve()
        use_one_allocator()
        self._config = config
        self._coordinator: Any = _Remote(coordinator)
        self._follower = Follower(config, self._coordinator.follow, subset)
        await self._follower.start()
        self._task = asyncio.create_task(self._follower.run())


class GatewayDeployment(_FollowingReplica):
    """The ingress: HTTP in front of a Service."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServeConfig,
        coordinator: Handle,
        encoder: Handle | None,
        searchers: list[Handle],
        reranker: Handle | None,
        address: Address | None,
    ) -> None:
        self._open = contextlib.AsyncExitStack()
        self.tokens, self.admin_tokens = tokens_of(config)
        self.metrics = metrics.ServingMetrics()
        await self._start(config, coordinator, NO_SHARDS if encoder else ALL_SHARDS)
        remote: Any = _Admin(coordinator)
        self.admin: SnapshotCoordinator = remote
        backend = _Backend(encoder, searchers, reranker) if encoder else None
        # Probes are no events.
        probing = Service(config, self._follower, backend)
        for name in config.bundles:  # a probe through all deployments
            probes = self._follower.current(name).probes[:1]
            await probing.search(schema.SearchRequest(texts=probes, model=name), "probe")
        events = EventSender(remote)
        self.service = Service(config, self._follower, backend, events)
        self._tasks = [self._task]
        if address is not None:
            self._tasks.append(await self._open.enter_async_context(listening(self, *address)))

    async def __del__(self) -> None:
        await self._open.aclose()  # requests in progress are answered

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http.create_app(self, sends_request_id=False)

    async def Search(self, request: SearchRequest, grpc_context: Any) -> SearchResponse:  # noqa: N802
        """The gRPC method of search.proto; Serve calls it by that name."""
        return await rpc.search(self, request, grpc_context)

    async def own_metrics(self) -> tuple[str, str]:
        """This replica's name and its metrics."""
        self.metrics.update(self.service.models().models, self.service.drifts())
        return serve.get_replica_context().replica_tag, self.metrics.text()

    async def metrics_text(self) -> str:
        """The metrics of all ingress replicas, and of the coordinator."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        texts = dict([await self.own_metrics()])
        # Serve hears of a replica a moment after it is ready.
        with contextlib.suppress(DeploymentUnavailableError):
            replies = await handle.broadcast("own_metrics").results_async(return_exceptions=True)
            texts |= dict(reply for reply in replies if not isinstance(reply, BaseException))
        ordered = sorted(texts.items())
        # While the coordinator is started again, the metrics of the others are still useful.
        with contextlib.suppress(Exception):
            text = await asyncio.wait_for(self.admin.metrics_text(), STATUS_S)
            ordered.append(("coordinator", text))
        return metrics.combine_metrics(ordered)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if any(task.done() for task in self._tasks):
            raise RuntimeError(
                "this replica does not follow the coordinator any more, or does not listen"
            )


class EncoderDeployment(_FollowingReplica):
    """Encodes texts; the requests that came while others were encoded are one batch."""

    async def __init__(self, config: ServeConfig, coordinator: Handle) -> None:  # type: ignore[misc]
        self._batcher = MicroBatcher[tuple[Snapshot, list[str]], EncodedTexts](
            ThreadPoolExecutor(1, "encode"), self._encode_batch, MAX_BATCH_TEXTS
        )
        await self._start(config, coordinator, NO_SHARDS)

    async def encode(self, reference: SnapshotReference, texts: list[str]) -> EncodedTexts:
        """Vectors of the texts, by the encoder of the referenced version."""
        snapshot = await self._follower.referenced(reference, self._config.deadline_ms / 1000)
        # Label operations do not change the encoder: requests from before and after an operation
        # share a batch.
        key = (reference.model, reference.version)
        num_answers = ENCODED_AS_ANSWERS * len(texts)
        return await self._batcher.run(key, len(texts), (snapshot, texts), num_answers)

    def _encode_batch(self, requests: Sequence[tuple[Snapshot, list[str]]]) -> list[EncodedTexts]:
        snapshot = requests[0][0]  # all of one version, whose snapshots have the same encoder
        all_texts: list[str] = []
        for _, texts in requests:
            all_texts += texts
        encoded = snapshot.encode(all_texts, self._config.max_tokens)
        results = []
        start = 0
        for _, texts in requests:
            stop = start + len(texts)
            results.append(encoded.slice(start, stop))
            start = stop
        return results


class SearcherDeployment(_FollowingReplica):
    """Searches a subset of the index shards."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServeConfig,
        coordinator: Handle,
        subset: ShardSubset,
    ) -> None:
        find = functools.partial(find_hits, max_tokens=config.max_tokens, subset=subset)
        thread = ThreadPoolExecutor(1, "search")
        self._batcher = MicroBatcher[PendingSearch, SearchHits](thread, find, MAX_BATCH_TEXTS)
        await self._start(config, coordinator, subset)

    async def find(
        self,
        reference: SnapshotReference,
        request: schema.SearchRequest,
        k: int,
        query_BD: Float32Array | None,
    ) -> SearchHits:
        """See `SearchBackend`; in this subset."""
        snapshot = await self._follower.referenced(reference, self._config.deadline_ms / 1000)
        search = PendingSearch(snapshot, request, k, query_BD)
        return await self._batcher.run(
            search.batch_key,
            len(request.texts),
            search,
            search.num_answers,
        )


class RerankerDeployment:
    """Scores pairs of query and label text with the cross-encoder of the settings.

    Pairs of one request are one call of the model, as in one process: batches of several requests
    would pad texts otherwise, and round their scores otherwise.
    """

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        _log_with_serve()
        torch.set_num_threads(config.threads)
        self._thread = ThreadPoolExecutor(1, "rerank")
        # A GPU that this deployment reserves in its `ray_actor_options` is its own.
        device = "cuda" if ray.get_gpu_ids() else "cpu"
        self._encoder = await asyncio.to_thread(_cross_encoder, config.rerank, device)

    async def score_pairs(self, pairs: list[tuple[str, str]]) -> Float32Array:
        """See `SearchBackend`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encoder.score, pairs)


def _cross_encoder(path: str, device: str) -> CrossEncoder:
    from xmcray.retrieval.reranker import Reranker  # its library takes seconds to import

    encoder = Reranker.load(path).encoder
    assert encoder is not None, "it reads in this process"
    encoder.model.to(device)
    return encoder


class _Backend:
    """Encoder, searchers and reranker behind handles. Implements `SearchBackend`."""

    def __init__(self, encoder: Handle, searchers: list[Handle], reranker: Handle | None) -> None:
        self._encoder: Any = _Remote(encoder)
        self._reranker: Any = _Remote(reranker) if reranker else None
        self._searchers: list[Any] = [_Remote(searcher) for searcher in searchers]

    async def encode(self, reference: SnapshotReference, texts: list[str]) -> EncodedTexts:
        with _refusing_when_lost():
            encoded: EncodedTexts = await self._encoder.encode(reference, texts)
        return encoded

    async def find(
        self,
        reference: SnapshotReference,
        request: schema.SearchRequest,
        k: int,
        query_BD: Float32Array | None,
    ) -> SearchHits:
        with _refusing_when_lost():
            calls = [searcher.find(reference, request, k, query_BD) for searcher in self._searchers]
            all_hits: list[SearchHits] = await asyncio.gather(*calls)
        if len(all_hits) == 1:
            return all_hits[0]
        # The subsets are disjoint.
        neighbours = Neighbours.merged([hits.neighbours for hits in all_hits])
        return SearchHits(neighbours, all_hits[0].truncated)

    async def score_pairs(self, pairs: list[tuple[str, str]]) -> Float32Array:
        with _refusing_when_lost():
            scores: Float32Array = await self._reranker.score_pairs(pairs)
        return scores


@contextlib.contextmanager
def _refusing_when_lost() -> Iterator[None]:
    """Turns a deployment that refuses a request or dies with it into a problem.

    The client may ask again, because searching changes nothing.

    Raises:
        ProblemError: see above. What the deployment itself raised goes through.
    """
    deployments = "the encoder, a searcher or the reranker"
    try:
        with _refusing_when_not_taken(deployments):
            yield
    except RayError:
        message = f"{deployments} was lost with this request; ask again"
        raise ProblemError("not-ready", message) from None


@contextlib.contextmanager
def _refusing_when_not_taken(deployments: str) -> Iterator[None]:
    """Refuses a request that Serve gave to no replica, so that nothing was done.

    Args:
        deployments: those that are asked, as they are named in the message.
    Raises:
        ProblemError: see above.
    """
    try:
        yield
    except BackPressureError:
        message = f"too many requests wait for {deployments}; ask again"
        raise ProblemError("overloaded", message) from None
    except DeploymentUnavailableError:
        message = f"{deployments} could not be started; see `serve status`, then ask again"
        raise ProblemError("not-ready", message) from None


class _Remote:
    """The methods of a deployment, as if its object were in this process."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._handle, name)

        async def call(*arguments: Any) -> Any:
            try:
                return await method.remote(*arguments)
            except RayTaskError as error:
                # What the method itself raised.
                if isinstance(error.cause, Exception):
                    raise error.cause from None
                raise

        return call


class _Admin(_Remote):
    """The coordinator for requests that change something: they end with a problem if it does not
    take them or dies with them.
    """

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = super().__getattr__(name)

        async def call(*arguments: Any) -> Any:
            try:
                with _refusing_when_not_taken("the coordinator"):
                    return await method(*arguments)
            except RayError:
                message = (
                    "the coordinator was lost with this request, which it may have carried out, and is"
                    " started again; look whether it did, then try again"
                )
                raise ProblemError("lost", message) from None

        return call


def _log_with_serve() -> None:
    """Sends the log of this replica where Serve's own log goes: Serve takes stderr for itself."""
    for handler in logging.getLogger("ray.serve").handlers:
        logging.getLogger().addHandler(handler)


def _deployment(config: ServeConfig, kind: type, name: str, **options: Any) -> Any:
    """A class as a deployment, with the options that the settings give it."""
    all_options: dict[str, Any] = {
        "max_ongoing_requests": config.in_flight,
        "max_queued_requests": config.in_flight,
        "ray_actor_options": {"num_cpus": NUM_CPUS},
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        **options,
        **dict(config.options.get(name, {})),
    }
    return serve.deployment(kind, name=name, **all_options)


def _ingress(config: ServeConfig, address: Address | None) -> Any:
    options: dict[str, Any] = {
        # Twice the limit, so that most refusals are ours and give a reason.
        "max_ongoing_requests": 2 * config.in_flight,
        "backpressure_config": BackpressureConfig(status_code=503, retry_after_s=RETRY_AFTER_S),
    }
    if config.max_replicas > config.replicas:
        options["autoscaling_config"] = {
            "min_replicas": config.replicas,
            "max_replicas": config.max_replicas,
        }
    else:
        options["num_replicas"] = config.replicas
        if address is not None:
            # On the node on which Serve's proxy would run.
            resources = {HEAD_RESOURCE: 0.001}
            options["ray_actor_options"] = {"num_cpus": NUM_CPUS, "resources": resources}
    return _deployment(config, serve.ingress()(GatewayDeployment), "Gateway", **options)
