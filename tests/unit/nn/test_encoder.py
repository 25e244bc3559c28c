from pathlib import Path

import numpy as np
import pytest
import torch

from xmcray.config import build
from xmcray.data.tokens import TextTokenizer, train_wordpiece
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import SETTINGS, EncoderConfig, build_encoder, fit_width, load_encoder
from xmcray.nn.static import StaticEncoder
from xmcray.types import Ragged

TEXTS = [
    "sort an array",
    "",
    "sort",
    "the sorted order of an array of numbers",
    "numbers numbers numbers",
]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_wordpiece(iter(TEXTS * 3), vocab_size=60, max_len=16)


@pytest.fixture
def encoder(tokenizer: TextTokenizer) -> StaticEncoder:
    counts = np.random.default_rng(0).integers(0, 50, tokenizer.vocab_size)
    encoder = build_encoder(EncoderConfig(dim=24), tokenizer, counts, seed=3)
    assert isinstance(encoder, StaticEncoder)
    torch.manual_seed(1)
    torch.nn.init.normal_(encoder.out.weight, std=0.2)  # as after some training; it starts at zero
    return encoder


def gradient_rows(encoder: StaticEncoder, tokens: Ragged) -> list[int]:
    """Rows of the table in the gradient of a text's vector."""
    encoder.zero_grad()
    encoder(tokens).sum().backward()
    return encoder.embedding.weight.grad.coalesce().indices()[0].tolist()


def test_bag_is_the_idf_weighted_sum_over_the_length_of_the_weights() -> None:
    encoder = StaticEncoder(torch.tensor([1.0, 2.0, 5.0]), dim=2, residual=False)
    encoder.embedding.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])

    vectors = encoder(Ragged.from_rows([[0, 1, 1], []]))

    # The weights of tokens 0, 1 and 1 are 1, 2 and 2, whose length is sqrt(1 + 4 + 4) = 3.
    torch.testing.assert_close(vectors, torch.tensor([[1 / 3, 4 / 3], [0.0, 0.0]]))


def test_lead_makes_the_first_tokens_of_each_text_weigh_more(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.ones(12), dim=12, residual=False, position_decay=3.0)
    # Token t has the unit vector t, so that a text's vector shows the weight of each token.
    encoder.embedding.weight.data = torch.eye(12)

    vectors = encoder(Ragged.from_rows([np.arange(12), np.arange(12)]))

    weight_T = 1 + 3 * torch.exp(-torch.arange(12) / 10)
    expected = weight_T / weight_T.norm()
    torch.testing.assert_close(vectors, expected.expand(2, 12))
    encoder.save(tmp_path)
    assert load_encoder(tmp_path).position_decay == 3.0


def test_a_static_encoder_with_the_former_names_of_its_settings_opens(tmp_path: Path) -> None:
    saved = StaticEncoder(
        torch.ones(12), dim=12, residual=False, position_decay=3.0, bigram_buckets=5
    )
    saved.save(tmp_path)
    path = tmp_path / SETTINGS
    settings = path.read_text(encoding="utf-8")
    former = settings.replace("position_decay", "lead").replace("bigram_buckets", "pairs")
    path.write_text(former, encoding="utf-8")

    encoder = load_encoder(tmp_path)

    assert isinstance(encoder, StaticEncoder)
    assert encoder.position_decay == 3.0
    assert encoder.bigram_buckets == 5


def test_pairs_of_neighbours_have_rows_and_weigh_the_mean_of_their_tokens(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.tensor([1.0, 3.0]), dim=2, residual=False, bigram_buckets=50)
    # Tokens 0 and 1 count in the first column, and pairs in the second.
    encoder.embedding.weight.data[:2] = torch.tensor([1.0, 0.0])
    encoder.embedding.weight.data[2:] = torch.tensor([0.0, 1.0])
    texts = Ragged.from_rows([[0, 1, 0], [], [1], [0, 1]])

    vectors = encoder(texts)

    # Tokens weigh 1 and 3, and a pair of both weighs 2. The squares of the weights add up to:
    # 1 + 9 + 1 + 4 + 4 = 19, nothing (whose length is taken as 1), 9, and 1 + 9 + 4 = 14.
    length = torch.tensor([19.0, 1.0, 9.0, 14.0]).sqrt()
    sums = torch.tensor([[5.0, 4.0], [0.0, 0.0], [3.0, 0.0], [4.0, 2.0]])
    torch.testing.assert_close(vectors, sums / length[:, None])
    encoder.save(tmp_path)
    assert torch.equal(load_encoder(tmp_path)(texts), vectors)


