"""Exact top-k by inner product, blocked so that memory stays bounded, with ties decided by id.

A score and an id travel as one int64 key whose order is "higher score first, then lower id". Every selection is then
a plain top-k of keys, which has no ties, so the answer does not depend on block sizes or on the order of the rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xmcray.types import Float32Array, Int64Array, Ragged

# Queries and rows of one block: 4 MiB of scores on a CPU (they stay near its caches), 512 MiB on a GPU.
CPU_BLOCK, GPU_BLOCK = (256, 1 << 12), (1024, 1 << 17)
GROUP = 32
LOW_BITS = 0x7FFFFFFF


def exact_search(
    vectors: Float32Array | Tensor,
    queries: Float32Array,
    k: int,
    ids: Int64Array | None = None,
    hidden: Ragged | None = None,
) -> tuple[Float32Array, Int64Array]:
    """The k rows with the largest inner product, best first; equal scores by lower id.

    Args:
        vectors: float32 [n, D], possibly memory-mapped, or a tensor (of any float type) on the device to compute on.
        queries: float32 [Q, D].
        k: answers per query, at least 1.
        ids: int64 [n] below 2**31, what the rows are called in the answer; their positions if not given. A row with a
            negative one is never answered, and leaves the scores of the others as they are, bit for bit.
        hidden: Q rows of positions in `vectors` that must not be answered.
    Returns:
        Scores float32 [Q, k] and ids int64 [Q, k]; -inf and -1 where there is no further row.
    """
    return from_keys(exact_keys(vectors, queries, nothing(len(queries), k), ids, hidden))


def exact_keys(
    vectors: Float32Array | Tensor,
    queries: Float32Array,
    best_QK: Tensor,
    ids: Int64Array | None = None,
    hidden: Ragged | None = None,
) -> Tensor:
    """As `exact_search`, but keys int64 [Q, K], of the best among these rows and `best_QK`, what is known already."""
    vector_ND = vectors if isinstance(vectors, Tensor) else as_tensor(vectors)
    device = vector_ND.device
    id_N = (
        torch.arange(len(vector_ND), device=device)
        if ids is None
        else as_tensor(ids, np.int64).to(device)
    )
    nameless_N = id_N < 0
    some_nameless = bool(nameless_N.any())
    query_QD = as_tensor(queries)
    num_queries, num_rows = GPU_BLOCK if device.type == "cuda" else CPU_BLOCK
    num_rows = min(num_rows, -(-len(vector_ND) // GROUP) * GROUP)  # few rows need no full block
    keys = [best_QK[:0]]
    for start in range(0, len(query_QD), num_queries):
        query_BD = query_QD[start : start + num_queries].to(device)
        best_BK = best_QK[start : start + num_queries].to(device)
        hide = hidden.slice(start, start + len(query_BD)) if hidden is not None else None
        # One buffer for all blocks: fresh memory costs more than the product that fills it.
        score_BR = query_BD.new_full((len(query_BD), num_rows), -torch.inf)
        for first in range(0, len(vector_ND), max(1, num_rows)):
            vector_RD = vector_ND[first : first + num_rows].to(query_BD.dtype)
            if len(vector_RD) == num_rows:
                torch.mm(query_BD, vector_RD.T, out=score_BR)
            else:
                score_BR.fill_(-torch.inf)[:, : len(vector_RD)] = query_BD @ vector_RD.T
            if some_nameless:
                score_BR[:, : len(vector_RD)].masked_fill_(
                    nameless_N[first : first + num_rows], -torch.inf
                )
            if hide is not None:
                _hide(score_BR, hide, first)
            best_BK = _improve(best_BK, score_BR, id_N[first : first + num_rows])
        keys.append(best_BK.cpu())
    return torch.cat(keys)


def as_tensor(array: Float32Array | Int64Array, kind: type[np.generic] = np.float32) -> Tensor:
    """A tensor over the same memory where type and layout allow; read-only memory is copied, as torch asks."""
    array = np.ascontiguousarray(array, dtype=kind)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_keys(score: Tensor, ids: Tensor) -> Tensor:
    """int64 keys of float32 scores and broadcastable int64 ids; larger is better. NaN and ids below 0 count as -inf."""
    score = (
        torch.where(score.isnan() | (ids < 0), -torch.inf, score) + 0.0
    )  # + 0.0 turns -0.0 into 0.0
    bits = score.contiguous().view(torch.int32)
    # IEEE floats order like integers once the magnitude bits of negative ones are inverted.
    return ((bits ^ ((bits >> 31) & LOW_BITS)).to(torch.int64) << 32) | (LOW_BITS - ids)


def from_keys(keys: Tensor) -> tuple[Float32Array, Int64Array]:
    """Scores and ids of keys; id -1 where the score is -inf."""
    score = scores_of(keys)
    ids = torch.where(score == -torch.inf, -1, LOW_BITS - (keys & LOW_BITS))
    return score.numpy(), ids.numpy()


def scores_of(keys: Tensor) -> Tensor:
    """The scores in keys."""
    bits = (keys >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & LOW_BITS)).view(torch.float32)


def nothing(num_queries: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [num_queries, k], the keys of "no answer"."""
    worst = to_keys(torch.tensor([-torch.inf]), torch.tensor([LOW_BITS]))
    return worst.to(device).expand(num_queries, k)


