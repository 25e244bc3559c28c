"""Texts to token ids: a WordPiece vocabulary of the corpus, or the tokenizer of a transformer.

Both are a `tokenizers.Tokenizer`. On disk it is a folder with `tokenizer.json`, `xmcray.json` (what
this class adds) and, for a transformer, the small JSON files that its own loader expects.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import socket
import sys
import tempfile
import unicodedata
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.token_cache import TokenCache, is_separable
from xmcray.errors import BundleError, ConfigError, one_line, readable
from xmcray.storage.whole_files import read_json
from xmcray.types import BoolArray, Ragged, offsets_of, spans

PAD = "[PAD]"
UNKNOWN = "[UNK]"
MAX_VOCAB = 32_000
MIN_FREQUENCY = 2
MAX_ALPHABET = 1_000
LABEL_MAX_LEN = 32
MAX_LEN = 1 << 20
ENCODE_BLOCK = 1024  # texts
SETTINGS = "xmcray.json"
# Of a sentence-transformers folder: its prompts and its similarity.
SENTENCE_SETTINGS = "config_sentence_transformers.json"
# Names that such folders give the prompt of what is found, the first before the others.
_LABEL_PROMPTS = ("document", "passage", "corpus")
_LIBRARY_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """What xmcray.json holds: arguments of `TextTokenizer`."""

    kind: str
    pad_id: int
    max_len: int
    label_max_len: int = LABEL_MAX_LEN
    query_prompt: str = ""
    label_prompt: str = ""


class TextTokenizer:
    """Token ids of texts, truncated.

    Args:
        files: the tokenizers library's files, name -> text.

    Attributes:
        kind: "wordpiece" (trained on the corpus, lower-cased, no special tokens) or "transformer"
            (the model's own).
        vocab_size: number of token ids.
        pad_id: the id that fills up a padded row.
        max_len: tokens kept of a query, special tokens included.
        label_max_len: tokens kept of a label text; at most `max_len`.
        query_prompt: put before each query that is not empty; its tokens count as the query's.
        label_prompt: the same for label texts.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        kind: str,
        pad_id: int,
        max_len: int,
        label_max_len: int = LABEL_MAX_LEN,
        query_prompt: str = "",
        label_prompt: str = "",
    ) -> None:
        check_range("max_len", max_len, 1, MAX_LEN)
        check_range("label_max_len", label_max_len, 1, MAX_LEN)
        self._files = dict(files)
        self._backends: dict[int, Tokenizer] = {}
        self.kind = kind
        self.pad_id = pad_id
        self.max_len = max_len
        self.label_max_len = min(label_max_len, max_len)
        self.query_prompt = query_prompt
        self.label_prompt = label_prompt
        # The cache cuts texts itself, so its backend must not.
        backend = self._backend(MAX_LEN if kind == "wordpiece" else max_len)
        self._cache = None
        if kind == "wordpiece" and is_separable(backend):
            self._cache = TokenCache(backend)
        self._library = backend
        ids = backend.get_vocab(with_added_tokens=True).values()
        # Ids may have gaps, in which case the largest one counts.
        self.vocab_size = max(len(ids), max(ids, default=-1) + 1)
        check_range("pad_id", pad_id, 0)

    def encode(self, texts: Sequence[str], max_len: int | None = None) -> Ragged:
        """Token ids of each query; an empty one has none, or only special tokens.

        Args:
            max_len: tokens kept per text; None keeps the tokenizer's `max_len`.
        """
        return self._encode(texts, max_len or self.max_len, self.query_prompt)

    def encode_labels(self, texts: Sequence[str]) -> Ragged:
        """As `encode`, for the texts of labels."""
        return self._encode(texts, self.label_max_len, self.label_prompt)

    @functools.cached_property
    def num_special_tokens(self) -> int:
        """Tokens of an empty text, which a transformer's tokenizer adds to each text."""
        return len(self.encode_labels([""]).values)

    def has_tokens(self, tokens: Ragged) -> BoolArray:
        """bool, which of some texts have a token besides the special ones.

        Args:
            tokens: what `encode` or `encode_labels` gave.
        """
        return tokens.lengths > self.num_special_tokens

    def _encode(self, texts: Sequence[str], max_len: int, prompt: str) -> Ragged:
        if not texts:
            return Ragged.empty(0)
        # A block at a time: an encoding takes some kilobytes per text, and the ids are a small
        # part.
        rows: list[list[int]] = []
        for span in spans(len(texts), ENCODE_BLOCK):
            block = texts[span]
            if prompt:
                block = [prompt + text if text else "" for text in block]
            rows += self._token_ids(block, max_len)
        offsets = offsets_of([len(row) for row in rows])
        token_ids = itertools.chain.from_iterable(rows)
        values = np.fromiter(token_ids, np.int64, count=int(offsets[-1]))
        # Special tokens have ids of their own in tokenizer.json, which need not be in the vocabulary.
        if len(values) and values.max() >= self.vocab_size:
            raise BundleError(
                f"the tokenizer gives token id {values.max()}, expected less than {self.vocab_size};"
                " make the artifact again"
            )
        return Ragged(values, offsets)

    def _token_ids(self, texts: Sequence[str], max_len: int) -> list[list[int]]:
        """The token ids of each text."""
        if self._cache is not None:
            return [self._cache.token_ids(text, max_len) for text in texts]
        encodings = self._backend(max_len).encode_batch_fast(list(texts))
        return [encoding.ids for encoding in encodings]

    def check_room(self) -> None:
        """Raises ConfigError if special tokens and a prompt leave no room for the text."""
        sides = (
            ("max_len", self.query_prompt, self.max_len),
            ("label_max_len", self.label_prompt, self.label_max_len),
        )
        for setting, prompt, max_len in sides:
            num_tokens = len(self._backend(MAX_LEN).encode(prompt).ids)
            if num_tokens < max_len:
                continue
            if prompt:
                raise ConfigError(
                    f"{setting} is {max_len}, but the prompt {prompt!r} alone has {num_tokens} tokens;"
                    f" raise {setting} or shorten the prompt"
                )
            raise ConfigError(
                f"{setting} is {max_len}, expected more than the tokenizer's {num_tokens} special"
                " tokens, which count too; raise it"
            )

    def tokens(self, text: str) -> list[str]:
        """The tokens of one text as strings, for people."""
        ids = self._token_ids([text], self.max_len)[0]
        return [self._library.id_to_token(token_id) or UNKNOWN for token_id in ids]

    def vocabulary(self) -> list[str]:
        """All tokens as strings, by id."""
        ids = self._library.get_vocab(with_added_tokens=True)
        return sorted(ids, key=lambda token: ids[token])

    def words(self) -> list[str]:
        """Each token as a text, by id; the inside of a word ("##ing") as if it were a word."""
        if self.kind == "wordpiece":
            return [token.removeprefix("##") for token in self.vocabulary()]
        words = []
        for token_id in range(self.vocab_size):
            word = self._library.decode([token_id], skip_special_tokens=False)
            words.append(word.strip().removeprefix("##"))
        return words

    def to_files(self) -> dict[str, str]:
        """Everything as file name -> text: what `save` writes and other processes receive."""
        settings = {
            "kind": self.kind,
            "pad_id": self.pad_id,
            "max_len": self.max_len,
            "label_max_len": self.label_max_len,
        }
        # Left out where there is none, so that files of such tokenizers stay as they were.
        if self.query_prompt or self.label_prompt:
            settings["query_prompt"] = self.query_prompt
            settings["label_prompt"] = self.label_prompt
        return {**self._files, SETTINGS: json.dumps(settings, indent=1, sort_keys=True)}

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> TextTokenizer:
        """The inverse of `to_files`."""
        library_files = dict(files)
        values = json.loads(library_files.pop(SETTINGS))
        settings = configs.build(_Settings, values)
        return cls(library_files, **dataclasses.asdict(settings))

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
        failure = f"{folder} holds no readable tokenizer"
        with readable(failure, "make the artifact again", BundleError):
            settings = (folder / SETTINGS).read_text(encoding="utf-8")
            return cls.from_files({SETTINGS: settings, **_library_files(folder)})

    def _backend(self, max_len: int) -> Tokenizer:
        """One backend per length: changing the truncation of one would disturb other threads."""
        backend = self._backends.get(max_len)
        if backend is None:
            try:
                backend = Tokenizer.from_str(self._files["tokenizer.json"])
            except Exception as error:  # the binding raises plain Exception
                raise ValueError(f"tokenizer.json: {error}") from None
            backend.no_padding()
            backend.enable_truncation(max_len)
            self._backends[max_len] = backend
        return backend


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int = MAX_VOCAB,
    max_len: int = 128,
    label_max_len: int = LABEL_MAX_LEN,
) -> TextTokenizer:
    """A lower-cased WordPiece vocabulary of tokens that occur at least twice in `texts`.

    The same texts give the same bytes. The library numbers single characters in the order of a hash
    table and breaks ties between merges by these numbers. Naming all characters beforehand, sorted,
    removes both sources of chance.

    Args:
        vocab_size: largest number of tokens.

    Raises:
        ConfigError: `texts` hold no word to learn from, or more characters than `vocab_size` lets in.
    """
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    alphabet = _alphabet(texts, normalizer)
    if not alphabet:
        raise ConfigError(
            "the corpus has no text to train a tokenizer on; choose --tokenizer MODEL or add texts"
        )
    # "##a" is the letter a inside a word. Punctuation is always a word of its own.
    letters = [letter for letter in alphabet if unicodedata.category(letter)[0] != "P"]
    inner = [f"##{letter}" for letter in letters]
    first_tokens = [PAD, UNKNOWN, *alphabet, *inner]
    if vocab_size < len(first_tokens):
        raise ConfigError(
            f"vocab_size is {vocab_size:,}, expected at least {len(first_tokens):,}, as the characters of"
            " the corpus are tokens themselves; raise it"
        )
    trained = _wordpiece_backend({}, normalizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=first_tokens,
        # Alphabet and limit together admit no other character, whose number would again be chance.
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer, length=len(texts))
    # The trainer registered the characters as special tokens, which match before any word. The
    # vocabulary alone, in a new backend, has no special tokens.
    clean = _wordpiece_backend(trained.get_vocab(with_added_tokens=False), normalizer)
    return TextTokenizer(
        {"tokenizer.json": clean.to_str()},
        kind="wordpiece",
        pad_id=0,
        max_len=max_len,
        label_max_len=label_max_len,
    )


