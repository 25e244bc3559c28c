"""The driver's side of `prepare`: settings, writing packed shards, counting, and the card. No Ray here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from xmcray.data.chunks import Shard
from xmcray.data.corpus import Card, frequency_histogram
from xmcray.data.formats import BadRow, Source
from xmcray.data.tokens import MAX_VOCAB, TextTokenizer
from xmcray.errors import ConfigError, DataError
from xmcray.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Everything that shapes a corpus besides its raw files.

    Attributes:
        max_len, label_max_len: tokens kept of a query and of a label text.
        tokenizer: "wordpiece", or a transformer's hub id or folder.
        vocab_size: largest vocabulary to train.
        on_error: "fail" stops at the first malformed row, "skip" writes them to rejected.jsonl.
        seed: of the label permutation and the vocabulary sample.
        propensity: constants A and B (Jain et al., KDD 2016).
        shard_rows: rows per shard.
    """

    max_len: int = 128
    label_max_len: int = 32
    tokenizer: str = "wordpiece"
    vocab_size: int = MAX_VOCAB
    on_error: str = "fail"
    seed: int = 0
    propensity: tuple[float, float] = (0.55, 1.5)
    shard_rows: int = 16_384

    def __post_init__(self) -> None:
        if self.on_error not in ("fail", "skip"):
            raise ConfigError(f"on_error is {self.on_error!r}, expected 'fail' or 'skip'")
        if self.shard_rows < 1:
            raise ConfigError(f"shard_rows is {self.shard_rows}, expected at least 1")


@dataclass(slots=True)
class CorpusWriter:
    """The driver's side: writes finished shards and counts."""

    folder: Path
    num_rows: Counter[str] = field(default_factory=Counter)
    num_tokens: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[str, BadRow]] = field(default_factory=list)
    filters: dict[str, list[Int64Array]] = field(default_factory=dict)
    counts: dict[str, Int64Array] = field(default_factory=dict)

    def add(self, shard: Shard) -> None:
        """Writes a shard's files."""
        split = shard.split
        target = self.folder / split
        target.mkdir(exist_ok=True)
        for name, content in shard.files.items():
            (target / name).write_bytes(content)
        self.num_rows[split] += shard.num_rows
        self.num_tokens[split] += shard.num_tokens
        self.odd += shard.odd
        self.rejected += [(split, bad) for bad in shard.rejected]
        if split != "labels":
            if split not in self.counts:
                self.counts[split] = np.zeros(self.num_rows["labels"], np.int64)
            np.add.at(self.counts[split], shard.label_ids, 1)
            self.filters.setdefault(split, []).append(shard.filters)

    def finish(
        self,
        source: Source,
        config: PrepareConfig,
        name: str,
        licence: str,
        tokenizer: TextTokenizer,
    ) -> None:
        """Everything that needs the counts: label order, filters, rejected rows, card."""
        for split in ("labels", *source.splits):
            if not self.num_rows[split]:
                raise DataError(f"{source.path}: split {split!r} has no row; expected at least one")
        num_labels, train = self.num_rows["labels"], self.counts["train"]
        tokenizer.save(self.folder / "tokenizer")
        np.save(
            self.folder / "label_order.npy",
            np.random.default_rng([config.seed, 0]).permutation(num_labels),
        )
        np.save(self.folder / "train_counts.npy", train)
        for split, parts in self.filters.items():
            (self.folder / "filters").mkdir(exist_ok=True)
            np.save(self.folder / "filters" / f"{split}.npy", sorted_pairs(np.concatenate(parts)))
        rejected = sorted(
            self.rejected, key=lambda item: (item[0], item[1].file, item[1].line, item[1].reason)
        )
        if rejected:
            lines = [
                json.dumps(
                    {"split": split, **asdict(bad), "file": Path(bad.file).name}, ensure_ascii=False
                )
                for split, bad in rejected
            ]
            (self.folder / "rejected.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        unseen = train == 0
        if "test" in self.counts:
            only_test = unseen & (self.counts["test"] > 0)
            self.odd["labels: seen only in test"] = int(only_test.sum())
            unseen &= ~only_test
        self.odd["labels: never seen"] = int(unseen.sum())
        Card(
            name=name,
            source=source.path.name,
            format=source.format,
            licence=licence,
            num_train=self.num_rows["train"],
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
            averages={
                "labels per training query": int(train.sum()) / self.num_rows["train"],
                "training queries per label": int(train.sum()) / num_labels,
                "tokens per training query": self.num_tokens["train"] / self.num_rows["train"],
                "tokens per label": self.num_tokens["labels"] / num_labels,
            },
            frequency=frequency_histogram(train),
            odd={reason: count for reason, count in sorted(self.odd.items()) if count},
            rejected=dict(sorted(Counter(split for split, _ in rejected).items())),
        ).save(self.folder / "card.yaml")


def short_name(tokenizer: str) -> str:
    """A hub id as it is, a folder without its path: a corpus must not depend on where it was made."""
    return Path(tokenizer).name if Path(tokenizer).is_dir() else tokenizer


def sorted_pairs(pairs: Int64Array) -> Int64Array:
    """int64 [pairs, 2], each pair once, by row and label."""
    return np.unique(np.asarray(pairs, np.int64).reshape(-1, 2), axis=0)


def statistics_table(card: Card) -> Table:
    """What a corpus holds, for the eye: sizes, averages, label frequencies, odd and rejected rows."""
    table = Table(title=f"{card.name}: {card.num_labels:,} labels", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("training queries", f"{card.num_train:,}")
    table.add_row("test queries", f"{card.num_test:,}")
    for what, average in card.averages.items():
        table.add_row(what, f"{average:.2f}")
    table.add_row("tokens in the vocabulary", f"{card.vocab_size:,}")
    table.add_section()
    for bin_, count in card.frequency.items():
        table.add_row(f"labels with {bin_} training queries", f"{count:,}")
    if card.odd or card.rejected:
        table.add_section()
    for reason, count in card.odd.items():
        table.add_row(f"kept: {reason}", f"{count:,}")
    for split, count in card.rejected.items():
        table.add_row(f"rejected: {split}", f"{count:,}")
    return table
