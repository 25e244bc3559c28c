"""A bundle and the label operations applied to it so far.

A request is answered from one snapshot, from start to end. A snapshot never changes. The next
operations make another one, which shares everything that is the same; a request that holds the
older one goes on with it. The id of a new label depends on the operations alone, so that the
snapshots of all processes agree.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from xmcray.errors import StorageError, memory_errors
from xmcray.nn.label_side import LabelSide
from xmcray.retrieval.answers import FoundLabel
from xmcray.retrieval.attributes import ColumnTypes, LabelAttributes
from xmcray.retrieval.bundle import KIND, read_attributes
from xmcray.retrieval.labels import NewLabel, load_label_sides, with_labels
from xmcray.retrieval.new_vectors import is_prepared, new_vectors, prepare
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ALL_SHARDS, NO_SHARDS, ShardSubset
from xmcray.retrieval.uid_index import UidIndex
from xmcray.retrieval.votes import MemoryConfig
from xmcray.serving import schema
from xmcray.serving.log_place import Commit, LogPlace, compacted_from, place_in
from xmcray.storage.artifact import open_artifact
from xmcray.storage.manifest import read_manifest
from xmcray.types import BoolArray, Float32Array

MAX_VIEWS = 16  # filters whose views are kept
NUM_PROBES = 32
PROBE_K = 10
_INDEXING = threading.Lock()


@dataclass(frozen=True, slots=True)
class SnapshotReference:
    """Names the snapshot that a request began with, for the processes that answer parts of it.

    Attributes:
        model: name of the model.
        version: SHA-256 of the bundle.
        place: place in the label log.
    """

    model: str
    version: str
    place: LogPlace


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Vectors of some texts.

    Attributes:
        query_BD: query vectors, float32 [B, D].
        truncated: for each text, whether it was too long to be read to its end.
    """

    query_BD: Float32Array
    truncated: list[bool]

    def slice(self, start: int, stop: int) -> EncodedTexts:
        """The texts start ... stop - 1."""
        return EncodedTexts(self.query_BD[start:stop], self.truncated[start:stop])


