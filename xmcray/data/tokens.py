"""Texts to token ids: a WordPiece vocabulary trained on the corpus, or the tokenizer of a transformer.

Both are a `tokenizers.Tokenizer`; on disk a folder with `tokenizer.json`, `xmcray.json` (what this class adds) and, for
a transformer, the small JSON files that its own loader expects beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
import unicodedata
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from xmcray.errors import BundleError, ConfigError
from xmcray.types import Ragged

PAD, UNKNOWN = "[PAD]", "[UNK]"
MAX_VOCAB, MIN_FREQUENCY, MAX_ALPHABET = 32_000, 2, 1_000
LABEL_MAX_LEN = 32
ENCODE_BLOCK = 1024  # texts


class TextTokenizer:
    """Token ids of texts, truncated.

    Attributes:
        kind: "wordpiece" (trained on the corpus, lower-cased, no special tokens) or "transformer" (the model's own).
        vocab_size: number of token ids.
        pad_id: the id that fills up a padded row.
        max_len: tokens kept of a query, special tokens included.
        label_max_len: tokens kept of a label text; at most `max_len`.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        kind: str,
        pad_id: int,
        max_len: int,
        label_max_len: int = LABEL_MAX_LEN,
    ) -> None:
        if max_len < 1 or label_max_len < 1:
            raise ConfigError(
                f"max_len is {max_len} and label_max_len {label_max_len}, expected at least 1"
            )
        self._files = dict(files)
        self._by_length: dict[int, Tokenizer] = {}
        self.kind, self.pad_id, self.max_len = kind, pad_id, max_len
        self.label_max_len = min(label_max_len, max_len)
        self.vocab_size: int = self._truncating(max_len).get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str], max_len: int | None = None) -> Ragged:
        """Token ids of each text; an empty text has none, or only the special tokens of a transformer.

        Args:
            max_len: tokens kept per text; the tokenizer's `max_len` if not given.
        """
        if not texts:
            return Ragged.empty(0)
        backend = self._truncating(max_len or self.max_len)
        # A block at a time: the library's answer takes some kilobytes per text, of which the ids are a small part.
        rows = [
            row.ids
            for block in _blocks(texts, ENCODE_BLOCK)
            for row in backend.encode_batch_fast(list(block))
        ]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return Ragged(
            np.fromiter(itertools.chain.from_iterable(rows), np.int64, int(offsets[-1])), offsets
        )

    def tokens(self, text: str) -> list[str]:
        """The pieces of one text, to look at."""
        return list(self._truncating(self.max_len).encode(text).tokens)

    def with_lengths(self, max_len: int, label_max_len: int) -> TextTokenizer:
        """The same tokenizer with other truncation lengths."""
        return TextTokenizer(
            self._files,
            kind=self.kind,
            pad_id=self.pad_id,
            max_len=max_len,
            label_max_len=label_max_len,
        )

    def to_files(self) -> dict[str, str]:
        """Everything as file name -> text: what `save` writes, and what travels to other processes."""
        about = {
            "kind": self.kind,
            "pad_id": self.pad_id,
            "max_len": self.max_len,
            "label_max_len": self.label_max_len,
        }
        return {**self._files, "xmcray.json": json.dumps(about, indent=1, sort_keys=True)}

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> TextTokenizer:
        """The inverse of `to_files`."""
        about = json.loads(files["xmcray.json"])
        return cls({name: text for name, text in files.items() if name != "xmcray.json"}, **about)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into `folder`, which is made if needed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.to_files().items():
            (folder / name).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Reads what `save` wrote; other files in the folder are ignored.

        Raises:
            BundleError: files are missing or damaged.
        """
        try:
            names = ["xmcray.json", *_files_of(folder)]
            return cls.from_files(
                {name: (folder / name).read_text(encoding="utf-8") for name in names}
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(
                f"{folder} holds no readable tokenizer ({error}); make the artifact again"
            ) from None

    def _truncating(self, max_len: int) -> Tokenizer:
        """One backend per length: changing the truncation of a shared one would disturb other threads."""
        backend = self._by_length.get(max_len)
        if backend is None:
            try:
                backend = Tokenizer.from_str(self._files["tokenizer.json"])
            except Exception as error:  # the binding raises plain Exception
                raise ValueError(f"tokenizer.json: {error}") from None
            backend.no_padding()
            backend.enable_truncation(max_len)
            self._by_length[max_len] = backend
        return backend


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int = MAX_VOCAB,
    max_len: int = 128,
    label_max_len: int = LABEL_MAX_LEN,
) -> TextTokenizer:
    """A lower-cased WordPiece vocabulary of at most `vocab_size` tokens that occur at least twice in `texts`.

    The same texts give the same bytes. The library numbers single characters in the order of a hash table and breaks
    ties between merges by these numbers; naming all characters beforehand, sorted, removes both sources of chance.

    Raises:
        ConfigError: `texts` hold no word to learn from.
    """
    known = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    alphabet = _alphabet(known, normalizer)
    if not alphabet:
        raise ConfigError(
            "the corpus has no text to train a tokenizer on; choose --tokenizer MODEL or add texts"
        )
    inner = [f"##{letter}" for letter in alphabet if unicodedata.category(letter)[0] != "P"]
    first = [PAD, UNKNOWN, *alphabet, *inner]
    backend = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=max(vocab_size, len(first)),
        min_frequency=MIN_FREQUENCY,
        special_tokens=first,
        initial_alphabet=alphabet,  # with the limit: no other character, whose number would again be chance
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(known, trainer, length=len(known))
    # The trainer registered the characters as special tokens, which match before any word: take the vocabulary alone.
    clean = Tokenizer(
        models.WordPiece(backend.get_vocab(with_added_tokens=False), unk_token=UNKNOWN)
    )
    clean.normalizer, clean.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    return TextTokenizer(
        {"tokenizer.json": clean.to_str()},
        kind="wordpiece",
        pad_id=0,
        max_len=max_len,
        label_max_len=label_max_len,
    )


def from_transformer(
    name_or_path: str, max_len: int, label_max_len: int = LABEL_MAX_LEN
) -> TextTokenizer:
    """The tokenizer of a transformer: a local folder, a model in the local cache, or a hub id to download.

    Raises:
        ConfigError: nothing is found under the name, the hub is out of reach, or the tokenizer has no fast form.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    known: Any = None
    for local in (True, False):
        try:
            if not local:
                _probe_hub(name_or_path)
            known = transformers.AutoTokenizer.from_pretrained(
                name_or_path, local_files_only=local, trust_remote_code=False
            )
            break
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if Path(name_or_path).is_dir() or not local:
                raise ConfigError(
                    f"tokenizer {name_or_path!r} cannot be loaded ({reason}); expected a folder with a transformer's"
                    " tokenizer files, or a hub id that is cached or can be downloaded"
                ) from None
    if getattr(known, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"tokenizer {name_or_path!r} has no fast form (tokenizer.json); choose another model"
        )
    pad_id = known.pad_token_id if known.pad_token_id is not None else known.eos_token_id or 0
    with tempfile.TemporaryDirectory() as folder:
        known.save_pretrained(folder)
        files = {
            name: Path(folder, name).read_text(encoding="utf-8") for name in _files_of(Path(folder))
        }
    return TextTokenizer(
        files, kind="transformer", pad_id=pad_id, max_len=max_len, label_max_len=label_max_len
    )


