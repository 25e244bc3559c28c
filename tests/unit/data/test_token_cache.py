"""Texts have the same tokens by their words as from the tokenizers library."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import BertProcessing

from xmcray.data import token_cache
from xmcray.data.token_cache import TokenCache, is_separable
from xmcray.data.tokens import train_wordpiece

TEXTS = ["The naïve café, 東京 and straße", "return x[0] += foo.bar(y)", "the tokens of a text"] * 2
# Also what normalisation removes, joins or takes for a space.
LETTERS = st.one_of(
    st.sampled_from(" \t\n\r\x0b\x0c\x1c\x85\xa0\u2028\u200b\u0301\u03a3\u0130,.[]_`~@\u2014東京"),
    st.characters(exclude_categories=["Cs"]),
)


def backend() -> Tokenizer:
    tokenizer = train_wordpiece(TEXTS)
    return Tokenizer.from_str(tokenizer.to_files()["tokenizer.json"])


LIBRARY = backend()


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text(LETTERS, max_size=6) | st.sampled_from(" ".join(TEXTS).split(" "))),
    separator=st.sampled_from([" ", "  ", "\n", " \t"]),
    max_len=st.integers(1, 40),
)
def test_tokens_are_those_of_the_library(words: list[str], separator: str, max_len: int) -> None:
    text = separator.join(words)
    expected = LIBRARY.encode(text).ids[:max_len]
    cache = TokenCache(LIBRARY)
    assert cache.token_ids(text, max_len) == expected
    assert cache.token_ids(text, max_len) == expected, "with its words known"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_WORDS", 3)
    cache = TokenCache(LIBRARY)
    for text in ("the tokens", "of a text", "the tokens of a text", "x" * 65):
        assert cache.token_ids(text, 99) == LIBRARY.encode(text).ids
        assert len(cache._ids) <= 3
    assert "x" * 65 not in cache._ids


def test_a_long_text_is_read_as_far_as_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHARS_PER_TOKEN", 2)
    cache = TokenCache(LIBRARY)
    assert cache.token_ids("the text", 1) == LIBRARY.encode("the").ids
    assert list(cache._ids) == ["the"]
    # White space has no token, so more of the text is read.
    assert cache.token_ids("the" + 9 * " " + "text of a", 2) == LIBRARY.encode("the text").ids
    assert "of" not in cache._ids


def test_a_new_name_is_made_of_known_pieces() -> None:
    cache = TokenCache(LIBRARY)
    cache.token_ids("foo . bar", 99)
    known = set(cache._ids)
    assert cache.token_ids("foo.bar", 99) == LIBRARY.encode("foo.bar").ids
    assert set(cache._ids) - known == {"foo.bar"}


def test_texts_with_special_tokens_are_not_separable() -> None:
    assert is_separable(LIBRARY)
    with_ends = backend()
    with_ends.post_processor = BertProcessing(("[UNK]", 1), ("[UNK]", 1))
    with_names = backend()
    with_names.add_tokens(["new york"])
    with_capitals = backend()
    with_capitals.normalizer = BertNormalizer(lowercase=False)
    assert not is_separable(with_capitals)
    assert not is_separable(with_ends)
    assert not is_separable(with_names)
