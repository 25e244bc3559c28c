"""Administrators name bundles below the server's roots only; nothing else is opened or tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from bundles import write_bundle_of
from served import ADMIN, served

from xmcray.errors import ConfigError
from xmcray.serving.bundle_roots import BundleRoots
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ServeConfig, with_absolute_paths


def roots_of(folder: Path, *more: str) -> BundleRoots:
    """The roots of a server with a bundle in a folder and one in a bucket."""
    bundles = {
        "local": str(folder / "bundles" / "a"),
        "bucket": "s3://models/fr/a",
        "web": "https://example.org/bundles/a",
    }
    return BundleRoots(
        ServeConfig(bundles=bundles, state_dir=str(folder / "state"), bundle_roots=more)
    )


@pytest.mark.parametrize(
    "location", ["bundles/b", "bundles/b/c/", "bundles/x/../b", "state/new", "listed/b", "current"]
)
def test_local_folders_below_a_root(location: str, tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "bundles" / "b")
    roots_of(tmp_path, str(tmp_path / "listed")).check(str(tmp_path / location))


def test_a_root_that_is_not_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots_of(tmp_path, str(tmp_path), "gs://all")
    assert caplog.messages == []
    roots_of(tmp_path, f"{tmp_path}/lsited").check(f"{tmp_path}/lsited/b")
    assert caplog.messages == [
        f"bundle_roots: {tmp_path}/lsited is not a folder, expected one; make it, or correct the setting"
    ]


def test_relative_folders_count_from_the_working_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may run in another one."""
    monkeypatch.chdir(tmp_path)
    roots = ("listed", "/all", "s3://models", "reference::x")
    config = with_absolute_paths(
        ServeConfig(
            bundles={"a": "b", "fr": "s3://models/fr"},
            state_dir="state",
            token_file="tokens",
            admin_token_file="/admin-tokens",
            upload="copy",
            bundle_roots=roots,
            rerank="reranker",
        )
    )
    assert config.bundles == {"a": f"{tmp_path}/b", "fr": "s3://models/fr"}
    assert (config.token_file, config.admin_token_file) == (f"{tmp_path}/tokens", "/admin-tokens")
    assert config.bundle_roots == (f"{tmp_path}/listed", "/all", "s3://models", "reference::x")
    assert (config.state_dir, config.upload) == (f"{tmp_path}/state", f"{tmp_path}/copy")
    # No folder of that name is there, so it is a hub id.
    assert config.rerank == "reranker"
    (tmp_path / "reranker").mkdir()
    assert with_absolute_paths(config).rerank == f"{tmp_path}/reranker"
    few = with_absolute_paths(ServeConfig(bundles={"a": "b"}))
    assert (few.upload, few.token_file, few.rerank) == (None, None, "")


def test_urls_below_a_root(tmp_path: Path) -> None:
    roots = roots_of(tmp_path, "https://example.org/listed/", "gs://all")
    for url in ("s3://models/fr/b", "https://example.org/listed/b", "gs://all/a/b"):
        roots.check(url)


HOSTILE = [
    "/etc",
    "/etc/passwd",
    "bundles/../../etc",
    "link/x",
    "a-folder-beside",
    "reference::{bundles}/x.json",
    "simplecache::s3://models/fr/b",
    "{bundles}/zip::x",
    "file://{bundles}/b",
    "file://~/x",
    "local://{bundles}/b",
    "http://127.0.0.1:8265/api/jobs",
    "http://169.254.169.254/latest/meta-data",
    "https://example.org/bundles/b",
    "https://example.org/",
    "s3://models",
    "s3://models/en/b",
    "s3://models/fresh/b",
    "s3://models/fr/../en/b",
    "s3://models/fr/%2e%2e/en/b",
    "s3://models/fr//b",
    "s3://models/fr/b?versionId=1",
    "s3://models/fr/b#x",
    "s3://user:key@models/fr/b",
    "S3://models/fr/b",
    "gs://models/fr/b",
    "{bundles}/a\0b",
    "{bundles}/a\nb",
    "{bundles}/\ud800",
    "{bundles}/" + "x" * 201,
    "{bundles}" + "/x" * 600,
    "",
]


@pytest.mark.parametrize("location", HOSTILE)
def test_everything_else_is_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "link").symlink_to("/etc")
    location = location.replace("{bundles}", str(tmp_path / "bundles"))
    if location.startswith(("bundles", "link", "a-")):
        location = f"{tmp_path}/{location.replace('link', 'bundles/link')}"
    with pytest.raises(ProblemError) as caught:
        roots_of(tmp_path).check(location)
    assert caught.value.kind == "refused"
    assert caught.value.detail.isprintable(), "one line, also if the path has several"


@pytest.mark.parametrize(
    "location",
    [
        "local",
        "local/head.json",
        "bucket/events/b",
        "x/../local/b",
        "link",
        "token",
        "admin-token/b",
    ],
)
def test_what_the_server_keeps_in_its_state_folder_is_refused(
    location: str, tmp_path: Path
) -> None:
    """Compacted there, a bundle would end the log of events, and the next start would fail."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "link").symlink_to(tmp_path / "state" / "local")
    roots_of(tmp_path).check(f"{tmp_path}/state/local-2")
    with pytest.raises(ProblemError, match="is what the server itself keeps in its state folder"):
        roots_of(tmp_path).check(f"{tmp_path}/state/{location}")


@pytest.mark.parametrize("name", ["token", "admin-token"])
def test_a_bundle_does_not_have_the_name_of_a_token_file(name: str) -> None:
    with pytest.raises(
        ConfigError, match="is a file of tokens in the state folder; choose another"
    ):
        ServeConfig(bundles={name: "b"})


@pytest.mark.parametrize("root", ["simplecache::s3://models", "s3://a?b", "file:///models"])
def test_a_root_is_one_plain_folder_or_url(root: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        roots_of(tmp_path, root)


async def test_a_refused_name_reaches_no_disk_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests, over HTTP. Until these roots existed, `compact` made folders anywhere."""
    home = tmp_path / "home"
    bundle = write_bundle_of(home / "b", "texts")

    def opened(url: str, **_: Any) -> None:
        raise AssertionError(f"{url} was opened")

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)

    roots = (str(home),)
    async with served(home, {"default": bundle}, bundle_roots=roots) as one:
        outside = str(tmp_path / "outside" / "deep")
        for location in (outside, "reference::/tmp/x", "http://127.0.0.1:1/x", "memory://a/b"):
            swap = await one.ask("/admin/v1/swap", {"bundle": location}, ADMIN)
            compact = await one.ask("/admin/v1/compact", {"out": location}, ADMIN)
            assert (swap.status_code, compact.status_code) == (409, 409)
        inside = {"out": str(home / "compacted")}
        assert (await one.ask("/admin/v1/compact", inside, ADMIN)).status_code == 200
    assert not (tmp_path / "outside").exists()
