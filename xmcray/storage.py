"""Directories that are complete or absent: corpus, checkpoint and bundle.

An artifact is a directory with `manifest.json`: its kind, schema version, what made it, and name, size and SHA-256 of
every file. Locally it is written under a temporary name beside its destination, synced and renamed. On an object
store, which has no rename, data files go first and the manifest last. A directory without a verifying manifest does
not exist for a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from safetensors import SafetensorError

from xmcray.errors import StorageError, XmcrayError

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HERE, _EXCHANGE = -100, 2  # of renameat2: names from the working folder, swapped


class MissingFolderError(StorageError, FileNotFoundError):
    """The folder to write into is not there (any more); for those who expect that, the system's error too."""


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
    """Size and SHA-256 of one file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        size = file.tell()
    return FileEntry(size, digest.hexdigest())


def is_url(path: str | Path) -> bool:
    """Whether `path` is an fsspec URL such as s3://bucket/run rather than a local path."""
    return "://" in str(path)


def fsync(path: Path) -> None:
    """Forces a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside(path: Path) -> Path:
    """A hidden name beside `path` that nobody on any machine uses; it does not end as `path` does: no glob finds it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def write_json(path: Path, value: object) -> None:
    """Writes JSON as `write_text` writes text."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never a part of it.

    The text goes to a temporary file, which is synchronised and renamed. What UTF-8 cannot encode is
    written as an escape.
    """
    temporary = aside(path)
    with disk_errors(path):
        try:
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync(path.parent)


@contextlib.contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turns a full disk, or a path that is forbidden or not there, into a StorageError that names it.

    That something else is not there, such as a file that was to be read meanwhile, stays what it is.
    """
    try:
        yield
    except SafetensorError as error:  # no OSError, it has the system's number only in its words
        if any(f"(os error {code})" in str(error) for code in _FULL) or "No space left" in str(
            error
        ):
            raise _full(path) from error
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path) from error
        message = f"{path} cannot be written ({error.strerror}); choose another folder"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(message) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and _concerns(
            error.filename, Path(path)
        ):
            raise (MissingFolderError if error.errno == errno.ENOENT else StorageError)(
                message
            ) from error
        raise


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Every remote file system has its own errors; each becomes a StorageError that names the URL."""
    try:
        yield
    except XmcrayError:
        raise
    except ImportError as error:  # fsspec's own words name the package
        raise StorageError(
            f"{url} cannot be used: {_one_line(error)} (pip install it beside xmcray)"
        ) from error
    except Exception as error:
        raise StorageError(
            f"{url} cannot be used ({_one_line(error)}); check the URL and its rights"
        ) from error


def filesystem_of(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        StorageError: no such kind of URL, or its package is not installed.
    """
    with reaching(url):
        filesystem, root = fsspec.core.url_to_fs(url)
        return filesystem, str(root)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def check_file(path: str | Path) -> None:
    """Raises StorageError if a file cannot be written there: asked before the work whose result it is to hold."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise StorageError(
            f"{path} cannot be written: folder {folder} {found}; make it or choose another"
        )
    if Path(path).is_dir():
        raise StorageError(f"{path} is a folder, expected a file; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(
            f"{path} cannot be written ({os.strerror(errno.EACCES)}); choose another folder"
        )


def _full(path: str | Path) -> StorageError:
    return StorageError(
        f"no space left while writing {path}: the disk is full; free some space or choose another folder"
    )


def _concerns(named: object, path: Path) -> bool:
    """Whether an error names `path`, a folder above it, or a file beside it, where it is written first."""
    if not isinstance(named, str | Path):
        return False
    name, whole = Path(named).absolute(), path.absolute()
    return name in (whole, *whole.parents) or name.parent == whole.parent


