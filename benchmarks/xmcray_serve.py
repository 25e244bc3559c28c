"""`xmcray serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from load import free_port


@contextlib.contextmanager
def served(command: list[str], bundle: Path, mode: str, threads: int) -> Iterator[tuple[int, str]]:
    """Port and token of a server that is ready; stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="xmcray-load.") as folder:
        token = secrets.token_urlsafe(32)
        port = free_port()
        log = Path(folder, "log")
        with os.fdopen(os.open(f"{folder}/token", os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
        arguments = ["--port", str(port), "--mode", mode, "--threads", str(threads)]
        arguments += ["--token-file", f"{folder}/token", "--state-dir", f"{folder}/state"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(bundle), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_ready(port, process, log)
            yield port, token
        finally:
            stop(process)


def wait_until_ready(
    port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 300.0
) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5),
        ):
            return
        time.sleep(0.2)
    print(log.read_text()[-2000:], file=sys.stderr)
    raise SystemExit("error: the server did not become ready; its last words are above")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


class Server:
    """`xmcray serve` in a process that is killed and started again, always with the same state."""

    def __init__(self, bundle: Path, state: Path) -> None:
        self.port = free_port()
        self._state = state
        self._log = state.with_suffix(".log")
        self._command = [
            str(Path(sys.executable).parent / "xmcray"),
            "serve",
            str(bundle),
            "--port",
            str(self.port),
        ]
        self.process = self._start()

    def revive(self) -> None:
        """Starts it again if it was killed, and returns when it answers."""
        if self.process.poll() is not None:
            self.process = self._start()

    def running(self) -> list[int]:
        """The process, if it runs."""
        return [self.process.pid] if self.process.poll() is None else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [*self._command, "--state-dir", str(self._state)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until_ready(self.port, process, self._log)
        return process
