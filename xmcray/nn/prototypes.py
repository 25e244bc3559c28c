"""Label prototypes (PRIME): a transformer layer over a label's text, centroid and free vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray.parallel.transfers import to_device


class PrototypeNetwork(nn.Module):
    """z_l = l2norm(mean(g([h_l, c_l, v_l]))), g an encoder layer with one head, GELU and post-norm.

    Dropout is passed as a mask, so that a label's mask does not depend on which rank owns it.

    Args:
        dim: D.
        feed_forward: width of the layer's network.
        num_vectors: rows of the bank of free vectors.
        seed: of the initial values; None leaves them to be loaded.

    Attributes:
        mask_width: values of a dropout mask that a label needs.
    """

    def __init__(self, dim: int, feed_forward: int, num_vectors: int, seed: int | None) -> None:
        super().__init__()
        self.into = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, feed_forward)
        self.down = nn.Linear(feed_forward, dim)
        # Random values of its own would be replaced below, and on the device "meta" they take
        # seconds, because PyTorch then imports its compiler.
        bank_KD = torch.empty(num_vectors, dim)
        self.bank = nn.Embedding.from_pretrained(bank_KD, freeze=False, sparse=True)
        # A label has three tokens. Each of these sizes is what one label needs.
        self._mask_sizes = [
            3 * 3,  # attention weights
            3 * dim,  # after attention
            3 * feed_forward,  # between the two layers of the network
            3 * dim,  # after the network
        ]
        self.mask_width = sum(self._mask_sizes)
        if seed is None:
            return
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.into, self.out, self.up, self.down):
            nn.init.xavier_uniform_(linear.weight, generator=generator)
            nn.init.zeros_(linear.bias)
        nn.init.xavier_uniform_(self.bank.weight, generator=generator)

    def sparse_parameters(self) -> list[str]:
        """The bank: a batch touches few of its rows, and they have no weight decay."""
        return ["bank.weight"]

    def forward(
        self,
        text_UD: Tensor,
        centroid_UD: Tensor,
        cluster_U: Tensor,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Prototypes [U, D] of length 1.

        Args:
            text_UD: h of the labels.
            centroid_UD: c of the labels.
            cluster_U: int64 [U], rows of the bank that the labels share with their clusters.
            keep: [U, mask_width], 0 for what is dropped and 1 / (1 - rate) for what is kept; None
                drops nothing.
        """
        dim = text_UD.shape[1]
        masks: Sequence[Tensor | None] = [None] * len(self._mask_sizes)
        if keep is not None:
            masks = keep.split(self._mask_sizes, dim=1)
        weight_mask, attention_mask, hidden_mask, output_mask = masks
        token_UTD = torch.stack([text_UD, centroid_UD, self.bank(cluster_U)], dim=1)
        # Attention of the three tokens of a label to each other.
        query_UTD, key_UTD, value_UTD = self.into(token_UTD).chunk(3, dim=2)
        score_UTT = query_UTD @ key_UTD.transpose(1, 2) / math.sqrt(dim)
        weight_UTT = _drop(score_UTT.softmax(dim=2), weight_mask)
        attended_UTD = self.out(weight_UTT @ value_UTD)
        # Post-norm: each residual sum is normalised.
        token_UTD = self.norm1(token_UTD + _drop(attended_UTD, attention_mask))
        hidden_UTF = _drop(F.gelu(self.up(token_UTD)), hidden_mask)
        output_UTD = _drop(self.down(hidden_UTF), output_mask)
        token_UTD = self.norm2(token_UTD + output_UTD)
        return F.normalize(token_UTD.mean(dim=1), dim=-1)


def move_centroids(
    centroid_SD: Tensor,
    label_T: Tensor,
    query_GD: Tensor,
    query_T: Tensor,
    momentum: float,
) -> None:
    """c <- momentum c + (1 - momentum) h_q in place, once for each entry, in the order of the entries.

    Args:
        centroid_SD: c of this rank's labels; changed.
        label_T: int64 on the host, row of `centroid_SD` of each entry.
        query_GD: the queries' vectors h_q.
        query_T: int64 on the host, row of `query_GD` of each entry.
        momentum: share of the old centroid.
    """
    # n moves in a row are one weighted sum: an entry with k later entries of its label has the
    # weight (1 - momentum) * momentum^k, and the old centroid has momentum^n.
    # Sorted by label, entries of a label are neighbours; a stable sort keeps their order.
    # All of this is done on the host: the device would have to say how many labels there are.
    sorted_T, order_T = torch.sort(label_T, stable=True)
    ids_U, count_U = sorted_T.unique_consecutive(return_counts=True)
    end_U = count_U.cumsum(0)
    # Position of the last entry of each entry's label, and how many entries lie between.
    last_of_label_T = end_U.repeat_interleave(count_U) - 1
    later_T = last_of_label_T - torch.arange(len(order_T))
    # Where each label's entries begin, and the end of the last.
    offsets = F.pad(end_U, (1, 0))
    source_T, offsets, ids_U, count_U, later_T = to_device(
        [query_T[order_T], offsets, ids_U, count_U, later_T], query_GD.device
    )
    # A bag of embeddings adds up in the order of its entries.
    sum_UD = F.embedding_bag(
        source_T,
        query_GD,
        offsets,
        mode="sum",
        per_sample_weights=(1 - momentum) * momentum ** later_T.to(query_GD),
        include_last_offset=True,
    )
    old_share_U1 = momentum ** count_U.to(query_GD)[:, None]
    centroid_SD[ids_U] = centroid_SD[ids_U] * old_share_U1 + sum_UD


def _drop(value: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return value
    return value * keep.view_as(value)
