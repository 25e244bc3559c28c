"""Paths that are URLs, and the file systems behind them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from xmcray import hub
from xmcray.errors import StorageError, XmcrayError, one_line


def is_url(path: str | Path) -> bool:
    """Whether `path` is an fsspec URL such as s3://bucket/run rather than a local path."""
    return "://" in str(path)


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turns the errors of remote file systems, which all have their own, into a StorageError."""
    try:
        yield
    except XmcrayError:
        raise
    except ImportError as error:  # fsspec's own message names the missing package
        raise StorageError(
            f"{url} cannot be used: {_named(error)} (install it with pip where xmcray is installed)"
        ) from error
    except Exception as error:
        remedy = hub.REMEDY if url.startswith(hub.PREFIX) else "check the URL and its rights"
        raise StorageError(f"{url} cannot be used ({_named(error)}); {remedy}") from error


def _named(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def filesystem_of(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        StorageError: no such kind of URL, or its package is not installed.
    """
    if url.startswith(hub.PREFIX):
        hub.HubPath.parse(url)  # a malformed one never goes to the network
    with reaching(url):
        filesystem, root = fsspec.core.url_to_fs(url)
        return filesystem, str(root)


@contextlib.contextmanager
def local_file(path: str | Path) -> Iterator[Path]:
    """A file that may be at a URL: its path, or that of a copy, which is removed at the end.

    The path does not exist if the file does not.

    Raises:
        StorageError: the URL cannot be used.
    """
    if not is_url(path):
        yield Path(path)
        return
    url = str(path)
    filesystem, root = filesystem_of(url)
    with tempfile.TemporaryDirectory(prefix="xmcray.") as folder:
        copy = Path(folder) / "file"
        with reaching(url), contextlib.suppress(FileNotFoundError):
            filesystem.get_file(root, str(copy))
        yield copy
