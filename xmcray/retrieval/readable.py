"""One error for whatever a library raises on a file of a bundle that it cannot read."""

from __future__ import annotations

import contextlib

from xmcray import errors


def readable(
    failure: str, remedy: str = "export it again"
) -> contextlib.AbstractContextManager[None]:
    """`errors.readable`, which raises a BundleError.

    Args:
        failure: what the message says, such as "labels.parquet cannot be read".
        remedy: what to do about it.
    """
    return errors.readable(failure, remedy, errors.BundleError)
