"""Directories that are complete or absent: corpus, checkpoint and bundle.

An artifact is a directory with `manifest.json`: its kind, schema version, what made it, and name,
size and SHA-256 of every file but `README.md`. Locally it is written under a temporary name in the
destination's folder, synced and renamed. An object store has no rename, so data files are uploaded
first and the manifest last. Readers ignore a directory without a verified manifest.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
from safetensors import SafetensorError

from xmcray import __version__, hub
from xmcray.errors import StorageError, XmcrayError, one_line, readable

MANIFEST = "manifest.json"
CARD = "README.md"  # for people: not part of an artifact, so it may change or be missing
SCHEMA_VERSION = 1  # "format" in messages; docs/compatibility.md says when it is raised
HASH_THREADS = min(8, os.cpu_count() or 1)  # files that are hashed at the same time
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_PATH = 3_900  # of Linux, 4,095, less what artifacts add
_LONGEST_NAME = 230  # of Linux, 255, less what temporary names add
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# The disk or the network file system itself fails.
_FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)
# Arguments of the system call renameat2: paths start at the working folder; swap two names.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class MissingPathError(StorageError, FileNotFoundError):
    """A file, or the folder to write into, does not exist (any more).

    It is a FileNotFoundError too, for callers that expect it to vanish.
    """


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
    with read_errors(path), path.open("rb") as file:
        # A file may be larger than the memory.
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


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing; they survive a crash."""
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new_folders:
        fsync(folder.parent)


def aside(path: Path) -> Path:
    """A unique hidden name in the folder of `path`, for a file or folder that will replace it.

    It starts with a dot and does not end as `path` does, so no pattern for finished files finds it.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write; its file replaces `path` when the block ends.

    A reader of `path` sees the old or the new content, never a part. If the block fails, the
    temporary file is removed.

    Raises:
        StorageError: the disk is full, or the folder is missing or forbidden.
    """
    temporary = aside(path)
    with disk_errors(path):
        try:
            yield temporary
            fsync(temporary)
            temporary.replace(path)
            fsync(path.parent)
        finally:
            # Nothing is left to remove after a success.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError, RecursionError: it is no JSON, or something else than an object.
    """
    body = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(body, dict):
        raise ValueError(f"found {type(body).__name__}, expected an object")
    return body


def write_json(path: Path, value: object) -> None:
    """Writes JSON as `write_text` writes text."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never a part of it.

    What UTF-8 cannot encode, such as half of a surrogate pair, is written as an escape.
    """
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Turns whatever the system raises while `path` is read into a StorageError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingPathError(f"{path} is missing; put a copy of it back") from error
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); check its rights and the disk"
        ) from error


@contextlib.contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turns a full disk, or a path that is forbidden or missing, into a StorageError that names it.

    An error about another file, such as one that the block reads, is raised unchanged.
    """
    try:
        yield
    except SafetensorError as error:
        # safetensors raises no OSError: the system's error number stands only in its message.
        message = str(error)
        full = any(f"(os error {code})" in message for code in _FULL)
        if full or "No space left" in message:
            raise disk_full(path) from error
        raise
    except shutil.Error as error:
        # copytree collects what went wrong as texts, each with the system's error number.
        message = str(error)
        if any(f"[Errno {code}]" in message for code in _FULL):
            raise disk_full(path) from error
        raise StorageError(
            f"{path} cannot be written ({one_line(message)}); choose another folder"
        ) from error
    except OSError as error:
        storage_error = _storage_error(error, path)
        if storage_error is None:
            raise
        raise storage_error from error


def _storage_error(error: OSError, path: str | Path) -> StorageError | None:
    """The error to raise instead of the system's; None if it does not concern `path`."""
    if error.errno in _FULL:
        return disk_full(path)
    message = f"{path} cannot be written ({error.strerror}); choose another folder"
    if error.errno in _FORBIDDEN:
        return StorageError(message)
    if error.errno in _FAILING:
        return StorageError(
            f"{path} cannot be written ({error.strerror}): the disk fails; look at the system's log"
        )
    if not _concerns(error.filename, Path(path)):
        return None
    if error.errno == errno.ENOENT:
        return MissingPathError(message)
    # A file exists where a folder should be made.
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return StorageError(message)
    return None


def disk_full(path: str | Path) -> StorageError:
    """The error of a write for which the disk has no room."""
    return StorageError(
        f"no space left while writing {path}: the disk is full; free some space or choose another folder"
    )


def _concerns(filename: object, path: Path) -> bool:
    """Whether `filename` is `path`, a folder above it, or a file in the same folder.

    New files are first written in the same folder, under another name.
    """
    if not isinstance(filename, str | Path):
        return False
    named_path = Path(filename).absolute()
    path = path.absolute()
    return named_path == path or named_path in path.parents or named_path.parent == path.parent


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


