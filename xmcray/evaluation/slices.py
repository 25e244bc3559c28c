"""The metrics of groups of queries: those that have the same value of an attribute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xmcray.errors import DataError
from xmcray.evaluation.evaluate import Evaluation, bootstrap_intervals
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues
from xmcray.types import BoolArray

MAX_VALUES = 100  # of one attribute


def with_slices(
    evaluation: Evaluation,
    attributes: Sequence[Mapping[str, Any]],
    resamples: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """An evaluation with the main metrics of each value of each attribute.

    Args:
        evaluation: the evaluation of some queries.
        attributes: attributes by name of each query that counted, in the order of
            `evaluation.query_ids`.
        resamples: number of resamples of the bootstrap.
        seed: seed of the bootstrap.

    Raises:
        DataError: no query has an attribute, or one has too many values.
    """
    slices = []
    for name in _names(attributes):
        key_by_query = [_key(own.get(name)) for own in attributes]
        for key in _distinct_keys(name, key_by_query):
            is_member_Q = np.array([own_key == key for own_key in key_by_query])
            _, value = key
            row = {
                "attribute": name,
                "value": value,
                "queries": int(is_member_Q.sum()),
                **_metrics_of(evaluation.per_query, is_member_Q, resamples, seed),
            }
            slices.append(row)
    return dataclasses.replace(evaluation, slices=slices)


def check_attributes(attributes: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError as `with_slices` would, so that nothing is measured in vain.

    Args:
        attributes: attributes by name of each query that may count.
    """
    for name in _names(attributes):
        _distinct_keys(name, [_key(own.get(name)) for own in attributes])


def _names(attributes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all attributes, in order; raises DataError if there is none."""
    names = sorted(set[str]().union(*attributes))
    if not names:
        raise DataError(
            f"none of {len(attributes)} queries has an attribute, expected uids of this split"
        )
    return names


def _key(value: Any) -> tuple[bool, Any]:
    """What tells a value from others: to Python, True and 1 are equal."""
    return isinstance(value, bool), value


# The key of queries that do not have the attribute.
_ABSENT = _key(None)


def _distinct_keys(name: str, key_by_query: Sequence[tuple[bool, Any]]) -> list[tuple[bool, Any]]:
    """The values of an attribute in order, as `_key` has them; last that of queries without it.

    Raises:
        DataError: there are too many.
    """
    present = set(key_by_query) - {_ABSENT}
    # Values of other types may read alike, as 1 and "1" do.
    distinct = sorted(present, key=lambda key: (str(key[1]), repr(key[1])))
    if len(distinct) > MAX_VALUES:
        raise DataError(
            f"attribute {name!r} has {len(distinct):,} values, expected at most {MAX_VALUES};"
            " put them into groups"
        )
    if _ABSENT in key_by_query:
        distinct.append(_ABSENT)
    return distinct


def _metrics_of(
    per_query: QueryValues, is_member_Q: BoolArray, resamples: int, seed: int
) -> dict[str, Any]:
    """The main metrics of some of the queries, with their intervals."""
    members = QueryValues(per_query.gain_QM[is_member_Q], per_query.divisor_QM[is_member_Q])
    gains = members.gain_QM.sum(axis=0)
    divisors = members.divisor_QM.sum(axis=0)
    values = (gains / divisors).tolist()
    metrics: dict[str, Any] = dict(zip(MAIN_METRICS, values, strict=True))
    metrics["intervals"] = bootstrap_intervals(members, resamples, seed)
    return metrics