@dataclass(eq=False)
class Snapshot:
    """One state of one model.

    Attributes:
        model: name of the model.
        retriever: searches the labels.
        attributes: values by which labels are filtered.
        label_sides: compute vectors of new labels, one per member of the bundle.
        folder: the bundle's local folder.
        place: place in the label log behind the operations that are applied.
        changed_ids: ids of the labels that were changed since the export, by uid; None if deleted.
        exported: looks up the exported labels by uid; built by the first look-up.
        compacted_from: SHA-256 of the bundle from which this one differs by operations of the served
            log alone; None if it was not compacted.
    """

    model: str
    retriever: Retriever
    attributes: LabelAttributes
    label_sides: Sequence[LabelSide]
    folder: Path
    place: LogPlace
    changed_ids: Mapping[str, int | None] = field(default_factory=dict)
    exported: UidIndex | None = None
    compacted_from: str | None = None
    _views: dict[str, Retriever] = field(default_factory=dict, init=False)

    @classmethod
    @memory_errors()
    def load(
        cls,
        bundle: str,
        model: str,
        threads: int,
        subset: ShardSubset = ALL_SHARDS,
        encoder: str = "float32",
        rerank: str = "",
    ) -> Snapshot:
        """Loads a bundle as it was written; every file is compared with its hash.

        Args:
            bundle: folder or URL.
            model: name of the model whose operations the bundle may hold.
            threads: see `Retriever.load`.
            subset: shards that can be searched.
            encoder: see `Retriever.load`.
            rerank: a cross-encoder that reads the best answers again; none if empty.
        Raises:
            StorageError, BundleError: missing, altered, malformed, changed meanwhile, or not a
                bundle.
            OutOfMemoryError: it does not fit.
        """
        retriever = Retriever.load(bundle, threads=threads, subset=subset, precision=encoder)
        if rerank and subset in (ALL_SHARDS, NO_SHARDS):
            # Only processes that name answers order them. In the composed mode these have no
            # shards, and a deployment of its own reads.
            retriever = retriever.reranked_by(rerank, reads=subset == ALL_SHARDS)
        folder, manifest = open_artifact(bundle, KIND, contents=False)
        place = place_in(manifest.about, model)
        attributes = read_attributes(folder, retriever.settings, retriever.labels.removed)
        label_sides = load_label_sides(folder, retriever.settings)
        # Last: parts of two versions would fit each other and give wrong answers.
        latest = read_manifest(folder, KIND)
        if {manifest.sha256, latest.sha256} != {retriever.sha256}:
            raise StorageError(
                f"{bundle} has changed while it was loaded, expected version"
                f" {retriever.sha256[:12]}; load it again"
            )
        return cls(
            model,
            retriever,
            attributes,
            label_sides,
            folder,
            place,
            compacted_from=compacted_from(manifest.about, model),
        )

    @property
    def version(self) -> str:
        """SHA-256 of the bundle's content."""
        return self.retriever.sha256

    @property
    def reference(self) -> SnapshotReference:
        """Names this snapshot in other processes."""
        return SnapshotReference(self.model, self.version, self.place)

    @property
    def number(self) -> int:
        """Number of the last operation that is applied."""
        return self.place.number

    def at(self, place: LogPlace) -> Snapshot:
        """The same snapshot, whose place in the label log is known better.

        Args:
            place: `LabelLog.resume_place`, or `LabelLog.place` of the last operation.
        """
        # From another place on, all operations are applied: the bundle has those of another log.
        origin = self.compacted_from if place.number == self.number else None
        return replace(self, place=place, compacted_from=origin)

    def after(self, operations: Sequence[schema.Operation]) -> Snapshot:
        """The snapshot with further operations applied.

        Args:
            operations: the operations after `number`, in order; checked before.
        Returns:
            The snapshot. Of its place only the number is known (`at`).
        """
        return self._after([operations]) if operations else self

    def _after(self, commits: Sequence[Sequence[schema.Operation]]) -> Snapshot:
        """The snapshot with the operations of some commits applied; at least one commit."""
        operations = list(itertools.chain.from_iterable(commits))
        # The first look-up builds `exported`. Later the retriever has labels that were added, too.
        old_ids = self.label_ids(operation.uid for operation in operations)
        changes = _LabelChanges(self, old_ids)
        for commit in commits:
            changes.add_commit(commit)
        retriever = self.retriever
        # First join, then leave: a label that joined may leave in the same sequence.
        if changes.joining:
            retriever = with_labels(retriever, self.label_sides, changes.joining)
        if changes.leaving:
            retriever = retriever.without(np.array(changes.leaving, np.int64))
        num_labels = retriever.settings.num_labels
        return replace(
            self,
            retriever=retriever,
            attributes=self.attributes.with_rows(
                num_labels, changes.attributes, changes.types.widened
            ),
            place=LogPlace(self.number + len(operations)),
            changed_ids=changes.ids,
        )

    def after_commits(self, commits: Sequence[Commit]) -> Snapshot:
        """The snapshot with further commits applied.

        How commits are grouped into calls makes no difference, up to rounding of new vectors.

        Args:
            commits: those after `number`, in order, at least one.
        """
        return self._after([commit.operations for commit in commits]).at(commits[-1].place)

    def label_id(self, uid: str) -> int | None:
        """Id of a label that can be answered; None if there is none of that uid."""
        return self.label_ids([uid]).get(uid)

    def index_uids(self) -> UidIndex:
        """Looks up the exported labels by uid. The first call takes seconds with millions of labels."""
        if self.exported is None:
            # Without the lock, each request that waits for it would build its own.
            with _INDEXING:
                if self.exported is None:
                    self.exported = UidIndex(self.retriever.labels)
        return self.exported

    def label_ids(self, uids: Iterable[str]) -> dict[str, int]:
        """Ids of labels that can be answered, by uid; without the uids that have none."""
        labels = self.retriever.labels
        exported = self.index_uids()
        ids = {}
        unchanged = []
        for uid in uids:
            if uid not in self.changed_ids:
                unchanged.append(uid)
            elif (label_id := self.changed_ids[uid]) is not None:
                ids[uid] = label_id
        return ids | exported.ids_of(unchanged, labels)

    def text(self, label_id: int) -> str:
        """Text of a label."""
        return self.retriever.labels.texts(np.array([label_id]))[0]

    def encode(
        self, texts: Sequence[str], max_tokens: int, vectors: Float32Array | None = None
    ) -> EncodedTexts:
        """Vectors of texts, of which at most `max_tokens` tokens are read.

        Args:
            texts: B texts.
            max_tokens: tokens of a text that are read.
            vectors: float32 [B, W], side vectors of the texts, if they have some.
        """
        query_BD, truncated = self.retriever.encode_start(texts, max_tokens, vectors)
        return EncodedTexts(query_BD, truncated.tolist())

    def num_tokens(self, texts: Sequence[str], max_tokens: int) -> int:
        """Tokens of texts, as far as they are read: at most `max_tokens` of each."""
        tokenizer = self.retriever.tokenizer
        limit = min(max_tokens, tokenizer.max_len)
        return int(tokenizer.encode(list(texts), limit).lengths.sum())

    @property
    def can_score(self) -> bool:
        """Whether `score` needs no `prepare_scores` before."""
        return is_prepared(self.retriever, self.label_sides[0])

    def prepare_scores(self) -> None:
        """Computes once what `score` needs; with a transformer it can take most of a minute.

        Raises:
            DataError: the bundle cannot score texts.
        """
        prepare(self.retriever, self.label_sides[0])

    def score(
        self, query: str, documents: Sequence[str], max_tokens: int
    ) -> tuple[Float32Array, bool]:
        """Inner products of a query with the vectors that labels of these texts would get.

        Of a bundle with several members, the vectors are those of the first.

        Args:
            query: its text.
            documents: n texts with a token each.
            max_tokens: tokens of the query that are read.
        Returns:
            float32 [n], and whether only the start of the query was read.
        """
        encoder = self.retriever.query_encoder
        query_BD, truncated = encoder.encode_start([query], max_tokens)
        label_LD = new_vectors(self.retriever, self.label_sides[0], documents)
        scores: Float32Array = label_LD @ query_BD[0]
        return scores, bool(truncated[0])

    def view(self, label_filter: schema.Filter | None) -> Retriever:
        """A retriever that answers only labels that pass the filter; the last views are kept.

        Args:
            label_filter: which labels pass; all of them if None.
        Raises:
            ConfigError: no label has an attribute of that name.
        """
        if label_filter is None or label_filter == schema.Filter():
            return self.retriever
        key = label_filter.model_dump_json()
        # Another thread may drop the views.
        views = self._views
        if key not in views:
            while len(views) >= MAX_VIEWS:
                oldest = next(iter(views))
                views.pop(oldest, None)
            # A view costs a pass over all labels, and requests often repeat their filter.
            views[key] = self.retriever.restricted(self._mask(label_filter))
        return views[key]

    def drop_views(self) -> None:
        """Drops what was kept for filters: each view can hold as much as a sixteenth of all vectors."""
        self._views = {}

    def drop_derived(self) -> None:
        """Drops arrays over all labels, which the next search makes again."""
        for member in self.retriever.members:
            member.labels.drop_derived()

    def memory_config(self, changes: schema.MemorySettings | None) -> MemoryConfig | None:
        """Settings of the memory for a request that changes some; None for those of the bundle."""
        memory = self.retriever.memory
        if changes is None or memory is None:
            return None
        return replace(memory.config, **changes.model_dump(exclude_none=True))

    @functools.cached_property
    def probes(self) -> list[str]:
        """Texts of some labels of the bundle, as queries for a trial after loading."""
        settings = self.retriever.settings
        num_labels = settings.first_added or settings.num_labels
        num_probes = min(NUM_PROBES, num_labels)
        # A fixed seed: old and new bundle are compared by the same queries.
        sample = np.random.default_rng(0).choice(num_labels, num_probes, replace=False)
        texts = self.retriever.labels.texts(sample)
        with_words = [text for text in texts if text.strip()]
        # An empty query shows at least that the bundle answers.
        return with_words or [""]

    def probe(self, texts: Sequence[str]) -> list[set[str]]:
        """Uids of the best labels of each text."""
        k = min(PROBE_K, self.retriever.num_labels)
        all_answers = self.retriever.search(texts, k)
        return [_uids(answers) for answers in all_answers]

    def _mask(self, label_filter: schema.Filter) -> BoolArray:
        """For each label id, whether the label passes."""
        num_labels = self.retriever.settings.num_labels
        mask = np.ones(num_labels, bool)
        if label_filter.attributes:
            mask = self.attributes.mask(label_filter.attributes)
        if label_filter.allow is not None:
            allowed = np.zeros(num_labels, bool)
            allowed[self._existing(label_filter.allow)] = True
            mask &= allowed
        # Last: `deny` wins over `allow`.
        mask[self._existing(label_filter.deny)] = False
        return mask

    def _existing(self, uids: Sequence[str]) -> list[int]:
        return list(self.label_ids(uids).values())


