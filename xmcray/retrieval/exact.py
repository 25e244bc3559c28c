"""Exact top-k by inner product, blocked so that memory stays bounded, with ties decided by id.

A score and an id travel as one int64 key whose order is "higher score first, then lower id". Every
selection is then a plain top-k of keys, which has no ties, so the answer does not depend on block
sizes or on the order of the rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from xmcray.retrieval.answerable import AnswerableRows
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

# Queries and rows of one block: 4 MiB of scores on a CPU, which stay near its caches, and 512 MiB
# on a GPU.
CPU_BLOCK = (256, 1 << 12)
GPU_BLOCK = (1024, 1 << 17)
GROUP = 32  # columns of which only the maximum is compared at first
LOW_BITS = 0x7FFFFFFF


def exact_search(
    vectors: Float32Array | Tensor,
    queries: Float32Array,
    k: int,
    ids: Int64Array | None = None,
    hidden: Ragged | None = None,
) -> TopLabels:
    """The k rows with the largest inner product, best first; equal scores by lower id.

    Args:
        vectors: float32 [n, D], possibly memory-mapped, or a tensor (of any float type) on the
            device to compute on.
        queries: float32 [Q, D].
        k: answers per query, at least 1.
        ids: int64 [n] below 2**31, ids of the rows in the answer; positions if not given. A row
            with a negative id is no answer; the scores of other rows keep their bits.
        hidden: Q rows of positions in `vectors` that must not be answered.
    Returns:
        Ids int64 [Q, k] and scores float32 [Q, k]; -1 and -inf where there is no further row.
    """
    rows = AnswerableRows.of(len(vectors), len(queries), ids, hidden)
    return from_keys(exact_keys(vectors, queries, empty_keys(len(queries), k), rows))


def exact_keys(
    vectors: Float32Array | Tensor,
    queries: Float32Array,
    best_QK: Tensor,
    rows: AnswerableRows,
) -> Tensor:
    """As `exact_search`, but with keys int64 [Q, K], and merged with the best keys so far.

    Args:
        vectors: as in `exact_search`.
        queries: float32 [Q, D].
        best_QK: int64 [Q, K], keys that compete with these rows; `empty_keys` at first.
        rows: ids and hidden positions of the rows in `vectors`.
    """
    # Memory-mapped vectors stay on disk: a block is read when it is multiplied.
    vector_ND = vectors if isinstance(vectors, Tensor) else as_tensor(vectors)
    num_vectors = len(vector_ND)
    device = vector_ND.device
    id_N = as_tensor(rows.ids, np.int64).to(device)
    # Rows without an id are scored like all others and masked afterwards: leaving them out would
    # change the shape of the product, and with it the last bits of other scores.
    no_answer_N = id_N < 0
    some_no_answer = bool(no_answer_N.any())
    query_QD = as_tensor(queries)
    block_queries, block_rows = GPU_BLOCK if device.type == "cuda" else CPU_BLOCK
    # Few rows need no full block, but whole groups.
    num_groups = math.ceil(num_vectors / GROUP)
    block_rows = min(block_rows, num_groups * GROUP)
    keys = [best_QK[:0]]
    for start in range(0, len(query_QD), block_queries):
        query_BD = query_QD[start : start + block_queries].to(device)
        best_BK = best_QK[start : start + block_queries].to(device)
        hidden = rows.hidden.slice(start, start + len(query_BD))
        # One buffer for all blocks: fresh memory costs more than the product that fills it.
        score_BR = query_BD.new_full((len(query_BD), block_rows), -torch.inf)
        for first in range(0, num_vectors, max(1, block_rows)):
            vector_RD = vector_ND[first : first + block_rows].to(query_BD.dtype)
            filled = len(vector_RD)  # the last block may be shorter
            last = first + filled
            if filled == block_rows:
                torch.mm(query_BD, vector_RD.T, out=score_BR)
            else:
                score_BR.fill_(-torch.inf)
                score_BR[:, :filled] = query_BD @ vector_RD.T
            if some_no_answer:
                score_BR[:, :filled].masked_fill_(no_answer_N[first:last], -torch.inf)
            if len(hidden.values):
                _hide(score_BR, hidden, first)
            best_BK = _improve(best_BK, score_BR, id_N[first:last])
        # Queries are independent, so their keys leave the device as soon as they are final.
        keys.append(best_BK.cpu())
    return torch.cat(keys)


def as_tensor(array: Float32Array | Int64Array, kind: type[np.generic] = np.float32) -> Tensor:
    """A tensor over the same memory if type and layout allow; read-only memory is copied."""
    array = np.ascontiguousarray(array, dtype=kind)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_keys(score: Tensor, ids: Tensor) -> Tensor:
    """Packs scores and ids into sort keys; larger is better.

    Args:
        score: float32; NaN counts as -inf.
        ids: int64, broadcastable to `score`; a row with a negative id counts as -inf.
    """
    no_answer = score.isnan() | (ids < 0)
    # Adding 0.0 turns -0.0 into 0.0, so that both zeros are one score.
    score = torch.where(no_answer, -torch.inf, score) + 0.0
    bits = score.contiguous().view(torch.int32)
    # IEEE floats order like integers once the magnitude bits of negative ones are inverted. The
    # sign bit, shifted through the word, is the mask that does it for negative ones only.
    ordered = bits ^ ((bits >> 31) & LOW_BITS)
    # The lower half holds the id in reverse, so that the lower id has the larger key.
    return (ordered.to(torch.int64) << 32) | (LOW_BITS - ids)


def from_keys(keys: Tensor) -> TopLabels:
    """Unpacks sort keys into ids and scores; id -1 where the score is -inf."""
    score = scores_of(keys)
    ids = torch.where(score == -torch.inf, -1, LOW_BITS - (keys & LOW_BITS))
    return TopLabels(ids.numpy(), score.numpy())


def scores_of(keys: Tensor) -> Tensor:
    """The scores in keys: the inverse of `to_keys`."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & LOW_BITS)).view(torch.float32)


