"""Answers as users see them: labels with names, and the training queries that voted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.label_index import LabelIndex
from xmcray.types import TopLabels


@dataclass(frozen=True, slots=True)
class VotingQuery:
    """A training query that voted for an answer.

    Attributes:
        uid: of the query.
        text: of the query.
        weight: its part of the answer's probability.
    """

    uid: str
    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class FoundLabel:
    """One answer.

    Attributes:
        label_id: source id, the label's line in the user's files.
        uid: of the label.
        text: of the label.
        score: inner product of query and label vector. With a memory the probability; above 1 for a
            label that joined later and is nearer than all keys; the inner product minus 2 for a
            label without votes that only completes the list.
        voters: with `explain`, the training queries that voted for the label, the largest weight
            first. The vote of the label's own text is the rest of the probability.
    """

    label_id: int
    uid: str
    text: str
    score: float
    voters: tuple[VotingQuery, ...] | None = None


Voters = Sequence[Sequence[tuple[VotingQuery, ...]]]  # by query and place in its list of answers


def named_answers(
    top: TopLabels, labels: LabelIndex, voters: Voters | None
) -> list[list[FoundLabel]]:
    """Gives the answers to each query their names.

    Args:
        top: source ids and scores of B queries.
        labels: knows uids and texts.
        voters: of each answer; None if they are not wanted.
    """
    # All queries in one look-up. The id -1 of a missing answer borrows the name of label 0 and is
    # skipped below.
    uids, texts = labels.uids_and_texts(np.maximum(top.ids, 0).ravel())
    scores = top.scores.tolist()
    answers = []
    for query, label_ids in enumerate(top.ids.tolist()):
        found = []
        for place, label_id in enumerate(label_ids):
            if label_id < 0:
                continue
            position = query * top.width + place
            found.append(
                FoundLabel(
                    label_id,
                    uids[position],
                    texts[position],
                    scores[query][place],
                    voters[query][place] if voters else None,
                )
            )
        answers.append(found)
    return answers