def _uids(answers: Sequence[FoundLabel]) -> set[str]:
    return {answer.uid for answer in answers}


class _LabelChanges:
    """What the operations of some commits change in a snapshot.

    Attributes:
        ids: as `Snapshot.changed_ids`.
        joining: labels with the next ids.
        leaving: ids of labels that are no longer answered.
        attributes: new attributes by label id.
        types: of the attributes, commit by commit.

    Args:
        snapshot: the labels before the sequence.
        old_ids: its ids of the labels that are changed, by uid.
    """

    def __init__(self, snapshot: Snapshot, old_ids: Mapping[str, int]) -> None:
        self.ids = dict(snapshot.changed_ids)
        self.joining: list[NewLabel] = []
        self.leaving: list[int] = []
        self.attributes: dict[int, schema.Attributes] = {}
        self.types = ColumnTypes(snapshot.attributes)
        self._rows: dict[int, schema.Attributes] = {}  # as `attributes`, of the present commit
        self._snapshot = snapshot
        self._old_ids = old_ids
        self._first_new_id = snapshot.retriever.settings.num_labels

    def add_commit(self, operations: Sequence[schema.Operation]) -> None:
        """Adds the operations of a commit."""
        for operation in operations:
            self._add(operation)
        self.types.apply(self._rows)
        self.attributes.update(self._rows)
        self._rows = {}

    def _add(self, operation: schema.Operation) -> None:
        """Adds one operation. A label whose text changes leaves, and joins with a new id."""
        uid = operation.uid
        text = operation.text or ""
        old_id = self.ids[uid] if uid in self.ids else self._old_ids.get(uid)
        attributes = operation.attributes
        deletes = operation.op == "delete"
        # A text that stays keeps the label's id and vector.
        if old_id is not None:
            # `events export` and `prepare` remove blanks at the ends of a text.
            same_texts = (None, self._text(old_id).strip())
            if not deletes and operation.text in same_texts:
                if attributes is not None:
                    self._rows[old_id] = attributes
                return
            self.leaving.append(old_id)
            if attributes is None and not deletes:
                attributes = self._attributes(old_id)
            # A label that left decides no longer of what type an attribute is.
            self._rows[old_id] = {}
        # Recorded even for a label without tokens: it hides the exported label of this uid.
        self.ids[uid] = None
        if deletes or not self._snapshot.retriever.has_tokens(text):
            return
        new_id = self._first_new_id + len(self.joining)
        self.ids[uid] = new_id
        self._rows[new_id] = attributes or {}
        self.joining.append(NewLabel(uid, text))

    def _text(self, label_id: int) -> str:
        if label_id >= self._first_new_id:
            return self.joining[label_id - self._first_new_id].text
        return self._snapshot.text(label_id)

    def _attributes(self, label_id: int) -> schema.Attributes:
        if label_id in self._rows:
            return self._rows[label_id]
        if label_id in self.attributes:
            return self._as_stored(self.attributes[label_id])
        return self._snapshot.attributes.of([label_id])[0]

    def _as_stored(self, attributes: schema.Attributes) -> schema.Attributes:
        """Attributes of an earlier commit, as they would be read from its columns."""
        widened = self.types.widened
        stored = dict(attributes)
        for name, value in attributes.items():
            if type(value) is int and name in widened:  # a boolean is an integer, too
                stored[name] = float(value)
        return stored
