"""Problems that end a request (RFC 9457)."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from xmcray.errors import ConfigError, XmcrayError, one_line
from xmcray.serving.schema import UNKNOWN_FIELD

STATUS = {
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "not-allowed": 405,
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
    "lost": 503,
}
TITLE = {
    "unauthorized": "No valid token",
    "forbidden": "Not with this token",
    "not-found": "Not found",
    "not-allowed": "Method not allowed",
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
    "lost": "Not known whether it was done",
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
        entries = error.errors()[:20]
        errors = []
        for entry in entries:
            where = [str(place) for place in entry["loc"]]
            errors.append({"where": where, "message": entry["msg"]})
        return ProblemError("invalid", _detail(entries[0]), errors)
    return ProblemError("internal", "the request could not be answered; see the log")


def _detail(entry: Mapping[str, Any]) -> str:
    """What was found, what was expected and what to do, of an error of pydantic or FastAPI."""
    kind = entry["type"]
    places = [str(place) for place in entry["loc"]]
    where = ".".join(places) or "the request"
    if kind == "json_invalid":
        # FastAPI gives the position as the last place.
        reason = f"{entry['ctx']['error']}, character {places[-1]}"
        return f"the body is no JSON ({one_line(reason)}), expected a JSON object; correct it"
    if isinstance(entry["input"], bytes):
        # FastAPI has not parsed it.
        return (
            "the body is not declared as JSON, expected the header `Content-Type: application/json`;"
            " send it"
        )
    if kind == "missing" and where == "body":
        return "the request has no body, expected a JSON object; see /openapi.json"
    if kind == "missing":
        return f"{where} is missing, expected a value; add it"
    if kind == UNKNOWN_FIELD:
        return f"{where}: {entry['msg']}"
    found = reprlib.repr(entry["input"])
    message = entry["msg"]
    return f"{where} is {found}, but {message[:1].lower()}{message[1:]}; correct it"
