"""A table of token vectors distilled from a transformer: the start of a static encoder.

Each token of a vocabulary is encoded as a text of its own, as model2vec does
(https://github.com/MinishLab/model2vec). What comes out are vectors of words, and not of a
transformer's raw input embeddings. The transformer runs once over the vocabulary; its vectors are
kept in this user's cache:

    CACHE/tokens-0123abcd....npy    float32 [V, H], named by the hashes of model and vocabulary
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from xmcray.errors import ConfigError
from xmcray.nn import pretrained, transformer
from xmcray.nn.transformer import TransformerEncoder
from xmcray.storage.cache import cache_folder
from xmcray.storage.manifest import hash_file
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import whole_file
from xmcray.types import Ragged

if TYPE_CHECKING:
    from xmcray.data.tokens import TextTokenizer

TOKENS_AT_ONCE = 1024
# Of the files in the cache; a change of how tokens are encoded counts it up.
_VERSION = 1


def distilled_tokens(name: str, tokenizer: TextTokenizer) -> Tensor:
    """The vector that a transformer gives each token of a vocabulary.

    Args:
        name: of the transformer: a folder or a hub id. Any one will do, because tokens that it does
            not have are encoded as texts.
        tokenizer: of the corpus.

    Returns:
        float32 [V, H], before any reduction of the width.

    Raises:
        ConfigError: there is no such transformer.
        StorageError: the cache cannot be written.
    """
    model = pretrained.find(name)
    key = _key(model, tokenizer)
    cache = cache_folder()
    path = cache / f"tokens-{key}.npy"
    with disk_errors(path):
        cache.mkdir(parents=True, exist_ok=True)
        # The workers of a machine wait for the first one instead of all running the transformer.
        with (cache / f".tokens-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                encoder = transformer.open_model(model, ConfigError).eval()
                # Lengths of single tokens mean nothing: the table is scaled as a whole.
                encoder.normalize = False
                vectors = token_vectors(encoder, tokenizer)
                with whole_file(path) as temporary, temporary.open("wb") as file:
                    np.save(file, vectors.numpy())
        return torch.from_numpy(np.load(path))


def _key(model: Path, tokenizer: TextTokenizer) -> str:
    """A hash of all that the vectors depend on."""
    digest = hashlib.sha256(str(_VERSION).encode())
    for path in sorted(model.rglob("*")):
        if path.suffix in (".json", ".txt", ".safetensors"):
            digest.update(path.relative_to(model).as_posix().encode())
            digest.update(hash_file(path).sha256.encode())
    for token in tokenizer.vocabulary():
        # Zero bytes between them, so that "a", "b" is another vocabulary than "ab".
        digest.update(token.encode() + b"\0")
    return digest.hexdigest()[:32]


def token_vectors(encoder: TransformerEncoder, tokenizer: TextTokenizer) -> Tensor:
    """The vector that a transformer gives each token of a vocabulary as a text of its own.

    Args:
        encoder: the transformer, in its state for answering.
        tokenizer: of the corpus.

    Returns:
        float32 [V, H].
    """
    tokens = _texts_of_tokens(encoder, tokenizer)
    with torch.no_grad():
        vectors = [encoder(chunk) for chunk in tokens.chunks(TOKENS_AT_ONCE)]
    return torch.cat(vectors).float()


def _texts_of_tokens(encoder: TransformerEncoder, tokenizer: TextTokenizer) -> Ragged:
    """Each token of the vocabulary as a text in the transformer's own tokens."""
    own: Any = encoder.tokenizer
    vocabulary = tokenizer.vocabulary()
    if own.convert_tokens_to_ids(vocabulary) == list(range(len(vocabulary))):
        # The transformer's own vocabulary: a token is itself, between the special tokens of a text.
        start, end = _special_tokens(own)
        texts = [[*start, token, *end] for token in range(len(vocabulary))]
        return Ragged.from_rows(texts)
    rows = own(tokenizer.words(), truncation=True, max_length=tokenizer.max_len)["input_ids"]
    return Ragged.from_rows(rows)


def _special_tokens(own: Any) -> tuple[list[int], list[int]]:
    """Ids that a transformer's tokenizer puts before and after a text."""
    text = "a"
    plain = own(text, add_special_tokens=False)["input_ids"]
    whole = own(text)["input_ids"]
    first = whole.index(plain[0])
    return whole[:first], whole[first + len(plain) :]
