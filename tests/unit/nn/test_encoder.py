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
    built = build_encoder(EncoderConfig(dim=24), tokenizer, counts, seed=3)
    assert isinstance(built, StaticEncoder)
    torch.manual_seed(1)
    torch.nn.init.normal_(built.out.weight, std=0.2)  # as after some training; it starts at zero
    return built


def gradient_rows(encoder: StaticEncoder, tokens: Ragged) -> list[int]:
    """Rows of the table in the gradient of a text's vector."""
    encoder.zero_grad()
    encoder(tokens).sum().backward()
    return encoder.embedding.weight.grad.coalesce().indices()[0].tolist()


def test_bag_is_the_idf_weighted_sum_over_the_length_of_the_weights() -> None:
    encoder = StaticEncoder(torch.tensor([1.0, 2.0, 5.0]), dim=2, residual=False)
    encoder.embedding.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])
    vectors = encoder(Ragged.from_rows([[0, 1, 1], []]))
    torch.testing.assert_close(
        vectors, torch.tensor([[1 / 3, 4 / 3], [0.0, 0.0]])
    )  # weights 1, 2, 2: length 3


def test_lead_makes_the_first_tokens_of_each_text_weigh_more(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.ones(12), dim=12, residual=False, position_decay=3.0)
    encoder.embedding.weight.data = torch.eye(12)
    vectors = encoder(Ragged.from_rows([np.arange(12), np.arange(12)]))
    weight = 1 + 3 * torch.exp(-torch.arange(12) / 10)
    torch.testing.assert_close(vectors, (weight / weight.norm()).expand(2, 12))
    encoder.save(tmp_path)
    assert load_encoder(tmp_path).position_decay == 3.0


def test_a_static_encoder_with_the_former_names_of_its_settings_opens(tmp_path: Path) -> None:
    StaticEncoder(
        torch.ones(12), dim=12, residual=False, position_decay=3.0, bigram_buckets=5
    ).save(tmp_path)
    path = tmp_path / SETTINGS
    text = path.read_text(encoding="utf-8")
    text = text.replace("position_decay", "lead").replace("bigram_buckets", "pairs")
    path.write_text(text, encoding="utf-8")
    encoder = load_encoder(tmp_path)
    assert isinstance(encoder, StaticEncoder)
    assert encoder.position_decay == 3.0
    assert encoder.bigram_buckets == 5


def test_pairs_of_neighbours_have_rows_and_weigh_the_mean_of_their_tokens(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.tensor([1.0, 3.0]), dim=2, residual=False, bigram_buckets=50)
    encoder.embedding.weight.data[:] = torch.tensor([1.0, 0.0])
    encoder.embedding.weight.data[2:] = torch.tensor([0.0, 1.0])
    texts = Ragged.from_rows([[0, 1, 0], [], [1], [0, 1]])
    length = torch.tensor([19.0, 1.0, 9.0, 14.0]).sqrt()
    expected = torch.tensor([[5.0, 4.0], [0.0, 0.0], [3.0, 0.0], [4.0, 2.0]])
    torch.testing.assert_close(encoder(texts), expected / length[:, None])
    pairs = [gradient_rows(encoder, texts.slice(i, i + 1))[2:] for i in (0, 3)]
    assert len(pairs[0]) == 2, "0 1 and 1 0 are different pairs"
    assert set(pairs[1]) < set(pairs[0]), "a pair has the same row in every text"
    encoder.save(tmp_path)
    assert torch.equal(load_encoder(tmp_path)(texts), encoder(texts))


def test_label_texts_have_rows_of_their_own_that_start_as_those_of_queries(tmp_path: Path) -> None:
    encoder = StaticEncoder(torch.ones(3), 4, bigram_buckets=5, separate_labels=True)
    encoder.reset(seed=0)
    queries = Ragged.from_rows([[0, 2, 2], [], [1]])
    labels = encoder.as_labels(queries)
    torch.testing.assert_close(encoder(labels), encoder(queries))
    query_rows = gradient_rows(encoder, queries)
    # 3 tokens and 2 of the 5 buckets for pairs; the other side has 8 rows before.
    assert len(query_rows) == 5
    assert gradient_rows(encoder, labels) == [row + 8 for row in query_rows]

    with torch.no_grad():
        encoder.embedding.weight[8:] += 1
    encoder.save(tmp_path)
    loaded = load_encoder(tmp_path)
    assert torch.equal(loaded(loaded.as_labels(queries)), encoder(labels))
    assert not torch.equal(encoder(labels), encoder(queries))
    assert loaded.num_tokens == 3


def test_untrained_vectors_have_length_about_one_whatever_the_number_of_tokens(
    tokenizer: TextTokenizer,
) -> None:
    encoder = build_encoder(EncoderConfig(dim=512), tokenizer, None, seed=0)
    rows = [np.arange(n) for n in (1, 4, 30)]
    np.testing.assert_allclose(encoder(Ragged.from_rows(rows)).norm(dim=1).detach(), 1, atol=0.2)


