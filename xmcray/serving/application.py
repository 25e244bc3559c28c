"""The application on Ray Serve: `build` makes it from settings.

    Coordinator    one replica: what is served, and the log of label operations
    Gateway        the ingress. "single": encodes and searches itself. "composed": asks
    Encoder          texts -> vectors of a transformer, requests that arrive together in one batch; a static encoder
                     takes less time than a call does, so the searchers have it to themselves
    Searcher0 ...    one for each part of the index shards; the gateway merges what they find

The classes here only connect; what they do is in coordinator.py, follower.py, service.py and http.py. Serve awaits
their constructors, which type checkers do not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from xmcray.config import build as build_config
from xmcray.ray_adapter.private import HEAD_RESOURCE
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import ALL_SHARDS, NO_SHARDS, ShardSubset
from xmcray.serving import http, metrics, rpc, schema, service
from xmcray.serving.coordinator import Coordinator, Known, News, Numbered, Status
from xmcray.serving.follower import Follower
from xmcray.serving.local import listening, tokens_of
from xmcray.serving.micro_batcher import MicroBatcher
from xmcray.serving.problems import RETRY_AFTER_S, ProblemError
from xmcray.serving.search_pb2 import SearchRequest, SearchResponse
from xmcray.serving.service import Asked, Near, Pin, Service
from xmcray.serving.settings import ServeConfig, composed_parts
from xmcray.types import Float32Array

NAME = "xmcray"
Handle = DeploymentHandle[Any]
Address = tuple[str, int, int]  # host, port, port of gRPC or 0
BATCH = 32
STATUS_S = 2.0
CPUS = 0.1  # reserved by each process; set others in `options`


def build(args: Mapping[str, Any], address: Address | None = None) -> Application:
    """The application for `serve run` and for `args` of a Serve config file: the fields of ServeConfig.

    Args:
        address: where the ingress, of one replica then, listens itself; Ray Serve's proxy is asked if not given.
    """
    config = build_config(ServeConfig, dict(args))
    config = dataclasses.replace(config, state_dir=str(Path(config.state_dir).absolute()))
    coordinator = _deployment(
        config,
        CoordinatorDeployment,
        "Coordinator",
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=1,
    ).bind(config)
    ingress = _ingress(config, address)
    shards = composed_parts(config)
    if not shards:
        alone: Application = ingress.bind(config, coordinator, address=address)
        return alone
    encoder = _deployment(config, EncoderDeployment, "Encoder").bind(config, coordinator)
    searchers = [
        _deployment(config, SearcherDeployment, f"Searcher{i}").bind(
            config, coordinator, ShardSubset(i, shards)
        )
        for i in range(shards)
    ]
    composed: Application = ingress.bind(config, coordinator, encoder, searchers, address)
    return composed


class CoordinatorDeployment(Coordinator):
    """The coordinator behind a handle."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        _log_with_serve()
        super().__init__(config)
        await self.start()

    def __del__(self) -> None:
        self.close()


class _Following:
    """A replica that holds what the coordinator decided; ready when all of it is loaded."""

    async def _start(
        self, config: ServeConfig, coordinator: Handle, subset: ShardSubset
    ) -> Follower:
        self._coordinator = coordinator
        _log_with_serve()
        follower = Follower(config, self._follow, self._operations, subset)
        await follower.start()
        self._task = asyncio.create_task(follower.run())
        return follower

    async def _follow(
        self, replica: str, known: Mapping[str, Known], wait_s: float
    ) -> dict[str, News]:
        found: dict[str, News] = await _called(
            self._coordinator.follow.remote(replica, known, wait_s)
        )
        return found

    async def _operations(self, model: str, since: int) -> list[Numbered]:
        found: list[Numbered] = await _called(self._coordinator.operations.remote(model, since))
        return found