def _wordpiece_backend(vocabulary: dict[str, int], normalizer: Any) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _alphabet(texts: Sequence[str], normalizer: Any) -> list[str]:
    """The most frequent characters (at most MAX_ALPHABET, ties by code point), sorted."""
    counts = np.zeros(sys.maxunicode + 1, np.int64)
    for span in spans(len(texts), 4096):
        text = normalizer.normalize_str(" ".join(texts[span]))
        # UTF-32 has one number per character, which numpy counts faster than Python does.
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        counts += np.bincount(code_points, minlength=len(counts))
    # The stable sort breaks ties by code point.
    by_count = np.argsort(-counts, kind="stable")
    occurring = by_count[: np.count_nonzero(counts)].tolist()
    letters = [chr(point) for point in occurring if not chr(point).isspace()]
    return sorted(letters[:MAX_ALPHABET])


def from_transformer(
    name_or_path: str,
    max_len: int,
    label_max_len: int = LABEL_MAX_LEN,
    query_prompt: str | None = None,
    label_prompt: str | None = None,
) -> TextTokenizer:
    """The tokenizer of a transformer: a local folder, a model in the local cache, or a hub id.

    Args:
        name_or_path: of the transformer.
        max_len: tokens kept of a query.
        label_max_len: tokens kept of a label text.
        query_prompt: put before each query; None is the one that a sentence-transformers folder
            declares.
        label_prompt: the same for label texts.

    Raises:
        ConfigError: nothing has this name, the hub is out of reach, or the tokenizer has no fast
            form.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer, prompts = _load_transformer_tokenizer(name_or_path)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"tokenizer {name_or_path!r} has no fast form (tokenizer.json); choose another model"
        )
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = tokenizer.eos_token_id or 0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = _library_files(Path(folder))
    text_tokenizer = TextTokenizer(
        files,
        kind="transformer",
        pad_id=pad_id,
        max_len=max_len,
        label_max_len=label_max_len,
        query_prompt=prompts["query"] if query_prompt is None else query_prompt,
        label_prompt=prompts["document"] if label_prompt is None else label_prompt,
    )
    text_tokenizer.check_room()
    return text_tokenizer


def declared_prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The prompts of "query" and "document" in the settings of a sentence-transformers folder.

    Raises:
        ValueError: they are something else than texts by name.
    """
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ValueError(f"prompts in {SENTENCE_SETTINGS} are no texts by name")
    document = ""
    # The first of these names that the folder has, as in sentence-transformers' encode_document.
    for name in reversed(_LABEL_PROMPTS):
        document = prompts.get(name, document)
    declared = {"query": prompts.get("query") or "", "document": document or ""}
    for prompt in declared.values():
        if not isinstance(prompt, str):
            raise ValueError(f"prompts in {SENTENCE_SETTINGS} are no texts by name")
    return declared


