"""Tokenizers: ids, truncation, a folder that gives them back, and a vocabulary without chance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from models import write_bert

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.data.writer import PrepareConfig, short_name
from xmcray.errors import BundleError, ConfigError

TEXTS = ["The quick brown fox", "the QUICK dog!", "brown dogs, brown foxes", ""]
MANY_LETTERS = """import hashlib, random
from xmcray.data.tokens import train_wordpiece
letters = "abcdefgh" * 40 + "".join(map(chr, range(0x1200, 0x1800)))
draw = random.Random(0)
words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=8)) for _ in range(400)]
print(hashlib.sha256(train_wordpiece(texts).to_files()["tokenizer.json"].encode()).hexdigest())
"""


def test_encodes_known_words_lower_cased_and_truncated() -> None:
    tokenizer = train_wordpiece(TEXTS, max_len=3, label_max_len=8)
    rows = tokenizer.encode(["Brown THE", "", "the the the the"])
    assert rows.lengths.tolist() == [2, 0, 3]
    assert tokenizer.tokens("Brown THE") == ["brown", "the"]
    assert tokenizer.tokens("§ the") == ["[UNK]", "the"]
    assert tokenizer.encode(["the the"], max_len=1).lengths.tolist() == [1]
    assert tokenizer.encode([]).lengths.tolist() == []
    assert tokenizer.label_max_len == 3  # never above max_len
    assert tokenizer.pad_id == 0
    assert rows.values.max() < tokenizer.vocab_size


def test_vocabulary_obeys_its_size_and_minimum_frequency() -> None:
    tokenizer = train_wordpiece(["once twice", "twice"])
    assert tokenizer.tokens("twice") == ["twice"]
    assert len(tokenizer.tokens("once")) > 1


def test_characters_are_always_known_and_must_fit_into_the_vocabulary() -> None:
    # 18 letters, each also inside a word, two punctuation marks, [PAD] and [UNK].
    with pytest.raises(ConfigError, match="vocab_size is 39, expected at least 40"):
        train_wordpiece(TEXTS, vocab_size=39)
    letters = train_wordpiece(TEXTS, vocab_size=40)
    assert letters.vocab_size == 40
    assert letters.tokens("fox") == ["f", "##o", "##x"]


def test_blocks_of_texts_join_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_wordpiece(TEXTS)
    texts = ["the fox", "", "brown", "the the the", "fox"]
    whole = tokenizer.encode(texts)
    monkeypatch.setattr("xmcray.data.tokens.ENCODE_BLOCK", 2)
    blocks = tokenizer.encode(texts)
    assert blocks.values.tolist() == whole.values.tolist()
    assert blocks.offsets.tolist() == whole.offsets.tolist() == [0, 2, 2, 3, 6, 7]


def test_folder_gives_the_same_tokenizer_back(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, max_len=5, label_max_len=2)
    tokenizer.save(tmp_path / "t")
    again = TextTokenizer.load(tmp_path / "t")
    assert again.encode(TEXTS).values.tolist() == tokenizer.encode(TEXTS).values.tolist()
    assert (again.kind, again.max_len, again.label_max_len) == ("wordpiece", 5, 2)
    assert (again.vocab_size, again.pad_id) == (tokenizer.vocab_size, 0)
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="no readable tokenizer"):
        TextTokenizer.load(tmp_path / "t")


def test_two_processes_learn_the_same_bytes() -> None:
    """More characters than are kept, and many ties between merges: both depend on a hash seed in the library."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", MANY_LETTERS], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_without_text_there_is_no_vocabulary() -> None:
    with pytest.raises(ConfigError, match="no text"):
        train_wordpiece(["", " "])


def test_a_transformer_folder_keeps_its_special_tokens(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    tokenizer = from_transformer(str(tmp_path / "model"), max_len=4)
    rows = tokenizer.encode(["The fox", "the fox the fox", ""])
    assert [words[i] for i in rows[0]] == ["[CLS]", "the", "fox", "[SEP]"]
    assert [words[i] for i in rows[1]] == ["[CLS]", "the", "fox", "[SEP]"]
    assert [words[i] for i in rows[2]] == ["[CLS]", "[SEP]"]
    assert (tokenizer.kind, tokenizer.pad_id, tokenizer.vocab_size) == ("transformer", 0, 7)
    tokenizer.save(tmp_path / "saved")
    assert "tokenizer_class" in json.loads(
        (tmp_path / "saved" / "tokenizer_config.json").read_text()
    )


def test_a_folder_has_a_name_also_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model")
    names = [short_name(path) for path in (".", "below/..", "../model/", str(tmp_path / "model"))]
    assert names == ["model"] * 4
    assert short_name("acme/model") == "acme/model"


@pytest.mark.parametrize("max_len", [1, 2])
def test_special_tokens_leave_room_for_the_text(tmp_path: Path, max_len: int) -> None:
    bert = str(write_bert(tmp_path, ["the", "fox"]))
    with pytest.raises(
        ConfigError, match=f"^max_len is {max_len}, expected more than .* 2 special"
    ):
        from_transformer(bert, max_len)
    with pytest.raises(ConfigError, match=f"^label_max_len is {max_len}, expected more than"):
        from_transformer(bert, 8, label_max_len=max_len)
    assert from_transformer(bert, 3, label_max_len=3).tokens("the fox") == ["[CLS]", "the", "[SEP]"]


def test_an_unreachable_hub_id_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*not in the local cache") as caught:
        from_transformer("nobody/nothing", 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", ["max_len", "label_max_len"])
def test_lengths_are_checked_before_a_text_is_read(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is 0, expected at least 1"):
        PrepareConfig(**{setting: 0})
