"""The copy of a label log at a URL is whole or refused, and never delays an append."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from operations import ALL, BATCHES, add, delete, operations_after
from processes import wait_until

from xmcray.errors import StorageError
from xmcray.serving.label_log import LabelLog
from xmcray.serving.log_place import LogPlace


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    root = "/label-log-test" if request.param == "memory" else f"{tmp_path}/copy"
    yield f"{request.param}://{root}"
    fsspec.filesystem("memory").store.clear()


def objects(url: str) -> dict[str, str]:
    """Paths of the segments by name."""
    filesystem, root = fsspec.core.url_to_fs(url)
    found = filesystem.ls(f"{root}/label_log", detail=False)
    return {path.rsplit("/", 1)[-1]: path for path in found if path.endswith(".log")}


def upload(log: LabelLog) -> None:
    """Uploads now what the copy of a log lacks."""
    assert log.uploader
    log.uploader.upload()


def copied(url: str, state: Path) -> LabelLog:
    """A log that uploads only on demand, with its first line and three segments at the URL."""
    log = LabelLog(state, "m", upload_url=url, upload_every_s=1000)
    for batch in BATCHES:
        log.append(batch)
        upload(log)
    return log


def test_an_empty_folder_takes_the_copy(url: str, tmp_path: Path) -> None:
    log = copied(url, tmp_path / "one")
    assert [name[:25] for name in sorted(objects(url))] == [
        f"{a:012}-{b:012}" for a, b in ((1, 0), (1, 2), (3, 3), (4, 6))
    ]  # fmt: skip
    assert log.copy_lag_s() == 0.0
    assert log.append([add("late")]) == 7
    # The time of an operation is rounded to a millisecond, which may be still to come.
    wait_until(lambda: log.copy_lag_s() > 0.0, 5, lambda: "the copy lacks nothing")
    log.close()  # uploads the rest
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ".label_log.sqlite.unfinished").touch()
    with LabelLog(tmp_path / "one", "m", upload_url=url) as log:
        assert operations_after(log, 0) == [*ALL, add("late")]
        assert log.append([delete("late")]) == 8
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["label_log.sqlite"]
    with LabelLog(tmp_path / "one", "m", upload_url=url) as log:
        upload(log)
        assert log.copy_lag_s() == 0.0


def without(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.rm(next(path for name, path in objects(url).items() if "3-" in name[:14]))


def flip(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    path = max(objects(url).values())
    filesystem.pipe_file(path, filesystem.cat_file(path).replace(b"x", b"y"))


def first_gone(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.rm(min(objects(url).values()))


def second_gone(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.rm(sorted(objects(url).values())[1])


def another_writer(url: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    with LabelLog(f"{root}-other", "m", upload_url=f"{url}-other") as log:
        log.append([add("q"), add("r")])
        upload(log)
    for name, path in objects(f"{url}-other").items():
        filesystem.pipe_file(f"{root}/label_log/{name}", filesystem.cat_file(path))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (without, "found operation 4, expected 3: a segment is missing"),
        (first_gone, "begins with operation 1, expected the beginning of the log: a segment is"),
        (second_gone, "found operation 3, expected 1: a segment is missing"),
        (flip, "is damaged (its SHA-256 differs from its name)"),
        (another_writer, "two writers used this URL"),
    ],
)
def test_a_copy_that_is_not_whole_is_not_taken(
    harm: Callable[[str], None], message: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/copy"
    copied(url, tmp_path / "one").close()
    harm(url)
    with pytest.raises(StorageError) as caught:
        LabelLog(tmp_path / "two", "m", upload_url=url)
    assert message in str(caught.value)
    assert "file:///" in str(caught.value)
    assert not (tmp_path / "two" / "label_log.sqlite").exists(), "the next start asks again"
    LabelLog(tmp_path / "one", "m").close()


def test_an_upload_that_arrived_although_it_failed_does_no_harm(url: str, tmp_path: Path) -> None:
    with copied(url, tmp_path / "one") as log:
        assert log.uploader
        log.uploader._uploaded = 0
        upload(log)  # one segment of what three segments hold too
        assert len(objects(url)) == 5
    for state in ("one", "two"):
        with LabelLog(tmp_path / state, "m", upload_url=url) as log:
            assert operations_after(log, 0) == ALL


@pytest.mark.parametrize("place", [0, -1])
def test_a_segment_of_which_a_part_was_written_is_written_again(
    place: int, url: str, tmp_path: Path
) -> None:
    """SFTP and others write in place, and the server may end meanwhile."""
    log = LabelLog(tmp_path / "one", "m", upload_url=url, upload_every_s=1000)
    if place == -1:
        log.append(BATCHES[0])
    log.close()
    filesystem, _ = fsspec.core.url_to_fs(url)
    path = sorted(objects(url).values())[place]
    whole = filesystem.cat_file(path)
    filesystem.pipe_file(path, whole[:10])
    LabelLog(tmp_path / "one", "m", upload_url=url).close()
    assert filesystem.cat_file(path) == whole


def test_a_part_of_a_segment_does_not_stay_if_its_upload_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://part"
    kind = type(fsspec.filesystem("memory"))
    write = kind.pipe_file

    def fail(filesystem: Any, path: str, data: bytes, **options: Any) -> None:
        write(filesystem, path, data[:10], **options)
        raise ConnectionError("lost")

    with LabelLog(tmp_path / "one", "m", upload_url=url, upload_every_s=1000) as log:
        log.append(BATCHES[0])
        monkeypatch.setattr(kind, "pipe_file", fail)
        with pytest.raises(StorageError, match="lost"):
            upload(log)
        monkeypatch.undo()
        # The next segment would begin with the same operation, and end later.
        log.append(BATCHES[1])
    with LabelLog(tmp_path / "two", "m", upload_url=url) as log:
        assert operations_after(log, 0) == [*BATCHES[0], *BATCHES[1]]
    fsspec.filesystem("memory").store.clear()


def test_local_state_wins_but_not_over_a_newer_copy(url: str, tmp_path: Path) -> None:
    with LabelLog(tmp_path / "old", "m") as log:
        log.append(BATCHES[0])
    copied(url, tmp_path / "one").close()
    shutil.copytree(tmp_path / "one", tmp_path / "copied")
    with LabelLog(tmp_path / "one", "m", upload_url=url) as log:
        log.append([add("z")])
    for state in ("old", "copied"):
        with pytest.raises(
            StorageError,
            match=r"ends with operation 7, is no copy of the local log, which ends with [26]:",
        ):
            LabelLog(tmp_path / state, "m", upload_url=url)
    with LabelLog(tmp_path / "copied", "m") as log:
        log.append([add("another 7")])
    with pytest.raises(
        StorageError, match="ends with operation 7, is no copy of the local log, which ends with 7"
    ):
        LabelLog(tmp_path / "copied", "m", upload_url=url)


def test_a_log_that_begins_late_has_a_copy_too(url: str, tmp_path: Path) -> None:
    with LabelLog(tmp_path / "one", "m", upload_url=url, start_after=LogPlace(6)) as log:
        assert log.append([add("z")]) == 7
    with LabelLog(tmp_path / "two", "m", upload_url=url) as log:
        assert operations_after(log, 6) == [add("z")]
        with pytest.raises(StorageError, match="operations 1 to 6 of model 'm' are not in"):
            operations_after(log, 0)
    LabelLog(tmp_path / "short", "m", upload_url=f"{url}-short").close()
    with LabelLog(tmp_path / "one", "m", upload_url=f"{url}-short") as log:
        with pytest.raises(StorageError, match="ends with operation 0, the local log begins after"):
            upload(log)
        assert log.append([add("y")]) == 8, "the log itself goes on"


class Server:
    """The memory file system, which a test can make fail (`down`) or wait (`stuck`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down = False
        self.stuck = threading.Event()
        self.asked = threading.Event()
        self.stuck.set()
        kind = type(fsspec.filesystem("memory"))
        for name in ("pipe_file", "ls"):
            monkeypatch.setattr(kind, name, self.guarding(getattr(kind, name)))

    def guarding(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            self.asked.set()
            assert self.stuck.wait(60)
            if self.down:
                raise ConnectionError("no server at https://h/x?sig=s3cr3t")
            return real(*args, **options)

        return act


def test_a_server_that_is_down_or_slow_stops_no_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = "memory://down"
    server = Server(monkeypatch)
    server.down = True
    with pytest.raises(
        StorageError, match=r"memory://down/label_log cannot be used \(ConnectionError: no ser"
    ):
        LabelLog(tmp_path, "m", upload_url=url)
    LabelLog(tmp_path, "m").close()
    with LabelLog(
        tmp_path, "m", upload_url=url, upload_every_s=0.001
    ) as log:  # there is a log: it is enough
        assert log.append(BATCHES[0]) == 2
        for _ in range(3):
            server.asked.clear()
            assert server.asked.wait(60), "it tries again by itself"
        assert log.copy_lag_s() > 0.0
        assert "the copy of a label log is behind" in caplog.text
        assert "no server at https://h/x?sig=***" in caplog.text
        server.stuck.clear()
        server.down = False
        server.asked.clear()
        assert server.asked.wait(60)
        assert log.append(BATCHES[1]) == 3, "while an upload hangs"
        server.stuck.set()
    with LabelLog(tmp_path / "two", "m", upload_url=url) as log:
        assert operations_after(log, 0) == ALL[:3]
    fsspec.filesystem("memory").store.clear()
