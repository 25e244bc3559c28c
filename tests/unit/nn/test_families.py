"""Families of encoders: vectors equal those of transformers, with prompts, pooling and padding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from models import FAMILIES, as_sentence_transformer, write_bert, write_family
from torch import Tensor

from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.pretrained import fill_constants, set_dropout
from xmcray.nn.transformer import TransformerEncoder
from xmcray.types import Ragged

WORDS = ["sort", "an", "array", "of", "numbers", "find", "the", "largest", "element", "query", "in"]
LONG_TEXT = " ".join([*WORDS, *reversed(WORDS)])
TEXTS = ["sort an array", "find", LONG_TEXT, "the largest element in an array", "numbers"]
PROMPTS = {"query": "find the query ", "document": "in "}
# How the settings of a folder name the pooling of each family under test.
POOLINGS = {
    "bert": "cls_token",
    "roberta": "weightedmean_tokens",
    "mpnet": "mean_tokens",
    "modernbert": "mean_tokens",
    "qwen3": "lasttoken",
    "t5": "mean_tokens",
}


@pytest.fixture(scope="module", params=POOLINGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder of one family, named after it."""
    path = write_family(tmp_path_factory.mktemp("models") / request.param, WORDS, request.param)
    as_sentence_transformer(path, POOLINGS[request.param], PROMPTS)
    return path


def pooled(states_BTH: Tensor, mask_BT: Tensor, pooling: str) -> Tensor:
    """Pooled states, by the definition of each way of pooling; padding may be on either side."""
    vectors = []
    for states_TH, is_token_T in zip(states_BTH, mask_BT.bool(), strict=True):
        tokens_TH = states_TH[is_token_T]
        places_T = torch.arange(1, len(tokens_TH) + 1)
        vectors.append(
            {
                "cls_token": tokens_TH[0],
                "lasttoken": tokens_TH[-1],
                "mean_tokens": tokens_TH.mean(dim=0),
                "weightedmean_tokens": (places_T[:, None] * tokens_TH).sum(0) / places_T.sum(),
            }[pooling]
        )
    return torch.stack(vectors)


def vectors_of_transformers(folder: Path, prompt: str) -> Tensor:
    """Vectors of `TEXTS` by the transformers library, padded on the tokenizer's own side."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    if folder.name == "t5":
        model = model.encoder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([prompt + text for text in TEXTS], padding=True, return_tensors="pt")
    assert tokenizer.padding_side == ("left" if folder.name == "qwen3" else "right")
    # Positions are counted from the first token; generation does the same to a padded prompt.
    options = {}
    if folder.name == "qwen3":
        options["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        output = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **options
        )
    pooled_BH = pooled(output.last_hidden_state, batch["attention_mask"], POOLINGS[folder.name])
    return F.normalize(pooled_BH, dim=-1)


def test_vectors_with_prompts_are_those_of_transformers(folder: Path) -> None:
    tokenizer = from_transformer(str(folder), max_len=64, label_max_len=64)
    encoder = load_encoder(folder)
    with torch.no_grad():
        queries = encoder(tokenizer.encode(TEXTS))
        labels = encoder(tokenizer.encode_labels(TEXTS))
    for vectors, prompt in ((queries, PROMPTS["query"]), (labels, PROMPTS["document"])):
        expected = vectors_of_transformers(folder, prompt)
        assert F.cosine_similarity(vectors, expected).min() >= 0.99999
        torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


def test_packed_and_padded_texts_have_the_same_vectors_and_gradients(folder: Path) -> None:
    tokenizer = from_transformer(str(folder), max_len=64)
    results = []
    for packs in (True, False):
        encoder = load_encoder(folder)
        assert isinstance(encoder, TransformerEncoder)
        assert encoder.packed == (folder.name in ("bert", "modernbert", "qwen3"))
        encoder.packed &= packs
        vectors = encoder(tokenizer.encode(TEXTS))
        vectors[:, 0].sum().backward()
        gradients = [weight.grad for weight in encoder.parameters() if weight.grad is not None]
        results.append([vectors.detach(), *gradients])
    for packed_result, padded_result in zip(*results, strict=True):
        torch.testing.assert_close(packed_result, padded_result, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["fnet", "convbert"])
def test_texts_run_without_padding_where_it_would_change_them(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path, WORDS, family)
    tokenizer = from_transformer(str(folder), max_len=64)
    encoder = load_encoder(folder)
    tokens = tokenizer.encode(TEXTS)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        vectors = encoder(tokens)
        for number, vector in enumerate(vectors):
            states_1TH = model(torch.from_numpy(tokens[number])[None]).last_hidden_state
            torch.testing.assert_close(vector, states_1TH[0].mean(dim=0), rtol=0, atol=1e-5)


def test_saved_folder_keeps_pooling_prompts_and_similarity(folder: Path, tmp_path: Path) -> None:
    tokenizer = from_transformer(str(folder), max_len=64)
    load_encoder(folder).save(tmp_path)
    tokens = tokenizer.encode(TEXTS)
    assert torch.equal(load_encoder(tmp_path)(tokens), load_encoder(folder)(tokens))
    again = from_transformer(str(tmp_path), max_len=64)
    assert (again.query_prompt, again.label_prompt) == tuple(PROMPTS.values())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without files of sentence-transformers."""
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


