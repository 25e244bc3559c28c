"""A frozen transformer: each text is encoded once, also after a restart, and only the projection learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from models import write_bert

from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import ConfigError
from xmcray.nn import frozen
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.transformer import TransformerEncoder
from xmcray.training.optim import EncoderOptimizer, OptimConfig
from xmcray.types import Ragged

WORDS = ["sort", "an", "array", "of", "numbers", "find", "the", "largest", "element"]
TEXTS = ["sort an array", "", "find", " ".join(WORDS), "the largest element", "an array of numbers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer with dropout."""
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return from_transformer(str(folder), max_len=16)


def make(folder: Path, tokenizer: TextTokenizer) -> TransformerEncoder:
    config = EncoderConfig(
        name=str(folder), dim=16, frozen=True
    )  # as wide as the model: it is projected all the same
    encoder = build_encoder(config, tokenizer, None, seed=1)
    assert isinstance(encoder, TransformerEncoder)
    return encoder


def files_of(folder: Path) -> list[Path]:
    """The files of vectors, which lie in a folder named after the model."""
    return sorted(folder.glob("*/*.npy"))


def never(*_: object, **__: object) -> None:
    raise AssertionError("a text was encoded again")


def test_vectors_come_from_the_files_and_only_the_projection_learns(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "FILE_ROWS", 4)
    monkeypatch.setattr(frozen, "TEXTS_AT_ONCE", 3)
    tokens = tokenizer.encode(TEXTS)
    encoder = make(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)
    plain = make(folder, tokenizer)
    plain.load_state_dict(encoder.state_dict())
    expected = plain.eval()(tokens)
    assert [path.name for path in files_of(tmp_path)] == ["00000000.npy", "00000001.npy"]
    restarted = make(folder, tokenizer)
    monkeypatch.setattr(TransformerEncoder, "call_costs", never)
    restarted.remember(tmp_path, len(TEXTS), tokens.take)
    order = np.array([5, 1, 3, 0, 2, 4, 3])
    restarted.train()
    found = restarted(tokens.take(order))
    torch.testing.assert_close(found, expected[torch.from_numpy(order)], rtol=0, atol=1e-6)
    before = {name: tensor.clone() for name, tensor in restarted.state_dict().items()}
    optimizer = EncoderOptimizer({"encoder": restarted}, OptimConfig(), [])
    found.square().sum().backward()
    optimizer.step(1.0)
    moved = [
        name
        for name, tensor in restarted.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]
    assert moved == ["projection.weight"]


def test_a_file_that_a_kill_left_out_is_made_again_with_the_same_bytes(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "FILE_ROWS", 2)
    tokens = tokenizer.encode(TEXTS)
    make(folder, tokenizer).remember(tmp_path, len(TEXTS), tokens.take)
    kept = {path.name: path.read_bytes() for path in files_of(tmp_path)}
    files_of(tmp_path)[1].unlink()
    make(folder, tokenizer).remember(tmp_path, len(TEXTS), tokens.take)
    assert {path.name: path.read_bytes() for path in files_of(tmp_path)} == kept


def test_a_new_projection_starts_on_the_principal_axes_at_length_one(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "FILE_ROWS", 4)
    tokens = tokenizer.encode(TEXTS)
    config = EncoderConfig(name=str(folder), dim=3, frozen=True)
    encoder = build_encoder(config, tokenizer, None, seed=1)
    encoder.remember(tmp_path / "v", len(TEXTS), tokens.take)
    vectors = encoder(tokens).detach()
    assert float(vectors.norm(dim=1).mean()) == pytest.approx(1)
    pooled = encoder.pooled(tokens)
    variances = torch.linalg.svdvals(pooled - pooled.mean(dim=0)).square()
    projected = torch.linalg.svdvals(vectors - vectors.mean(dim=0)).square()
    # The three largest variances are kept, up to the common scale.
    torch.testing.assert_close(projected / projected[0], variances[:3] / variances[0])

    # A projection that was loaded stays as it was trained.
    encoder.save(tmp_path / "saved")
    saved = EncoderConfig(name=str(tmp_path / "saved"), dim=3, frozen=True)
    again = build_encoder(saved, tokenizer, None, seed=1)
    again.get_parameter("projection.weight").data *= 7
    again.remember(tmp_path / "v", len(TEXTS), tokens.take)
    torch.testing.assert_close(again(tokens), 7 * vectors)


def test_another_model_or_pooling_does_not_read_the_vectors_of_one(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    tokens = tokenizer.encode(TEXTS)
    encoder = make(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)
    pooled = encoder.pooled(tokens)
    for change in ("pooling", "weights"):
        other = make(folder, tokenizer)
        if change == "pooling":
            other.pooling = "cls"
        else:
            other.model.get_input_embeddings().weight.data += 0.1
        other.remember(tmp_path, len(TEXTS), tokens.take)
        assert not torch.allclose(other.pooled(tokens), pooled), change
    assert len(list(tmp_path.iterdir())) == 3


def test_keys_tell_texts_apart() -> None:
    rows = [row for n in range(4) for row in itertools.product([0, 1, 2, 30_000], repeat=n)]
    keys = frozen.text_keys(Ragged.from_rows(rows))
    assert len(set(keys.tolist())) == len(rows)
    assert frozen.text_keys(Ragged.from_rows(rows[::-1])).tolist() == keys[::-1].tolist()


def test_a_static_encoder_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match=r"encoder\.frozen"):
        EncoderConfig(frozen=True)
