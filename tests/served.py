"""A served application in this process: coordinator, one replica and HTTP, without Ray and without a port."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.http import create_app
from xmcray.serving.local import LocalGateway, http_server
from xmcray.serving.security import new_token_file
from xmcray.serving.service import Service
from xmcray.serving.settings import ServeConfig
from xmcray.serving.source import SnapshotSource

TOKEN = "token" * 4
ADMIN = "admin" * 4
# Texts of searches.
ASKED = ["matrix vector norm", "", "sort sort join", "w3x1 w4x2"]


class Call:
    """gRPC's context of a call.

    Attributes:
        problem: why the call failed; "" if it did not.
    """

    problem = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {TOKEN}")]

    def set_code(self, code: object) -> None:
        pass

    def set_details(self, details: str) -> None:
        self.problem = details


class Served(LocalGateway):
    """A gateway whose tokens are known, and clients with and without rights.

    Attributes:
        visible_s: seconds to wait for an acknowledged operation in answers; a moment, but for a
            machine that is busy.
    """

    visible_s = 60.0

    def __init__(
        self, config: ServeConfig, models: SnapshotSource, coordinator: SnapshotCoordinator
    ) -> None:
        for name, token in (("token", TOKEN), ("admin-token", ADMIN)):
            new_token_file(Path(config.state_dir) / name).write_text(token)
        super().__init__(config, coordinator)
        self.service = Service(config, models, events=coordinator)
        self.models = models
        self.app = create_app(self)

    async def ask(
        self, path: str, body: Any = None, token: str | None = TOKEN, **options: Any
    ) -> httpx.Response:
        """One request; GET without a body."""
        headers = {
            **({"Authorization": f"Bearer {token}"} if token else {}),
            **options.pop("headers", {}),
        }
        if body is not None:
            options["json"] = body
        method = options.pop(
            "method", "GET" if body is None and "content" not in options else "POST"
        )
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, **options)

    async def search(self, texts: list[str], **fields: Any) -> Any:
        """The body of a search that must work."""
        answer = await self.ask("/v1/search", {"texts": texts, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def change(self, *operations: Mapping[str, Any]) -> httpx.Response:
        """Label operations."""
        return await self.ask("/admin/v1/labels", {"operations": list(operations)}, ADMIN)

    async def reached(self, number: int) -> None:
        """Waits until answers have an operation."""
        async with asyncio.timeout(self.visible_s):
            while self.models.current(None).number < number:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def served(
    folder: Path, bundles: Mapping[str, Path], **settings: Any
) -> AsyncIterator[Served]:
    """Bundles by name, with their state in `folder`/state."""
    paths = {name: str(path) for name, path in bundles.items()}
    # Tests swap to bundles that they write into their own folder.
    settings.setdefault("bundle_roots", (str(folder),))
    config = ServeConfig(bundles=paths, state_dir=str(folder / "state"), **settings)
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    follower = Follower(config, coordinator.follow)
    await follower.start()
    task = asyncio.create_task(follower.run())
    try:
        yield Served(config, follower, coordinator)
    finally:
        task.cancel()
        coordinator.close()


@contextlib.contextmanager
def listening(folder: Path, bundles: Mapping[str, Path], **settings: Any) -> Iterator[str]:
    """As `served`, in a thread and on a port of this machine; yields the address."""
    began = queue.Queue[Any]()
    stop = threading.Event()

    async def main() -> None:
        async with served(folder, bundles, **settings) as one:
            config = one.service.config
            # As `xmcray serve`, so that its limits of connections are tested too.
            server = http_server(one.app, config.max_connections, config.max_body)
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                task = asyncio.create_task(server.serve(sockets=[listener]))
                while not server.started:
                    await asyncio.sleep(0.01)
                began.put(f"http://127.0.0.1:{listener.getsockname()[1]}")
                await asyncio.to_thread(stop.wait)
                server.should_exit = True
                await task

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            began.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    address = began.get(timeout=60)
    if isinstance(address, BaseException):
        raise address
    try:
        yield address
    finally:
        stop.set()
        thread.join(20)