def test_a_projection_of_the_folder_stays_or_gives_way_to_another_width(
    plain: Path, tmp_path: Path
) -> None:
    tokenizer = from_transformer(str(plain), max_len=64)
    for width, other in ((16, 8), (8, 16)):
        folder = tmp_path / str(width)
        frozen = EncoderConfig(name=str(plain), dim=width, frozen=True)
        projected = build_encoder(frozen, tokenizer, None, seed=3)
        assert isinstance(projected, TransformerEncoder)
        assert projected.projection is not None
        projected.save(folder)
        same = build_encoder(EncoderConfig(name=str(folder), dim=width), tokenizer, None, seed=4)
        assert isinstance(same, TransformerEncoder)
        assert same.projection is not None
        assert torch.equal(same.projection.weight, projected.projection.weight)
        changed = build_encoder(EncoderConfig(name=str(folder), dim=other), tokenizer, None, seed=4)
        assert changed(tokenizer.encode(TEXTS)).shape[1] == other


def test_two_dense_layers_are_refused(plain: Path, tmp_path: Path) -> None:
    tokenizer = from_transformer(str(plain), max_len=64)
    build_encoder(EncoderConfig(name=str(plain), dim=8), tokenizer, None, seed=3).save(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (dense,) = [module for module in modules if module["type"].endswith("Dense")]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, dense]))
    with pytest.raises(ConfigError, match="has two parts Dense, expected one of each kind"):
        build_encoder(EncoderConfig(name=str(tmp_path), dim=0), tokenizer, None, seed=3)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token", "weighted_mean"])
def test_pooling_is_a_setting(plain: Path, pooling: str) -> None:
    tokenizer = from_transformer(str(plain), max_len=64)
    config = EncoderConfig(name=str(plain), dim=0, pooling=pooling)  # type: ignore[arg-type]
    encoder = build_encoder(config, tokenizer, None, seed=0).eval()
    assert isinstance(encoder, TransformerEncoder)
    tokens = tokenizer.encode(TEXTS)
    packed = encoder(tokens)
    encoder.packed = False
    torch.testing.assert_close(encoder(tokens), packed, rtol=0, atol=1e-5)
    states_TH = encoder.model(torch.from_numpy(tokens[0])[None]).last_hidden_state[0]
    names = {"mean": "mean_tokens", "cls": "cls_token", "last_token": "lasttoken"}
    mask_T = torch.ones(len(states_TH))
    expected = pooled(states_TH[None], mask_T[None], names.get(pooling, "weightedmean_tokens"))
    torch.testing.assert_close(packed[:1], expected, rtol=0, atol=1e-5)


def test_prompts_that_are_set_replace_those_of_the_folder(plain: Path, tmp_path: Path) -> None:
    tokenizer = from_transformer(str(plain), 64, query_prompt="find ", label_prompt="sort ")
    tokenizer.save(tmp_path)
    again = TextTokenizer.load(tmp_path)
    without = from_transformer(str(plain), 64)
    assert "query_prompt" not in without.to_files()["xmcray.json"]
    for queries, expected in (
        (again.encode(["an array"]), without.encode(["find an array"])),
        (again.encode_labels(["an array"]), without.encode(["sort an array"])),
        # A label without text stays one: its prompt alone would be an answer to anything.
        (again.encode_labels([""]), without.encode([""])),
    ):
        np.testing.assert_array_equal(queries.values, expected.values)
    with pytest.raises(ConfigError, match="label_max_len is 4, but the prompt"):
        from_transformer(str(plain), 64, 4, label_prompt="sort an array ")


def test_an_encoder_decoder_learns_as_an_encoder(tmp_path: Path) -> None:
    name = str(write_family(tmp_path / "t5", WORDS, "t5"))
    tokenizer = from_transformer(name, max_len=64)
    encoder = build_encoder(EncoderConfig(name=name, dim=8), tokenizer, None, seed=0)
    encoder(tokenizer.encode(TEXTS)).square().sum().backward()
    assert all(weight.grad is not None for weight in encoder.parameters())
    assert not [weight for weight, _ in encoder.named_parameters() if "decoder" in weight]


