"""Problems that end a request (RFC 9457)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xmcray.errors import XmcrayError

STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "late": 408,
    "refused": 409,
    "too-large": 413,
    "too-long": 422,
    "invalid": 422,
    "internal": 500,
    "overloaded": 503,
    "not-ready": 503,
    "timeout": 503,
}
TITLE = {
    "unauthorized": "No valid token",
    "forbidden": "Not with this token",
    "not-found": "Not found",
    "late": "Request not received in time",
    "refused": "Refused",
    "too-large": "Request too large",
    "too-long": "Text too long",
    "invalid": "Invalid request",
    "internal": "Our mistake",
    "overloaded": "Too many requests at a time",
    "not-ready": "Not ready",
    "timeout": "Not answered in time",
}
RETRY_AFTER_S = 1


class ProblemError(XmcrayError):
    """Ends a request with a problem document.

    Args:
        kind: a key of STATUS.
        detail: what was found, what was expected and what to do.
        errors: places in an invalid request.
    """

    def __init__(self, kind: str, detail: str, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        return ProblemError, (self.kind, self.detail, self.errors)


def unknown_model(name: str, served: Iterable[str]) -> ProblemError:
    """The problem of a request that names a model that is not served."""
    return ProblemError(
        "not-found", f"model {name[:80]!r} is not served, expected one of: {', '.join(served)}"
    )
