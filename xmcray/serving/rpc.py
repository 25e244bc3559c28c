"""The search over gRPC (search.proto): the same schema, limits, token and answers as over HTTP."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import ValidationError

from xmcray.errors import ConfigError
from xmcray.serving import schema
from xmcray.serving.metrics import ServingMetrics
from xmcray.serving.problems import ProblemError
from xmcray.serving.search_pb2 import SearchRequest, SearchResponse
from xmcray.serving.security import Tokens
from xmcray.serving.service import Service

ROUTE = "grpc search"  # in the metrics
SERVICER = "xmcray.serving.search_pb2_grpc.add_RetrieverServicer_to_server"
CODES = {
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "too-large": grpc.StatusCode.INVALID_ARGUMENT,
    "too-long": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "not-ready": grpc.StatusCode.UNAVAILABLE,
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Context(Protocol):
    """What is used of a gRPC call's context."""

    def invocation_metadata(self) -> Iterable[tuple[str, Any]]:
        """Pairs that came with the call."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Ends the call with an error."""

    def set_details(self, details: str) -> None:
        """Says why."""


class Gateway(Protocol):
    """What is used of the replica that is called."""

    service: Service
    tokens: Tokens
    metrics: ServingMetrics


async def search(gateway: Gateway, request: SearchRequest, context: Context) -> SearchResponse:
    """Answers one call; an error goes into the context."""
    begin, code, details = time.perf_counter(), grpc.StatusCode.UNKNOWN, ""
    try:
        found = await _found(
            gateway, request, {name.lower(): v for name, v in context.invocation_metadata()}
        )
        code = grpc.StatusCode.OK
    except ProblemError as problem:
        code, details = CODES[problem.kind], problem.detail
    except ConfigError as error:
        code, details = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except ValidationError as error:
        first = error.errors()[0]
        code, details = (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
        )
    finally:
        gateway.metrics.requests.labels(ROUTE, code.name).inc()
        gateway.metrics.seconds.labels(ROUTE).observe(time.perf_counter() - begin)
    if code != grpc.StatusCode.OK:
        context.set_code(code)
        context.set_details(details)
        return SearchResponse()
    gateway.metrics.texts.labels(found.model).inc(len(request.texts))
    answer: SearchResponse = ParseDict(found.model_dump(exclude_none=True), SearchResponse())
    return answer


async def _found(
    gateway: Gateway, request: SearchRequest, given: dict[str, Any]
) -> schema.SearchResponse:
    if not gateway.tokens.accept(str(given.get("authorization", ""))):
        raise ProblemError("unauthorized", "expected metadata `authorization: Bearer TOKEN`")
    if request.ByteSize() > gateway.service.config.max_body:
        raise ProblemError(
            "too-large", f"the request has {request.ByteSize():,} bytes; send less at once"
        )
    values = MessageToDict(request, preserving_proto_field_name=True)
    return await gateway.service.search(
        schema.SearchRequest.model_validate(values), _request_id(given)
    )


def _request_id(given: dict[str, Any]) -> str:
    return str(given.get("x-request-id") or secrets.token_hex(16))[:128]
