"""The losses as the papers write them, in loops over queries and labels: golden vectors of any seed.

Each function takes the inputs of a golden vector and returns what the vector expects; gradients are
those of autograd in float64. The first query has no positive where the loss allows that, and the
second one has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Vector = Mapping[str, npt.NDArray[Any]]
Results = dict[str, npt.NDArray[Any]]


def soft_plus(score: Tensor) -> Tensor:
    """log(1 + e^score)."""
    return torch.logaddexp(score, torch.zeros_like(score))


def of_scores(
    vector: Vector, loss_of_query: Callable[[Tensor, list[int], list[int]], Tensor]
) -> Results:
    """Mean over queries of a loss of the query's scores, its positives and its negatives."""
    score_BL = torch.tensor(vector["scores"], requires_grad=True)
    total = score_BL.sum() * 0
    for query, is_positive in enumerate(vector["positives"]):
        positives = np.flatnonzero(is_positive).tolist()
        negatives = np.flatnonzero(~is_positive).tolist()
        total = total + loss_of_query(score_BL[query], positives, negatives)
    loss = total / len(score_BL)
    loss.backward()
    assert score_BL.grad is not None
    return {"loss": loss.detach().numpy(), "grad_scores": score_BL.grad.numpy()}


def bce_full(vector: Vector) -> Results:
    """Binary cross-entropy over all labels."""

    def of_query(scores: Tensor, positives: list[int], negatives: list[int]) -> Tensor:
        return soft_plus(-scores[positives]).sum() + soft_plus(scores[negatives]).sum()

    return of_scores(vector, of_query)


def astra(vector: Vector) -> Results:
    """ASTRA, Eq. 2."""
    query_BD = torch.tensor(vector["queries"], requires_grad=True)
    row_LD = torch.tensor(vector["classifier"], requires_grad=True)
    total = query_BD.sum() * 0
    for query, is_positive in enumerate(vector["positives"]):
        positives = np.flatnonzero(is_positive)
        hard = vector["hard"][query]
        for label in positives:
            total = total + soft_plus(-(query_BD[query] @ row_LD[label]))
        for label in hard:
            total = total + soft_plus(query_BD[query] @ row_LD[label])
        for label in vector["pool"]:
            if label not in positives and label not in hard:
                total = total + float(vector["weight"]) * soft_plus(query_BD[query] @ row_LD[label])
    loss = total / len(query_BD)
    loss.backward()
    assert query_BD.grad is not None
    assert row_LD.grad is not None
    return {
        "loss": loss.detach().numpy(),
        "grad_queries": query_BD.grad.numpy(),
        "grad_classifier": row_LD.grad.numpy(),
    }


def softmax(vector: Vector) -> Results:
    """DEXML, Eq. 3."""
    tau = float(vector["tau"])

    def of_query(scores: Tensor, positives: list[int], _: list[int]) -> Tensor:
        return -(scores / tau).log_softmax(dim=0)[positives].sum()

    return of_scores(vector, of_query)


def decoupled(vector: Vector) -> Results:
    """DEXML, Eq. 5."""
    tau = float(vector["tau"])

    def of_query(scores: Tensor, positives: list[int], negatives: list[int]) -> Tensor:
        total = scores.sum() * 0
        for positive in positives:
            counted = (scores / tau)[[positive, *negatives]]
            total = total - counted.log_softmax(dim=0)[0]
        return total

    return of_scores(vector, of_query)


def soft_top_k(vector: Vector) -> Results:
    """DEXML, Eq. 6."""
    k = float(vector["k"])
    alpha = float(vector["alpha"])

    def of_query(scores: Tensor, positives: list[int], _: list[int]) -> Tensor:
        low = -scores.detach().max() - 40 / alpha
        high = -scores.detach().min() + 40 / alpha
        for _step in range(200):
            middle = (low + high) / 2
            if torch.sigmoid(alpha * (scores.detach() + middle)).sum() < k:
                low = middle
            else:
                high = middle
        # One step of Newton from the solution: its gradient is that of the implicit function.
        z = torch.sigmoid(alpha * (scores + low))
        slope = (alpha * z * (1 - z)).sum().detach()
        threshold = low - (z.sum() - k) / slope
        return soft_plus(-alpha * (scores[positives] + threshold)).sum()

    return of_scores(vector, of_query)


