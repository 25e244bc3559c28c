"""Token ids of texts by the ids of their chunks, each of which the tokenizers library meets once.

For WordPiece as `tokens.train_wordpiece` makes it, a text's tokens are those of the chunks between
its spaces, one after the other: what normalises a text looks at single characters and their accents,
and no token reaches over a space. Most chunks of a text were in another one before, so looking them
up takes a fifth to a tenth of the library's time.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MAX_CHUNKS = 1 << 15  # about 10 MB
MAX_CHARS = 64  # a longer chunk hardly comes again


class TokenCache:
    """Remembers the token ids of chunks.

    Args:
        backend: one of which `is_separable` is true. It must not truncate.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._ids: dict[str, list[int]] = {}

    def token_ids(self, text: str, max_len: int) -> list[int]:
        """The first `max_len` token ids of a text."""
        found: list[int] = []
        known = self._ids
        for chunk in text.replace("\n", " ").split(" "):
            ids = known.get(chunk)
            found += self._tokenize(chunk) if ids is None else ids
            if len(found) >= max_len:
                break
        return found[:max_len]

    def _tokenize(self, chunk: str) -> list[int]:
        ids: list[int] = self._backend.encode(chunk).ids
        if len(chunk) <= MAX_CHARS:
            # Frequent chunks are soon back, so it does not matter which ones go.
            if len(self._ids) >= MAX_CHUNKS:
                self._ids.clear()
            self._ids[chunk] = ids
        return ids


def is_separable(backend: Tokenizer) -> bool:
    """Whether the tokens of a text are those of its chunks between spaces."""
    # Added tokens may hold spaces, and a post-processor puts tokens before and behind a text.
    whole_texts = backend.get_added_tokens_decoder() or backend.post_processor
    return (
        not whole_texts
        and isinstance(backend.normalizer, BertNormalizer)
        and isinstance(backend.pre_tokenizer, BertPreTokenizer)
        and isinstance(backend.model, WordPiece)
    )
