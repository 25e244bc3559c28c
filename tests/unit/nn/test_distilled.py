"""A static encoder starts from what a transformer makes of each token, which runs once for all trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import write_bert

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.errors import ConfigError
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.transformer import TransformerEncoder

WORDS = ["sort", "an", "array", "of", "numbers", "find"]
TEXTS = ["sort an array", "find numbers", "sort numbers of an array"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XMCRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start_table(model: Path, tokenizer: TextTokenizer, **settings: object) -> torch.Tensor:
    config = EncoderConfig(dim=16, init_from=str(model), **settings)  # type: ignore[arg-type]
    encoder = build_encoder(config, tokenizer, None, seed=0)
    return encoder.get_parameter("embedding.weight").detach()


@pytest.mark.parametrize("kind", ["own tokens", "tokens of the corpus"])
def test_a_token_starts_as_what_the_transformer_makes_of_it_alone(model: Path, kind: str) -> None:
    own = from_transformer(str(model), max_len=8)
    tokenizer = own if kind == "own tokens" else train_wordpiece(iter(TEXTS * 2), vocab_size=60)
    table = start_table(model, tokenizer)
    # "##r" is no word of the transformer: it is encoded as the text "r".
    words = [token.removeprefix("##") for token in tokenizer.vocabulary()]
    with torch.no_grad():
        expected = load_encoder(model)(own.encode(words))
    centred = expected - expected.mean(dim=0)
    torch.testing.assert_close(table, centred / centred.norm(dim=1).mean(), rtol=1e-4, atol=1e-5)


def test_the_transformer_runs_once_for_all_trainings(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_wordpiece(iter(TEXTS * 2), vocab_size=60)
    first = start_table(model, tokenizer)

    def never(*_: object) -> torch.Tensor:
        raise AssertionError("the transformer ran again")

    monkeypatch.setattr(TransformerEncoder, "forward", never)
    assert torch.equal(start_table(model, tokenizer), first)
    (kept,) = cache.glob("tokens-*.npy")
    kept.unlink()
    with pytest.raises(AssertionError, match="ran again"):
        start_table(model, tokenizer)


def test_pairs_start_at_zero_and_labels_as_queries(model: Path) -> None:
    tokenizer = train_wordpiece(iter(TEXTS * 2), vocab_size=60)
    table = start_table(model, tokenizer, bigram_buckets=3, separate_labels=True)
    query_rows, label_rows = table.chunk(2)
    assert torch.equal(query_rows, label_rows)
    assert not query_rows[tokenizer.vocab_size :].any()
    assert query_rows[: tokenizer.vocab_size].any()


def test_a_share_of_the_start_may_stay_random(model: Path) -> None:
    tokenizer = train_wordpiece(iter(TEXTS * 2), vocab_size=60)
    pairs = {"bigram_buckets": 3}
    random_rows = start_table(model, tokenizer, init_share=0.0, **pairs)
    distilled_rows = start_table(model, tokenizer, **pairs)
    mixed_rows = start_table(model, tokenizer, init_share=0.25, **pairs)
    torch.testing.assert_close(mixed_rows, 0.75**0.5 * random_rows + 0.5 * distilled_rows)


def test_a_model_that_is_nowhere_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokenizer = train_wordpiece(iter(TEXTS * 2), vocab_size=60)
    with pytest.raises(ConfigError, match="hub") as caught:
        start_table(tmp_path / "nowhere", tokenizer)
    assert "\n" not in str(caught.value)
