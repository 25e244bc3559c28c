"""What coordinator and replicas send each other: decisions, operations, and what a replica has."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xmcray.serving.schema import Operation


@dataclass(frozen=True, slots=True)
class Decision:
    """What is served under a name.

    Attributes:
        bundle: folder or URL.
        version: SHA-256 that the bundle must have.
        loading: bundle and version that replicas load alongside.
        epoch: differs from that of every other decision.
    """

    bundle: str
    version: str
    loading: tuple[str, str] | None = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica has of one model.

    Attributes:
        epoch: the last decision that it carried out.
        answering: the version that answers.
        versions: the versions that are loaded.
        number: the last operation that all of them have; -1 if none is loaded.
    """

    epoch: str = ""
    answering: str = ""
    versions: tuple[str, ...] = ()
    number: int = -1


@dataclass(frozen=True, slots=True)
class Update:
    """What a replica is to carry out.

    Attributes:
        decision: the newest decision.
        last: number of the last operation that there is.
        since: number of the operation before the first one of `operations`.
        operations: operations that the replica lacks, as many as are sent at once.
    """

    decision: Decision
    last: int
    since: int
    operations: Sequence[Operation]


Follow = Callable[[str, Mapping[str, ReplicaState], float], Awaitable[dict[str, Update]]]
