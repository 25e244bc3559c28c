"""The whole application in this process, without Ray, for a bundle that fits into one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from xmcray.serving import metrics, rpc
from xmcray.serving.connections import (
    ACCEPTED,
    BACKLOG,
    HEAD_S,
    MAX_HEAD,
    ConnectionRoom,
    LimitedProtocol,
    Refusal,
    check_open_files,
    refuse_nothing,
)
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.http import Gateway, create_app, refusal
from xmcray.serving.search_pb2 import SearchRequest, SearchResponse
from xmcray.serving.search_pb2_grpc import RetrieverServicer, add_RetrieverServicer_to_server
from xmcray.serving.security import Tokens, new_token_file
from xmcray.serving.service import Service
from xmcray.serving.settings import ADMIN_TOKEN, TOKEN, ServeConfig, authority

STOP_S = 5  # for requests that are being answered when the server is stopped
GRPC_IDLE_S = 30.0  # a connection of gRPC without calls is closed, and opened again by its client


class LocalGateway:
    """Implements `http.Gateway`; requests are answered from the coordinator's own snapshots."""

    def __init__(self, config: ServeConfig, coordinator: SnapshotCoordinator) -> None:
        self.service = Service(config, coordinator, events=coordinator)
        self.metrics = metrics.ServingMetrics()
        self.admin = coordinator
        self.tokens, self.admin_tokens = tokens_of(config)

    async def metrics_text(self) -> str:
        """The metrics of this process and of its coordinator."""
        self.metrics.update(self.service.models().models, self.service.drifts())
        coordinator_text = await self.admin.metrics_text()
        texts = [("local", self.metrics.text()), ("coordinator", coordinator_text)]
        return metrics.combine_metrics(texts)


def tokens_of(config: ServeConfig) -> tuple[Tokens, Tokens]:
    """Tokens of readers and of administrators; files that were not given are made in the state
    folder.
    """
    folder = Path(config.state_dir)
    reader_file = config.token_file or new_token_file(folder / TOKEN)
    admin_file = config.admin_token_file or new_token_file(folder / ADMIN_TOKEN)
    return Tokens(Path(reader_file)), Tokens(Path(admin_file))


@contextlib.asynccontextmanager
async def local_gateway(config: ServeConfig) -> AsyncIterator[LocalGateway]:
    """A gateway; its bundles are loaded.

    Args:
        config: settings.
    Raises:
        XmcrayError: a bundle, a log or a token file is missing or damaged.
    """
    coordinator = SnapshotCoordinator(config)
    try:
        await coordinator.start()
        yield LocalGateway(config, coordinator)
    finally:
        coordinator.close()


def use_one_allocator() -> None:
    """Lets Arrow take the memory of this process from malloc, as all else does.

    Arrow's own allocator keeps much of what loads and compactions free, and a server that makes
    them for days would grow.
    """
    pa.set_memory_pool(pa.system_memory_pool())