def check_file(path: str | Path) -> None:
    """Raises StorageError if a file cannot be written there; for checks before long work."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise StorageError(
            f"{path} cannot be written: folder {folder} {state}; make it or choose another"
        )
    if Path(path).is_dir():
        raise StorageError(f"{path} is a folder, expected a file; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES)
        raise StorageError(f"{path} cannot be written ({reason}); choose another folder")


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
    for name, path in _files_below(folder):
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


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of every file but the manifest, sorted."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            yield name, path


@contextlib.contextmanager
def new_artifact(
    destination: str | Path,
    kind: str,
    about: Mapping[str, Any],
    hashed_files: Mapping[str, FileEntry] | None = None,
    replacing: bool = False,
    finished: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """A folder to fill; when the block ends it is hashed, synced and renamed to `destination`.

    `about` and `hashed_files` are read at the end, so the block may still add to them. If the block
    fails nothing is left behind.

    Args:
        hashed_files: entries of files that need no hashing and syncing, from `link_files`.
        replacing: the destination, a local folder, exists; the new folder takes its place in one
            atomic step.
        finished: called with the folder when its manifest is written, and before it is renamed or
            uploaded; files that it adds are not part of the artifact.
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
            finish_manifest(folder, kind, about, hashed_files or {})
            if finished is not None:
                finished(folder)
            if remote:
                # An object store has no rename; the manifest, uploaded last, completes it.
                _upload(folder, str(destination))
            elif replacing:
                exchange(folder, Path(destination).absolute())
            else:
                publish(folder, Path(destination).absolute())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, destination: Path) -> None:
    """Renames a finished folder to its destination and syncs the parent.

    An empty folder at the destination is replaced.
    """
    if destination.is_dir():
        destination.rmdir()
    folder.rename(destination)
    fsync(destination.parent)


def exchange(folder: Path, destination: Path) -> None:
    """Swaps the names of two folders in one atomic step.

    A process that opens `destination` gets the old or the new folder, and keeps the files that it
    has open.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(destination))
    if rename is None or rename(*names, _RENAME_EXCHANGE) != 0:
        # Without the system call, `destination` does not exist for a moment.
        old = aside(destination)
        destination.rename(old)
        folder.rename(destination)
        old.rename(folder)
    fsync(destination.parent)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other processes from changing an artifact while the block runs; readers are not affected.

    The system releases the lock when the process dies.

    Raises:
        StorageError: another process is changing it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(descriptor, folder):
            raise StorageError(
                f"{folder} is being changed by another process; try again when that is done"
            )
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether another process is changing an artifact."""
    try:
        with exclusive(folder):
            return False
    except StorageError:
        return True


def _locked(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Another process may have exchanged the folder between opening and locking it.
    return os.path.samestat(os.fstat(descriptor), folder.stat())


def link_files(
    source: Path,
    manifest: Manifest,
    folder: Path,
    without: Collection[str],
) -> dict[str, FileEntry]:
    """Gives `folder` the files of a verified artifact under a second name; never write into those.

    Args:
        without: names of files to leave out.
    Returns:
        The entries of files that were linked and so are as safe on disk as those of `source`. Files
        on another disk are copied and have no entry.
    """
    linked: dict[str, FileEntry] = {}
    for name in manifest.files.keys() - set(without):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target)
            # The same bytes on the same disk: verified and synced already.
            linked[name] = manifest.files[name]
        except OSError:
            shutil.copyfile(source / name, target)
    return linked


def check_path(path: str | Path) -> None:
    """Raises StorageError for a path that no file can have."""
    try:
        encoded = os.fsencode(path)
    except UnicodeError:
        raise StorageError(
            f"{str(path)[:80]!a} is no path: it cannot be encoded; choose another name"
        ) from None
    if b"\0" in encoded:
        raise StorageError(
            f"{str(path)[:80]!a} is no path: it has a null character; choose another name"
        )
    longest = max(map(len, encoded.split(b"/")))
    # A file is first written under a name that is 18 characters longer.
    if not is_url(path) and (len(encoded) > _LONGEST_PATH or longest > _LONGEST_NAME):
        raise StorageError(
            f"{one_line(path, 80)}... is {len(encoded)} bytes long with a name of {longest}, expected at"
            f" most {_LONGEST_PATH} and {_LONGEST_NAME}; choose a shorter path"
        )


def refuse_existing(destination: str | Path) -> None:
    """Raises StorageError if something is already there: good data is never overwritten."""
    check_path(destination)
    if is_url(destination):
        filesystem, root = filesystem_of(str(destination))
        with reaching(str(destination)):
            exists = filesystem.exists(f"{root}/{MANIFEST}")
    else:
        path = Path(destination)
        exists = any(path.iterdir()) if path.is_dir() else path.exists()
        parents = path.absolute().parents
        nearest = next(parent for parent in parents if parent.exists())
        if not nearest.is_dir():
            raise StorageError(
                f"{destination} cannot be written: {nearest} is a file; choose another --out"
            )
    if exists:
        raise StorageError(
            f"{destination} exists and is not empty; remove it or choose another --out"
        )


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
            content = (folder / MANIFEST).read_bytes()
    except MissingPathError:
        raise StorageError(
            f"{path} has no {MANIFEST}: it is not a complete {kind}; make it again"
        ) from None
    return _parse_manifest(content, path, kind)


