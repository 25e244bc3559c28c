"""The prototype network is torch's encoder layer over three tokens; centroids move query by query."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray.errors import BundleError
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.nn.prototypes import PrototypeNetwork, move_centroids

DIM, FEED_FORWARD, VECTORS = 6, 10, 4


def network() -> PrototypeNetwork:
    return PrototypeNetwork(DIM, FEED_FORWARD, VECTORS, seed=3).double()


def torch_layer(like: PrototypeNetwork) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        DIM, 1, FEED_FORWARD, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    attention = layer.self_attn
    assert attention.in_proj_weight is not None
    with torch.no_grad():
        for theirs, ours in [
            (attention.in_proj_weight, like.into.weight),
            (attention.in_proj_bias, like.into.bias),
            (attention.out_proj.weight, like.out.weight),
            (attention.out_proj.bias, like.out.bias),
            (layer.linear1.weight, like.up.weight),
            (layer.linear1.bias, like.up.bias),
            (layer.linear2.weight, like.down.weight),
            (layer.linear2.bias, like.down.bias),
        ]:
            theirs.copy_(ours)
    return layer


def test_a_prototype_is_the_mean_over_an_encoder_layer() -> None:
    ours, clusters = network(), torch.tensor([1, 1, 2])
    text, centroid = torch.randn(2, 3, DIM, dtype=torch.float64)
    with torch.no_grad():
        for parameter in ours.parameters():  # biases start at 0
            parameter.add_(torch.randn_like(parameter) / 10)
        for norm in (ours.norm1, ours.norm2):
            norm.reset_parameters()
    tokens = torch.stack([text, centroid, ours.bank.weight[clusters]], dim=1)
    expected = F.normalize(torch_layer(ours)(tokens).mean(dim=1), dim=-1)
    torch.testing.assert_close(ours(text, centroid, clusters), expected, rtol=1e-12, atol=1e-12)


def test_labels_of_a_cluster_share_a_gradient_of_few_rows() -> None:
    ours, clusters = network(), torch.tensor([1, 1, 2])
    text, centroid = torch.randn(2, 3, DIM, dtype=torch.float64)
    ours(text, centroid, clusters)[:, 0].sum().backward()
    grad = ours.bank.weight.grad
    assert grad is not None
    assert grad.coalesce().indices()[0].tolist() == [1, 2]
    assert ours.sparse_parameters() == ["bank.weight"]


def test_a_mask_of_ones_drops_nothing_and_each_value_of_it_counts() -> None:
    ours, clusters = network(), torch.arange(2)
    text, centroid = torch.randn(2, 2, DIM, dtype=torch.float64)
    ones = torch.ones(2, ours.mask_width, dtype=torch.float64)
    plain = ours(text, centroid, clusters)
    torch.testing.assert_close(ours(text, centroid, clusters, ones), plain, rtol=0, atol=0)
    starts = torch.tensor(
        [0, 9, 9 + 3 * DIM, 9 + 3 * DIM + 3 * FEED_FORWARD]
    )  # weights, attention, hidden, out
    for start in starts:
        mask = ones.clone()
        mask[1, start] = 0
        masked = ours(text, centroid, clusters, mask)
        assert torch.equal(masked[0], plain[0])
        assert not torch.equal(masked[1], plain[1])


def test_labels_without_any_row_are_legal() -> None:
    none = torch.empty(0, DIM, dtype=torch.float64)
    assert network()(none, none, torch.empty(0, dtype=torch.int64)).shape == (0, DIM)


def test_centroids_move_query_by_query_in_order() -> None:
    torch.manual_seed(0)
    start, query_GD = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    labels, queries = torch.tensor([4, 1, 4, 4, 1]), torch.tensor([0, 0, 1, 2, 3])
    expected: Tensor = start.clone()
    for label, query in zip(labels, queries, strict=True):
        expected[label] = 0.95 * expected[label] + 0.05 * query_GD[query]
    moved = start.clone()
    move_centroids(moved, labels, query_GD, queries, 0.95)
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(moved[[0, 2, 3]], start[[0, 2, 3]])
    move_centroids(moved, labels[:0], query_GD, queries[:0], 0.95)
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "clusters",
    [torch.zeros(3).double(), torch.tensor([0, VECTORS]), torch.tensor([-1]), torch.tensor([[0]])],
    ids=["no integers", "too large", "negative", "no list"],
)
def test_clusters_that_the_network_does_not_have_are_refused(
    clusters: Tensor, tmp_path: Path
) -> None:
    LabelSide(prototypes=network(), cluster_L=clusters).save(tmp_path)
    with pytest.raises(BundleError, match="expected clusters as a list of integers from 0 to 3"):
        load_label_side(tmp_path)