def _alphabet(texts: Sequence[str], normalizer: Any) -> list[str]:
    """The most frequent characters (at most MAX_ALPHABET, ties by code point), sorted."""
    counts: dict[str, int] = {}
    for block in _blocks(texts):
        points = np.frombuffer(
            normalizer.normalize_str(" ".join(block)).encode("utf-32-le"), np.uint32
        )
        for point, count in zip(*np.unique(points, return_counts=True), strict=True):
            counts[chr(point)] = counts.get(chr(point), 0) + int(count)
    letters = [letter for letter in counts if not letter.isspace()]
    return sorted(sorted(letters, key=lambda letter: (-counts[letter], letter))[:MAX_ALPHABET])


def _blocks(texts: Sequence[str], size: int = 4096) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _files_of(folder: Path) -> list[str]:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return [name for name in names if (folder / name).is_file()]


def _probe_hub(name: str) -> None:
    """Fails within seconds when the model hub is out of reach; its own client retries for half a minute."""
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set and the model is not in the local cache")
    endpoint = urllib.parse.urlsplit(hub.ENDPOINT)
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    target = urllib.parse.urlsplit(proxy) if proxy else endpoint
    try:
        socket.create_connection((target.hostname or "", target.port or 443), timeout=3).close()
        if proxy:  # the proxy answers although what lies behind it may not
            urllib.request.urlopen(
                f"{hub.ENDPOINT}/{name}/resolve/main/config.json", timeout=5
            ).close()
    except OSError as error:
        raise OSError(
            f"not in the local cache, and the model hub is out of reach: {error}"
        ) from None