def empty_keys(num_queries: int, k: int) -> Tensor:
    """int64 [num_queries, k], the keys of "no answer"."""
    worst_score = torch.tensor([-torch.inf])
    worst_id = torch.tensor([LOW_BITS])
    # Expanding shares the memory of one key.
    return to_keys(worst_score, worst_id).expand(num_queries, k)


def with_new_keys(best_BK: Tensor, key_P: Tensor, query_P: Tensor, slot_P: Tensor) -> Tensor:
    """The best K keys of each query among those so far and new ones.

    Args:
        best_BK: int64 [B, K], the best keys so far.
        key_P: int64 [P], new keys.
        query_P: int64 [P], the query of each new key.
        slot_P: int64 [P], the place of each key among the new keys of its query.
    """
    width = int(slot_P.max()) + 1 if len(slot_P) else 0
    new_BW = empty_keys(len(best_BK), width).to(best_BK.device, copy=True)
    new_BW[query_P, slot_P] = key_P
    competing = torch.cat([best_BK, new_BW], dim=1)
    return competing.topk(best_BK.shape[1], dim=1).values


def row_slots(row_P: Tensor, num_rows: int) -> Tensor:
    """int64 [P], the place of each entry in its row, for entries in ascending order of rows.

    Args:
        row_P: int64 [P], ascending row numbers.
        num_rows: B.
    """
    count_B = torch.bincount(row_P, minlength=num_rows)
    first_B = count_B.cumsum(0) - count_B
    return torch.arange(len(row_P), device=row_P.device) - first_B[row_P]


def _improve(best_BK: Tensor, score_BR: Tensor, id_R: Tensor) -> Tensor:
    """The best K keys of `best_BK` and a block of scores.

    After the first blocks few scores reach the K-th best so far. Maxima of groups find them in one
    pass, and they alone become keys.
    """
    k = best_BK.shape[1]
    num_queries, num_rows = score_BR.shape
    # A score has to reach the K-th best so far. At first that is -inf.
    bar_B = scores_of(best_BK[:, -1])
    query_H, group_H = _promising_groups(score_BR, bar_B)
    if len(query_H) > num_queries * num_rows // GROUP // 2 and k <= num_rows:
        # Most groups are promising, as in the first block: a top-k of the block raises the bar.
        torch.nan_to_num_(score_BR, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bar_B = torch.maximum(bar_B, score_BR.topk(k, dim=1).values[:, -1])
        query_H, group_H = _promising_groups(score_BR, bar_B)
    if len(query_H) == 0:
        return best_BK
    # H promising groups of GROUP scores each; P of those scores are hits.
    score_HR = score_BR.view(num_queries, num_rows // GROUP, GROUP)[query_H, group_H]
    reached_HR = (score_HR >= bar_B[query_H, None]) & (score_HR > -torch.inf)
    hit_P, place_P = reached_HR.nonzero(as_tuple=True)
    query_P = query_H[hit_P]
    row_P = group_H[hit_P] * GROUP + place_P
    key_P = to_keys(score_HR[hit_P, place_P], id_R[row_P])
    # `nonzero` lists the hits query by query, as `row_slots` needs them.
    slot_P = row_slots(query_P, num_queries)
    return with_new_keys(best_BK, key_P, query_P, slot_P)


def _promising_groups(score_BR: Tensor, bar_B: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (query, group of columns) in which some score may reach the query's bar."""
    max_BG = score_BR.view(len(score_BR), -1, GROUP).amax(dim=2)
    # Written as a negation because the maximum of a group with a NaN is NaN.
    hopeless_BG = (max_BG < bar_B[:, None]) | (max_BG == -torch.inf)
    return (~hopeless_BG).nonzero(as_tuple=True)  # type: ignore[return-value]


def _hide(score_BR: Tensor, hidden: Ragged, first: int) -> None:
    """Masks the hidden positions that lie in a block of rows starting at `first`."""
    inside = (hidden.values >= first) & (hidden.values < first + score_BR.shape[1])
    query_P = torch.from_numpy(hidden.row_ids[inside]).to(score_BR.device)
    row_P = torch.from_numpy(hidden.values[inside] - first).to(score_BR.device)
    score_BR[query_P, row_P] = -torch.inf
