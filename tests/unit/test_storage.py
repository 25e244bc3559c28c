"""What the disk refuses, in one line; what is written aside and where."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from xmcray.errors import StorageError
from xmcray.storage.artifact import new_artifact, open_artifact
from xmcray.storage.manifest import MANIFEST, check_contents, read_manifest
from xmcray.storage.path_errors import check_file, disk_errors
from xmcray.storage.whole_files import aside, write_json

FULL = "no space left while writing .*: the disk is full; free some space"


def raising(error: BaseException) -> Callable[[Path], object]:
    def act(_: Path) -> object:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (raising(OSError(errno.ENOSPC, "No space left on device")), FULL),
        (raising(OSError(errno.EDQUOT, "Disk quota exceeded")), FULL),
        (raising(SafetensorError("I/O error: No space left on device (os error 28)")), FULL),
        (
            raising(SafetensorError(f"I/O error: Disk quota exceeded (os error {errno.EDQUOT})")),
            FULL,
        ),
        (
            raising(PermissionError(errno.EACCES, "Permission denied")),
            "cannot be written .Permission denied",
        ),
        (
            lambda tmp: write_json(tmp / "no" / "x.json", 1),
            r"x\.json cannot be written .No such file",
        ),
        (
            lambda tmp: write_json(tmp / "file" / "x.json", 1),
            r"x\.json cannot be written .Not a directory",
        ),
        (
            lambda tmp: write_json(tmp / "folder", 1),
            "folder cannot be written .Is a directory",
        ),
        (lambda tmp: (tmp / "folder").write_text("x"), "cannot be written .Is a directory"),
    ],
)
def test_a_refused_write_is_a_storage_error(
    tmp_path: Path, act: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(StorageError, match=message) as caught,
        disk_errors(tmp_path / "folder"),
    ):
        act(tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_one_line(number: int) -> None:
    # A failed sync names no file.
    with (
        pytest.raises(StorageError, match=r"out cannot be written .*: the disk fails; look at"),
        disk_errors("out"),
    ):
        raise OSError(number, os.strerror(number))


def test_a_folder_that_vanished_is_missing_for_those_who_expect_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_json(tmp_path / "gone" / "x.json", 1)
    assert isinstance(caught.value, StorageError)
    assert str(caught.value).endswith(
        "x.json cannot be written (No such file or directory); choose another folder"
    )


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/elsewhere/labels.npy"),
        FileNotFoundError("nothing is named"),
        SafetensorError("header too small"),
        ValueError("our own mistake"),
    ],
)
def test_what_does_not_concern_the_path_stays_what_it_is(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path / "out"):
        raise error
    assert caught.value is error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_really_full() -> None:
    with (
        pytest.raises(StorageError, match=FULL),
        disk_errors("out"),
        Path("/dev/full").open("wb") as file,
    ):
        file.write(bytes(1 << 20))


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """As root, a file in the place of /dev/full or /dev/null would harm the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(StorageError, match="is a pipe or a device"):
            write_json(path, {})
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


@pytest.mark.skipif(not Path("/dev/stdout").is_symlink(), reason="needs /dev/stdout")
def test_a_link_of_the_system_may_lead_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        led_to = Path(f"/proc/self/fd/{opened.fileno()}")
        assert led_to.is_file()
        # Not with /dev/stdout itself, which a mistake here would replace.
        with pytest.raises(StorageError, match="is a pipe or a device"):
            write_json(led_to, {})
    link = tmp_path / "link"
    link.symlink_to(file)
    write_json(link, {})
    assert not link.is_symlink()


def test_a_file_to_be_written_later(tmp_path: Path) -> None:
    check_file(tmp_path / "new.json")
    with pytest.raises(
        StorageError, match=r"folder .*/no does not exist; make it or choose another"
    ):
        check_file(tmp_path / "no" / "new.json")


def test_names_aside_differ_and_are_found_by_no_pattern(tmp_path: Path) -> None:
    names = {aside(tmp_path / "x.json") for _ in range(50)}
    assert len(names) == 50
    for name in names:
        name.touch()
    assert [*tmp_path.glob("*.json"), *tmp_path.glob("x*")] == []


def test_safetensors_really_reports_a_missing_folder_as_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError):  # the reason why `disk_errors` reads its words
        save_file({"x": np.zeros(1)}, tmp_path / "no" / "x.safetensors")


def artifact(folder: Path) -> Path:
    """A small corpus with one file."""
    artifact_at(folder)
    return folder


def artifact_at(destination: str | Path) -> None:
    """Writes a small corpus with one file to a folder or a URL."""
    with new_artifact(destination, "corpus", {}) as unfinished:
        (unfinished / "file").write_text("x")


