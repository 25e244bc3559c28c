"""A random transformer for tests, in the form in which such models are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


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
