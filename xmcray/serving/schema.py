"""Requests, answers and problems of the HTTP interface. The OpenAPI description is made from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

MAX_BODY = 1 << 20  # bytes
MAX_NAME = 100  # letters of the name of a model or an attribute
MAX_TEXTS = 64
MAX_K = 1000
MAX_LIST = 10_000  # uids in an allow or deny list
MAX_OPERATIONS = 1000
MAX_WIDTH = 1 << 16  # numbers of a side vector
UNKNOWN_FIELD = "unknown_field"  # type of an error of pydantic


def _at_most(max_length: int) -> tuple[Any, BeforeValidator]:
    """Limits a dictionary, whose entries pydantic alone would first validate one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > max_length:
            limits = {"max_length": max_length, "actual_length": len(value)}
            raise PydanticKnownError("too_long", {"field_type": "Dictionary", **limits})
        return value

    return Field(max_length=max_length), BeforeValidator(check)


Text = Annotated[str, StringConstraints(max_length=100_000)]
# Without blanks at the ends, as `prepare` reads the texts of labels.
LabelText = Annotated[Text, AfterValidator(str.strip)]
Uid = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
# Each error costs microseconds, and a body of a megabyte has room for 300,000 of them.
Vector = Annotated[list[float], Field(min_length=1, max_length=MAX_WIDTH, fail_fast=True)]
Scalar = Text | bool | int | float
Scalars = Annotated[list[Scalar], Field(max_length=1000, fail_fast=True)]
Attributes = dict[Name, Scalar]


class Schema(BaseModel):
    """A part of a request; unknown fields are refused."""

    # JSON has no NaN, and a misspelt field must not be ignored.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, values: Any) -> Any:
        """Names the field and those that there are, which pydantic's own message does not."""
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    known = ", ".join(cls.model_fields)
                    message = (
                        f"unknown field {str(name)[:80]!r}, expected one of {known}; rename it"
                    )
                    raise PydanticCustomError(UNKNOWN_FIELD, "{message}", {"message": message})
        return values


class Range(Schema):
    """Values of a number: every bound that is given holds."""

    # An integer stays one: as a float it would lose its last digits beyond 2**53.
    gt: int | float | None = None
    gte: int | float | None = None
    lt: int | float | None = None
    lte: int | float | None = None


class Filter(Schema):
    """Which labels may be answered; all parts that are given hold.

    Attributes:
        allow: uids, and no other. deny: uids that are left out. Unknown ones are ignored.
        attributes: of each name the value, one of several values, or a range; a label without the attribute fails.
    """

    allow: Annotated[list[Uid], Field(max_length=MAX_LIST)] | None = None
    deny: Annotated[list[Uid], Field(max_length=MAX_LIST)] = []
    attributes: Annotated[dict[Name, Scalar | Scalars | Range], *_at_most(8)] = {}


class MemorySettings(Schema):
    """How training queries vote, in place of the bundle's own settings (methods.md: lambda, tau, b)."""

    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    keys: Annotated[int, Field(ge=1, le=10_000)] | None = None


FieldName = Literal["uid", "text", "label_id", "score", "probability", "attributes"]
# Without a limit each of half a million wrong names would be an error of its own.
MAX_FIELDS = len(get_args(FieldName))


class SearchRequest(Schema):
    """POST /v1/search.

    Attributes:
        texts: what to search for; an empty text is legal.
        vectors: a side vector for each text, if the model mixes them; zeros are none.
        k: answers per text; fewer come back where fewer labels pass the filter.
        fields: of each answer.
        model: name of the bundle where several are served; the first one if not given.
        explain: name the training queries that voted, and of a fused bundle what each part gave.
        min_probability: leave out answers that are less probable; the bundle must be calibrated.
        timeout_ms: answer within that time or with 503.
    """

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    fields: Annotated[list[FieldName], Field(max_length=MAX_FIELDS)] = [
        "uid",
        "text",
        "score",
        "probability",
    ]
    model: Name | None = None
    filter: Filter | None = None
    memory: MemorySettings | None = None
    explain: bool = False
    min_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=600_000)] | None = None


EventName = Literal["click", "accept", "purchase", "reject"]


class FeedbackRequest(Schema):
    """POST /v1/feedback: what a user did with an answer; needs a server that collects events.

    Attributes:
        request_id: of the answered search.
        label: uid of the label.
        event: what the user did.
        text: place of the text in the search, from 0.
        model: name of the bundle that answered; the first one if not given.
    """

    request_id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    label: Uid
    event: EventName
    text: Annotated[int, Field(ge=0, lt=MAX_TEXTS)] = 0
    model: Name | None = None


