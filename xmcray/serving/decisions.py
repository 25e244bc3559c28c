"""What coordinator and replicas send each other: decisions, operations, and what a replica has."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xmcray.serving.log_place import Commit, LogPlace


@dataclass(frozen=True, slots=True)
class ServedBundle:
    """A bundle, and where it stands in the label log.

    Attributes:
        path: folder or URL.
        version: SHA-256 that the bundle must have.
        place: place in the log from which operations are applied to it.
    """

    path: str
    version: str
    place: LogPlace


@dataclass(frozen=True, slots=True)
class Decision:
    """What is served under a name.

    Attributes:
        bundle: the bundle that answers.
        loading: the bundle that replicas load alongside.
        epoch: differs from that of every other decision.
    """

    bundle: ServedBundle
    loading: ServedBundle | None = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica has of one model.

    Attributes:
        epoch: the last decision that it carried out.
        answering: the version that answers.
        places: by version that is loaded, its place in the label log.
        failure: why the bundle that is to be loaded alongside cannot be loaded; "" if it can.
    """

    epoch: str = ""
    answering: str = ""
    places: Mapping[str, LogPlace] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica has.

    Attributes:
        replica: name of the replica.
        number: larger than that of every earlier report of this replica. Calls over Ray Serve may
            overtake each other.
        states: by model, what the replica has.
    """

    replica: str
    number: int
    states: Mapping[str, ReplicaState]


@dataclass(frozen=True, slots=True)
class Update:
    """What a replica is to carry out.

    Attributes:
        decision: the newest decision.
        last: number of the last operation that there is.
        commits: by version that lacks operations, the next ones, as many as are sent at once.
        stale: versions of the replica that have other operations than the log.
    """

    decision: Decision
    last: int
    commits: Mapping[str, Sequence[Commit]]
    stale: Sequence[str] = ()


Follow = Callable[[Report, float], Awaitable[dict[str, Update]]]