def psl(vector: Vector, is_normalised: bool) -> Results:
    """UniDEC's loss in both directions, each the mean over its anchors with a positive."""
    score_BP = torch.tensor(vector["scores"], requires_grad=True)
    tau = float(vector["tau"])
    weight = float(vector["lambda_"])

    def direction(scores: Tensor, is_positive: npt.NDArray[np.bool_]) -> Tensor:
        anchors = []
        for row, of_row in zip(scores / tau, is_positive, strict=True):
            positives = np.flatnonzero(of_row).tolist()
            if positives:
                terms = -row.log_softmax(dim=0)[positives]
                anchors.append(terms.mean() if is_normalised else terms.sum())
        return torch.stack(anchors).mean()

    to_labels = direction(score_BP, vector["positives"])
    to_queries = direction(score_BP.T, vector["positives"].T)
    loss = weight * to_labels + (1 - weight) * to_queries
    loss.backward()
    assert score_BP.grad is not None
    return {
        "loss_q2l": to_labels.detach().numpy(),
        "loss_l2q": to_queries.detach().numpy(),
        "loss": loss.detach().numpy(),
        "grad_scores": score_BP.grad.numpy(),
    }


def triplet_term(vector: Vector, positive: Tensor, negative: Tensor, inverted: bool) -> Tensor:
    """max(s_n - s_p + m, 0); a term that is 0 has no gradient (PRIME, Eq. 3, 13, 14)."""
    low = float(vector["gamma_min"])
    gap = positive - negative
    margin = gap.detach().abs().clamp(low, float(vector["gamma_max"]))
    if inverted and 0 < gap < low:
        gap = -gap
    term = margin - gap
    return term if term > 0 else gap.detach() * 0


def triplet_dynamic(vector: Vector, inverted: bool) -> Results:
    """Mean over the pairs of a positive and a negative."""

    def of_query(scores: Tensor, positives: list[int], negatives: list[int]) -> Tensor:
        total = scores.sum() * 0
        for positive in positives:
            for negative in negatives:
                term = triplet_term(vector, scores[positive], scores[negative], inverted)
                total = total + term / (len(positives) * len(negatives))
        return total

    return of_scores(vector, of_query)


def triplet_weighted(vector: Vector) -> Results:
    """One positive, the hardest negatives, and weights by their hardness (the released code)."""
    drawn = iter(vector["positive_index"].tolist())
    temperature = float(vector["weight_temperature"])

    def of_query(scores: Tensor, _: list[int], negatives: list[int]) -> Tensor:
        positive = scores[next(drawn)]
        by_hardness = sorted(negatives, key=lambda label: -scores[label].item())
        terms = []
        hardness = []
        for negative in by_hardness[: int(vector["num_negatives"])]:
            term = triplet_term(vector, positive, scores[negative], inverted=False)
            if term > 0:
                terms.append(term)
                hardness.append(scores[negative] / temperature)
        if not terms:
            return scores.sum() * 0
        weights = torch.stack(hardness).softmax(dim=0)
        if vector["weights_detached"]:
            weights = weights.detach()
        return (weights * torch.stack(terms)).sum()

    return of_scores(vector, of_query)


def rae_loss(vector: Vector) -> Results:
    """RAE-XMC, Eq. 10."""
    query_BD = torch.tensor(vector["queries"], requires_grad=True)
    label_PD = torch.tensor(vector["label_pool"], requires_grad=True)
    tau = float(vector["tau"])
    full = vector["positives_full"]
    total = query_BD.sum() * 0
    for query, column in enumerate(vector["picked_positive"]):
        scores = [query_BD[query] @ label_PD[column]]
        for place, label in enumerate(vector["pool_label_ids"]):
            if not full[query, label]:
                scores.append(query_BD[query] @ label_PD[place])
        shares_none = ~(full & full[query]).any(axis=1)
        scores += [query_BD[query] @ query_BD[other] for other in np.flatnonzero(shares_none)]
        total = total - (torch.stack(scores) / tau).log_softmax(dim=0)[0]
    loss = total / len(query_BD)
    loss.backward()
    assert query_BD.grad is not None
    assert label_PD.grad is not None
    return {
        "loss": loss.detach().numpy(),
        "grad_queries": query_BD.grad.numpy(),
        "grad_label_pool": label_PD.grad.numpy(),
    }


