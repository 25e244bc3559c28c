"""Continues a corpus that is appended to.

Full shards stay as they are: their files can be linked, and the new writer begins with the counts of
their rows. The rows of a split's last shard, which is not full, are unfinished: they are packed again,
together with the new rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from xmcray.data.append import AppendedFiles
from xmcray.data.appended_labels import removed_labels
from xmcray.data.array_files import ArrayFiles
from xmcray.data.checked_files import read_array
from xmcray.data.corpus import REMOVED, Corpus, Split
from xmcray.data.rejected import SPLITS, earlier_rejected
from xmcray.data.shards import ARRAY_SUFFIXES
from xmcray.data.text_keys import COUNTED, keys_by_name
from xmcray.data.writer import CorpusWriter, PrepareConfig
from xmcray.errors import DataError, readable
from xmcray.types import Int64Array, id_blocks

# Reasons that depend on other rows too; the writer counts them anew at its end.
_COUNTED_ANEW = ("labels: never seen", "labels: seen only in test", *COUNTED)


def files_to_write(names: Iterable[str], source: AppendedFiles, config: PrepareConfig) -> set[str]:
    """Names of the files of the corpus that cannot be linked.

    Linked are full shards, and all files of a split that the new files lack.
    """
    return {name for name in names if _is_written_anew(name, source, config)}


def _is_written_anew(name: str, source: AppendedFiles, config: PrepareConfig) -> bool:
    """Whether a file of the corpus is written anew, perhaps with the same content."""
    split, _, file_name = name.partition("/")
    if split not in SPLITS:
        return True
    if split not in source.appended_splits:
        return False
    number, _, suffix = file_name.partition(".")
    first_unfinished = source.first_shard(split, config.shard_rows)
    kind = suffix.removesuffix(".npy")
    if kind in ARRAY_SUFFIXES:
        # An array file has the rows of several shards.
        first_unfinished //= config.shards_per_array_file
    return int(number) >= first_unfinished


def continued_writer(
    folder: Path, corpus: Corpus, source: AppendedFiles, config: PrepareConfig
) -> CorpusWriter:
    """A writer for the new corpus that has counted the rows of full shards already.

    It also writes the removed labels, and copies the shards of array files that are not full.

    Args:
        folder: of the new corpus.
        corpus: the corpus whose rows come first.
        source: the rows that will be packed: unfinished ones, then the new ones.
        config: settings of the corpus.
    """
    card = corpus.card
    # Those of the corpus, too.
    removed_ids = removed_labels(corpus, source.new, source.label_ids)
    if len(removed_ids):
        np.save(folder / REMOVED, removed_ids)
    writer = CorpusWriter(folder, source, config, card.name, card.licence)
    writer.odd = Counter(card.odd)
    for reason in _COUNTED_ANEW:
        writer.odd.pop(reason, None)
    writer.earlier_rows = {name: card.num_rows(name) for name in SPLITS}
    writer.earlier_odd = Counter(card.odd)
    writer.earlier_rejected = earlier_rejected(corpus.path, card)
    for name in SPLITS:
        _continue_split(writer, source, Split(corpus.path, name, card))
    return writer


def _continue_split(writer: CorpusWriter, source: AppendedFiles, old: Split) -> None:
    """Gives the writer the counts of the full shards; of a split without new files, all counts."""
    name = old.name
    num_kept = len(old)
    if name in source.appended_splits:
        num_full_shards = source.first_shard(name, source.card.shard_rows)
        num_kept = num_full_shards * source.card.shard_rows
        _copy_partial_arrays(writer, source, name, num_full_shards)
        _uncount_unfinished(writer, source, old)
    writer.num_rows[name] = num_kept
    for rows in id_blocks(num_kept):
        # Hashes of texts, by which the writer finds equal texts.
        keys = keys_by_name(name, old.texts(rows))
        writer.keys.add(keys)
    # Without old rows the writer begins these counts itself.
    if name != "labels" and len(old):
        writer.counts[name] = _positives_by_label(old, num_kept, source.num_labels)
        # Those of all old rows: unfinished ones bring no filter pairs when they are packed again.
        writer.filters[name] = [_filter_pairs(source.corpus, name)]


def _copy_partial_arrays(
    writer: CorpusWriter, source: AppendedFiles, name: str, num_shards: int
) -> None:
    """Copies the full shards that lie in an array file that is not full.

    That file is written anew, with the rows that follow.
    """
    folder = writer.folder / name
    folder.mkdir(exist_ok=True)
    arrays = ArrayFiles(folder, writer.config.shards_per_array_file)
    arrays.keep(source.corpus / name, num_shards, source.card.shard_rows)
    writer.arrays[name] = arrays


def _uncount_unfinished(writer: CorpusWriter, source: AppendedFiles, old: Split) -> None:
    """Subtracts unfinished rows from the writer's odd rows and tokens."""
    name = old.name
    unfinished = source.unfinished(name)
    writer.odd.subtract(_odd_when_packed(old, unfinished))
    if name == "test":
        # The card has no average of test queries.
        return
    average_name = "tokens per label" if name == "labels" else "tokens per training query"
    # The card has only the average. Times the number of rows and rounded, it gives the exact sum.
    num_tokens = round(source.card.averages[average_name] * len(old))
    tokens = old.tokens(unfinished)
    writer.num_tokens[name] = num_tokens - len(tokens.values)


def _odd_when_packed(split: Split, rows: Int64Array) -> Counter[str]:
    """What packing some rows again will count as odd.

    It is subtracted first, so that each row counts once.
    """
    odd: Counter[str] = Counter()
    odd[f"{split.name}: no text"] = sum(not text.strip() for text in split.texts(rows))
    if split.name != "labels":
        # The stored positives lack the filter pairs. A row that lost all of them to these counts here
        # and when it is packed again, so both cancel.
        has_none = split.positives(rows).lengths == 0
        odd[f"{split.name}: no positives"] = int(has_none.sum())
    return odd


def _filter_pairs(folder: Path, split: str) -> Int64Array:
    """int64 [pairs, 2], the filter pairs of a split of a corpus."""
    path = folder / "filters" / f"{split}.npy"
    with readable(f"{path} cannot be read", "prepare the corpus again", DataError):
        return np.asarray(read_array(path, np.int64, ndim=2))


def _positives_by_label(split: Split, num_rows: int, num_labels: int) -> Int64Array:
    """int64 [L], how many of the first rows of a split carry each label."""
    counts = np.zeros(num_labels, np.int64)
    for rows in id_blocks(num_rows):
        counts += np.bincount(split.positives(rows).values, minlength=num_labels)
    return counts