class GatewayDeployment(_Following):
    """The ingress: HTTP in front of a Service."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServeConfig,
        coordinator: Handle,
        encoder: Handle | None = None,
        searchers: list[Handle] | None = None,
        address: Address | None = None,
    ) -> None:
        self._open = contextlib.AsyncExitStack()
        self.tokens, self.admin_tokens = tokens_of(config)
        self.metrics = metrics.ServingMetrics()
        self.admin: http.Admin = _Admin(coordinator)
        follower = await self._start(config, coordinator, NO_SHARDS if encoder else ALL_SHARDS)
        parts = _Parts(encoder, searchers or []) if encoder else None
        self.service = Service(config, follower, parts)
        for name in config.bundles:  # a probe through all parts
            await self.service.search(
                schema.SearchRequest(texts=follower.current(name).probes[:1], model=name), "probe"
            )
        self._tasks = [self._task]
        if address is not None:
            self._tasks.append(await self._open.enter_async_context(listening(self, *address)))

    async def __del__(self) -> None:
        await self._open.aclose()  # requests that are being answered are answered

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http.create_app(self, sends_request_id=False)

    async def Search(self, request: SearchRequest, grpc_context: Any) -> SearchResponse:  # noqa: N802
        """The gRPC method of search.proto; Serve calls it by that name."""
        return await rpc.search(self, request, grpc_context)

    async def own_metrics(self) -> tuple[str, str]:
        """This replica's name and its metrics."""
        self.metrics.update(self.service.models().models)
        return serve.get_replica_context().replica_tag, self.metrics.text()

    async def metrics_text(self) -> str:
        """The metrics of all ingress replicas, and of the coordinator."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        found = dict([await self.own_metrics()])
        with contextlib.suppress(
            DeploymentUnavailableError
        ):  # Serve hears of a replica a moment after it is ready
            replies = await handle.broadcast("own_metrics").results_async(return_exceptions=True)
            found |= dict(reply for reply in replies if not isinstance(reply, BaseException))
        texts = sorted(found.items())
        with contextlib.suppress(
            Exception
        ):  # it is being started again: the others are worth having
            status: Status = await asyncio.wait_for(
                _called(self._coordinator.status.remote()), STATUS_S
            )
            texts.append(
                ("coordinator", metrics.coordinator_metrics(status.replicas, status.copy_seconds))
            )
        return metrics.combine_metrics(texts)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if any(task.done() for task in self._tasks):
            raise RuntimeError(
                "this replica does not follow the coordinator any more, or does not listen"
            )


class EncoderDeployment(_Following):
    """Texts to vectors; those that came while others were encoded, in one batch."""

    async def __init__(self, config: ServeConfig, coordinator: Handle) -> None:  # type: ignore[misc]
        self._config, self._thread = config, ThreadPoolExecutor(1, "encode")
        self._follower = await self._start(config, coordinator, NO_SHARDS)

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0)
    async def encode(
        self, asked: list[tuple[Pin, list[str]]]
    ) -> list[tuple[Float32Array, list[bool]]]:
        """As `Snapshot.encode` for each of the requests; those of the same version at once."""
        found: list[Any] = [None] * len(asked)
        for key in {(pin.model, pin.version) for pin, _ in asked}:
            places = [i for i, (pin, _) in enumerate(asked) if (pin.model, pin.version) == key]
            pin = asked[places[0]][0]
            snapshot = await self._follower.any_of(
                pin.model, pin.version, self._config.deadline_ms / 1000
            )
            texts = [text for i in places for text in asked[i][1]]
            loop = asyncio.get_running_loop()
            vectors, longer = await loop.run_in_executor(
                self._thread, snapshot.encode, texts, self._config.max_tokens
            )
            ends = np.cumsum([0, *(len(asked[i][1]) for i in places)]).tolist()
            for i, first, last in zip(places, ends, ends[1:], strict=False):
                found[i] = vectors[first:last], longer[first:last]
        return found


class SearcherDeployment(_Following):
    """One part of the index shards."""

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, coordinator: Handle, subset: ShardSubset
    ) -> None:
        self._config, thread = config, ThreadPoolExecutor(1, "search")
        find = functools.partial(service.find, max_tokens=config.max_tokens, subset=subset)
        self._searches = MicroBatcher[Asked, Near](thread, find, service.TOGETHER)
        self._follower = await self._start(config, coordinator, subset)

    async def find(
        self, pin: Pin, request: schema.SearchRequest, k: int, query_BD: Float32Array | None
    ) -> Near:
        """See `service.find`."""
        snapshot = await self._follower.pinned(
            pin.model, pin.version, pin.number, self._config.deadline_ms / 1000
        )
        asked = Asked(snapshot, request, k, query_BD)
        return await self._searches.run(asked.alike, len(request.texts), asked)


class _Parts:
    """Encoder and searchers behind handles."""

    def __init__(self, encoder: Handle, searchers: list[Handle]) -> None:
        self._encoder, self._searchers = encoder, searchers

    async def encode(self, pin: Pin, texts: list[str]) -> tuple[Float32Array, list[bool]]:
        with _missing_parts():
            found: tuple[Float32Array, list[bool]] = await _called(
                self._encoder.encode.remote((pin, texts))
            )
        return found

    async def find(
        self, pin: Pin, request: schema.SearchRequest, k: int, query_BD: Float32Array | None
    ) -> Near:
        with _missing_parts():
            calls = [
                _called(searcher.find.remote(pin, request, k, query_BD))
                for searcher in self._searchers
            ]
            near: list[Near] = await asyncio.gather(*calls)
        if len(near) == 1:
            return near[0]
        return Near(Neighbours.merged([one.found for one in near]), near[0].longer)


class _Admin:
    """The coordinator behind a handle."""

    def __init__(self, coordinator: Handle) -> None:
        self._handle = coordinator

    async def operate(self, model: str, operations: list[schema.Operation]) -> int:
        return int(await _called(self._handle.operate.remote(model, operations)))

    async def swap(self, model: str, request: schema.SwapRequest) -> schema.SwapResponse:
        found: schema.SwapResponse = await _called(self._handle.swap.remote(model, request))
        return found

    async def compact(self, model: str, out: str) -> schema.CompactResponse:
        found: schema.CompactResponse = await _called(self._handle.compact.remote(model, out))
        return found


@contextlib.contextmanager
def _missing_parts() -> Iterator[None]:
    """Turns a part that is overloaded, or died with the request, into a refusal: searching changes nothing.

    Raises:
        ProblemError: see above; what the part itself raised goes through.
    """
    try:
        yield
    except BackPressureError:
        raise ProblemError(
            "overloaded", "too many requests wait for the encoder or a searcher; ask again"
        ) from None
    except RayError:
        raise ProblemError(
            "not-ready", "the encoder or a searcher was lost with this request; ask again"
        ) from None


async def _called(response: Any) -> Any:
    """The result of a call; what was raised there is raised here."""
    try:
        return await response
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise


def _log_with_serve() -> None:
    """What is logged in this replica goes where Serve's own lines go: Serve takes stderr for itself."""
    for handler in logging.getLogger("ray.serve").handlers:
        logging.getLogger().addHandler(handler)


def _deployment(config: ServeConfig, kind: type, name: str, **options: Any) -> Any:
    """A class as a deployment, with the options that the settings give it."""
    given: dict[str, Any] = {
        "max_ongoing_requests": config.in_flight,
        "max_queued_requests": config.in_flight,
        "ray_actor_options": {"num_cpus": CPUS},
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        **options,
        **dict(config.options.get(name, {})),
    }
    return serve.deployment(kind, name=name, **given)


def _ingress(config: ServeConfig, address: Address | None) -> Any:
    options: dict[str, Any] = {"num_replicas": config.replicas}
    if address is not None:
        options["ray_actor_options"] = {"num_cpus": CPUS, "resources": {HEAD_RESOURCE: 0.001}}
    if config.max_replicas > config.replicas:
        options = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": config.max_replicas,
            }
        }
    options["backpressure_config"] = BackpressureConfig(
        status_code=503, retry_after_s=RETRY_AFTER_S
    )
    options["max_ongoing_requests"] = (
        2 * config.in_flight
    )  # so that most refusals are ours, with a reason
    return _deployment(config, serve.ingress()(GatewayDeployment), "Gateway", **options)