def test_rare_tokens_weigh_more_unless_idf_is_off(tokenizer: TextTokenizer) -> None:
    counts = np.arange(tokenizer.vocab_size)
    weight = build_encoder(EncoderConfig(dim=4), tokenizer, counts, seed=0).state_dict()["weight"]
    assert (weight.diff() < 0).all()
    assert weight[-1] == pytest.approx(1)
    off = build_encoder(EncoderConfig(dim=4, idf=False), tokenizer, counts, seed=0).state_dict()[
        "weight"
    ]
    assert (off == 1).all()


def test_a_text_has_the_same_vector_whatever_its_neighbours(
    encoder: StaticEncoder, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(TEXTS)
    together = encoder(tokens)
    assert together.shape == (len(TEXTS), 24)
    assert together.isfinite().all()
    order = np.array([3, 0, 4, 2, 1])
    assert torch.equal(encoder(tokens.take(order)), together[torch.from_numpy(order)])
    alone = torch.cat([encoder(tokens.slice(i, i + 1)) for i in range(len(TEXTS))])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


def test_no_texts_at_all(encoder: StaticEncoder) -> None:
    vectors = encoder(Ragged.empty(0))
    assert vectors.shape == (0, 24)
    vectors.sum().backward()
    assert gradient_rows(encoder, Ragged.empty(0)) == []


def test_forward_and_backward_twice_give_the_same_bits(encoder: StaticEncoder) -> None:
    rng = np.random.default_rng(0)
    tokens = Ragged.from_rows([rng.integers(0, len(encoder.weight), 40) for _ in range(64)])
    gradients = []
    for _ in range(2):
        encoder.zero_grad()
        encoder(tokens).square().sum().backward()
        gradients.append([p.grad.to_dense() for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(g.any() for g in gradients[0])


def test_gradient_is_right_and_zero_outside_the_batch(tokenizer: TextTokenizer) -> None:
    encoder = build_encoder(EncoderConfig(dim=3), tokenizer, None, seed=0).double()
    tokens = Ragged.from_rows([[1, 2, 2], [], [5]])

    def vectors(table: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(encoder, {"embedding.weight": table}, (tokens,))

    table = encoder.get_parameter("embedding.weight").detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    along, towards = (
        torch.randn(t.shape, generator=generator).double() for t in (table, vectors(table))
    )
    (vectors(table) * towards).sum().backward()
    moved = (vectors(table + 1e-6 * along) - vectors(table - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(
        (table.grad.to_dense() * along).sum(), (moved * towards).sum(), rtol=1e-8, atol=0
    )
    assert encoder.sparse_parameters() == ["embedding.weight"]
    assert table.grad.coalesce().indices()[0].tolist() == [1, 2, 5]


@pytest.mark.parametrize("double", [False, True])
def test_saved_and_loaded_encoder_gives_the_same_bits(
    encoder: StaticEncoder, tokenizer: TextTokenizer, tmp_path: Path, double: bool
) -> None:
    encoder = encoder.double() if double else encoder
    encoder.save(tmp_path / "encoder")
    loaded = load_encoder(tmp_path / "encoder")
    tokens = tokenizer.encode(TEXTS)
    assert torch.equal(loaded(tokens), encoder(tokens))
    assert loaded.dim == 24
    assert not loaded.training


def test_training_starts_from_a_saved_static_encoder(
    encoder: StaticEncoder, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder.save(tmp_path)
    start = build_encoder(EncoderConfig(name=str(tmp_path), dim=24), tokenizer, None, seed=9)
    assert torch.equal(start.get_parameter("embedding.weight"), encoder.embedding.weight)
    with pytest.raises(ConfigError, match="width 24, the run needs"):
        build_encoder(EncoderConfig(name=str(tmp_path), dim=8), tokenizer, None, seed=9)


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
    with pytest.raises(BundleError, match="holds no encoder"):
        load_encoder(tmp_path / "elsewhere")


def test_the_seed_alone_decides_the_start(tokenizer: TextTokenizer) -> None:
    def table(seed: int) -> torch.Tensor:
        return build_encoder(EncoderConfig(dim=8), tokenizer, None, seed).get_parameter(
            "embedding.weight"
        )

    torch.manual_seed(0)
    first = table(1)
    assert torch.equal(first, table(1))
    assert not torch.equal(first, table(2))


def test_fit_width_keeps_the_principal_axes() -> None:
    plane = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    rows = torch.nn.functional.pad(plane - plane.mean(dim=0), (1, 3)).double()
    fitted = fit_width(rows + 7, 2)
    torch.testing.assert_close(
        torch.cdist(fitted, fitted), torch.cdist(rows, rows) / rows.norm(dim=1).mean()
    )
    wide = fit_width(rows, 9)
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
