"""Tokens in files of their owner, their rotation, and addresses that are not opened by mistake."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from xmcray.errors import ConfigError, ResourceError
from xmcray.serving import security
from xmcray.serving.run import HA_PROXY, check_address, check_port
from xmcray.serving.security import Tokens, new_token_file
from xmcray.serving.settings import ServeConfig

OLD = "old-token-0123456789"
NEW = "new-token-0123456789"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_rotation_with_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "CHECK_S", -1.0)
    tokens = Tokens(write(tmp_path / "t", OLD))
    assert tokens.accept(f"Bearer {OLD}")
    assert not tokens.accept(f"Bearer {NEW}")

    def now_with(text: str) -> list[bool]:
        write(tmp_path / "t", text)
        return [tokens.accept(f"bearer {token}") for token in (NEW, OLD)]

    soon, past = (datetime.now(UTC) + timedelta(seconds=s) for s in (60, -1))
    assert now_with(f"{NEW}\n{OLD}\n") == [True, True]
    assert now_with(f"{NEW}\n{OLD} until {soon.isoformat()}\n") == [True, True]
    assert now_with(f"{NEW}\n{OLD} until {past.isoformat()}\n") == [True, False]
    assert now_with(f"{NEW}\n{OLD}\tuntil\t{soon.isoformat()} \n") == [True, True]
    assert now_with(f"{NEW}\n") == [True, False]
    assert now_with(f"\ufeff{NEW}\n") == [True, False]


Damage = Callable[[Path], object]
# What happens to a token file that named OLD and NEW, and which of the two it still names.
DAMAGE: dict[str, tuple[Damage, list[bool], str]] = {
    "emptied": (lambda path: path.write_text(""), [False, False], "is empty"),
    "deleted": (lambda path: path.unlink(), [False, False], "No such file"),
    "open to others": (lambda path: path.chmod(0o644), [False, False], "has mode 0644"),
    "a line too short": (lambda path: path.write_text(f"short\n{NEW}\n"), [False, True], "line 1"),
    "a letter beyond ASCII": (
        lambda path: path.write_text(f"{OLD}é\n{NEW}\n", "utf-8"),
        [False, True],
        "line 1: a token with characters other than visible ASCII",
    ),
    "no time": (lambda path: path.write_text(f"{OLD} soon\n{NEW}\n"), [False, True], "until TIME"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff" * 20), [False, False], "is not UTF-8"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), [False, False], "Is a directory"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_token_file_revokes_what_it_does_not_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(security, "CHECK_S", -1.0)
    damage, expected, message = DAMAGE[kind]
    path = write(tmp_path / "t", f"{OLD}\n{NEW}\n")
    before = path.stat()
    tokens = Tokens(path)
    damage(path)
    if path.exists():
        # The old time stamp, as a restored copy has it.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(3):
        accepted = [tokens.accept(f"Bearer {token}") for token in (OLD, NEW)]
        assert accepted == expected
    assert caplog.text.count(message) == 1, "logged once, not with every request"
    assert OLD not in caplog.text
    assert NEW not in caplog.text
    with contextlib.suppress(OSError):
        path.rmdir()
    write(path, OLD)
    assert tokens.accept(f"Bearer {OLD}"), "a repaired file is read again"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", f"Basic {OLD}", OLD, f"Bearer {OLD[:-1]}", "Bearer é", "Basic \xff"],
)
def test_what_is_no_token(header: str | None, tmp_path: Path) -> None:
    assert not Tokens(write(tmp_path / "t", OLD)).accept(header, basic=True)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (OLD, 0o640, "mode 0640, expected 0600"),
        ("", 0o600, "is empty"),
        ("short", 0o600, "5 characters"),
        (f"{OLD} until tomorrow", 0o600, "expected `until TIME`"),
    ],
)
def test_token_files_that_are_refused(text: str, mode: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        Tokens(write(tmp_path / "t", text, mode))
    with pytest.raises(ConfigError, match="No such file"):
        Tokens(tmp_path / "nowhere")


def test_a_new_token_is_random_and_private(tmp_path: Path) -> None:
    paths = [new_token_file(tmp_path / "a" / name) for name in ("one", "two", "one")]
    one, two, again = (path.read_text() for path in paths)
    assert one == again != two
    assert paths[0].stat().st_mode & 0o777 == 0o600
    assert Tokens(paths[0]).accept(f"Bearer {one.strip()}")


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ServeConfig(bundles={"a": "b"})
    own = ServeConfig(bundles={"a": "b"}, token_file="t", admin_token_file="u")
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        check_address(plain, host, 0, False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="expected --token-file and --admin-token-file"):
            check_address(plain, host, 0, False)
        check_address(own, host, 0, False)
    with pytest.raises(ConfigError, match="gRPC on port 9000"):
        check_address(own, "127.0.0.1", 9000, False)
    check_address(own, "127.0.0.1", 9000, True)
    monkeypatch.setenv(HA_PROXY, "1")
    with pytest.raises(ConfigError, match="8404 and 9101"):
        check_address(own, "127.0.0.1", 0, False)
    check_address(own, "127.0.0.1", 0, True)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match="choose another --port"):
            check_port("127.0.0.1", taken.getsockname()[1])