def finish_manifest(
    folder: Path, kind: str, about: Mapping[str, Any], known: Mapping[str, FileEntry]
) -> Manifest:
    """Hashes the files of `folder` that `known` lacks, syncs everything and writes the manifest into it."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files and name != MANIFEST:
            files[name] = hash_file(path)
            fsync(path)
    body = {
        "kind": kind,
        "schema_version": SCHEMA_VERSION,
        "files": {
            name: {"size": entry.size, "sha256": entry.sha256}
            for name, entry in sorted(files.items())
        },
        "about": dict(about),
    }
    digest = _content_hash(body)
    write_json(folder / MANIFEST, {**body, "sha256": digest})
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            fsync(path)
    return Manifest(kind, files, dict(about), digest)


@contextlib.contextmanager
def new_artifact(
    destination: str | Path,
    kind: str,
    about: Mapping[str, Any],
    known: Mapping[str, FileEntry] | None = None,
    replacing: bool = False,
) -> Iterator[Path]:
    """A folder to fill; when the block ends it is hashed, synced and takes the name `destination`.

    `about` and `known` are read at the end, so the block may still add to them. If the block fails nothing is left
    behind.

    Args:
        known: entries of files that need no hashing and syncing, from `link_files`.
        replacing: the destination, a local folder, exists; it changes from the old to the new one at one moment.
    Raises:
        StorageError: the destination exists and is not empty, or the disk is full.
    """
    if not replacing:
        refuse_existing(destination)
    remote = is_url(destination)
    parent = Path(tempfile.gettempdir()) if remote else Path(destination).absolute().parent
    with disk_errors(destination):
        parent.mkdir(parents=True, exist_ok=True)
        name = str(destination).rstrip("/").rsplit("/", 1)[-1]
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        try:
            folder.chmod(0o755)
            yield folder
            finish_manifest(folder, kind, about, known or {})
            if remote:
                _upload(folder, str(destination))
            elif replacing:
                exchange(folder, Path(destination).absolute())
            else:
                publish(folder, Path(destination).absolute())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, destination: Path) -> None:
    """Renames a finished folder to its destination (an empty folder there is replaced) and syncs the parent."""
    if destination.is_dir():
        destination.rmdir()
    folder.rename(destination)
    fsync(destination.parent)


def exchange(folder: Path, destination: Path) -> None:
    """Two folders swap names: whoever opens `destination` finds the old or the new one, and keeps what it has open."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None or rename(
        _HERE, os.fsencode(folder), _HERE, os.fsencode(destination), _EXCHANGE
    ):
        old = aside(
            destination
        )  # where the system has no such call there is no `destination` for a moment
        destination.rename(old)
        folder.rename(destination)
        old.rename(folder)
    fsync(destination.parent)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Nobody else changes an artifact meanwhile; the system ends that when the process dies. Readers do not care.

    Raises:
        StorageError: another process is changing it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(
            os.fstat(descriptor), folder.stat()
        ):  # it was exchanged before we held it
            raise BlockingIOError
        yield
    except BlockingIOError:
        raise StorageError(
            f"{folder} is being changed by another process; try again when that is done"
        ) from None
    finally:
        os.close(descriptor)


def link_files(
    source: Path, manifest: Manifest, folder: Path, without: Collection[str]
) -> dict[str, FileEntry]:
    """Gives `folder` all files of a verified artifact but some, under a second name; never write into those.

    Returns:
        The entries of the files that are as safe on disk as those of `source`; others, on another disk, are copies.
    """
    known: dict[str, FileEntry] = {}
    for name in manifest.files.keys() - set(without):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, folder / name)
            known[name] = manifest.files[name]
        except OSError:
            shutil.copyfile(source / name, folder / name)
    return known


def refuse_existing(destination: str | Path) -> None:
    """Raises StorageError if something is already there: good data is never overwritten."""
    if is_url(destination):
        filesystem, root = filesystem_of(str(destination))
        with reaching(str(destination)):
            taken = filesystem.exists(f"{root}/{MANIFEST}")
    else:
        path = Path(destination)
        taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if taken:
        raise StorageError(
            f"{destination} exists and is not empty; remove it or choose another --out"
        )


