"""Low-rank adapters and gradient checkpointing: the plain peft loop, resume, and merged folders."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from corpora import planted_decoder
from loops import trained
from models import write_family
from torch import Tensor

from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import ConfigError, RunError
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.transformer import TransformerEncoder
from xmcray.training.optim import EncoderOptimizer, OptimConfig
from xmcray.training.run_config import RunConfig
from xmcray.training.step import Embedder

WORDS = ["sort", "an", "array", "of", "numbers", "find", "the", "largest", "element", "in", "row"]
TEXTS = ["sort an array", "find", " ".join(WORDS), "the largest element in an array", "row"]
LORA = {"lora_rank": 3, "lora_alpha": 6, "lora_targets": ("q_proj", "v_proj")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder."""
    return write_family(tmp_path_factory.mktemp("models") / "qwen3", WORDS, "qwen3")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return from_transformer(str(folder), max_len=16)


def make(folder: Path, tokenizer: TextTokenizer, **settings: object) -> TransformerEncoder:
    values = {"dim": 0, "pooling": "last_token", **settings}
    config = EncoderConfig(name=str(folder), **values)  # type: ignore[arg-type]
    encoder = build_encoder(config, tokenizer, None, seed=1)
    assert isinstance(encoder, TransformerEncoder)
    return encoder


def loss_of(vector_BD: Tensor) -> Tensor:
    """Every vector's gradient depends on all others, as in a contrastive loss."""
    return torch.logsumexp(vector_BD @ vector_BD.T / 4, dim=1).mean()


def train(encoder: TransformerEncoder, tokenizer: TextTokenizer, steps: int) -> list[float]:
    """Losses of some steps of the encoder's own optimiser, in micro-batches."""
    embedder = Embedder(encoder, micro_batch=2)
    optimizer = EncoderOptimizer({"encoder": encoder}, OptimConfig(lr=0.01), [])
    tokens = tokenizer.encode(TEXTS)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(embedder(tokens))
        loss.backward()
        embedder.finish_backward()
        optimizer.step(1.0)
        losses.append(float(loss.detach()))
    return losses


def test_training_is_that_of_a_plain_peft_loop(folder: Path, tokenizer: TextTokenizer) -> None:
    encoder = make(folder, tokenizer, **LORA)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)  # that of the run, by which the first factors are drawn
    plain = peft.get_peft_model(transformers.AutoModel.from_pretrained(folder), settings)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    batch = own(TEXTS, padding=True, return_tensors="pt")
    places = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)

    def vectors() -> Tensor:
        # Padding is on the left, so the last token of each text is in the last column.
        output = plain(**batch, position_ids=places)
        states: Tensor = output.last_hidden_state[:, -1]
        return states

    config = OptimConfig(lr=0.01)
    trainable = [weight for weight in plain.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(
        trainable,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    expected_losses = []
    for _ in range(20):
        adam.zero_grad()
        loss = loss_of(vectors())
        loss.backward()
        adam.step()
        expected_losses.append(float(loss.detach()))
    losses = train(encoder, tokenizer, 20)
    assert losses[-1] < losses[0] - 0.01
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
    with torch.no_grad():
        found = encoder(tokenizer.encode(TEXTS))
        torch.testing.assert_close(found, vectors(), rtol=0, atol=1e-5)


def test_saved_folder_is_merged_and_training_goes_on_from_it(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    encoder = make(folder, tokenizer, **LORA)
    train(encoder, tokenizer, 3)
    encoder.save(tmp_path)
    tokens = tokenizer.encode(TEXTS)
    merged = load_encoder(tmp_path)
    assert not [name for name in merged.state_dict() if "lora" in name]
    torch.testing.assert_close(merged(tokens), encoder(tokens), rtol=0, atol=1e-5)
    resumed = make(folder, tokenizer, **LORA)
    resumed.restore(tmp_path)
    for weight, expected in zip(resumed.parameters(), encoder.parameters(), strict=True):
        assert torch.equal(weight, expected)
    # Merged weights are no start for the adapters that are in them already.
    of_another_model = make(tmp_path, tokenizer, **LORA)
    with pytest.raises(RunError, match=r"encoder.name is another model than the one that"):
        of_another_model.restore(tmp_path)


def test_gradient_checkpointing_changes_no_gradient(folder: Path, tokenizer: TextTokenizer) -> None:
    gradients = []
    for is_on in (False, True):
        settings = {"gradient_checkpointing": is_on, "dropout": 0.2, "dim": 4}
        encoder = make(folder, tokenizer, **settings, **LORA)
        forward_calls = []
        layer = encoder.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=forward_calls: calls.append(1))
        torch.manual_seed(5)
        encoder(tokenizer.encode(TEXTS)).square().sum().backward()
        assert len(forward_calls) == 1 + is_on
        gradients.append([p.grad for p in encoder.parameters() if p.grad is not None])
    assert (
        len(gradients[0]) == 2 * 2 * 2 + 1
    )  # two factors of two targets of two layers; projection
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    corpus, name = planted_decoder(tmp_path)
    values = [
        f"encoder.name={name}",
        "encoder.dim=0",
        "encoder.pooling=last_token",
        "encoder.dropout=0.1",
        "encoder.lora_rank=2",
        "encoder.gradient_checkpointing=true",
        "method.columns=cache",
        "method.cache_hard=4",
        "method.num_positives=1",
        "negatives.hard=0",
        "optim.batch_size=33",
        "optim.micro_batch=10",
        "optim.epochs=2",
        "log.every=1",
    ]
    config = RunConfig.resolve("dexml", {}, values)

    def train_to(folder: Path, step: int) -> dict[str, Tensor]:
        stepper = trained(folder, corpus, config, step).stepper
        return {**stepper.encoder.state_dict(), **stepper.optimizer.tensors()}

    whole = train_to(tmp_path / "whole", 6)
    before = train_to(tmp_path / "killed", 3)
    resumed = train_to(tmp_path / "killed", 6)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
    assert not all(torch.equal(before[key], tensor) for key, tensor in whole.items())


def test_targets_that_no_layer_has_are_named(folder: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"lora_targets is \['query'\], expected names of linear"):
        make(folder, tokenizer, lora_rank=2, lora_targets=("query",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "static", "lora_rank": 2}, "lora_rank is set, which needs encoder.name to be a"),
        ({"name": "m", "frozen": True, "lora_rank": 2}, "needs encoder.frozen=false"),
        ({"name": "m", "frozen": True, "gradient_checkpointing": True}, "encoder.frozen=false"),
        ({"name": "m", "lora_targets": ("query",)}, "lora_targets is set, which needs"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(**settings)  # type: ignore[arg-type]
