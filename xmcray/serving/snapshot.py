"""A bundle and the label operations applied to it so far: what one request is answered from, from start to end.

A snapshot never changes. The next operations make another one, which shares everything that is the same; a request
that holds the older one goes on with it. Which id a label that joins gets depends on the operations alone, so the
snapshots of all processes agree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray import storage
from xmcray.errors import ConfigError
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.retrieval.attributes import LabelAttributes
from xmcray.retrieval.bundle import KIND, read_attributes
from xmcray.retrieval.labels import NewLabel, with_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ALL_SHARDS, ShardSubset
from xmcray.retrieval.votes import MemoryConfig
from xmcray.serving import schema
from xmcray.serving.operations import number_in
from xmcray.types import Float32Array

VIEWS = 16  # filters whose views are kept
PROBES, PROBE_K = 32, 10


class Snapshot:
    """One state of one model.

    Attributes:
        number: the last operation that is in it; `exported`: the last one that is in the bundle's files already.
        retriever, attributes: what is searched, and by what labels can be filtered.
        folder: the bundle's local folder.
    """

    def __init__(
        self,
        retriever: Retriever,
        attributes: LabelAttributes,
        side: LabelSide,
        folder: Path,
        number: int,
        exported: int,
        ids: Mapping[str, int] | None = None,
        changed: Mapping[str, int | None] | None = None,
    ) -> None:
        self.retriever, self.attributes, self.folder = retriever, attributes, folder
        self.number, self.exported = number, exported
        self._side, self._changed = side, dict(changed or {})
        self._ids = ids
        self._views: dict[str, Retriever] = {}

    @classmethod
    def load(
        cls,
        bundle: str,
        model: str,
        threads: int,
        subset: ShardSubset = ALL_SHARDS,
        encoder: str = "float32",
    ) -> Snapshot:
        """A bundle as it was written; every file is compared with its hash.

        Args:
            model: whose operations the bundle may already hold. subset: of the shards; others cannot be searched.
            encoder: see `Retriever.load`.
        Raises:
            StorageError, BundleError: missing, altered, malformed, or not a bundle.
        """
        retriever = Retriever.load(bundle, threads=threads, subset=subset, encoder=encoder)
        folder, manifest = storage.open_artifact(bundle, KIND, contents=False)
        number = number_in(manifest.about, model)
        attributes = read_attributes(folder, retriever.settings)
        return cls(
            retriever, attributes, load_label_side(folder / "label_side"), folder, number, number
        )

    @property
    def version(self) -> str:
        """SHA-256 that names the bundle's content."""
        return self.retriever.sha256

    def after(self, operations: Sequence[schema.Operation]) -> Snapshot:
        """The snapshot that further operations lead to. An operation that says nothing new changes nothing."""
        if not operations:
            return self
        retriever, changed = self.retriever, dict(self._changed)
        first = retriever.settings.num_labels
        joining, leaving = list[NewLabel](), list[int]()
        told: dict[int, schema.Attributes] = {}
        for operation in operations:
            uid = operation.uid
            label = changed[uid] if uid in changed else self._exported_ids.get(uid)
            before = None if label is None else self._text(label, joining)
            if operation.op != "delete" and label is not None and operation.text in (None, before):
                if operation.attributes is not None:
                    told[label] = operation.attributes
                continue
            if label is not None:
                leaving.append(label)
            changed[uid] = None
            if operation.op != "delete" and self.has_tokens(operation.text or ""):
                changed[uid] = first + len(joining)
                told[first + len(joining)] = self._attributes(operation, label, told)
                joining.append(NewLabel(uid, operation.text or ""))
        if joining:
            retriever = with_labels(retriever, self._side, joining)
        if leaving:
            retriever = retriever.without(np.array(leaving, np.int64))
        attributes = self.attributes.with_rows(retriever.settings.num_labels, told)
        number = self.number + len(operations)
        known = self._exported_ids
        return Snapshot(
            retriever, attributes, self._side, self.folder, number, self.exported, known, changed
        )

    def label_id(self, uid: str) -> int | None:
        """Source id of a label that can be answered."""
        return self._changed[uid] if uid in self._changed else self._exported_ids.get(uid)

    def text(self, label: int) -> str:
        """Text of a label by source id."""
        return self.retriever.labels.texts(np.array([label]))[0]

    def has_tokens(self, text: str) -> bool:
        """Whether a label's text has any token: without one it has no vector."""
        tokenizer = self.retriever.tokenizer
        return bool(tokenizer.encode([text], tokenizer.label_max_len).lengths[0])

    def encode(self, texts: Sequence[str], max_tokens: int) -> tuple[Float32Array, list[bool]]:
        """Query vectors float32 [B, D], and which of the texts were too long to be read to their end."""
        tokenizer = self.retriever.tokenizer
        limit = min(max_tokens, tokenizer.max_len)
        tokens = tokenizer.encode(texts, limit)
        full = np.flatnonzero(tokens.lengths >= limit)
        longer = np.zeros(len(texts), bool)
        if len(full):
            longer[full] = (
                tokenizer.encode([texts[i] for i in full.tolist()], limit + 1).lengths > limit
            )
        return self.retriever.encode(tokens), longer.tolist()

    def view(self, wanted: schema.Filter | None) -> Retriever:
        """The retriever that answers only what a filter lets pass; views of the last filters are kept.

        Raises:
            ConfigError: no label has an attribute of that name.
        """
        if wanted is None or wanted == schema.Filter():
            return self.retriever
        key = wanted.model_dump_json()
        if key not in self._views:
            while len(self._views) >= VIEWS:
                self._views.pop(next(iter(self._views)), None)
            self._views[key] = self.retriever.restricted(self._mask(wanted))
        return self._views[key]

    def voting(self, asked: schema.MemorySettings | None) -> MemoryConfig | None:
        """How training queries vote in a request that changes some settings.

        Raises:
            ConfigError: the bundle has no memory.
        """
        if asked is None:
            return None
        memory = self.retriever.memory
        if memory is None:
            raise ConfigError("this bundle has no memory of training queries; leave `memory` out")
        known, given = memory.config, asked.model_dump(exclude_none=True)
        return MemoryConfig(
            **{name: given.get(name, getattr(known, name)) for name in MemoryConfig.__annotations__}
        )

    @functools.cached_property
    def probes(self) -> list[str]:
        """Texts of some labels of the bundle, to ask for after loading."""
        number = self.retriever.settings.first_added or self.retriever.settings.num_labels
        sample = np.random.default_rng(0).choice(number, min(PROBES, number), replace=False)
        return [text for text in self.retriever.labels.texts(sample) if text.strip()] or [""]

    def probe(self, texts: Sequence[str]) -> list[set[str]]:
        """Uids of the best labels of each text."""
        k = min(PROBE_K, self.retriever.num_labels)
        return [{answer.uid for answer in answers} for answers in self.retriever.search(texts, k)]

    @property
    def _exported_ids(self) -> Mapping[str, int]:
        if self._ids is None:
            self._ids = self.retriever.labels.ids_by_uid()
        return self._ids

    def _text(self, label: int, joining: Sequence[NewLabel]) -> str:
        number = label - self.retriever.settings.num_labels
        return joining[number].text if number >= 0 else self.text(label)

    def _attributes(
        self, operation: schema.Operation, label: int | None, told: Mapping[int, schema.Attributes]
    ) -> schema.Attributes:
        """Those of a label whose text is new: given, or what it had."""
        if operation.attributes is not None or label is None:
            return operation.attributes or {}
        return told[label] if label in told else self.attributes.of([label])[0]

    def _mask(self, wanted: schema.Filter) -> npt.NDArray[np.bool_]:
        number = self.retriever.settings.num_labels
        conditions: dict[str, Any] = wanted.attributes
        mask = self.attributes.mask(conditions) if conditions else np.ones(number, bool)
        if wanted.allow is not None:
            allowed = np.zeros(number, bool)
            allowed[self._known(wanted.allow)] = True
            mask &= allowed
        mask[self._known(wanted.deny)] = False
        return mask

    def _known(self, uids: Sequence[str]) -> list[int]:
        return [label for uid in uids if (label := self.label_id(uid)) is not None]
