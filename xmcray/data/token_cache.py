"""Token ids of texts, put together from the remembered token ids of their words.

A word here is what stands between two spaces, with its punctuation. For WordPiece as
`tokens.train_wordpiece` makes it, the tokens of a text are those of its words in order: the
normaliser changes each character alone or with its accents, and no token contains a space. Most words
of a text were in another one before, and looking them up is faster than tokenizing them again
(benchmarks/prepare.py).
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MAX_WORDS = 1 << 15  # about 10 MB of memory when full
MAX_WORD_CHARS = 64  # a longer word hardly comes again


class TokenCache:
    """Remembers the token ids of words. Several threads may use it.

    Args:
        backend: one of which `is_separable` is true. It must not truncate texts.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._ids: dict[str, list[int]] = {}

    def token_ids(self, text: str, max_len: int) -> list[int]:
        """The first `max_len` token ids of a text."""
        found: list[int] = []
        known = self._ids
        # Newlines are frequent, so they separate words too. The library splits at other white space.
        for word in text.replace("\n", " ").split(" "):
            ids = known.get(word)
            found += self._tokenize(word) if ids is None else ids
            if len(found) >= max_len:
                break
        return found[:max_len]

    def _tokenize(self, word: str) -> list[int]:
        ids: list[int] = self._backend.encode(word).ids
        if len(word) <= MAX_WORD_CHARS:
            # All of them go: frequent words are soon back.
            if len(self._ids) >= MAX_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def is_separable(backend: Tokenizer) -> bool:
    """Whether the tokens of a text are surely those of its words; False if in doubt."""
    # Added tokens may hold spaces, and a post-processor puts tokens before and after a text.
    sees_whole_texts = backend.get_added_tokens_decoder() or backend.post_processor
    return (
        not sees_whole_texts
        and isinstance(backend.normalizer, BertNormalizer)
        and isinstance(backend.pre_tokenizer, BertPreTokenizer)
        and isinstance(backend.model, WordPiece)
    )
