"""What an artifact consists of: `manifest.json` with the hash of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xmcray import __version__
from xmcray.errors import StorageError, one_line, readable
from xmcray.storage.path_errors import MissingPathError, check_path, read_errors
from xmcray.storage.whole_files import fsync, read_bytes, write_json

MANIFEST = "manifest.json"
CARD = "README.md"  # for people: not part of an artifact, so it may change or be missing
SCHEMA_VERSION = 1  # "format" in messages; docs/compatibility.md says when it is raised
# What makes an artifact of a kind, for messages.
_MADE_BY = {
    "corpus": "make one of raw files with `xmcray prepare`",
    "bundle": "make one of a run with `xmcray export`",
}
HASH_THREADS = min(8, os.cpu_count() or 1)  # files that are hashed at the same time


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact: size in bytes and SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact consists of.

    Attributes:
        kind: "corpus", "checkpoint", "bundle" ...
        files: entries by path relative to the artifact, with forward slashes.
        about: what made it (command, configuration, counts); free JSON.
        sha256: hash over kind, files and about; names the artifact's content.
    """

    kind: str
    files: Mapping[str, FileEntry]
    about: Mapping[str, Any]
    sha256: str


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of one file, read in blocks.

    Raises:
        StorageError: the file cannot be read.
    """
    digest = hashlib.sha256()
    # A file may be larger than the memory. One buffer for all blocks, and none of Python's between it
    # and the file: bytes that come from the disk are hashed a quarter faster.
    buffer = memoryview(bytearray(1 << 20))
    size = 0
    with read_errors(path), path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            size += num_bytes
    return FileEntry(size, digest.hexdigest())


def finish_manifest(
    folder: Path,
    kind: str,
    about: Mapping[str, Any],
    hashed_files: Mapping[str, FileEntry],
) -> Manifest:
    """Hashes and syncs the files of `folder`, then writes the manifest into it.

    Args:
        hashed_files: entries of files that are on disk already and need no hashing.
    """
    # Data files are on the disk before the manifest says that they are complete.
    files = dict(hashed_files)
    for name, path in files_below(folder):
        if name not in files and name != CARD:
            files[name] = hash_file(path)
            fsync(path)
    body = {
        "kind": kind,
        "schema_version": SCHEMA_VERSION,
        "release": __version__,
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "about": dict(about),
    }
    digest = _content_hash(body)
    write_json(folder / MANIFEST, {**body, "sha256": digest})
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync(path)
    return Manifest(kind, files, dict(about), digest)


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of every file but the manifest, sorted."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            yield name, path


def read_manifest(path: str | Path, kind: str) -> Manifest:
    """The manifest of a local artifact, itself verified; file contents are not read.

    Raises:
        StorageError: no folder, no manifest or one that cannot be read, another kind, another
            schema, or an altered manifest.
    """
    check_path(path)
    folder = Path(path)
    with read_errors(path):
        is_folder = folder.is_dir()
    if not is_folder:
        raise StorageError(f"{path} does not exist; expected a {kind} folder")
    try:
        with read_errors(f"{path}/{MANIFEST}"):
            content = read_bytes(folder / MANIFEST)
    except MissingPathError:
        raise StorageError(
            f"{path} has no {MANIFEST}: it is not a complete {kind}; {made_by(kind)}"
        ) from None
    return parse_manifest(content, path, kind)


def made_by(kind: str) -> str:
    """What to do if an artifact of a kind is not there."""
    return _MADE_BY.get(kind, "make it again")


def parse_manifest(content: bytes, source: str | Path, kind: str) -> Manifest:
    """A manifest from its bytes, verified.

    Args:
        source: folder or URL of the artifact, for messages.
    """
    with readable(f"{source}/{MANIFEST} is damaged", f"make the {kind} again"):
        body = json.loads(content)
        digest = str(body.pop("sha256"))
        files = {}
        for name, entry in body["files"].items():
            files[name] = FileEntry(int(entry["size"]), str(entry["sha256"]))
        about = dict(body["about"])
        manifest = Manifest(str(body["kind"]), files, about, digest)
        version = body["schema_version"]
        # The first release did not note its number.
        release = body.get("release")
        # Within the block, because a value that is nested too deeply cannot be hashed either.
        content_hash = _content_hash(body)
    if manifest.kind == "predictions" != kind:
        raise StorageError(
            f"{source} holds predictions, expected a {kind}; name {source}/predictions.npz to"
            " evaluate them"
        )
    if manifest.kind != kind:
        raise StorageError(
            f"{source} holds a {one_line(manifest.kind, 40)}, expected a {kind}; {made_by(kind)}"
        )
    if version != SCHEMA_VERSION:
        reader = "the release that wrote it"
        if release is not None:
            reader = f"xmcray {one_line(release, 40)}, which wrote it, or a later one"
        raise StorageError(
            f"{source} has format {one_line(version, 40)}, xmcray {__version__} reads format"
            f" {SCHEMA_VERSION}; use {reader}, or make the {kind} again"
        )
    if digest != content_hash:
        raise StorageError(
            f"{source}/{MANIFEST} was altered after it was written; make the {kind} again"
        )
    # A name must not lead out of the folder when its file is copied or read.
    if any(not _is_inside(name) for name in files):
        raise StorageError(
            f"{source}/{MANIFEST} names a file outside its folder; do not use this {kind}"
        )
    return manifest


def _is_inside(name: str) -> bool:
    """Whether the name of a file leads to a file inside the artifact's folder."""
    parts = name.split("/")
    return name.isprintable() and not {"", ".", ".."} & set(parts)


def check_contents(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    source: str | Path,
) -> None:
    """Compares files of an artifact with the hashes of its manifest.

    Args:
        folder: local folder of the artifact.
        manifest: of the artifact.
        names: files that are read.
        source: folder or URL of the artifact, for messages.
    Raises:
        StorageError: naming the file that was altered.
    """
    checked_names = list(names)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        entries = pool.map(lambda name: hash_file(folder / name), checked_names)
        for name, entry in zip(checked_names, entries, strict=True):
            if entry == manifest.files[name]:
                continue
            raise StorageError(
                f"{source}/{name} was altered (SHA-256 differs from the manifest); make the"
                f" {manifest.kind} again"
            )


def _content_hash(body: Mapping[str, Any]) -> str:
    # Sorted keys and fixed separators: equal content has one form only.
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