def serve_local(
    config: ServeConfig,
    host: str,
    port: int,
    grpc_port: int,
    ready: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT; see `run.serve_forever`."""
    use_one_allocator()
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # uvloop where it is installed
        runner.run(_serve(config, host, port, grpc_port, ready))


async def _serve(
    config: ServeConfig,
    host: str,
    port: int,
    grpc_port: int,
    ready: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    async with local_gateway(config) as gateway:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with listening(gateway, host, port, grpc_port) as running:
            # What was loaded stays: collecting it again would take as long as some searches.
            gc.collect()
            gc.freeze()
            ready(f"http://{authority(host, port)}")
            # Whichever comes first: a signal, or the end of a server that failed.
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()


@contextlib.asynccontextmanager
async def listening(
    gateway: Gateway,
    host: str,
    port: int,
    grpc_port: int,
) -> AsyncIterator[asyncio.Task[None]]:
    """Answers HTTP and, if a port is given, gRPC in this process; yields the server's task.

    Args:
        gateway: answers the requests.
        host: address to listen on.
        port: port of HTTP.
        grpc_port: port of gRPC; 0 for none.
    Raises:
        OSError: a port is taken.
        ResourceError: too few files may be open.
    """
    config = gateway.service.config
    check_open_files(config.max_connections)
    # Each port has connections of its own: clients of one cannot take those of the other.
    grpc_connections = config.max_connections // 2 if grpc_port else 0
    server = http_server(
        create_app(gateway),
        config.max_connections - grpc_connections,
        config.max_body,
        functools.partial(refusal, gateway),
    )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # gRPC counts the connections of each address of a name, so it gets an address.
        address = listener.getsockname()[0]
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not running.done():
                # uvicorn has no event for this.
                await asyncio.sleep(0.01)
            async with _grpc(gateway, address, grpc_port, grpc_connections):
                yield running
        finally:
            server.should_exit = True
            await running


def http_server(
    app: FastAPI,
    max_connections: int,
    max_body: int,
    refusal: Refusal = refuse_nothing,
) -> uvicorn.Server:
    """A server with the limits of connections.py, which is not started yet.

    Args:
        app: answers the requests.
        max_connections: largest number of connections.
        max_body: bytes of a request's body.
        refusal: see `ConnectionRoom`.
    """
    room = ConnectionRoom(max_connections, max_body, refusal)
    return _Server(
        uvicorn.Config(
            app,
            http=functools.partial(LimitedProtocol, room),  # type: ignore[arg-type]
            ws="none",
            backlog=ACCEPTED,
            log_config=None,  # as all other logs
            # A warning for each malformed request would let anyone fill the log.
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=STOP_S,
        )
    )


@contextlib.asynccontextmanager
async def _grpc(
    gateway: Gateway,
    host: str,
    port: int,
    max_connections: int,
) -> AsyncIterator[None]:
    if not port:
        yield
        return
    limits = gateway.service.config
    server = grpc.aio.server(
        options=[
            # Otherwise another server could share the port unnoticed.
            ("grpc.so_reuseport", 0),
            # Closed as soon as they are accepted.
            ("grpc.max_allowed_incoming_connections", max_connections),
            # A message that is a little too large still gets our own answer.
            ("grpc.max_receive_message_length", 2 * limits.max_body),
            ("grpc.absolute_max_metadata_size", MAX_HEAD),
            # A connection that says nothing, at its beginning and later.
            ("grpc.server_handshake_timeout_ms", int(1000 * HEAD_S)),
            ("grpc.max_connection_idle_ms", int(1000 * GRPC_IDLE_S)),
            ("grpc.max_concurrent_streams", limits.in_flight),
        ],
        interceptors=[_CallCheck(gateway)],
        maximum_concurrent_rpcs=2 * limits.in_flight,
    )
    add_RetrieverServicer_to_server(_Servicer(gateway), server)
    server.add_insecure_port(authority(host, port))
    await server.start()
    try:
        yield
    finally:
        await server.stop(STOP_S)


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again when it stops, and would end the process
    before its log.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, with more room in the system than is accepted at a time."""
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio has one number for both.
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _CallCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a token before their message comes, and others if it comes late.

    A call that sends no message would hold one of the places for calls for as long as its client
    likes. gRPC itself waits for it without a limit, but not where a handler takes a stream: that
    one starts before a message is there.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def intercept_service(self, continuation: Callable[..., Any], call: Any) -> Any:
        """The handler of a call, whose metadata is known."""
        if not self._gateway.tokens.accept(dict(call.invocation_metadata).get("authorization")):
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        handler = await continuation(call)
        # There is no such method.
        if handler is None:
            return None
        return grpc.stream_unary_rpc_method_handler(
            functools.partial(self._answer, handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    async def _refuse(self, _messages: Any, context: Any) -> None:
        await self._abort(context, grpc.StatusCode.UNAUTHENTICATED, rpc.NO_TOKEN)

    async def _answer(self, answer: Callable[..., Any], messages: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(self._gateway.service.config.deadline_ms / 1000):
                message = await anext(messages, None)
        except TimeoutError:
            message = None
        if message is None:
            await self._abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, rpc.NO_MESSAGE)
        return await answer(message, context)

    async def _abort(self, context: Any, code: grpc.StatusCode, reason: str) -> None:
        self._gateway.metrics.requests.labels(rpc.ROUTE, code.name).inc()
        await context.abort(code, reason)


class _Servicer(RetrieverServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Search(self, request: SearchRequest, context: Any) -> SearchResponse:  # noqa: N802
        return await rpc.search(self._gateway, request, context)
