"""A server in a process of its own, without a port, that can be asked, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from served import served

from xmcray.errors import XmcrayError
from xmcray.serving import security

MODEL = "m"
PATIENCE_S = 120.0  # for an answer; it takes milliseconds on an idle machine


class Server:
    """A server in a forked process; `start` before use."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self._folder = folder
        self._bundle = bundle
        self._process: Any = None
        self._pipe: Any = None

    def start(self) -> str:
        """Starts the server; returns "" or why it refused, in one line."""
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._pipe, self._folder, self._bundle), daemon=True
        )
        self._process.start()
        theirs.close()
        kind, text = self.receive()
        assert kind != "traceback", text
        if kind == "refused":
            self._process.join()
            assert "\n" not in text
            return str(text)
        return ""

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "no answer"
        return self._pipe.recv()

    def ask(self, *command: Any) -> Any:
        self.send(*command)
        kind, answer = self.receive()
        assert kind == "answer", answer
        return answer

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        """Ends the server in good order, if it runs."""
        if self._process is not None and self._process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self.send("close")
            self._process.join(PATIENCE_S)
            if self._process.is_alive():
                self.kill()


def _serve(pipe: Connection, ours: Connection, folder: Path, bundle: Path) -> None:
    """The server's process; it ends when the machine's end of the pipe is closed."""
    ours.close()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    security.CHECK_S = -1.0  # token files are read at each request instead of each second
    try:
        asyncio.run(_answer(pipe, folder, bundle))
    except XmcrayError as error:
        pipe.send(("refused", str(error)))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("traceback", traceback.format_exc()))
    os._exit(0)


async def _answer(pipe: Connection, folder: Path, bundle: Path) -> None:
    async with served(folder, {MODEL: bundle}, swap_s=60.0, keep_s=0.0) as one:
        pipe.send(("answer", "ready"))
        while True:
            command, *arguments = await asyncio.to_thread(pipe.recv)
            if command == "close":
                return
            if command == "ask":
                path, body, token = arguments
                response = await one.ask(path, body, token)
                if path == "/admin/v1/labels" and response.status_code == 200:
                    # Durable at once, and in the answers of a replica a moment later.
                    await one.reached(response.json()["label_log"])
                pipe.send(("answer", (response.status_code, response.text)))
            elif command == "labels":
                snapshot = one.admin.snapshots()[MODEL]
                pipe.send(("answer", _labels(snapshot, *arguments)))
            elif command == "jump":
                real, offset = time.time, arguments[0]
                time.time = lambda real=real, offset=offset: real() + offset
                pipe.send(("answer", None))


def _labels(snapshot: Any, uids: list[str]) -> dict[str, tuple[str, dict[str, Any]] | None]:
    """Text and attributes of labels as they are served, None for those that are not there."""
    labels = {}
    for uid in uids:
        label_id = snapshot.label_id(uid)
        if label_id is None:
            labels[uid] = None
        else:
            attributes = snapshot.attributes.of([label_id])[0]
            labels[uid] = (snapshot.text(label_id), dict(attributes))
    return labels