LOSSES: Mapping[str, Callable[[Vector], Results]] = {
    "bce_full": bce_full,
    "astra_bce_one": astra,
    "astra_bce_unbiased": astra,
    "softmax_tau0.05": softmax,
    "softmax_tau1.0": softmax,
    "decoupled_tau0.05": decoupled,
    "decoupled_tau1.0": decoupled,
    "softtopk_k3": soft_top_k,
    "softtopk_k5": soft_top_k,
    "psl_paln": lambda vector: psl(vector, is_normalised=True),
    "psl_pal": lambda vector: psl(vector, is_normalised=False),
    "triplet_dynamic": lambda vector: triplet_dynamic(vector, inverted=False),
    "triplet_dynamic_inverted": lambda vector: triplet_dynamic(vector, inverted=True),
    "triplet_weighted": triplet_weighted,
    "rae_loss": rae_loss,
}


def write_vectors(folder: Path, seed: int, num_queries: int = 7, num_labels: int = 19) -> None:
    """Vectors of another seed, with the names and fields of the committed ones.

    Args:
        folder: exists.
        seed: of the inputs.
        num_queries: rows of the scores.
        num_labels: columns of the scores.
    """
    random = np.random.default_rng(seed)
    shape = (num_queries, num_labels)
    positives = random.random(shape) < 0.2
    # Every query has a positive, which some losses need; then the two special ones.
    positives[np.arange(num_queries), random.integers(num_labels, size=num_queries)] = True
    edges = positives.copy()
    edges[0] = False
    edges[1] = True
    # Rounded scores have ties, also of a positive and a negative.
    scores = random.normal(size=shape).round(1)
    cosines = random.uniform(-0.2, 1.0, size=shape).round(2)
    query_BD = random.normal(size=(num_queries, 5))
    row_LD = random.normal(size=(num_labels, 5))
    hard = [random.permutation(np.flatnonzero(~row))[:3] for row in positives]
    drawn = [int(random.choice(np.flatnonzero(row))) for row in positives]

    margins = {"gamma_min": 0.1, "gamma_max": 0.3}
    sampled = {
        "queries": query_BD,
        "classifier": row_LD,
        "positives": positives,
        "hard": np.stack(hard),
        "pool": random.permutation(num_labels)[:6],
    }
    directions = {"scores": scores, "positives": edges, "tau": 0.05, "lambda_": 0.3}
    weighted = {
        # Without ties: which of two equal scores is among the hardest is not defined.
        "scores": random.uniform(-0.2, 1.0, size=shape),
        "positives": positives,
        "positive_index": np.array(drawn),
        "num_negatives": 4,
        "weight_temperature": 0.1,
        "weights_detached": bool(seed % 2),
    }
    pool_ids = np.unique([*drawn, *random.integers(num_labels, size=4)])
    queries = {
        "queries": query_BD / np.linalg.norm(query_BD, axis=1, keepdims=True),
        "label_pool": random.normal(size=(len(pool_ids), 5)) / 2,
        "pool_label_ids": pool_ids,
        "positives_full": positives,
        "picked_positive": np.searchsorted(pool_ids, drawn),
        "tau": 0.04,
    }
    inputs: dict[str, dict[str, Any]] = {
        "bce_full": {"scores": scores, "positives": edges},
        "astra_bce_one": {**sampled, "weight": 1.0},
        "astra_bce_unbiased": {**sampled, "weight": num_labels / 6},
        "softtopk_k3": {"scores": scores, "positives": edges, "k": 3, "alpha": 10.0},
        "softtopk_k5": {"scores": scores, "positives": edges, "k": 5, "alpha": 2.0},
        "psl_paln": directions,
        "psl_pal": directions,
        "triplet_dynamic": {"scores": cosines, "positives": edges, **margins},
        "triplet_dynamic_inverted": {"scores": cosines, "positives": edges, **margins},
        "triplet_weighted": {**weighted, **margins},
        "rae_loss": queries,
    }
    for tau in (0.05, 1.0):
        for name in ("softmax", "decoupled"):
            inputs[f"{name}_tau{tau}"] = {"scores": scores, "positives": edges, "tau": tau}
    for name, vector in inputs.items():
        arrays = {key: np.asarray(value) for key, value in vector.items()}
        np.savez(folder / f"{name}.npz", **arrays, **LOSSES[name](arrays))
