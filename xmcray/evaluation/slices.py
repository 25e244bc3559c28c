"""The metrics of groups of queries: those that have the same value of an attribute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xmcray.errors import DataError
from xmcray.evaluation.evaluate import Evaluation, bootstrap_intervals
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues

MAX_VALUES = 100  # of one attribute


def with_slices(
    evaluation: Evaluation,
    attributes: Sequence[Mapping[str, Any]],
    resamples: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """An evaluation with the main metrics of each value of each attribute.

    Args:
        evaluation: of some queries.
        attributes: by name, of each query that counted, in the order of `evaluation.query_ids`.
        resamples: number of resamples of the bootstrap.
        seed: of the bootstrap.

    Raises:
        DataError: no query has an attribute, or one has too many values.
    """
    names = sorted(set[str]().union(*attributes))
    if not names:
        raise DataError(
            f"none of {evaluation.queries} queries has an attribute, expected uids of this split"
        )
    slices = []
    for name in names:
        values = [own.get(name) for own in attributes]
        # Queries without the attribute are a slice too, the last one.
        distinct = sorted({value for value in values if value is not None}, key=str)
        if len(distinct) > MAX_VALUES:
            raise DataError(
                f"attribute {name!r} has {len(distinct):,} values, expected at most {MAX_VALUES};"
                " put them into groups"
            )
        if None in values:
            distinct.append(None)
        for value in distinct:
            members = np.array([own_value == value for own_value in values])
            per_query = QueryValues(
                evaluation.per_query.gain_QM[members], evaluation.per_query.divisor_QM[members]
            )
            gains = per_query.gain_QM.sum(0, dtype=np.float64)
            divisors = per_query.divisor_QM.sum(0, dtype=np.float64)
            row = {
                "attribute": name,
                "value": value,
                "queries": int(members.sum()),
                **dict(zip(MAIN_METRICS, (gains / divisors).tolist(), strict=True)),
                "intervals": bootstrap_intervals(per_query, resamples, seed),
            }
            slices.append(row)
    return dataclasses.replace(evaluation, slices=slices)
