"""The mixer of side vectors: its start, rows without a vector, folders, micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from xmcray.data.tokens import TextTokenizer, train_wordpiece
from xmcray.errors import ConfigError
from xmcray.nn.compact import compacted
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder, load_text_encoder
from xmcray.nn.side import PROJECTION_SPEED, START, MixedEncoder
from xmcray.training.step import Embedder
from xmcray.types import Float32Array, Ragged, side_vectors_of

TEXTS = ["sort an array", "find", "", "the largest element in an array"]
WIDTH = 3


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_wordpiece(TEXTS, 100, max_len=16)


@pytest.fixture
def encoder(tokenizer: TextTokenizer) -> MixedEncoder:
    """A mixer with weights, as after some training."""
    settings = EncoderConfig(dim=8, side="mix", separate_labels=True)
    encoder = build_encoder(settings, tokenizer, None, seed=1, side_width=WIDTH)
    assert isinstance(encoder, MixedEncoder)
    torch.nn.init.normal_(encoder.mixer.projection.weight)
    return encoder


@pytest.fixture
def vectors() -> Float32Array:
    """Of the first and the last text; the others have none."""
    values = np.zeros((len(TEXTS), WIDTH), np.float32)
    values[0] = [3, 0, 4]
    values[3] = [0, -2, 0]
    return values


def test_training_starts_near_the_vectors_of_the_texts(
    tokenizer: TextTokenizer, vectors: Float32Array
) -> None:
    tokens = tokenizer.encode(TEXTS)
    built = {}
    for side in ("ignore", "mix"):
        settings = EncoderConfig(dim=8, side=side)  # type: ignore[arg-type]
        built[side] = build_encoder(settings, tokenizer, None, seed=1, side_width=WIDTH)
    mixed_BD = built["mix"](tokens.with_vectors(vectors))
    text_BD = built["ignore"](tokens)
    # The first and the last text have a vector, which is as long as the gate says.
    shares = (mixed_BD - text_BD)[[0, 3]].norm(dim=1) / text_BD[[0, 3]].norm(dim=1)
    torch.testing.assert_close(shares, torch.full((2,), START))
    assert not isinstance(built["ignore"], MixedEncoder)


def test_a_vector_is_added_by_its_direction_and_zeros_add_nothing(
    encoder: MixedEncoder, tokenizer: TextTokenizer, vectors: Float32Array
) -> None:
    tokens = tokenizer.encode(TEXTS)
    text_BD = encoder.text(tokens)
    mixed_BD = encoder(tokens.with_vectors(vectors))
    assert torch.equal(mixed_BD[1:3], text_BD[1:3])
    assert torch.equal(encoder(tokens), text_BD)
    direction = torch.tensor([0.6, 0.0, 0.8])
    projected_D = PROJECTION_SPEED * (encoder.mixer.projection.weight @ direction)
    expected_D = text_BD[0] + START * text_BD[0].norm() * projected_D
    torch.testing.assert_close(mixed_BD[0], expected_D)


def test_labels_keep_their_vectors(
    encoder: MixedEncoder, tokenizer: TextTokenizer, vectors: Float32Array
) -> None:
    tokens = tokenizer.encode(TEXTS)
    marked = encoder.as_labels(tokens.with_vectors(vectors))
    assert np.array_equal(side_vectors_of(marked, WIDTH), vectors)
    assert np.array_equal(marked.values, encoder.text.as_labels(tokens).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_encoder_has_the_same_vectors(
    encoder: MixedEncoder,
    tokenizer: TextTokenizer,
    vectors: Float32Array,
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    tokens = tokenizer.encode(TEXTS).with_vectors(vectors)
    encoder.to(dtype).save(tmp_path)
    loaded = load_encoder(tmp_path)
    assert (loaded.side_width, loaded.dim) == (WIDTH, 8)
    assert loaded(tokens).dtype == dtype
    assert torch.equal(loaded(tokens), encoder(tokens))
    # It costs nothing next to the text encoder, which is what a precision is about.
    assert compacted(loaded, "int8") is loaded
    # The rest of the folder is that of the text encoder.
    assert torch.equal(load_text_encoder(tmp_path)(tokens), encoder.text(tokens))
    torch.nn.init.zeros_(loaded.get_parameter("mixer.gate"))
    loaded.restore(tmp_path)
    assert torch.equal(loaded(tokens), encoder(tokens))


def test_micro_batches_have_the_gradients_of_whole_batches(
    encoder: MixedEncoder, tokenizer: TextTokenizer, vectors: Float32Array
) -> None:
    tokens = tokenizer.encode(TEXTS).with_vectors(vectors)
    encoder.double()
    gradients: list[list[Tensor]] = []
    for micro_batch in (0, 3):
        encoder.zero_grad()
        embedder = Embedder(encoder, micro_batch)
        vector_BD = embedder(tokens)
        (vector_BD @ vector_BD.T).exp().sum().backward()
        embedder.finish_backward()
        names = ["mixer.gate", "mixer.projection.weight", "text.embedding.weight"]
        own_gradients = [encoder.get_parameter(name).grad for name in names]
        gradients.append([grad.to_dense() for grad in own_gradients if grad is not None])
    assert len(gradients[0]) == 3
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole)


def test_vectors_that_do_not_fit_are_refused(
    encoder: MixedEncoder, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder.save(tmp_path)
    of_other_width = Ragged.from_rows([[1]]).with_vectors(np.ones((1, 4), np.float32))
    with pytest.raises(ConfigError, match="width 4, expected 3"):
        encoder(of_other_width)
    settings = EncoderConfig(dim=8, side="mix")
    with pytest.raises(ConfigError, match="the corpus has no side vectors"):
        build_encoder(settings, tokenizer, None, seed=1)
    settings = EncoderConfig(name=str(tmp_path), dim=8, side="mix")
    with pytest.raises(ConfigError, match="mixes side vectors of width 3, the corpus has 4"):
        build_encoder(settings, tokenizer, None, seed=1, side_width=4)
    started = build_encoder(settings, tokenizer, None, seed=1, side_width=WIDTH)
    weight = started.get_parameter("mixer.projection.weight")
    assert torch.equal(weight, encoder.mixer.projection.weight)