def _parse_manifest(content: bytes, source: str | Path, kind: str) -> Manifest:
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
    if manifest.kind != kind:
        raise StorageError(f"{source} holds a {one_line(manifest.kind, 40)}, expected a {kind}")
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


def open_artifact(path: str | Path, kind: str, contents: bool = True) -> tuple[Path, Manifest]:
    """A local folder whose files are those of its manifest; a URL is first copied to a cache folder.

    Args:
        contents: also compare every SHA-256; without it only presence and sizes.
    Raises:
        StorageError: naming the file that is missing or altered.
    """
    check_path(path)
    folder = local_copy(str(path), kind) if is_url(path) else Path(path).absolute()
    manifest = read_manifest(folder, kind)
    for name, entry in manifest.files.items():
        file = folder / name
        with read_errors(file):
            is_file = file.is_file()
            size = file.stat().st_size if is_file else 0
        if not is_file:
            raise StorageError(f"{path}/{name} is missing; make the {kind} again")
        # The size is compared first, because it costs nothing.
        if size != entry.size:
            raise StorageError(
                f"{path}/{name} has {size} bytes, expected {entry.size}: it is damaged; make the {kind} again"
            )
    if contents:
        check_contents(folder, manifest, manifest.files, source=path)
    return folder, manifest


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


def _upload(folder: Path, url: str) -> None:
    """Copies an artifact to a URL; the manifest comes last and makes it complete."""
    if url.startswith(hub.PREFIX):
        hub.commit_folder(folder, url, f"Add {url.rsplit('/', 1)[-1]}")
        return
    filesystem, root = filesystem_of(url)
    names = [name for name, _ in _files_below(folder)]
    for name in [*names, MANIFEST]:
        target = f"{root}/{name}"
        with reaching(url):
            filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            filesystem.put_file(str(folder / name), target)


def cache_folder() -> Path:
    """This user's folder for what can be made again: XMCRAY_CACHE or ~/.cache/xmcray."""
    return Path(os.environ.get("XMCRAY_CACHE", Path.home() / ".cache" / "xmcray"))


def local_copy(source: str, kind: str) -> Path:
    """An artifact of a URL or a folder, copied to this machine's cache if it is not there yet.

    All processes of a machine share one copy. The first one makes it while the others wait. The
    copy is renamed to its final name only when every file has the hash of the manifest. What a
    killed process left behind is removed. CACHE is `cache_folder()`:

        CACHE/0123abcd...          a complete copy, named by the hash of its manifest
        CACHE/.0123abcd....part    a copy in progress; CACHE/.0123abcd....lock is held meanwhile

    Raises:
        StorageError: not an artifact, altered, or no room for it.
    """
    filesystem, root = filesystem_of(source)
    with reaching(source):
        try:
            content = filesystem.cat_file(f"{root}/{MANIFEST}")
        except FileNotFoundError:
            raise StorageError(f"{source} has no {MANIFEST}: it is not a complete {kind}") from None
    files = _parse_manifest(content, source, kind).files
    key = hashlib.sha256(content).hexdigest()[:32]
    cache = cache_folder()
    copy = cache / key
    with disk_errors(copy):
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it when the process dies
            if not copy.is_dir():
                # A killed process may have left a part behind.
                part = cache / f".{key}.part"
                shutil.rmtree(part, ignore_errors=True)
                try:
                    _copy_files(filesystem, root, source, files, part)
                    (part / MANIFEST).write_bytes(content)
                    fsync(part / MANIFEST)
                    publish(part, copy)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    return copy


def _copy_files(
    filesystem: Any,
    root: str,
    source: str,
    files: Mapping[str, FileEntry],
    folder: Path,
) -> None:
    """Downloads the files of an artifact into `folder` and compares their hashes."""
    folder.mkdir()
    needed = sum(entry.size for entry in files.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{source} has {needed / 1e9:.1f} GB, {folder.parent} has room for {free / 1e9:.1f} GB; remove old copies"
            " there or set XMCRAY_CACHE to a folder on another disk"
        )
    for name, entry in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with reaching(source), disk_errors(folder):
            try:
                filesystem.get_file(f"{root}/{name}", str(target))
            except FileNotFoundError:
                raise StorageError(f"{source}/{name} is missing; make it again") from None
        if hash_file(target) != entry:
            raise StorageError(
                f"{source}/{name} was altered (SHA-256 differs from the manifest); make it again"
            )
        fsync(target)
