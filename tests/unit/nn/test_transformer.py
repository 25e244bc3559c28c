import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from models import write_bert
from safetensors.torch import load_file, save_file

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.micro_batches import micro_batches
from xmcray.nn.transformer import TransformerEncoder
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
    "and",
    "a",
]
TEXTS = ["sort an array", "", "find", " ".join(WORDS), "the largest element", "row"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer, in the form in which such models come."""
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return from_transformer(str(model_folder), max_len=32)


def make(folder: Path, tokenizer: TextTokenizer, **settings: object) -> TransformerEncoder:
    encoder = build_encoder(EncoderConfig(name=str(folder), **settings), tokenizer, None, seed=1)  # type: ignore[arg-type]
    assert isinstance(encoder, TransformerEncoder)
    return encoder.eval()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_one_padded_batch(
    model_folder: Path, tokenizer: TextTokenizer, pooling: str
) -> None:
    encoder = make(model_folder, tokenizer, dim=0, pooling=pooling)
    tokens = tokenizer.encode(TEXTS)
    mask = torch.arange(int(tokens.lengths.max())) < torch.from_numpy(tokens.lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = torch.from_numpy(tokens.values)
    states = encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = mean if pooling == "mean" else states[:, 0]
    torch.testing.assert_close(encoder(tokens), expected, rtol=0, atol=1e-6)


def test_a_text_has_the_same_vector_whatever_its_neighbours(
    model_folder: Path, tokenizer: TextTokenizer
) -> None:
    encoder = make(model_folder, tokenizer, dim=5)
    tokens = tokenizer.encode(TEXTS)
    together = encoder(tokens)
    assert together.shape == (len(TEXTS), 5)
    order = np.array([5, 3, 1, 0, 2, 4])
    torch.testing.assert_close(
        encoder(tokens.take(order)), together[torch.from_numpy(order)], rtol=0, atol=1e-6
    )
    alone = torch.cat([encoder(tokens.slice(i, i + 1)) for i in range(len(TEXTS))])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


def test_rows_without_tokens_are_zero_and_a_batch_of_them_has_a_zero_gradient(
    model_folder: Path, tokenizer: TextTokenizer
) -> None:
    encoder = make(model_folder, tokenizer, dim=5)
    vectors = encoder(Ragged.from_rows([[2, 3], [], [2, 6, 3]]))
    assert vectors.any(dim=1).tolist() == [True, False, True]
    for rows in (0, 3):
        nothing = encoder(Ragged.empty(rows))
        assert nothing.shape == (rows, 5)
        nothing.sum().backward()
    assert not encoder.model.get_input_embeddings().weight.grad.any()


def test_every_parameter_has_a_gradient_and_it_is_the_same_twice(
    model_folder: Path, tokenizer: TextTokenizer
) -> None:
    encoder = make(model_folder, tokenizer, dim=5).train()
    gradients = []
    for _ in range(2):
        encoder.zero_grad()
        torch.manual_seed(7)  # dropout, which the trainer seeds by step
        encoder(tokenizer.encode(TEXTS)).square().sum().backward()
        assert all(p.grad is not None for p in encoder.parameters())
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_setting_replaces_the_models_own(
    model_folder: Path, tokenizer: TextTokenizer
) -> None:
    encoder = make(model_folder, tokenizer, dim=0, dropout=0.0).train()
    tokens = tokenizer.encode(TEXTS)
    assert torch.equal(encoder(tokens), encoder(tokens))
    with_dropout = make(model_folder, tokenizer, dim=0).train()
    assert not torch.equal(with_dropout(tokens), with_dropout(tokens))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dim", [0, 5])
def test_saved_and_loaded_encoder_gives_the_same_bits(
    model_folder: Path, tokenizer: TextTokenizer, tmp_path: Path, dim: int, normalize: bool
) -> None:
    encoder = make(model_folder, tokenizer, dim=dim, pooling="cls")
    encoder.normalize = normalize
    encoder.save(tmp_path)
    loaded = load_encoder(tmp_path)
    tokens = tokenizer.encode(TEXTS)
    assert torch.equal(loaded(tokens), encoder(tokens))
    assert loaded.dim == (dim or 16)
    start = make(
        tmp_path, tokenizer, dim=dim
    )  # training continues from it: same projection and pooling, no length 1
    assert not start.normalize
    torch.testing.assert_close(
        torch.nn.functional.normalize(start(tokens)), torch.nn.functional.normalize(loaded(tokens))
    )


def test_older_sentence_transformers_folders_are_read(
    model_folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder = make(model_folder, tokenizer, dim=0, pooling="cls")
    encoder.save(tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    old = {
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
    }
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(old))
    tokens = tokenizer.encode(TEXTS)
    torch.testing.assert_close(
        load_encoder(tmp_path)(tokens), torch.nn.functional.normalize(encoder(tokens))
    )


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": "mean", "include_prompt": False},
    ],
)
def test_parts_we_do_not_have_are_named(
    model_folder: Path, tokenizer: TextTokenizer, tmp_path: Path, pooling: dict[str, object]
) -> None:
    make(model_folder, tokenizer, dim=0).save(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(BundleError, match=r"Pooling (.*max.*|mean) that is not supported"):
        load_encoder(tmp_path)


def test_static_encoder_starts_from_a_transformers_embeddings(
    model_folder: Path, tokenizer: TextTokenizer
) -> None:
    config = EncoderConfig(dim=16, init_from=str(model_folder), init_vectors="embeddings")
    table = (
        build_encoder(config, tokenizer, None, seed=0).get_parameter("embedding.weight").detach()
    )
    rows = (
        transformers.AutoModel.from_pretrained(model_folder).get_input_embeddings().weight.detach()
    )
    centred = rows - rows.mean(dim=0)
    torch.testing.assert_close(table, centred / centred.norm(dim=1).mean())


def test_a_corpus_with_another_tokenizer_is_refused(model_folder: Path) -> None:
    other = train_wordpiece(iter(TEXTS), vocab_size=40, max_len=8)
    for config in (
        EncoderConfig(name=str(model_folder)),
        EncoderConfig(init_from=str(model_folder), init_vectors="embeddings"),
    ):
        with pytest.raises(ConfigError, match="prepare the corpus again with --tokenizer"):
            build_encoder(config, other, None, seed=0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("./nowhere/to/be", "neither an existing folder nor a hub id"),
        ("no-such-owner/no-such-model", "hub|cache"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    tokenizer: TextTokenizer, name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=found) as caught:
        build_encoder(EncoderConfig(name=name), tokenizer, None, seed=0)
    assert "\n" not in str(caught.value)


def test_a_folder_with_pickled_weights_only_is_refused(
    model_folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"cannot be loaded .* needs config.json and model.safetensors"
    ):
        make(tmp_path, tokenizer)


@pytest.mark.parametrize("change", ["layer", "prefix"])
def test_a_model_whose_weights_do_not_fit_is_refused(
    tokenizer: TextTokenizer, tmp_path: Path, change: str
) -> None:
    weights_file = write_bert(tmp_path, WORDS, layers=2) / "model.safetensors"
    saved = load_file(weights_file)
    if change == "layer":
        kept = {name: weight for name, weight in saved.items() if "layer.1." not in name}
    else:
        kept = {f"student.{name}": weight for name, weight in saved.items()}
    save_file(kept, weights_file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"\d+ weights are missing, such as e") as caught:
        make(tmp_path, tokenizer)
    assert "\n" not in str(caught.value)


def test_weights_of_a_pooler_may_be_missing(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    weights_file = write_bert(tmp_path, WORDS) / "model.safetensors"
    saved = load_file(weights_file)
    kept = {name: weight for name, weight in saved.items() if "pooler" not in name}
    assert len(kept) < len(saved)
    save_file(kept, weights_file, metadata={"format": "pt"})
    assert make(tmp_path, tokenizer).dim


def test_micro_batches_hold_each_text_once_and_stay_within_the_bound() -> None:
    lengths = np.random.default_rng(0).integers(0, 33, 500)
    groups = micro_batches(lengths, call_tokens=64, max_tokens=1024)
    assert sorted(np.concatenate(groups)) == np.flatnonzero(lengths).tolist()
    assert max(len(g) * lengths[g].max() for g in groups) <= 1024
    assert micro_batches(np.zeros(3, np.int64), 64, 1024) == []
    assert [len(g) for g in micro_batches(np.array([9, 9]), 64, 4)] == [1, 1]


def test_micro_batches_cost_as_little_as_the_best_of_all_cuts() -> None:
    lengths, call = np.array([3, 30, 4, 12, 11, 30, 5]), 10
    ordered = np.sort(lengths)

    def cost(cuts: list[int]) -> int:
        bounds = [0, *cuts, len(lengths)]
        groups = [ordered[a:b] for a, b in itertools.pairwise(bounds)]
        return sum(len(g) * int(g[-1]) + call for g in groups)

    every_cut = [[i + 1 for i in range(6) if mask >> i & 1] for mask in range(64)]
    found = micro_batches(lengths, call, 10_000)
    assert sum(len(g) * int(lengths[g].max()) + call for g in found) == min(map(cost, every_cut))
