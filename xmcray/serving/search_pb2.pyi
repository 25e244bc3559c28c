from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Filter(_message.Message):
    __slots__ = ("allow", "deny", "attributes", "allow_none")
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    DENY_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NONE_FIELD_NUMBER: _ClassVar[int]
    allow: _containers.RepeatedScalarFieldContainer[str]
    deny: _containers.RepeatedScalarFieldContainer[str]
    attributes: _struct_pb2.Struct
    allow_none: bool
    def __init__(self, allow: _Optional[_Iterable[str]] = ..., deny: _Optional[_Iterable[str]] = ..., attributes: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., allow_none: _Optional[bool] = ...) -> None: ...

class MemorySettings(_message.Message):
    __slots__ = ("weight", "temperature", "keys")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    weight: float
    temperature: float
    keys: int
    def __init__(self, weight: _Optional[float] = ..., temperature: _Optional[float] = ..., keys: _Optional[int] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("texts", "k", "fields", "model", "filter", "memory", "explain", "timeout_ms", "min_probability")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    k: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    model: str
    filter: Filter
    memory: MemorySettings
    explain: bool
    timeout_ms: int
    min_probability: float
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., k: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ..., memory: _Optional[_Union[MemorySettings, _Mapping]] = ..., explain: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., min_probability: _Optional[float] = ...) -> None: ...

class Voter(_message.Message):
    __slots__ = ("uid", "text", "weight")
    UID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    uid: str
    text: str
    weight: float
    def __init__(self, uid: _Optional[str] = ..., text: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("uid", "text", "label_id", "score", "attributes", "completed", "voters", "parts", "probability")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LABEL_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    uid: str
    text: str
    label_id: int
    score: float
    attributes: _struct_pb2.Struct
    completed: bool
    voters: _containers.RepeatedCompositeFieldContainer[Voter]
    parts: _containers.ScalarMap[str, float]
    probability: float
    def __init__(self, uid: _Optional[str] = ..., text: _Optional[str] = ..., label_id: _Optional[int] = ..., score: _Optional[float] = ..., attributes: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., completed: _Optional[bool] = ..., voters: _Optional[_Iterable[_Union[Voter, _Mapping]]] = ..., parts: _Optional[_Mapping[str, float]] = ..., probability: _Optional[float] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("answers", "truncated")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    truncated: bool
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("model", "version", "label_log", "request_id", "took_ms", "results")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_LOG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    label_log: int
    request_id: str
    took_ms: float
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., label_log: _Optional[int] = ..., request_id: _Optional[str] = ..., took_ms: _Optional[float] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...