def test_a_pair_has_the_same_row_in_every_text_and_another_in_the_other_order() -> None:
    encoder = StaticEncoder(torch.tensor([1.0, 3.0]), dim=2, residual=False, bigram_buckets=50)

    # Behind the rows of both tokens come those of pairs.
    both_orders = gradient_rows(encoder, Ragged.from_rows([[0, 1, 0]]))[2:]
    one_order = gradient_rows(encoder, Ragged.from_rows([[0, 1]]))[2:]

    assert len(both_orders) == 2
    assert set(one_order) < set(both_orders)


def test_label_texts_have_rows_of_their_own_that_start_as_those_of_queries() -> None:
    encoder = StaticEncoder(torch.ones(3), 4, bigram_buckets=5, separate_labels=True)
    encoder.reset(seed=0)
    queries = Ragged.from_rows([[0, 2, 2], [], [1]])
    labels = encoder.as_labels(queries)

    torch.testing.assert_close(encoder(labels), encoder(queries))

    # 3 tokens and 2 of the 5 buckets for pairs; the other side has 8 rows before.
    query_rows = gradient_rows(encoder, queries)
    assert len(query_rows) == 5
    assert gradient_rows(encoder, labels) == [row + 8 for row in query_rows]


def test_rows_of_label_texts_are_saved(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.ones(3), 4, bigram_buckets=5, separate_labels=True)
    encoder.reset(seed=0)
    with torch.no_grad():
        encoder.embedding.weight[8:] += 1
    queries = Ragged.from_rows([[0, 2, 2], [], [1]])
    label_vectors = encoder(encoder.as_labels(queries))
    assert not torch.equal(label_vectors, encoder(queries))
    encoder.save(tmp_path)

    loaded = load_encoder(tmp_path)

    assert torch.equal(loaded(loaded.as_labels(queries)), label_vectors)
    assert loaded.num_tokens == 3


def test_untrained_vectors_have_length_about_one_whatever_the_number_of_tokens(
    tokenizer: TextTokenizer,
) -> None:
    encoder = build_encoder(EncoderConfig(dim=512), tokenizer, None, seed=0)
    texts = Ragged.from_rows([np.arange(num_tokens) for num_tokens in (1, 4, 30)])
    lengths = encoder(texts).norm(dim=1).detach()
    np.testing.assert_allclose(lengths, 1, atol=0.2)


def idf_weights(tokenizer: TextTokenizer, *, idf: bool) -> torch.Tensor:
    """Of tokens that are the more frequent the higher their ids."""
    counts = np.arange(tokenizer.vocab_size)
    config = EncoderConfig(dim=4, idf=idf)
    return build_encoder(config, tokenizer, counts, seed=0).state_dict()["weight"]


def test_rare_tokens_weigh_more(tokenizer: TextTokenizer) -> None:
    weights = idf_weights(tokenizer, idf=True)
    assert (weights.diff() < 0).all()
    assert weights[-1] == pytest.approx(1)


def test_all_tokens_weigh_the_same_if_idf_is_off(tokenizer: TextTokenizer) -> None:
    assert (idf_weights(tokenizer, idf=False) == 1).all()


