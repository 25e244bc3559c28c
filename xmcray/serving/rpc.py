"""The search over gRPC (search.proto): the same schema, limits, token and answers as over HTTP."""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict, SerializeToJsonError

from xmcray.serving import request_checks, schema
from xmcray.serving.http import Gateway
from xmcray.serving.problems import ProblemError, problem_of
from xmcray.serving.search_pb2 import SearchRequest, SearchResponse

ROUTE = "grpc search"  # in the metrics
NO_TOKEN = "expected metadata `authorization: Bearer TOKEN`"
NOT_FINITE = "filter.attributes has NaN or infinity, expected finite numbers; leave it out"
# A message holds each number as a float64, which from here on stands for several integers.
MAX_NUMBER = 1 << 53
NO_MESSAGE = "the call has no message, expected one in time; send it at once"
SERVICER = "xmcray.serving.search_pb2_grpc.add_RetrieverServicer_to_server"
CODES = {
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "too-large": grpc.StatusCode.INVALID_ARGUMENT,
    "too-long": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "refused": grpc.StatusCode.FAILED_PRECONDITION,
    "internal": grpc.StatusCode.INTERNAL,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "not-ready": grpc.StatusCode.UNAVAILABLE,
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
}

log = logging.getLogger("xmcray.serving")


async def search(gateway: Gateway, request: SearchRequest, context: Any) -> SearchResponse:
    """Answers one call.

    Args:
        gateway: the replica that is called.
        request: the request.
        context: gRPC's or Ray Serve's context of the call; gets code and message of an error.
    """
    begin = time.perf_counter()
    code = grpc.StatusCode.UNKNOWN
    metadata = {}
    for name, value in context.invocation_metadata():
        metadata[name.lower()] = str(value)
    try:
        response = await _search(gateway, request, metadata)
        code = grpc.StatusCode.OK
    except Exception as error:
        # gRPC would send the text of the exception to the client, paths and all.
        problem = problem_of(error)
        code = CODES[problem.kind]
        if problem.kind == "internal":
            log.exception("a search over gRPC failed")
        context.set_code(code)
        context.set_details(problem.detail)
        return SearchResponse()
    finally:
        gateway.metrics.requests.labels(ROUTE, code.name).inc()
        gateway.metrics.seconds.labels(ROUTE).observe(time.perf_counter() - begin)
    gateway.metrics.texts.labels(response.model).inc(len(request.texts))
    values = response.model_dump(exclude_none=True)
    answer: SearchResponse = ParseDict(values, SearchResponse())
    return answer


async def _search(
    gateway: Gateway,
    request: SearchRequest,
    metadata: dict[str, str],
) -> schema.SearchResponse:
    if not gateway.tokens.accept(metadata.get("authorization")):
        raise ProblemError("unauthorized", NO_TOKEN)
    num_bytes = request.ByteSize()
    if num_bytes > gateway.service.config.max_body:
        message = f"the request has {num_bytes:,} bytes; send less at once"
        raise ProblemError("too-large", message)
    try:
        values = MessageToDict(request, preserving_proto_field_name=True)
    except SerializeToJsonError:
        raise ProblemError("invalid", NOT_FINITE) from None
    label_filter = values.get("filter", {})
    _check_numbers(label_filter.get("attributes"))
    if label_filter.pop("allow_none", False):
        if label_filter.get("allow"):
            raise ProblemError("invalid", "filter has allow and allow_none, expected one of them")
        # A message cannot hold an empty list.
        label_filter["allow"] = []
    search_request = schema.SearchRequest.model_validate(values)
    request_id = request_checks.request_id(metadata.get("x-request-id"))
    return await gateway.service.search(search_request, request_id)


def _check_numbers(value: Any) -> None:
    """Raises ProblemError for a number in the attributes of a filter that may have been rounded."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_numbers(part)
    elif isinstance(value, int | float) and abs(value) >= MAX_NUMBER:
        raise ProblemError(
            "invalid",
            f"filter.attributes has the number {value}, expected one below 2**53, beyond which gRPC"
            " rounds integers; ask over HTTP",
        )
