"""Random transformers for tests, in the form in which such models are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# In the order of RoBERTa and MPNet, which take token 1 for padding.
OTHER_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "pad_token_id": 1,
}
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertConfig", {}),
    "roberta": ("RobertaConfig", {}),
    "mpnet": ("MPNetConfig", {}),
    # Half of its layers see four tokens to either side.
    "modernbert": ("ModernBertConfig", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    # A decoder, in which two heads of queries share keys and values.
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 4}),
    # An encoder-decoder, of which only the encoder is used.
    "t5": ("T5Config", {"d_kv": 4, "d_ff": 32}),
    # Attention sees the distance of two tokens, which has no limit.
    "deberta-v2": (
        "DebertaV2Config",
        {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    # Its table of tokens is narrower than its states.
    "electra": ("ElectraConfig", {"embedding_size": 8}),
    # A Fourier transform mixes all cells, padding too.
    "fnet": ("FNetConfig", {}),
    # It takes a mask, but its convolutions mix padding into the states.
    "convbert": ("ConvBertConfig", {"embedding_size": 16}),
}


def write_bert(folder: Path, words: Sequence[str], layers: int = 1) -> Path:
    """Writes a BERT of 16 dimensions, with dropout, whose tokens are `words`; returns its folder."""
    vocabulary = {word: token_id for token_id, word in enumerate([*SPECIAL_TOKENS, *words])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_cross_encoder(folder: Path, words: Sequence[str]) -> Path:
    """Writes a random cross-encoder: the BERT of `write_bert` with one output; returns its folder."""
    write_bert(folder, words)
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder)
    return folder


def write_family(folder: Path, words: Sequence[str], family: str) -> Path:
    """Writes a random model of 16 dimensions and two layers of one of `FAMILIES`."""
    vocabulary = {word: token_id for token_id, word in enumerate([*OTHER_SPECIAL_TOKENS, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    is_decoder = family == "qwen3"
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>" if is_decoder else "<s> $A </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        # As Qwen's own tokenizer does.
        padding_side="left" if is_decoder else "right",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config_name, settings = FAMILIES[family]
    config_type = getattr(transformers, config_name)
    config = config_type(vocab_size=len(vocabulary), **SIZES, **settings)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the usual start, at which attention is nearly the same for all tokens.
            parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
    return folder


def as_sentence_transformer(
    folder: Path, pooling: str, prompts: Mapping[str, str], similarity: str = "cosine"
) -> None:
    """Adds the files by which sentence-transformers reads a folder; its vectors have length 1."""
    modules = []
    for number, kind in enumerate(("Transformer", "Pooling", "Normalize")):
        path = f"{number}_{kind}" if number else ""
        (folder / path).mkdir(exist_ok=True)
        module = {"idx": number, "name": str(number), "path": path}
        modules.append({**module, "type": f"sentence_transformers.models.{kind}"})
    # The settings of releases before 6, which most published folders have.
    settings = {"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(modules))
    sentence_settings = {"prompts": prompts, "similarity_fn_name": similarity}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(sentence_settings))