def test_an_encoder_decoder_whose_encoder_cannot_be_loaded_alone_is_refused(
    plain: Path, tmp_path: Path
) -> None:
    tokenizer = from_transformer(str(plain), max_len=64)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    transformers.BartConfig(vocab_size=64, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bart is an encoder-decoder, of which only T5") as caught:
        build_encoder(EncoderConfig(name=str(tmp_path)), tokenizer, None, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            transformers.OPTConfig(
                vocab_size=64,
                hidden_size=16,
                word_embed_proj_dim=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                ffn_dim=16,
            ),
            r"tokens are \[1, 3, 8\], and only \[1, 3, 16\] is supported",
        ),
        (
            transformers.FunnelConfig(vocab_size=64, architectures=["FunnelModel"]),
            "funnel merges the states of tokens; it is not supported",
        ),
    ],
)
def test_a_model_without_a_state_of_its_width_for_each_token_is_refused(
    plain: Path, tmp_path: Path, settings: transformers.PreTrainedConfig, reason: str
) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    if settings.model_type == "opt":
        transformers.AutoModel.from_config(settings).save_pretrained(tmp_path)
    settings.save_pretrained(tmp_path)
    with pytest.raises(BundleError, match=reason) as caught:
        load_encoder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "most"),
    [
        ("bert", 512),
        ("electra", 512),
        ("roberta", 510),
        ("mpnet", 510),
        ("modernbert", None),
        ("qwen3", None),
        ("t5", None),
        ("deberta-v2", None),
    ],
)
def test_texts_beyond_the_positions_of_a_model_are_refused(
    family: str, most: int | None, tmp_path: Path
) -> None:
    name = str(write_family(tmp_path / family, WORDS, family))
    config = EncoderConfig(name=name, dim=8)
    longest = from_transformer(name, max_len=most or 600)
    encoder = build_encoder(config, longest, None, seed=0)
    vectors = encoder(longest.encode(["sort " * 700]))
    assert vectors.isfinite().all()
    if most is None:
        return
    for max_len in (most + 1, 1 << 20):
        longer = from_transformer(name, max_len=max_len)
        expected = rf"keeps up to {max_len} tokens .* reads at most {most}; .* --max-len {most}$"
        with pytest.raises(ConfigError, match=expected):
            build_encoder(config, longer, None, seed=0)


@pytest.mark.parametrize(
    ("config_name", "num_rates"),
    [
        ("BertConfig", 2),
        ("DistilBertConfig", 2),
        ("ModernBertConfig", 3),
        ("BloomConfig", 2),
        ("GPTNeoXConfig", 2),
        ("FalconConfig", 2),
        ("GPT2Config", 3),
        ("T5Config", 1),
        ("MptConfig", 2),
    ],
)
def test_dropout_reaches_each_rate_of_a_family(config_name: str, num_rates: int) -> None:
    settings = getattr(transformers, config_name)()
    set_dropout(settings, 0.37)
    assert str(settings.to_dict()).count("0.37") == num_rates


def test_dropout_of_a_model_without_it_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"dropout is 0.1, but a model of type rwkv has no dropout"
    ):
        set_dropout(transformers.RwkvConfig(), 0.1)


def test_a_folder_that_lower_cases_texts_needs_a_tokenizer_that_does(tmp_path: Path) -> None:
    cased = write_family(tmp_path / "cased", WORDS, "bert")
    uncased = write_bert(tmp_path / "uncased", WORDS)
    for folder in (cased, uncased):
        as_sentence_transformer(folder, "mean_tokens", PROMPTS)
        (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(BundleError, match=r"lower-cases texts \(do_lower_case\), which") as caught:
        load_encoder(cased)
    assert "\n" not in str(caught.value)
    assert load_encoder(uncased).dim == 16


def test_a_similarity_without_inner_product_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path, WORDS)
    as_sentence_transformer(tmp_path, "mean_tokens", PROMPTS, similarity="manhattan")
    with pytest.raises(BundleError, match="compares vectors by manhattan, expected cosine or dot"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("dim", [0, 5])
def test_texts_without_tokens_have_the_width_of_the_states(tmp_path: Path, dim: int) -> None:
    name = str(write_family(tmp_path, WORDS, "electra"))
    tokenizer = from_transformer(name, max_len=64)
    encoder = build_encoder(EncoderConfig(name=name, dim=dim), tokenizer, None, seed=0)
    assert encoder(Ragged.empty(0)).shape == (0, dim or 16)
    assert encoder(Ragged.empty(3)).shape == encoder(tokenizer.encode(TEXTS[:3])).shape


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_no_file_has_follow_from_the_settings(family: str, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(write_family(tmp_path / family, WORDS, family))
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _, buffer in model.named_buffers():
        buffer.fill_(77)
    fill_constants(model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, wanted[name]), name
