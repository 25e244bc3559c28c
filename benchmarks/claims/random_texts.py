"""Corpora of random words, and transformers that start from nothing, for the claims about what losses can express."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import data_sets
import numpy as np
import torch
import transformers

from xmcray.data.corpus import Corpus

MARK = "marked"


def corpus(
    name: str,
    vocabulary: int,
    write: Callable[[Path], None],
    seed: int,
    layers: int,
    width: int,
    word_std: float | None = None,
) -> tuple[Corpus, Path]:
    """The corpus that `write` writes from words of `words`, and the folder of the transformer it is tokenised for."""
    model = data_sets.CACHE / "raw" / f"{name}-model"
    if not (model / "config.json").exists():
        save_transformer(model, vocabulary, seed, layers, width, word_std)
    return data_sets.prepared(name, write, tokenizer=str(model), max_len=32), model


def save_transformer(
    folder: Path, vocabulary: int, seed: int, layers: int, width: int, word_std: float | None = None
) -> None:
    """A BERT with random weights whose tokens are the random words, without special tokens around a text.

    Args:
        word_std: deviation of the word vectors; that of all other weights, 0.02, if not given.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["[PAD]", "[UNK]", MARK, *words(vocabulary)]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(seed)
    model = transformers.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():  # what all texts share would make their first vectors nearly the same
        model.embeddings.token_type_embeddings.weight.zero_()
        model.embeddings.position_embeddings.weight.mul_(0.1)
        if word_std is not None:
            model.embeddings.word_embeddings.weight.mul_(word_std / config.initializer_range)
    model.save_pretrained(folder)


def words(vocabulary: int) -> list[str]:
    """The random words."""
    return [f"w{number}" for number in range(vocabulary)]


def random_texts(
    generator: np.random.Generator, count: int, length: int, vocabulary: int
) -> list[str]:
    """Texts of independent uniform words."""
    drawn = generator.integers(vocabulary, size=(count, length))
    return [" ".join(f"w{number}" for number in row) for row in drawn]


def write_texts(
    folder: Path, labels: Sequence[str], **splits: Sequence[tuple[str, Sequence[int]]]
) -> None:
    """Plain JSON lines: label texts, and the queries of each split with their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "labels.jsonl",
        ({"uid": f"label{i}", "text": text} for i, text in enumerate(labels)),
    )
    for split, queries in splits.items():
        rows = (
            {"uid": f"{split}{i}", "text": text, "labels": list(ids)}
            for i, (text, ids) in enumerate(queries)
        )
        _write(folder / f"{split}.jsonl", rows)


def _write(path: Path, rows: Iterable[object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