class FeedbackResponse(BaseModel):
    """Number of the event, which is durable now together with the search that it is about."""

    model: str
    number: int


class Voter(BaseModel):
    """A training query that voted for an answer, and its part of the answer's probability."""

    uid: str
    text: str
    weight: float


class Answer(BaseModel):
    """One label; only the fields that were asked for are there.

    Attributes:
        score: as `Retriever.search` gives it.
        probability: that the label is relevant, if the bundle is calibrated and `memory` is not given.
        completed: true where a memory had no vote for the label and it only completes the list; not
            given where a reranker orders the answers.
        voters: with `explain`.
        parts: with `explain`, how much each part of a fused bundle added to the score.
    """

    uid: str | None = None
    text: str | None = None
    label_id: int | None = None
    score: float | None = None
    probability: float | None = None
    attributes: Attributes | None = None
    completed: bool | None = None
    voters: list[Voter] | None = None
    parts: dict[str, float] | None = None


class Result(BaseModel):
    """The answers of one text, best first; `truncated` if the text was longer than the model reads."""

    answers: list[Answer]
    truncated: bool = False


class Pinned(BaseModel):
    """Which model answered: name, version of the bundle (its SHA-256) and number of the last label operation."""

    model: str
    version: str
    label_log: int

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer that say the same."""
        return {"X-Xmcray-Version": self.version, "X-Xmcray-Label-Log": str(self.label_log)}


class SearchResponse(Pinned):
    """One result per text, in the order of the request."""

    request_id: str
    took_ms: float
    results: list[Result]


class EncodeRequest(Schema):
    """POST /v1/encode: the vectors by which labels are searched."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    model: Name | None = None


class EncodeResponse(Pinned):
    """float32 vectors [texts, dim]."""

    request_id: str
    dim: int
    vectors: list[list[float]]


class LabelResponse(Pinned):
    """GET /v1/labels/{uid}."""

    uid: str
    text: str
    label_id: int
    attributes: Attributes


class Model(Pinned):
    """One served bundle; `calibrated` if its answers have probabilities, `feedback` if events are collected.

    `compacted_from` is the version from which it differs by operations of this server's label log alone.
    `side_width` is the number of values of a side vector that a query may have; 0 if it can have none.
    """

    method: str
    predictor: str
    num_labels: int
    dim: int
    max_len: int
    attributes: list[str]
    calibrated: bool = False
    feedback: bool = False
    side_width: int = 0
    compacted_from: str | None = None


class ModelsResponse(BaseModel):
    """GET /v1/models; the first one answers where a request names none."""

    models: list[Model]


class SwapRequest(Schema):
    """POST /admin/v1/swap: answer from another bundle.

    Attributes:
        bundle: folder or fsspec URL.
        recall_floor: least share of the current bundle's ten best labels that the new one must find for the probe
            queries; 0 for a bundle of other labels.
        version: refuse any other content than this SHA-256.
    """

    bundle: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    model: Name | None = None
    recall_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    version: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None


class SwapResponse(BaseModel):
    """What was replaced by what."""

    model: str
    previous: str
    version: str
    recall: float | None
    seconds: float


class Operation(Schema):
    """One change of the labels. `add` and `update` need a text; an attribute set replaces the one before."""

    op: Literal["add", "update", "delete"]
    uid: Uid
    text: LabelText | None = None
    attributes: Annotated[Attributes, *_at_most(32)] | None = None


class OperationsRequest(Schema):
    """POST /admin/v1/labels: all of these operations or none."""

    operations: Annotated[
        list[Operation], Field(min_length=1, max_length=MAX_OPERATIONS, fail_fast=True)
    ]
    model: Name | None = None


class OperationsResponse(BaseModel):
    """Number of the last operation: durable now, and in every answer whose `label_log` is at least that."""

    model: str
    label_log: int


class CompactRequest(Schema):
    """POST /admin/v1/compact: write the labels as they are now into a new bundle at `out` (folder or URL)."""

    out: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    model: Name | None = None


class CompactResponse(BaseModel):
    """The new bundle; once it is swapped in, only later operations of the log are replayed."""

    model: str
    bundle: str
    version: str
    label_log: int


class Problem(BaseModel):
    """application/problem+json (RFC 9457); `type` names the kind of problem, `detail` says what to do."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str | None = None
    errors: list[dict[str, Any]] | None = None