def read_manifest(path: str | Path, kind: str) -> Manifest:
    """The manifest of a local artifact, itself verified; file contents are not read.

    Raises:
        StorageError: no folder, no manifest, another kind, another schema, or an altered manifest.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StorageError(f"{path} does not exist; expected a {kind} folder")
    try:
        body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise ValueError("not an object")
        digest = body.pop("sha256")
        files = {
            name: FileEntry(int(e["size"]), str(e["sha256"])) for name, e in body["files"].items()
        }
        found, version, about = body["kind"], body["schema_version"], body["about"]
    except FileNotFoundError:
        raise StorageError(
            f"{path} has no {MANIFEST}: it is not a complete {kind}; make it again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StorageError(f"{path}/{MANIFEST} is damaged; make the {kind} again") from None
    if found != kind:
        raise StorageError(f"{path} holds a {found}, expected a {kind}")
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{path} has schema version {version}, this release reads {SCHEMA_VERSION}"
        )
    if digest != _content_hash(body):
        raise StorageError(
            f"{path}/{MANIFEST} was altered after it was written; make the {kind} again"
        )
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise StorageError(
            f"{path}/{MANIFEST} names a file outside its folder; do not use this {kind}"
        )
    return Manifest(kind, files, about, digest)


def open_artifact(path: str | Path, kind: str, contents: bool = True) -> tuple[Path, Manifest]:
    """A local folder whose files are those of its manifest; a URL is first copied to a cache folder.

    Args:
        contents: also compare every SHA-256; without it only presence and sizes.
    Raises:
        StorageError: naming the file that is missing or altered.
    """
    folder = local_copy(str(path), kind) if is_url(path) else Path(path).absolute()
    manifest = read_manifest(folder, kind)
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise StorageError(f"{path}/{name} is missing; make the {kind} again")
        if file.stat().st_size != entry.size:
            raise StorageError(
                f"{path}/{name} has {file.stat().st_size} bytes, expected {entry.size}: damaged"
            )
        if contents and hash_file(file) != entry:
            raise StorageError(
                f"{path}/{name} was altered (SHA-256 differs from the manifest); make the {kind} again"
            )
    return folder, manifest


def _content_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _upload(folder: Path, url: str) -> None:
    filesystem, root = filesystem_of(url)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST]
    for path in [*files, folder / MANIFEST]:
        target = f"{root}/{path.relative_to(folder).as_posix()}"
        with reaching(url):
            filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            filesystem.put_file(str(path), target)


def local_copy(source: str, kind: str) -> Path:
    """An artifact of a URL or a folder, copied to this machine's cache if it is not there yet.

    All processes of a machine share one copy: the first one makes it while the others wait, and it has its name only
    when every byte has the hash of the manifest, which also names it. What a killed process left is removed.

        CACHE/0123abcd...          a whole copy, named by its content; CACHE is XMCRAY_CACHE or ~/.cache/xmcray
        CACHE/.0123abcd....part    one that is being made; CACHE/.0123abcd....lock is held meanwhile

    Raises:
        StorageError: not an artifact, altered, or no room for it.
    """
    filesystem, root = filesystem_of(source)
    with reaching(source):
        try:
            raw = filesystem.cat_file(f"{root}/{MANIFEST}")
        except FileNotFoundError:
            raise StorageError(f"{source} has no {MANIFEST}: it is not a complete {kind}") from None
    try:
        key = hashlib.sha256(raw).hexdigest()[:32]
        files = {
            name: FileEntry(int(e["size"]), str(e["sha256"]))
            for name, e in json.loads(raw)["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StorageError(f"{source}/{MANIFEST} is damaged; make the {kind} again") from None
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise StorageError(
            f"{source}/{MANIFEST} names a file outside its folder; do not use this {kind}"
        )
    copy = Path(os.environ.get("XMCRAY_CACHE", Path.home() / ".cache" / "xmcray")) / key
    with disk_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.with_name(f".{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when the process dies
            if not copy.is_dir():
                part = copy.with_name(f".{key}.part")
                shutil.rmtree(part, ignore_errors=True)
                try:
                    _copy_files(filesystem, root, source, files, part)
                    (part / MANIFEST).write_bytes(raw)
                    fsync(part / MANIFEST)
                    publish(part, copy)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    return copy


def _copy_files(
    filesystem: Any, root: str, source: str, files: Mapping[str, FileEntry], folder: Path
) -> None:
    folder.mkdir()
    needed, free = sum(entry.size for entry in files.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{source} has {needed / 1e9:.1f} GB, {folder.parent} has room for {free / 1e9:.1f} GB; remove old copies"
            " there or set XMCRAY_CACHE to a folder on another disk"
        )
    for name, entry in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with reaching(source), disk_errors(folder):
            try:
                filesystem.get_file(f"{root}/{name}", str(folder / name))
            except FileNotFoundError:
                raise StorageError(f"{source}/{name} is missing; make it again") from None
        if hash_file(folder / name) != entry:
            raise StorageError(
                f"{source}/{name} was altered (SHA-256 differs from the manifest); make it again"
            )
        fsync(folder / name)