def _improve(best_BK: Tensor, score_BR: Tensor, id_R: Tensor) -> Tensor:
    """The best K of `best_BK` and a block of scores.

    After the first blocks few scores reach the K-th best so far. Maxima of groups find them in one pass, and they alone
    become keys.
    """
    k, (num_queries, num_rows) = best_BK.shape[1], score_BR.shape
    bar_B = scores_of(best_BK[:, -1])
    query_H, group_H = _groups(score_BR, bar_B)
    if len(query_H) > num_queries * num_rows // GROUP // 2 and k <= num_rows:
        torch.nan_to_num_(score_BR, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bar_B = torch.maximum(bar_B, score_BR.topk(k, dim=1).values[:, -1])
        query_H, group_H = _groups(score_BR, bar_B)
    if len(query_H) == 0:
        return best_BK
    score_HR = score_BR.view(num_queries, num_rows // GROUP, GROUP)[query_H, group_H]
    hit_P, place_P = ((score_HR >= bar_B[query_H, None]) & (score_HR > -torch.inf)).nonzero(
        as_tuple=True
    )
    query_P, row_P = query_H[hit_P], group_H[hit_P] * GROUP + place_P
    count_B = torch.bincount(query_P, minlength=num_queries)
    slot_P = (
        torch.arange(len(query_P), device=query_P.device) - (count_B.cumsum(0) - count_B)[query_P]
    )
    new_BW = nothing(num_queries, int(count_B.max()), best_BK.device).clone()
    new_BW[query_P, slot_P] = to_keys(score_HR[hit_P, place_P], id_R[row_P])
    return torch.cat([best_BK, new_BW], dim=1).topk(k, dim=1).values


def _groups(score_BR: Tensor, bar_B: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (query, group of columns) in which some score may reach the bar."""
    max_BG = score_BR.view(len(score_BR), -1, GROUP).amax(dim=2)
    # Written as a negation because the maximum of a group with a NaN is NaN.
    return (~((max_BG < bar_B[:, None]) | (max_BG == -torch.inf))).nonzero(as_tuple=True)  # type: ignore[return-value]


def _hide(score_BR: Tensor, hide: Ragged, first: int) -> None:
    inside = (hide.values >= first) & (hide.values < first + score_BR.shape[1])
    query_P = torch.from_numpy(hide.row_ids[inside])
    row_P = torch.from_numpy(hide.values[inside] - first)
    score_BR[query_P.to(score_BR.device), row_P.to(score_BR.device)] = -torch.inf
