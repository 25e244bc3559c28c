"""Token ids of texts, put together from the remembered token ids of their words.

A word is the text between two spaces or newlines. Its pieces are its ASCII punctuation marks and the
text between them. With the WordPiece of `tokens.train_wordpiece`, the tokens of a text are those of
its words in order, and the tokens of a word are those of its pieces. This holds for two reasons. The
normaliser changes each character alone or with its accents. No token joins a space or a punctuation
mark with other characters.

Most words have occurred before, and looking them up is faster than tokenizing them again
(benchmarks/prepare.py).
"""

from __future__ import annotations

import re
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MAX_WORDS = 1 << 16  # and pieces; about 20 MB of memory when full
MAX_WORD_CHARS = 64  # a longer word hardly comes again
# Characters of a text that are read at first for each wanted token. Most texts need no more of them.
CHARS_PER_TOKEN = 8
_MARKS = r"!-/:-@\[-`{-~"
_find_pieces = re.compile(rf"[^{_MARKS}]+|[{_MARKS}]").findall


class TokenCache:
    """Remembers the token ids of words. Several threads may use it.

    Args:
        backend: one of which `is_separable` is true. It must not truncate texts.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._ids = _WordIds(backend)

    def token_ids(self, text: str, max_len: int) -> list[int]:
        """The first `max_len` token ids of a text."""
        token_ids: list[int] = []
        start = 0
        while start < len(text) and len(token_ids) < max_len:
            # Only a part of a long text is read at once. It ends at a space, so that no word is cut.
            stop = text.find(" ", start + CHARS_PER_TOKEN * max_len)
            if stop < 0:
                stop = len(text)
            # Newlines are frequent, so they separate words too. The library splits at other white space.
            words = text[start:stop].replace("\n", " ").split(" ")
            # `map` looks up known words without a step of Python for each.
            token_ids += chain.from_iterable(map(self._ids.__getitem__, words))
            start = stop
        return token_ids[:max_len]


class _WordIds(dict[str, tuple[int, ...]]):
    """Token ids of words and of their pieces. A new word gets its ids when they are looked up."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._model = backend.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._tokenize(word)
        if len(word) <= MAX_WORD_CHARS:
            # The cache is emptied as a whole, because frequent words return soon.
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def _tokenize(self, word: str) -> tuple[int, ...]:
        pieces = _find_pieces(word)
        if len(pieces) > 1:
            return tuple(chain.from_iterable(map(self.__getitem__, pieces)))
        if word.isascii() and word.isalnum():
            # For such a word the normaliser only lower-cases. Calling the model directly saves most time.
            return tuple(token.id for token in self._model.tokenize(word.lower()))
        return tuple(self._backend.encode(word).ids)


def is_separable(backend: Tokenizer) -> bool:
    """Whether the tokens of a text are surely those of its words; False if in doubt."""
    # Added tokens may hold spaces, and a post-processor puts tokens before and after a text.
    sees_whole_texts = backend.get_added_tokens_decoder() or backend.post_processor
    normalizer = backend.normalizer
    return (
        not sees_whole_texts
        and isinstance(normalizer, BertNormalizer)
        and normalizer.lowercase
        and isinstance(backend.pre_tokenizer, BertPreTokenizer)
        and isinstance(backend.model, WordPiece)
    )
