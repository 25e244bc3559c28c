"""Answers as users see them: labels with names, and the training queries that voted for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.label_index import LabelIndex
from xmcray.types import TopLabels


@dataclass(frozen=True, slots=True)
class VotingQuery:
    """A training query that voted for an answer.

    Attributes:
        uid: names the query in the user's files.
        text: its text.
        weight: its part of the answer's score.
    """

    uid: str
    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class FoundLabel:
    """One answer.

    Attributes:
        label_id: source id, the label's line in the user's files.
        uid: names the label in the user's files.
        text: its text.
        score: inner product of query and label vector. With a memory the share of the votes; above 1
            for a label that joined later and is nearer than all keys, or if votes count by
            relevance (`data.relevance`); the inner product minus 2 for a label without votes, which
            follows those with votes.
        probability: that the label is relevant (calibration.py); None if the bundle is not
            calibrated.
        voters: with `explain`, the training queries that voted for the label, the largest weight
            first. The vote of the label's own text is the rest of the score.
        parts: with `explain`, how much each part of a fused bundle added to the score; None for
            other bundles.
    """

    label_id: int
    uid: str
    text: str
    score: float
    probability: float | None = None
    voters: tuple[VotingQuery, ...] | None = None
    parts: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a label is an answer; see `FoundLabel`."""

    voters: tuple[VotingQuery, ...] = ()
    parts: Mapping[str, float] | None = None


AllReasons = Sequence[Sequence[Reasons]]  # by query and place in its list of answers


def named_voters(
    votes: Sequence[tuple[int, float]], names: Mapping[int, tuple[str, str]]
) -> tuple[VotingQuery, ...]:
    """Training queries with their names.

    Args:
        votes: row of the memory and weight of each voter.
        names: uid and text by row.
    """
    return tuple(VotingQuery(*names[row], weight) for row, weight in votes)


def at_least(labels: Sequence[FoundLabel], min_probability: float) -> list[FoundLabel]:
    """The answers that are probable enough, in their order; one without a probability is not."""
    # Probabilities are float32, as in `TopLabels.at_least`.
    least = float(np.float32(min_probability))
    return [
        label for label in labels if label.probability is not None and label.probability >= least
    ]


def named_answers(
    top: TopLabels, labels: LabelIndex, reasons: AllReasons | None
) -> list[list[FoundLabel]]:
    """Gives the answers to each query their names.

    Args:
        top: source ids, scores and maybe probabilities of B queries.
        labels: knows uids and texts.
        reasons: why each answer is one; None if that is not wanted.
    """
    # All queries in one look-up. The id -1 of a missing answer borrows the name of label 0 and is
    # skipped below.
    uids, texts = labels.uids_and_texts(np.maximum(top.ids, 0).ravel())
    names = zip(uids, texts, strict=True)
    scores = top.scores.tolist()
    probabilities = None if top.probabilities is None else top.probabilities.tolist()
    answers: list[list[FoundLabel]] = []
    for query, label_ids in enumerate(top.ids.tolist()):
        answers.append([])
        for place, label_id in enumerate(label_ids):
            uid, text = next(names)
            probability = None if probabilities is None else probabilities[query][place]
            label = FoundLabel(label_id, uid, text, scores[query][place], probability)
            if reasons is not None:
                why = reasons[query][place]
                label = dataclasses.replace(label, voters=why.voters, parts=why.parts)
            if label_id >= 0:
                answers[-1].append(label)
    return answers