def test_what_a_killed_process_left_is_removed_and_what_others_write_stays(tmp_path: Path) -> None:
    program = (
        "import os; from xmcray.storage.artifact import new_artifact\n"
        f"with new_artifact({str(tmp_path / 'corpus')!r}, 'corpus', {{}}): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert len([*tmp_path.iterdir()]) == 1
    own = tmp_path / ".corpus.backup"
    own.mkdir()
    writer = contextlib.ExitStack()
    unfinished = writer.enter_context(new_artifact(tmp_path / "corpus", "corpus", {}))
    faster = artifact(tmp_path / "corpus")
    assert {*tmp_path.iterdir()} == {own, unfinished, faster}
    with pytest.raises(StorageError, match="corpus exists and is not empty"):
        writer.close()
    assert {*tmp_path.iterdir()} == {own, faster}


def test_what_another_process_finished_at_a_url_stays(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/corpus"
    writer = contextlib.ExitStack()
    (writer.enter_context(new_artifact(url, "corpus", {})) / "file").write_text("slow")
    faster = artifact(tmp_path / "corpus")
    with pytest.raises(StorageError, match="corpus exists and is not empty"):
        writer.close()
    assert (faster / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["file", "below/file"])
def test_other_files_at_a_url_get_no_artifact_among_them(tmp_path: Path, name: str) -> None:
    other = tmp_path / "corpus" / name
    other.parent.mkdir(parents=True)
    other.write_text("other")
    with pytest.raises(StorageError, match="corpus exists and is not empty"):
        artifact_at(f"file://{tmp_path}/corpus")
    with pytest.raises(StorageError, match="file exists and is not empty"):
        artifact_at(f"file://{other}")
    assert other.read_text() == "other"


def test_an_empty_folder_of_a_url_takes_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    artifact_at(f"file://{tmp_path}/corpus")
    assert (tmp_path / "corpus" / "file").read_text() == "x"


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        PermissionError(errno.EPERM, "Operation not permitted"),  # a socket behind a firewall
        PermissionError(errno.EACCES, "Permission denied", "/usr/bin/program"),
        OSError(errno.ENOSPC, "No space left on device", "/another/disk"),
    ],
)
def test_what_fails_beside_a_new_artifact_is_not_told_of_it(
    tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(type(error)) as caught, new_artifact(tmp_path / "corpus", "corpus", {}):
        raise error
    assert caught.value is error
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("number", "names"),
    [
        # A write to an open file names nothing, a copy names its source first.
        (errno.ENOSPC, []),
        (errno.EIO, []),
        (errno.EACCES, ["file"]),
        (errno.ENOSPC, ["/another/file", None, "file"]),
    ],
)
def test_what_fails_in_a_new_artifact_is_told_of_it(
    tmp_path: Path, number: int, names: list[str | None]
) -> None:
    destination = tmp_path / "corpus"

    def fail(folder: Path) -> None:
        paths = [name and str(folder / name) for name in names]
        raise OSError(number, os.strerror(number), *paths)

    with (
        pytest.raises(StorageError, match=f"{destination}(:| cannot be written)"),
        new_artifact(destination, "corpus", {}) as unfinished,
    ):
        fail(unfinished)
    assert not [*tmp_path.iterdir()]


def test_artifacts_are_made_where_the_system_locks_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does for folders

    old = tmp_path / ".corpus.unfinished-abcdefgh"
    old.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    made = artifact(tmp_path / "corpus")
    # Whether a process still writes the old folder is unknown, so it stays.
    assert {*tmp_path.iterdir()} == {old, made}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", [MANIFEST, "file"])
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    path = artifact(tmp_path / "corpus")
    really_open = Path.open

    def fail(file: Path, *arguments: object, **options: object) -> object:
        if file.name == name:
            raise OSError(number, os.strerror(number), str(file))
        return really_open(file, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", fail)
    reason = f"{name} cannot be read .{os.strerror(number)}.; check its rights and the disk"
    with pytest.raises(StorageError, match=reason) as caught:
        open_artifact(path, "corpus")
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    path = artifact(tmp_path / "corpus")
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read .Is a directory.;"):
        open_artifact(path, "corpus")


def test_a_file_that_vanishes_before_it_is_hashed_is_one_line(tmp_path: Path) -> None:
    path = artifact(tmp_path / "corpus")
    manifest = read_manifest(path, "corpus")
    (path / "file").unlink()
    with pytest.raises(StorageError, match="file is missing; put a copy of it back"):
        check_contents(path, manifest, ["file"], source=path)
