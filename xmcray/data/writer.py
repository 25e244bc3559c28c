"""The driver's side of `prepare`, without Ray: settings, writing shards, counting, the card."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from xmcray.config import check_choices, check_range
from xmcray.data.array_files import ArrayFiles
from xmcray.data.chunks import PackedShard
from xmcray.data.corpus import Card, frequency_histogram, inverse_permutation
from xmcray.data.formats import RawFiles
from xmcray.data.formats.base import folder_name
from xmcray.data.rejected import Rejected, RejectedRows
from xmcray.data.text_keys import LEAKS, TextKeys
from xmcray.data.tokens import LABEL_MAX_LEN, MAX_LEN, MAX_VOCAB, TextTokenizer
from xmcray.errors import ConfigError, DataError
from xmcray.types import Int64Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Everything that shapes a corpus apart from its raw files.

    Attributes:
        max_len: tokens kept of a query.
        label_max_len: tokens kept of a label text; never more than `max_len`.
        tokenizer: "wordpiece", or a transformer's hub id or folder.
        query_prompt: put before each query; None is what the transformer's sentence-transformers
            folder declares, if it is one.
        label_prompt: the same for label texts.
        vocab_size: largest vocabulary to train.
        on_error: "fail" stops at the first malformed row, "skip" writes them to rejected.jsonl.
        on_leak: "keep" counts test queries whose text a training query has, "drop" also leaves
            these training queries out and writes them to rejected.jsonl.
        seed: of the label permutation and the vocabulary sample.
        propensity: constants A and B (Jain et al., KDD 2016).
        shard_rows: rows per shard, the unit of work; a file of texts holds one shard.
        array_rows: rows per file of token or label ids, rounded down to whole shards.
    """

    max_len: int = 128
    label_max_len: int = LABEL_MAX_LEN
    tokenizer: str = "wordpiece"
    query_prompt: str | None = None
    label_prompt: str | None = None
    vocab_size: int = MAX_VOCAB
    on_error: Literal["fail", "skip"] = "fail"
    on_leak: Literal["keep", "drop"] = "keep"
    seed: int = 0
    propensity: tuple[float, float] = (0.55, 1.5)
    shard_rows: int = 16_384
    # Four mapped files for 16 million rows keep 10^9 rows far below a system's limit of mappings.
    array_rows: int = 1 << 24

    def __post_init__(self) -> None:
        check_choices(self)
        if self.tokenizer == "wordpiece" and (self.query_prompt or self.label_prompt):
            raise ConfigError(
                "a prompt is set, which the vocabulary of the corpus knows nothing of; name the"
                " model that it belongs to with --tokenizer, or leave it out"
            )
        check_range("max_len", self.max_len, 1, MAX_LEN)
        check_range("label_max_len", self.label_max_len, 1, MAX_LEN)
        check_range("vocab_size", self.vocab_size, 1, 1 << 24)
        if len(self.propensity) != 2:
            raise ConfigError(f"propensity is {self.propensity}, expected two numbers, A and B")
        a, b = self.propensity
        check_range("propensity A", a, 0, 10)
        # With 0, a label without training queries would get an infinite weight.
        check_range("propensity B", b, 0.01, 1e6)
        check_range("shard_rows", self.shard_rows, low=1)
        check_range("array_rows", self.array_rows, low=1)

    @property
    def shards_per_array_file(self) -> int:
        """Shards whose token or label ids are in one file."""
        return max(1, self.array_rows // self.shard_rows)


@dataclass(slots=True)
class CorpusWriter:
    """Writes finished shards into a new corpus folder and counts what the card reports.

    Attributes:
        folder: of the corpus.
        source: raw files.
        config: settings of the corpus.
        name: of the corpus.
        licence: of the raw files.
        num_rows: by split.
        num_tokens: by split.
        odd: legal but unusual rows by reason.
        rejected: rows left out.
        earlier_rows: rows of the corpus that is appended to, by split; empty without one.
        earlier_odd: its odd rows by reason.
        earlier_rejected: those of the corpus that is appended to; read once, at the end.
        num_rejected: rows left out by split, counted when they are written.
        filters: by split, filter pairs of each shard.
        counts: by split, int64 [L]: queries that carry each label.
        arrays: by split, its files of token and label ids.
        keys: keys of all texts.
    """

    folder: Path
    source: RawFiles
    config: PrepareConfig
    name: str
    licence: str
    num_rows: Counter[str] = field(default_factory=Counter)
    num_tokens: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    earlier_rows: dict[str, int] = field(default_factory=dict)
    earlier_odd: Counter[str] = field(default_factory=Counter)
    rejected: RejectedRows = field(init=False)
    earlier_rejected: Iterable[Rejected] = ()
    num_rejected: Counter[str] = field(default_factory=Counter)
    filters: dict[str, list[Int64Array]] = field(default_factory=dict)
    counts: dict[str, Int64Array] = field(default_factory=dict)
    arrays: dict[str, ArrayFiles] = field(default_factory=dict)
    keys: TextKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = TextKeys(self.folder)
        self.rejected = RejectedRows(self.folder)

    def add(self, shard: PackedShard) -> None:
        """Writes a shard's files; all shards of "labels" come before those of other splits."""
        split = shard.split
        target = self.folder / split
        target.mkdir(exist_ok=True)
        if split not in self.arrays:
            self.arrays[split] = ArrayFiles(target, self.config.shards_per_array_file)
        arrays = {}
        for name, content in shard.files.items():
            if name.endswith(".npy"):
                arrays[name] = content
            else:
                (target / name).write_bytes(content)
        if arrays:
            self.arrays[split].add(shard.number, arrays)
        # Shards arrive in any order, on which sums do not depend.
        self.num_rows[split] += shard.num_rows
        self.num_tokens[split] += shard.num_tokens
        self.odd.update(shard.odd)
        self.keys.add(shard.keys)
        self.rejected.add(split, shard.number, shard.rejected)
        if split == "labels":
            return
        if split not in self.counts:
            # All labels have arrived, so their number is final.
            self.counts[split] = np.zeros(self.num_rows["labels"], np.int64)
            self.filters[split] = []
        # add.at counts a label once for each of its queries; += would count it once in all.
        np.add.at(self.counts[split], shard.label_ids, 1)
        self.filters[split].append(shard.filters)

    def finish(self, tokenizer: TextTokenizer) -> None:
        """Writes everything that needs the counts: label order, filters, rejected rows, card.

        Raises:
            DataError: a split has no row, or none of its queries has text or labels.
        """
        for split in ("labels", *self.source.splits):
            if not self.num_rows[split]:
                raise DataError(
                    f"{self.source.path}: split {split!r} has no row; expected at least one"
                )
        self._check_queries()
        for array_files in self.arrays.values():
            array_files.finish()
        tokenizer.save(self.folder / "tokenizer")
        # The survey draws from [seed, 1]: the two streams have nothing in common.
        rng = np.random.default_rng([self.config.seed, 0])
        label_order = rng.permutation(self.num_rows["labels"])
        np.save(self.folder / "label_order.npy", label_order)
        np.save(self.folder / "label_rank.npy", inverse_permutation(label_order))
        np.save(self.folder / "train_counts.npy", self.counts["train"])
        filter_folder = self.folder / "filters"
        filter_folder.mkdir(exist_ok=True)
        for split, shards in self.filters.items():
            pairs = sorted_pairs(np.concatenate(shards))
            np.save(filter_folder / f"{split}.npy", pairs)
        self.num_rejected = self.rejected.write(self.earlier_rejected)
        self._count_unseen_labels()
        self._count_equal_texts()
        # Before all files of the folder are listed.
        self.keys.close()
        self.rejected.close()
        self._card(tokenizer).save(self.folder / "card.yaml")

    def _check_queries(self) -> None:
        """Raises DataError if all of a split lack what they need, as with a field of another name.

        Of new rows that are appended it warns, because the earlier ones have it.
        """
        for split in self.source.splits:
            num_rows = self.num_rows[split] - self.earlier_rows.get(split, 0)
            num_without: dict[str, int] = {}
            for missing, reason in (("text", "no text"), ("labels", "no positives")):
                name = f"{split}: {reason}"
                num_without[missing] = self.odd[name] - self.earlier_odd[name]
            if self.source.side_vectors(split) is not None:
                # Side vectors, such as those of images, can stand for texts.
                num_without["text"] = 0
            for missing, count in num_without.items():
                if num_rows == 0 or count < num_rows:
                    continue
                kind = "training" if split == "train" else split
                kind = f"new {kind}" if self.earlier_rows else kind
                message = (
                    f"no {kind} query has {missing}, expected some; check the names of the fields or"
                    " columns"
                )
                if not self.earlier_rows:
                    raise DataError(f"{self.source.path}: {message} (format {self.source.format})")
                logger.warning(message)

    def _count_unseen_labels(self) -> None:
        """Counts labels without a training query among the odd rows."""
        unseen = self.counts["train"] == 0
        if "test" in self.counts:
            # A label of the test split is no mistake of the corpus, but no method can learn it.
            only_in_test = unseen & (self.counts["test"] > 0)
            self.odd["labels: seen only in test"] = int(only_in_test.sum())
            unseen &= ~only_in_test
        self.odd["labels: never seen"] = int(unseen.sum())

    def _count_equal_texts(self) -> None:
        """Counts rows whose text another row has among the odd rows; warns of test queries."""
        self.odd.update(self.keys.odd_rows())
        if self.odd[LEAKS]:
            # Rows that are there stay, so an append cannot leave them out.
            anew = "prepared anew from all raw files, " if self.earlier_rows else ""
            logger.warning(
                "%s of %s test queries have the text of a training query, which makes metrics too"
                " good; %s--on-leak drop leaves these training queries out",
                f"{self.odd[LEAKS]:,}",
                f"{self.num_rows['test']:,}",
                anew,
            )

    def _card(self, tokenizer: TextTokenizer) -> Card:
        """What the corpus says of itself."""
        config = self.config
        num_train = self.num_rows["train"]
        num_labels = self.num_rows["labels"]
        num_positives = int(self.counts["train"].sum())
        return Card(
            name=self.name,
            source=self.source.name,
            format=self.source.format,
            licence=self.licence,
            num_train=num_train,
            num_test=self.num_rows["test"],
            num_labels=num_labels,
            propensity_a=config.propensity[0],
            propensity_b=config.propensity[1],
            max_len=tokenizer.max_len,
            label_max_len=tokenizer.label_max_len,
            tokenizer=tokenizer.kind,
            tokenizer_name=short_name(config.tokenizer),
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            seed=config.seed,
            shard_rows=config.shard_rows,
            array_rows=config.shards_per_array_file * config.shard_rows,
            side_width=self.source.side_width(),
            averages={
                "labels per training query": num_positives / num_train,
                "training queries per label": num_positives / num_labels,
                "tokens per training query": self.num_tokens["train"] / num_train,
                "tokens per label": self.num_tokens["labels"] / num_labels,
            },
            frequency=frequency_histogram(self.counts["train"]),
            # Sorted, so that equal corpora have equal cards. Adding a positive count drops zeros.
            odd=dict(sorted((+self.odd).items())),
            rejected=dict(sorted(self.num_rejected.items())),
        )


def short_name(tokenizer: str) -> str:
    """A hub id, or a folder without its path: a corpus does not depend on where it was made."""
    return folder_name(Path(tokenizer)) if Path(tokenizer).is_dir() else tokenizer


def sorted_pairs(pairs: Int64Array) -> Int64Array:
    """int64 [pairs, 2], each pair once, by row and label."""
    return np.unique(np.asarray(pairs, np.int64).reshape(-1, 2), axis=0)


def statistics_table(card: Card) -> Table:
    """A corpus for people: sizes, averages, label frequencies, odd and rejected rows."""
    table = Table(title=f"{card.name}: {card.num_labels:,} labels", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("training queries", f"{card.num_train:,}")
    table.add_row("test queries", f"{card.num_test:,}")
    # The averages carry their own names.
    for quantity, average in card.averages.items():
        table.add_row(quantity, f"{average:.2f}")
    table.add_row("tokens in the vocabulary", f"{card.vocab_size:,}")
    if card.side_width:
        table.add_row("numbers of a side vector", f"{card.side_width:,}")
    table.add_section()
    for bin_name, count in card.frequency.items():
        table.add_row(f"labels with {bin_name} training queries", f"{count:,}")
    if card.odd or card.rejected:
        table.add_section()
    for reason, count in card.odd.items():
        table.add_row(f"kept: {reason}", f"{count:,}")
    for split, count in card.rejected.items():
        table.add_row(f"rejected: {split}", f"{count:,}")
    return table
