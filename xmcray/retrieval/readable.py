"""One error for whatever a library raises on a file of a bundle that it cannot read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from xmcray.errors import BundleError, ConfigError

_MALFORMED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ConfigError,
    pa.ArrowException,
)


@contextlib.contextmanager
def readable(failure: str, remedy: str = "export it again") -> Iterator[None]:
    """Turns the errors of a malformed file into a BundleError.

    Args:
        failure: what the message says, such as "labels.parquet cannot be read".
        remedy: what to do about it.
    """
    try:
        yield
    except _MALFORMED as error:
        raise BundleError(f"{failure} ({type(error).__name__}); {remedy}") from None
