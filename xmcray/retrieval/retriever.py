"""A bundle that answers. Needs neither Ray nor training code; evaluation and serving both call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import Encoder, load_encoder
from xmcray.nn.heads import Head, load_head
from xmcray.retrieval.bundle import KIND, Settings, open_shards, read_labels, read_settings
from xmcray.retrieval.exact import as_tensor, from_keys, nothing, to_keys
from xmcray.retrieval.index import Index
from xmcray.storage import open_artifact
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

CHUNK = 1024  # queries encoded and searched at once


@dataclass(frozen=True, slots=True)
class Answer:
    """One label that was found.

    Attributes:
        label_id: source id, the label's line in the user's files.
        score: inner product of query and label vector.
    """

    label_id: int
    uid: str
    text: str
    score: float


class Retriever:
    """Encoder, tokenizer, labels and index shards of one bundle. Make it with `load`.

    Attributes:
        settings: the bundle's settings.
        sha256: names the bundle's content.
        tokenizer: makes `Ragged` queries for `top_labels`.
    """

    def __init__(
        self,
        encoder: Encoder,
        head: Head,
        tokenizer: TextTokenizer,
        labels: pa.Table,
        label_order: Int64Array,
        shards: Sequence[Index],
        settings: Settings,
        sha256: str = "",
    ) -> None:
        self.settings, self.tokenizer, self.sha256 = settings, tokenizer, sha256
        self._encoder, self._head, self._labels, self._order = encoder, head, labels, label_order
        self._shards = list(shards)
        self._rank = np.empty_like(label_order)  # source -> internal
        self._rank[label_order] = np.arange(len(label_order))

    @classmethod
    def load(cls, path: str | Path, threads: int | None = None, device: str | None = None) -> Retriever:
        """Opens a bundle: every file is compared with its hash before it is used; vectors stay on disk.

        Args:
            path: folder or fsspec URL.
            threads: of torch and FAISS in this process; torch's own setting if not given.
            device: of the encoder and of exhaustive searches, such as "cuda:0"; the CPU if not given.
        Raises:
            StorageError: a file is missing or altered (named), or this is no bundle.
            BundleError: a file is malformed or does not fit the others.
            ConfigError: no such device.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            where = torch.zeros(0, device=device or "cpu").device
        except (RuntimeError, AssertionError):
            raise ConfigError(f"device {device!r} is not available on this machine; use 'cpu'") from None
        folder, manifest = open_artifact(path, KIND)
        settings = read_settings(folder)
        labels, order = read_labels(folder, settings.num_labels)
        encoder = load_encoder(folder / "encoder").to(where).eval()
        head = load_head(folder / "head").to(where)
        if (encoder.dim, head.out_dim) != (head.dim, settings.dim):
            raise BundleError(
                f"{path}: encoder of width {encoder.dim}, head from {head.dim} to {head.out_dim}, vectors of width"
                f" {settings.dim}; export again"
            )
        shards = list(open_shards(folder, manifest, settings, threads or torch.get_num_threads()))
        if where.type != "cpu":
            for shard in shards:
                shard.vectors = shard.vectors.to(where)
        tokenizer = TextTokenizer.load(folder / "tokenizer")
        return cls(encoder, head, tokenizer, labels, order, shards, settings, manifest.sha256)

    @property
    def num_labels(self) -> int:
        """L."""
        return self.settings.num_labels

    def encode(self, texts: Sequence[str] | Ragged) -> Float32Array:
        """Query vectors float32 [B, D]; texts or token ids, encoded in chunks. An empty text is legal."""
        parts = [np.empty((0, self.settings.dim), np.float32)]
        for start in range(0, len(texts), CHUNK):
            if isinstance(texts, Ragged):
                tokens = texts.slice(start, min(start + CHUNK, len(texts)))
            else:
                tokens = self.tokenizer.encode(list(texts[start : start + CHUNK]))
            with torch.inference_mode():
                query_BD = self._head(self._encoder(tokens)).float()
            parts.append(query_BD.cpu().numpy())
        return np.concatenate(parts)

    def search(self, texts: Sequence[str], k: int = 10) -> list[list[Answer]]:
        """The k best labels of each text, best first.

        Raises:
            ConfigError: k is not in 1 .. L, or `texts` is a single string.
        """
        if isinstance(texts, str):
            raise ConfigError("search was given one string, expected a list of texts; write search([text])")
        self._check(k)
        answers: list[list[Answer]] = []
        for start in range(0, len(texts), CHUNK):
            top = self.nearest(self.encode(texts[start : start + CHUNK]), k)
            known = self._labels.take(pa.array(np.maximum(top.ids, 0).ravel())).to_pydict()
            for row, (ids, scores) in enumerate(zip(top.ids.tolist(), top.scores.tolist(), strict=True)):
                uids, texts_ = (known[name][row * k : (row + 1) * k] for name in ("uid", "text"))
                found = zip(ids, uids, texts_, scores, strict=True)
                answers.append([Answer(*values) for values in found if values[0] >= 0])
        return answers

    def top_labels(self, tokens: Ragged, k: int, exclude: Ragged | None = None, exact: bool = False) -> TopLabels:
        """The k best labels of tokenised queries, as source ids; equal scores by lower source id.

        Args:
            tokens: B rows of token ids.
            k: answers per query, 1 .. L.
            exclude: B rows of source label ids that are masked before the k best are taken.
            exact: compare all labels, whatever the index: tells the index's error from the model's.
        Raises:
            ConfigError: k is not in 1 .. L.
        """
        self._check(k)
        parts = []
        for start in range(0, len(tokens), CHUNK):
            stop = min(start + CHUNK, len(tokens))
            hide = None if exclude is None else exclude.slice(start, stop)
            parts.append(self.nearest(self.encode(tokens.slice(start, stop)), k, hide, exact))
        ids = [np.empty((0, k), np.int64), *(part.ids for part in parts)]
        scores = [np.empty((0, k), np.float32), *(part.scores for part in parts)]
        return TopLabels(np.concatenate(ids), np.concatenate(scores))

    def nearest(self, query_BD: Float32Array, k: int, exclude: Ragged | None = None, exact: bool = False) -> TopLabels:
        """As `top_labels`, for query vectors float32 [B, D]."""
        self._check(k)
        keys = [nothing(len(query_BD), k)]
        for shard, rows in zip(self.settings.shards, self._shards, strict=True):
            hidden = None if exclude is None else self._inside(exclude, shard.start, shard.stop)
            names = self._order[shard.start : shard.stop]
            scores, ids = rows.search(query_BD, min(k, len(rows)), names, hidden, exact)
            keys.append(to_keys(as_tensor(scores), as_tensor(np.maximum(ids, 0), np.int64)))
        scores, ids = from_keys(torch.cat(keys, dim=1).topk(k, dim=1).values)
        return TopLabels(ids, scores)

    def _inside(self, exclude: Ragged, start: int, stop: int) -> Ragged:
        """Rows of a shard that carry the excluded source ids."""
        internal = self._rank[exclude.values]
        inside = (internal >= start) & (internal < stop)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside)])
        return Ragged(internal[inside] - start, before[exclude.offsets])

    def _check(self, k: int) -> None:
        if not 1 <= k <= self.num_labels:
            raise ConfigError(f"k is {k}, expected 1 .. {self.num_labels} (the number of labels)")
