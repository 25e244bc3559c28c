"""A random transformer for tests, in the form in which such models come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


def write_bert(folder: Path, words: Sequence[str], layers: int = 1) -> Path:
    """Writes a BERT of 16 dimensions, with dropout, whose tokens are `words`; returns its folder."""
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    }
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    transformers.BertModel(
        transformers.BertConfig(vocab_size=len(vocabulary), **sizes)
    ).save_pretrained(folder)
    return folder
