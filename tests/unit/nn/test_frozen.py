"""A frozen transformer: each text is encoded once, also after a restart, and only the projection learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from models import write_bert

from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import ConfigError, RunError, readable
from xmcray.nn import frozen
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder
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


@pytest.fixture(scope="module")
def tokens(tokenizer: TextTokenizer) -> Ragged:
    return tokenizer.encode(TEXTS)


def make(folder: Path, tokenizer: TextTokenizer) -> TransformerEncoder:
    # As wide as the model: it is projected all the same.
    config = EncoderConfig(name=str(folder), dim=16, frozen=True)
    encoder = build_encoder(config, tokenizer, None, seed=1)
    assert isinstance(encoder, TransformerEncoder)
    return encoder


def files_of(folder: Path) -> list[Path]:
    """The files of vectors, which lie in a folder named after the model."""
    return sorted(folder.glob("*/*.npy"))


def never(*_: object, **__: object) -> None:
    raise AssertionError("a text was encoded again")


def test_vectors_come_from_the_files_after_a_restart(
    folder: Path,
    tokenizer: TextTokenizer,
    tokens: Ragged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen, "FILE_ROWS", 4)
    monkeypatch.setattr(frozen, "TEXTS_AT_ONCE", 3)
    encoder = make(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)
    # 6 texts in files of 4.
    assert [path.name for path in files_of(tmp_path)] == ["00000000.npy", "00000001.npy"]
    without_files = make(folder, tokenizer)
    without_files.load_state_dict(encoder.state_dict())
    expected = without_files.eval()(tokens)

    restarted = make(folder, tokenizer)
    monkeypatch.setattr(TransformerEncoder, "call_costs", never)
    restarted.remember(tmp_path, len(TEXTS), tokens.take)
    restarted.train()
    order = np.array([5, 1, 3, 0, 2, 4, 3])
    vectors = restarted(tokens.take(order))

    torch.testing.assert_close(vectors, expected[torch.from_numpy(order)], rtol=0, atol=1e-6)


def test_only_the_projection_learns(
    folder: Path, tokenizer: TextTokenizer, tokens: Ragged, tmp_path: Path
) -> None:
    encoder = make(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)
    encoder.train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    optimizer = EncoderOptimizer({"encoder": encoder}, OptimConfig(), [])

    encoder(tokens).square().sum().backward()
    optimizer.step(1.0)

    after = encoder.state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert moved == ["projection.weight"]


def test_a_file_that_a_kill_left_out_is_made_again_with_the_same_bytes(
    folder: Path,
    tokenizer: TextTokenizer,
    tokens: Ragged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen, "FILE_ROWS", 2)
    make(folder, tokenizer).remember(tmp_path, len(TEXTS), tokens.take)
    files = files_of(tmp_path)
    contents = [path.read_bytes() for path in files]
    files[1].unlink()

    make(folder, tokenizer).remember(tmp_path, len(TEXTS), tokens.take)

    assert files_of(tmp_path) == files
    assert [path.read_bytes() for path in files] == contents


def variances(vectors: torch.Tensor) -> torch.Tensor:
    """Along the principal axes, up to the number of vectors; the largest comes first."""
    return torch.linalg.svdvals(vectors - vectors.mean(dim=0)).square()


def make_narrow(name: Path, tokenizer: TextTokenizer) -> Encoder:
    config = EncoderConfig(name=str(name), dim=3, frozen=True)
    return build_encoder(config, tokenizer, None, seed=1)


def test_a_new_projection_starts_on_the_principal_axes_at_length_one(
    folder: Path,
    tokenizer: TextTokenizer,
    tokens: Ragged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The axes are those of the vectors of several files.
    monkeypatch.setattr(frozen, "FILE_ROWS", 4)
    encoder = make_narrow(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)

    vectors = encoder(tokens).detach()

    assert float(vectors.norm(dim=1).mean()) == pytest.approx(1)
    # The three largest variances are kept, up to the common scale.
    kept = variances(vectors)
    largest = variances(encoder.pooled(tokens))[:3]
    torch.testing.assert_close(kept / kept[0], largest / largest[0])


def test_a_projection_that_was_loaded_stays_as_it_was_trained(
    folder: Path, tokenizer: TextTokenizer, tokens: Ragged, tmp_path: Path
) -> None:
    encoder = make_narrow(folder, tokenizer)
    encoder.remember(tmp_path / "v", len(TEXTS), tokens.take)
    vectors = encoder(tokens).detach()
    encoder.save(tmp_path / "saved")

    loaded = make_narrow(tmp_path / "saved", tokenizer)
    loaded.get_parameter("projection.weight").data *= 7
    loaded.remember(tmp_path / "v", len(TEXTS), tokens.take)

    torch.testing.assert_close(loaded(tokens), 7 * vectors)


@pytest.mark.parametrize("change", ["pooling", "weights"])
def test_another_model_or_pooling_does_not_read_the_vectors_of_one(
    folder: Path, tokenizer: TextTokenizer, tokens: Ragged, tmp_path: Path, change: str
) -> None:
    encoder = make(folder, tokenizer)
    encoder.remember(tmp_path, len(TEXTS), tokens.take)
    other = make(folder, tokenizer)
    if change == "pooling":
        other.pooling = "cls"
    else:
        other.model.get_input_embeddings().weight.data += 0.1

    other.remember(tmp_path, len(TEXTS), tokens.take)

    assert not torch.allclose(other.pooled(tokens), encoder.pooled(tokens))
    # A folder of vectors for each.
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_does_not_continue_with_the_vectors_of_another_model(
    folder: Path, tokenizer: TextTokenizer, tokens: Ragged, tmp_path: Path
) -> None:
    make(folder, tokenizer).save(tmp_path / "checkpoint")
    same = make(folder, tokenizer)
    same.remember(tmp_path / "same", len(TEXTS), tokens.take)
    same.restore(tmp_path / "checkpoint")

    other = make(folder, tokenizer)
    other.model.get_input_embeddings().weight.data += 0.1
    other.remember(tmp_path / "other", len(TEXTS), tokens.take)
    # No malformed checkpoint: the advice of a resume would be wrong.
    refusal = pytest.raises(RunError, match=r"^encoder\.name is another model than the one that")
    with refusal, readable("a checkpoint is malformed", "resume from an earlier one"):
        other.restore(tmp_path / "checkpoint")


def test_keys_tell_texts_apart() -> None:
    """All texts of up to three tokens out of four."""
    texts: list[tuple[int, ...]] = []
    for length in range(4):
        texts += itertools.product([0, 1, 2, 30_000], repeat=length)

    keys = frozen.text_keys(Ragged.from_rows(texts)).tolist()

    assert len(set(keys)) == len(texts)
    # A key does not depend on the text's place.
    backwards = frozen.text_keys(Ragged.from_rows(texts[::-1])).tolist()
    assert backwards == keys[::-1]


def test_a_static_encoder_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match=r"encoder\.frozen"):
        EncoderConfig(frozen=True)
