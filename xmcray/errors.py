"""Mistakes that a user can repair, as exceptions.

    XmcrayError            exit code 2: one line that says what was found, what was expected, what to do
    |-- ConfigError        a setting, an option or a preset
    |-- DataError          raw files or a corpus
    |   `-- NoPositivesError   a split whose queries have no positive left
    |-- RunError           a run directory: in use, not empty, of another corpus, no checkpoint; or a
    |                      run whose processes were lost
    |-- StorageError       the disk or object store: full, unreadable, altered since it was written
    |-- ResourceError      the machine or the cluster lacks a requested resource
    |-- OutOfMemoryError   the machine or its accelerator has too little memory
    |-- PartitionError     ranks that do not agree about who owns which label
    |-- ShortlistError     hard negatives that are missing or too old
    |-- BundleError        a bundle that cannot be loaded or searched
    |-- ProblemError       a request to a server that is not answered (serving/problems.py)
    `-- ClientError        the same on the client's side, and servers out of reach (client.py)

Any other exception that escapes is our own mistake and ends with a traceback and exit code 1.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from xmcray.terminal import printable


def one_line(message: object, limit: int = 200) -> str:
    """An error or text of another library as one line of at most `limit` characters."""
    return printable(" ".join(str(message).split()))[:limit]


class XmcrayError(Exception):
    """A mistake the user can repair. The message is one line: found, expected, what to do."""


class ConfigError(XmcrayError):
    """A setting, an option or a preset is unknown or out of range."""


class DataError(XmcrayError):
    """Raw files or a corpus are missing, malformed or altered."""


class NoPositivesError(DataError):
    """No query of a split has a positive that can be answered, so nothing can be measured."""


class RunError(XmcrayError):
    """A run directory is in use, belongs to other data or settings, or has no checkpoint; or the
    processes of a run were lost.
    """


class StorageError(XmcrayError):
    """The disk or object store is full, unreadable, or holds other bytes than were written."""


class ResourceError(XmcrayError):
    """The machine or the cluster lacks a requested resource."""


class OutOfMemoryError(XmcrayError):
    """The machine or its accelerator has too little memory for what was asked."""


class PartitionError(XmcrayError):
    """Ranks do not agree about who owns which label."""


class ShortlistError(XmcrayError):
    """Hard negatives are missing or older than allowed."""


class BundleError(XmcrayError):
    """A bundle cannot be loaded or searched."""


@contextlib.contextmanager
def readable(
    failure: str,
    remedy: str,
    error_type: type[XmcrayError] = StorageError,
) -> Iterator[None]:
    """Turns whatever a library raises on a malformed file into one line.

    Args:
        failure: what the message says, such as "labels.parquet cannot be read".
        remedy: what to do about it.
        error_type: the error to raise. Our own errors pass, except those about settings, which
            here are settings in the file.
    """
    try:
        yield
    except ConfigError as error:
        raise error_type(f"{failure} ({one_line(error)}); {remedy}") from error
    except XmcrayError:
        raise
    except BaseException as error:
        # A Rust library that gives up raises a PanicException, which is no Exception.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        reason = one_line(f"{type(error).__name__}: {error}", 160)
        raise error_type(f"{failure} ({reason}); {remedy}") from error


# What torch's messages say of memory. Its exception for CPUs is a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
# What torch and numpy say of a size that overflows, so that they ask the system for nothing.
_OVERFLOWS = (
    "Storage size calculation overflowed",
    "alloc_cpu() seems to have been called with negative number",
    "Overflow when unpacking long",
    "array is too big",
    "Maximum allowed dimension exceeded",
)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turns a failed allocation of Python, numpy, Arrow, torch or FAISS into an OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, ValueError) as error:
        message = str(error)
        is_named = any(phrase in message for phrase in (*_NO_MEMORY, *_OVERFLOWS))
        if not isinstance(error, MemoryError) and not is_named:
            raise
        # "you tried to allocate 4000 bytes", "Unable to allocate 7.11 PiB", and so on.
        amount = re.search(r"allocate ([0-9.]+ \w+)", message)
        needed = amount[1] if amount else one_line(message, 160) or "what was asked"
        raise OutOfMemoryError(
            f"there is no memory for {needed}, expected sizes that fit; lower them, or use a machine"
            " with more (`xmcray plan` estimates what a training needs)"
        ) from error
