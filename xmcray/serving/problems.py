"""Problems that end a request (RFC 9457)."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from xmcray.errors import ConfigError, XmcrayError

STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "late": 408,
    "refused": 409,
    "too-large": 413,
    "long-header": 431,
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
    "long-header": "Headers too large",
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


def problem_of(error: Exception) -> ProblemError:
    """The problem that a request ends with when answering it raises an error."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, XmcrayError):
        return ProblemError("invalid" if isinstance(error, ConfigError) else "refused", str(error))
    if isinstance(error, RequestValidationError | ValidationError):
        errors = []
        for entry in error.errors()[:20]:
            where = [str(place) for place in entry["loc"]]
            errors.append({"where": where, "message": entry["msg"]})
        first = errors[0] if errors else {"where": ["body"], "message": "malformed"}
        detail = f"{'.'.join(first['where'])}: {first['message']}"
        return ProblemError("invalid", detail, errors)
    return ProblemError("internal", "the request could not be answered; see the log")
