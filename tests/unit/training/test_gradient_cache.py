"""Gradient caching: encoding twice in chunks gives the gradients of one graph with the same dropout."""

from __future__ import annotations

import pytest
import torch
from models import write_bert
from torch import Tensor

from xmcray.data.tokens import from_transformer
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.transformer import TransformerEncoder
from xmcray.training.step import Embedder
from xmcray.types import Ragged

WORDS = [
    "sort",
    "an",
    "array",
    "of",
    "numbers",
    "find",
    "the",
    "largest",
    "element",
    "in",
    "each",
    "row",
]
TEXTS = [
    "sort an array",
    "find",
    "",
    " ".join(WORDS),
    "the largest element",
    "row of numbers",
    "each",
]
CHUNK = 3


@pytest.fixture(scope="module")
def encoder_and_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TransformerEncoder, Ragged]:
    """A random BERT of two layers with dropout, in float64."""
    folder = write_bert(tmp_path_factory.mktemp("bert"), WORDS, layers=2)
    tokenizer = from_transformer(str(folder), max_len=16)
    encoder = build_encoder(
        EncoderConfig(name=str(folder), dim=6, dropout=0.3), tokenizer, None, seed=1
    )
    assert isinstance(encoder, TransformerEncoder)
    return encoder.double().train(), tokenizer.encode(TEXTS)


def loss(vector_BD: Tensor) -> Tensor:
    """Every vector's gradient depends on all others, as in a contrastive loss."""
    return torch.logsumexp(3 * vector_BD @ vector_BD.T, dim=1).sum()


def gradients(encoder: TransformerEncoder) -> list[Tensor]:
    found = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
    encoder.zero_grad()
    return found


def cached(encoder: TransformerEncoder, tokens: Ragged, seed: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    embedder = Embedder(encoder, CHUNK)
    total = loss(embedder(tokens))
    total.backward()
    assert not gradients(encoder), "the vectors have no graph: nothing reaches the encoder yet"
    embedder.finish_backward()
    return total.detach(), gradients(encoder)


def direct(encoder: TransformerEncoder, tokens: Ragged, seed: int) -> tuple[Tensor, list[Tensor]]:
    """One graph over all chunks, each with the masks that gradient caching draws for it."""
    torch.manual_seed(seed)
    first = int(torch.randint(2**62, (1,)))
    parts = []
    for chunk, start in enumerate(range(0, len(tokens), CHUNK)):
        torch.manual_seed(first + chunk)
        parts.append(encoder(tokens.slice(start, min(start + CHUNK, len(tokens)))))
    total = loss(torch.cat(parts))
    total.backward()
    return total.detach(), gradients(encoder)


def test_gradients_are_those_of_one_graph(
    encoder_and_tokens: tuple[TransformerEncoder, Ragged],
) -> None:
    encoder, tokens = encoder_and_tokens
    total, expected = direct(encoder, tokens, seed=7)
    found_total, found = cached(encoder, tokens, seed=7)
    torch.testing.assert_close(found_total, total, rtol=1e-12, atol=0)
    assert len(found) == len(expected) == len(list(encoder.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


def test_other_masks_give_other_gradients(
    encoder_and_tokens: tuple[TransformerEncoder, Ragged],
) -> None:
    """Or else the test above would pass without any replay."""
    encoder, tokens = encoder_and_tokens
    total, expected = direct(encoder, tokens, seed=7)
    other_total, other = cached(encoder, tokens, seed=8)
    assert abs(total - other_total) > 1e-3
    assert max(float((a - b).abs().max()) for a, b in zip(expected, other, strict=True)) > 1e-3


def test_a_frozen_encoder_has_nothing_to_propagate(
    encoder_and_tokens: tuple[TransformerEncoder, Ragged],
) -> None:
    encoder, tokens = encoder_and_tokens
    encoder.requires_grad_(False)
    embedder = Embedder(encoder, CHUNK)
    vector_BD = embedder(tokens)
    assert vector_BD.shape == (len(tokens), 6)
    assert not vector_BD.requires_grad
    assert not embedder.is_deferred
    embedder.finish_backward()
    encoder.requires_grad_(True)