def test_a_text_has_the_same_vector_whatever_its_neighbours(
    encoder: StaticEncoder, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(TEXTS)
    together = encoder(tokens)
    assert together.shape == (len(TEXTS), 24)
    assert together.isfinite().all()

    order = np.array([3, 0, 4, 2, 1])
    reordered = encoder(tokens.take(order))
    assert torch.equal(reordered, together[torch.from_numpy(order)])

    alone = torch.cat([encoder(tokens.slice(i, i + 1)) for i in range(len(TEXTS))])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


def test_no_texts_at_all(encoder: StaticEncoder) -> None:
    vectors = encoder(Ragged.empty(0))
    assert vectors.shape == (0, 24)
    vectors.sum().backward()
    assert gradient_rows(encoder, Ragged.empty(0)) == []


def gradients_of(encoder: StaticEncoder, tokens: Ragged) -> list[torch.Tensor]:
    encoder.zero_grad()
    encoder(tokens).square().sum().backward()
    return [parameter.grad.to_dense() for parameter in encoder.parameters()]


def test_forward_and_backward_twice_give_the_same_bits(encoder: StaticEncoder) -> None:
    rng = np.random.default_rng(0)
    tokens = Ragged.from_rows([rng.integers(0, len(encoder.weight), 40) for _ in range(64)])

    first = gradients_of(encoder, tokens)
    second = gradients_of(encoder, tokens)

    for one, other in zip(first, second, strict=True):
        assert one.any()
        assert torch.equal(one, other)


def test_gradient_is_right_and_zero_outside_the_batch(tokenizer: TextTokenizer) -> None:
    encoder = build_encoder(EncoderConfig(dim=3), tokenizer, None, seed=0).double()
    tokens = Ragged.from_rows([[1, 2, 2], [], [5]])

    def vectors(table: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(encoder, {"embedding.weight": table}, (tokens,))

    table = encoder.get_parameter("embedding.weight").detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    # The loss is the product of the vectors with random numbers, and the table moves in a random
    # direction.
    direction = torch.randn(table.shape, generator=generator).double()
    factors = torch.randn(vectors(table).shape, generator=generator).double()

    (vectors(table) * factors).sum().backward()

    step = 1e-6
    moved = vectors(table + step * direction) - vectors(table - step * direction)
    numerical = (moved / (2 * step) * factors).sum()
    analytical = (table.grad.to_dense() * direction).sum()
    torch.testing.assert_close(analytical, numerical, rtol=1e-8, atol=0)
    assert encoder.sparse_parameters() == ["embedding.weight"]
    assert table.grad.coalesce().indices()[0].tolist() == [1, 2, 5]


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_saved_and_loaded_encoder_gives_the_same_bits(
    encoder: StaticEncoder, tokenizer: TextTokenizer, tmp_path: Path, precision: torch.dtype
) -> None:
    encoder = encoder.to(precision)
    tokens = tokenizer.encode(TEXTS)
    encoder.save(tmp_path / "encoder")

    loaded = load_encoder(tmp_path / "encoder")

    assert torch.equal(loaded(tokens), encoder(tokens))
    assert loaded.dim == 24
    assert not loaded.training


def test_training_starts_from_a_saved_static_encoder(
    encoder: StaticEncoder, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder.save(tmp_path)
    config = EncoderConfig(name=str(tmp_path), dim=24)
    start = build_encoder(config, tokenizer, None, seed=9)
    assert torch.equal(start.get_parameter("embedding.weight"), encoder.embedding.weight)


def test_a_run_of_another_width_does_not_start_from_it(
    encoder: StaticEncoder, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder.save(tmp_path)
    config = EncoderConfig(name=str(tmp_path), dim=8)
    with pytest.raises(ConfigError, match="width 24, the run needs"):
        build_encoder(config, tokenizer, None, seed=9)


@pytest.mark.parametrize("damage", ["missing", "cut", "settings"])
def test_a_damaged_encoder_is_one_line(encoder: StaticEncoder, tmp_path: Path, damage: str) -> None:
    encoder.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    else:
        (tmp_path / "static.json").write_text("{}")

    with pytest.raises(BundleError, match="cannot be read") as caught:
        load_encoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_holds_no_encoder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no encoder"):
        load_encoder(tmp_path / "elsewhere")


def test_the_seed_alone_decides_the_start(tokenizer: TextTokenizer) -> None:
    def table(seed: int) -> torch.Tensor:
        encoder = build_encoder(EncoderConfig(dim=8), tokenizer, None, seed)
        return encoder.get_parameter("embedding.weight")

    torch.manual_seed(0)
    first = table(1)
    # Torch's own generator would have moved on.
    assert torch.equal(first, table(1))
    assert not torch.equal(first, table(2))


@pytest.fixture
def plane() -> torch.Tensor:
    """50 points of a plane in six dimensions, around 0."""
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    centred = points - points.mean(dim=0)
    return torch.nn.functional.pad(centred, (1, 3)).double()


def test_fit_width_keeps_the_principal_axes(plane: torch.Tensor) -> None:
    fitted = fit_width(plane + 7, 2)

    # Distances stay, up to the scale that makes the mean length 1.
    scale = plane.norm(dim=1).mean()
    torch.testing.assert_close(torch.cdist(fitted, fitted), torch.cdist(plane, plane) / scale)


def test_fit_width_widens(plane: torch.Tensor) -> None:
    wide = fit_width(plane, 9)
    assert wide.shape == (50, 9)
    assert wide.norm(dim=1).mean() == pytest.approx(1)


@pytest.mark.parametrize(
    "values",
    [
        {"dim": 0},
        {"dropout": 0.1},
        {"name": "x", "dropout": 2.0},
        {"name": "x", "init_from": "y"},
        {"name": "x", "separate_labels": True},
        {"init_vectors": "embeddings"},
        {"init_share": 0.5},
        {"name": "x", "vectors_folder": "/v"},
        {"name": "x", "frozen": True, "vectors_folder": "v"},
        {"init_from": "y", "init_vectors": "inputs"},
        {"pooling": "max"},
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.|pooling|init_vectors") as caught:
        build(EncoderConfig, values)
    assert "\n" not in str(caught.value)
