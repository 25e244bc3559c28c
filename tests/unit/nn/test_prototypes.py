"""The prototype network is torch's encoder layer over three tokens.

Centroids move query by query.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray.errors import BundleError
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.nn.prototypes import PrototypeNetwork, move_centroids

DIM = 6
FEED_FORWARD = 10
VECTORS = 4


def network() -> PrototypeNetwork:
    return PrototypeNetwork(DIM, FEED_FORWARD, VECTORS, seed=3).double()


def text_and_centroid(num_labels: int) -> tuple[Tensor, Tensor]:
    text_LD, centroid_LD = torch.randn(2, num_labels, DIM, dtype=torch.float64)
    return text_LD, centroid_LD


def torch_layer(like: PrototypeNetwork) -> nn.TransformerEncoderLayer:
    """Torch's layer with the weights of the network."""
    layer = nn.TransformerEncoderLayer(
        DIM,
        nhead=1,
        dim_feedforward=FEED_FORWARD,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        dtype=torch.float64,
    )
    attention = layer.self_attn
    assert attention.in_proj_weight is not None
    with torch.no_grad():
        attention.in_proj_weight.copy_(like.into.weight)
        attention.in_proj_bias.copy_(like.into.bias)
        attention.out_proj.weight.copy_(like.out.weight)
        attention.out_proj.bias.copy_(like.out.bias)
        layer.linear1.weight.copy_(like.up.weight)
        layer.linear1.bias.copy_(like.up.bias)
        layer.linear2.weight.copy_(like.down.weight)
        layer.linear2.bias.copy_(like.down.bias)
    return layer


def test_a_prototype_is_the_mean_over_an_encoder_layer() -> None:
    ours = network()
    clusters = torch.tensor([1, 1, 2])
    text_LD, centroid_LD = text_and_centroid(3)
    with torch.no_grad():
        # Biases start at 0, where a mistake with them would not be seen.
        for parameter in ours.parameters():
            noise = torch.randn_like(parameter)
            parameter.add_(noise / 10)
        # Torch's layer keeps its initial norms.
        ours.norm1.reset_parameters()
        ours.norm2.reset_parameters()

    prototype_LD = ours(text_LD, centroid_LD, clusters)

    shared_LD = ours.bank.weight[clusters]
    token_L3D = torch.stack([text_LD, centroid_LD, shared_LD], dim=1)
    mean_LD = torch_layer(ours)(token_L3D).mean(dim=1)
    expected_LD = F.normalize(mean_LD, dim=-1)
    torch.testing.assert_close(prototype_LD, expected_LD, rtol=1e-12, atol=1e-12)


def test_labels_of_a_cluster_share_a_gradient_of_few_rows() -> None:
    ours = network()
    text_LD, centroid_LD = text_and_centroid(3)
    clusters = torch.tensor([1, 1, 2])

    prototype_LD = ours(text_LD, centroid_LD, clusters)
    prototype_LD[:, 0].sum().backward()

    grad = ours.bank.weight.grad
    assert grad is not None
    (rows,) = grad.coalesce().indices()
    assert rows.tolist() == [1, 2]
    assert ours.sparse_parameters() == ["bank.weight"]


def test_a_mask_of_ones_drops_nothing_and_each_value_of_it_counts() -> None:
    ours = network()
    text_LD, centroid_LD = text_and_centroid(2)
    clusters = torch.arange(2)
    ones = torch.ones(2, ours.mask_width, dtype=torch.float64)
    plain_LD = ours(text_LD, centroid_LD, clusters)

    unmasked_LD = ours(text_LD, centroid_LD, clusters, ones)
    torch.testing.assert_close(unmasked_LD, plain_LD, rtol=0, atol=0)

    # The first place of each of the four parts of a mask.
    weights = 0
    attention = weights + 3 * 3
    hidden = attention + 3 * DIM
    output = hidden + 3 * FEED_FORWARD
    for place in (weights, attention, hidden, output):
        mask = ones.clone()
        mask[1, place] = 0
        masked_LD = ours(text_LD, centroid_LD, clusters, mask)
        assert torch.equal(masked_LD[0], plain_LD[0])
        assert not torch.equal(masked_LD[1], plain_LD[1])


def test_labels_without_any_row_are_legal() -> None:
    no_vectors = torch.empty(0, DIM, dtype=torch.float64)
    no_clusters = torch.empty(0, dtype=torch.int64)

    prototype_LD = network()(no_vectors, no_vectors, no_clusters)

    assert prototype_LD.shape == (0, DIM)


def test_centroids_move_query_by_query_in_order() -> None:
    torch.manual_seed(0)
    start_LD = torch.randn(5, 3, dtype=torch.float64)
    query_GD = torch.randn(4, 3, dtype=torch.float64)
    labels = torch.tensor([4, 1, 4, 4, 1])
    queries = torch.tensor([0, 0, 1, 2, 3])

    moved_LD = start_LD.clone()
    move_centroids(
        moved_LD,
        labels,
        query_GD,
        queries,
        0.95,
    )

    expected_LD = start_LD.clone()
    for label, query in zip(labels, queries, strict=True):
        expected_LD[label] = 0.95 * expected_LD[label] + 0.05 * query_GD[query]
    torch.testing.assert_close(moved_LD, expected_LD, rtol=1e-12, atol=1e-12)
    without_query = [0, 2, 3]
    assert torch.equal(moved_LD[without_query], start_LD[without_query])

    # No pairs, no move.
    nothing = torch.empty(0, dtype=torch.int64)
    move_centroids(
        moved_LD,
        nothing,
        query_GD,
        nothing,
        0.95,
    )
    torch.testing.assert_close(moved_LD, expected_LD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "clusters",
    [
        pytest.param(torch.zeros(3).double(), id="no integers"),
        pytest.param(torch.tensor([0, VECTORS]), id="too large"),
        pytest.param(torch.tensor([-1]), id="negative"),
        pytest.param(torch.tensor([[0]]), id="no list"),
    ],
)
def test_clusters_that_the_network_does_not_have_are_refused(
    clusters: Tensor, tmp_path: Path
) -> None:
    side = LabelSide(prototypes=network(), cluster_L=clusters)
    side.save(tmp_path)

    with pytest.raises(BundleError, match="expected clusters as a list of integers from 0 to 3"):
        load_label_side(tmp_path)


def test_no_values_are_drawn_that_are_loaded_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device "meta" PyTorch would import its compiler for them, which takes seconds."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *_, **__: pytest.fail("drawn"))
    with torch.device("meta"):
        network = PrototypeNetwork(4, 8, 3, seed=None)
    assert network.bank.weight.requires_grad
