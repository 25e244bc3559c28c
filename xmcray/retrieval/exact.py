"""Exact top-k by inner product, blocked so that memory stays bounded, with ties decided by id.

A score and an id travel as one int64 key whose order is "higher score first, then lower id". Every
selection is then a plain top-k of keys, which has no ties, so the answer does not depend on block
sizes or on the order of the rows.

Letters of axes here, in addition to those in types.py:

    Q  all queries       B  queries of one block         R  rows of one block
    G  groups of rows    H  groups that may have a hit   J  rows of one group (GROUP)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray.retrieval import few_queries
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

# Queries and rows of one block: 4 MiB of scores on a CPU, which stay near its caches, and 512 MiB
# on a GPU.
CPU_BLOCK = (256, 1 << 12)
GPU_BLOCK = (1024, 1 << 17)
CANDIDATE_FLOATS = 1 << 22  # of vectors gathered at once
GROUP = 32  # columns of which only the maximum is compared at first
LOW_BITS = 0x7FFFFFFF
Bits = TypeVar("Bits", Tensor, npt.NDArray[np.int32])


def exact_device_bytes(num_rows: int, dim: int) -> int:
    """Bytes of a GPU that an exact search takes at its largest, without CUDA's own.

    Args:
        num_rows: rows that are searched, float32 [n, D].
        dim: D.
    """
    # Its float32 vector and its int64 id.
    row_bytes = 4 * dim + 8
    return num_rows * row_bytes + device_score_bytes(num_rows)


def device_score_bytes(num_rows: int) -> int:
    """Bytes of a GPU that the scores of an exact search take at their largest."""
    block_queries, block_rows = GPU_BLOCK
    # The scores of a block, and as much again for what is selected from them.
    return 2 * 4 * block_queries * min(block_rows, num_rows + GROUP)


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
    vector_ND = vectors if isinstance(vectors, Tensor) else as_tensor(vectors)
    rows_for_faiss = few_queries.faiss_rows(vector_ND)
    if rows_for_faiss is not None and hidden is None and len(queries) == 1:
        answer = few_queries.answer_at_once(rows_for_faiss, queries, k, rows.ids)
        if answer is not None:
            return answer
    no_keys = empty_keys(len(queries), k)
    best_keys = exact_keys(vector_ND, queries, no_keys, rows)
    return from_keys(best_keys)


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
    if few_queries.is_faster(vector_ND, len(queries)):
        return _few_query_keys(vector_ND, queries, best_QK, rows)
    query_QD = as_tensor(queries)
    num_vectors = len(vector_ND)
    device = vector_ND.device
    id_N = as_tensor(rows.ids, np.int64).to(device)
    # Rows without an id are scored like all others and masked afterwards: leaving them out would
    # change the shape of the product, and with it the last bits of other scores.
    has_unanswerable = bool((id_N < 0).any())
    most_queries, most_rows = GPU_BLOCK if device.type == "cuda" else CPU_BLOCK
    block_queries = _block_size(len(query_QD), most_queries)
    block_rows = _block_size(num_vectors, most_rows)
    keys = [best_QK[:0]]
    for start in range(0, len(query_QD), block_queries):
        query_BD = query_QD[start : start + block_queries].to(device)
        best_BK = best_QK[start : start + block_queries].to(device)
        hidden = rows.hidden.slice(start, start + len(query_BD))
        # One buffer for all blocks: fresh memory costs more than the product that fills it.
        buffer_BR = query_BD.new_empty((len(query_BD), block_rows))
        for first in range(0, num_vectors, block_rows):
            vector_RD = vector_ND[first : first + block_rows].to(query_BD.dtype)
            id_R = id_N[first : first + block_rows]
            # The last block may be shorter than the buffer. The rest of the buffer is no answer.
            score_BR = buffer_BR[:, : len(vector_RD)]
            buffer_BR[:, len(vector_RD) :] = -torch.inf
            torch.mm(query_BD, vector_RD.T, out=score_BR)
            if has_unanswerable:
                score_BR.masked_fill_(id_R < 0, -torch.inf)
            if len(hidden.values):
                _hide(score_BR, hidden, first)
            best_BK = _improve(best_BK, buffer_BR, id_R)
        # Queries are independent, so their keys leave the device as soon as they are final.
        keys.append(best_BK.cpu())
    return torch.cat(keys)


def _block_size(count: int, most: int) -> int:
    """The size of blocks of queries or rows: whole groups, and a last block of at least one group.

    Products with one or a few rows are summed in another order. With them, equal vectors would have
    different scores.

    Args:
        count: of all queries or rows.
        most: of one block.
    """
    # Few rows need no full block.
    num_groups = max(1, math.ceil(count / GROUP))
    size = min(most, num_groups * GROUP)
    while 0 < count % size < GROUP < size:
        size -= GROUP
    return size


def _few_query_keys(
    vector_ND: Tensor, queries: Float32Array, best_QK: Tensor, rows: AnswerableRows
) -> Tensor:
    """As `exact_keys`, one query after another.

    All of it is NumPy: after the vectors went through the processor's caches, each call of torch
    costs about 20 microseconds.
    """
    vectors = vector_ND.numpy()
    queries = np.ascontiguousarray(queries, np.float32)
    best_keys = best_QK.numpy()
    num_keys = best_QK.shape[1]
    keys = np.empty((len(queries), num_keys), np.int64)
    for query in range(len(queries)):
        hidden = rows.hidden[query]
        best = few_queries.best_rows(vectors, queries[query], num_keys, rows.ids, hidden)
        new_keys = answer_keys(best.scores, best.ids)
        # The best keys so far fill the places for which there are too few rows.
        competing = np.concatenate([best_keys[query], new_keys])
        competing.sort()
        # The sort ascends, so the best keys are the last ones; the best of all comes first.
        keys[query] = competing[::-1][:num_keys]
    return torch.from_numpy(keys)


def scores_on_device(vector_ND: Tensor, queries: Float32Array, row_QC: Int64Array) -> Float32Array:
    """Inner products of queries and some rows, computed where the vectors are.

    Args:
        vector_ND: float32 [n, D].
        queries: float32 [Q, D].
        row_QC: int64 [Q, C], positions of the rows of each query; -1 for none.
    Returns:
        float32 [Q, C]; -inf where there is no row.
    """
    num_queries, width = row_QC.shape
    device = vector_ND.device
    all_row_QC = torch.from_numpy(row_QC).to(device)
    query_QD = as_tensor(queries).to(device)
    scores = [np.empty((0, width), np.float32)]
    # In chunks of bounded memory.
    chunk = max(1, CANDIDATE_FLOATS // (width * vector_ND.shape[1]))
    for start in range(0, num_queries, chunk):
        row_BC = all_row_QC[start : start + chunk]
        query_BD = query_QD[start : start + chunk]
        vector_BCD = vector_ND[row_BC.clamp_min(0)]
        score_BC = (vector_BCD @ query_BD[:, :, None])[:, :, 0]
        score_BC[row_BC < 0] = -torch.inf
        scores.append(score_BC.cpu().numpy())
    return np.concatenate(scores)


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
    ordered = _ordered(score.contiguous().view(torch.int32))
    # The lower half holds the id in reverse, so that the lower id has the larger key.
    return (ordered.to(torch.int64) << 32) | (LOW_BITS - ids)


def to_key_array(scores: Float32Array, ids: Int64Array) -> Int64Array:
    """As `to_keys`, in NumPy, which is faster at the few numbers of one query."""
    no_answer = np.isnan(scores) | (ids < 0)
    return answer_keys(np.where(no_answer, np.float32(-np.inf), scores), ids)


def answer_keys(scores: Float32Array, ids: Int64Array) -> Int64Array:
    """As `to_key_array`, for answers alone: no score is NaN and no id negative."""
    bits = _ordered((scores + np.float32(0)).view(np.int32))
    return (bits.astype(np.int64) << 32) | (LOW_BITS - ids)


def from_keys(keys: Tensor) -> TopLabels:
    """Unpacks sort keys into ids and scores; id -1 where the score is -inf."""
    # NumPy is faster than torch at the few numbers of one query.
    key_array = keys.numpy()
    # The upper half holds the score, the lower half the id.
    scores = _ordered((key_array >> 32).astype(np.int32)).view(np.float32)
    ids = LOW_BITS - (key_array & LOW_BITS)
    ids[scores == -np.inf] = -1
    return TopLabels(ids, scores)


def scores_of(keys: Tensor) -> Tensor:
    """The scores in keys: the inverse of `to_keys`."""
    return _ordered((keys >> 32).to(torch.int32)).view(torch.float32)


def _ordered(bits: Bits) -> Bits:
    """Turns the bits of float32 into int32 of the same order, and back.

    IEEE floats order like integers once the magnitude bits of negative ones are inverted. The sign
    bit, shifted through the word, is the mask that does it for negative ones only.
    """
    return bits ^ ((bits >> 31) & LOW_BITS)


# The worst score with the worst id.
NO_ANSWER = to_keys(torch.tensor([-torch.inf]), torch.tensor([LOW_BITS]))


def empty_keys(num_queries: int, k: int) -> Tensor:
    """int64 [num_queries, k], the keys of "no answer"."""
    # Expanding shares the memory of one key.
    return NO_ANSWER.expand(num_queries, k)


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
    groups = promising_groups(score_BR, bar_B)
    num_groups = num_queries * num_rows // GROUP
    if len(groups) > num_groups // 2 and k <= num_rows:
        # Most groups are promising, as in the first block: a top-k of the block raises the bar. A
        # NaN would be the largest score of all, so it becomes -inf; infinities stay as they are.
        torch.nan_to_num_(score_BR, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        kth_score_B = score_BR.topk(k, dim=1).values[:, -1]
        bar_B = torch.maximum(bar_B, kth_score_B)
        groups = promising_groups(score_BR, bar_B)
    if len(groups) == 0:
        return best_BK
    hits = scores_in(groups, score_BR, bar_B)
    key_P = to_keys(hits.score_P, id_R[hits.row_P])
    # Hits are listed query by query, as `row_slots` needs them.
    slot_P = row_slots(hits.query_P, num_queries)
    return with_new_keys(best_BK, key_P, hits.query_P, slot_P)


@dataclass(frozen=True, slots=True)
class Hits:
    """Pairs of query and row whose scores reach the query's bar.

    Attributes:
        query_P: int64, the query of each pair.
        row_P: int64, the row of each pair.
        score_P: float32.
    """

    query_P: Tensor
    row_P: Tensor
    score_P: Tensor

    def take(self, places: Tensor) -> Hits:
        """Some of the pairs."""
        return Hits(self.query_P[places], self.row_P[places], self.score_P[places])


def promising_groups(score_BR: Tensor, bar_B: Tensor) -> Tensor:
    """Groups of columns in which some score may reach the query's bar.

    Few scores reach the bar. Maxima of groups find them in one pass, twice as fast as comparing
    every score.

    Args:
        score_BR: float32 [B, R]; R is a multiple of GROUP.
        bar_B: float32 [B].
    Returns:
        int64 [H, 2], query and number of each group, ascending.
    """
    max_BG = score_BR.view(len(score_BR), -1, GROUP).amax(dim=2)
    # Written as a negation because the maximum of a group with a NaN is NaN.
    hopeless_BG = (max_BG < bar_B[:, None]) | (max_BG == -torch.inf)
    return (~hopeless_BG).nonzero()


def scores_in(groups: Tensor, score_BR: Tensor, bar_B: Tensor) -> Hits:
    """The scores that reach the bar, in the order of the groups; rows are columns of `score_BR`."""
    query_H, group_H = groups.unbind(dim=1)
    # The scores of each query in groups, of which the chosen ones are copied.
    score_BGJ = score_BR.view(len(score_BR), -1, GROUP)
    score_HJ = score_BGJ[query_H, group_H]
    reaches_bar_HJ = score_HJ >= bar_B[query_H, None]
    is_hit_HJ = reaches_bar_HJ & (score_HJ > -torch.inf)
    hit_P, place_P = is_hit_HJ.nonzero(as_tuple=True)
    # Groups have GROUP rows each, so this is the row in the whole block.
    row_P = group_H[hit_P] * GROUP + place_P
    return Hits(query_H[hit_P], row_P, score_HJ[hit_P, place_P])


def _hide(score_BR: Tensor, hidden: Ragged, first: int) -> None:
    """Masks the hidden positions that lie in a block of rows starting at `first`."""
    columns = hidden.values - first
    is_inside = (columns >= 0) & (columns < score_BR.shape[1])
    query_P = torch.from_numpy(hidden.row_ids[is_inside]).to(score_BR.device)
    column_P = torch.from_numpy(columns[is_inside]).to(score_BR.device)
    score_BR[query_P, column_P] = -torch.inf