def _load_transformer_tokenizer(name_or_path: str) -> tuple[Any, dict[str, str]]:
    """The tokenizer and the prompts that its folder declares.

    Looks at local files first: a model that is cached needs no network.
    """
    import transformers
    from transformers.utils.hub import cached_file

    def load(local: bool) -> tuple[Any, dict[str, str]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path, local_files_only=local, trust_remote_code=False
        )
        path = cached_file(
            name_or_path,
            SENTENCE_SETTINGS,
            local_files_only=local,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return tokenizer, declared_prompts({} if path is None else read_json(Path(path)))

    load_errors = (OSError, ValueError, KeyError, ImportError)
    try:
        try:
            return load(local=True)
        except load_errors:
            if Path(name_or_path).is_dir():
                raise
            _probe_hub(name_or_path)
            return load(local=False)
    except load_errors as error:
        # The first line says what is wrong; the library's others are about its own options.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(
            f"tokenizer {name_or_path!r} cannot be loaded ({one_line(reason)}); expected a folder with a transformer's"
            " tokenizer files, or a hub id that is cached or can be downloaded"
        ) from None


def _library_files(folder: Path) -> dict[str, str]:
    """Name and text of the tokenizers library's files that the folder has."""
    present = [name for name in _LIBRARY_FILES if (folder / name).is_file()]
    return {name: (folder / name).read_text(encoding="utf-8") for name in present}


def _probe_hub(name: str) -> None:
    """Fails within seconds if the hub is out of reach; its own client retries for half a minute."""
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set and the model is not in the local cache")
    endpoint = urllib.parse.urlsplit(hub.ENDPOINT)
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    target = urllib.parse.urlsplit(proxy) if proxy else endpoint
    address = (target.hostname or "", target.port or 443)
    try:
        socket.create_connection(address, timeout=3).close()
        if proxy:  # the proxy may answer although the hub does not
            url = f"{hub.ENDPOINT}/{name}/resolve/main/config.json"
            urllib.request.urlopen(url, timeout=5).close()
    except OSError as error:
        raise OSError(
            f"not in the local cache, and the model hub is out of reach: {error}"
        ) from None
