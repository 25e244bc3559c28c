"""Writes a corpus of an older release anew, with few files of token and label ids.

Older releases wrote the arrays of each shard into files of their own. They are still read, but a
process that reads 2 * 10^8 queries would map more files than a system allows.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np

from xmcray.data.array_files import ArrayFiles
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.shards import ARRAY_SUFFIXES, shard_stem
from xmcray.data.writer import PrepareConfig
from xmcray.errors import DataError
from xmcray.storage.artifact import new_artifact, open_artifact
from xmcray.storage.manifest import MANIFEST

_REPLACED = ("card.yaml", "label_rank.npy")


def is_corpus(path: Path) -> bool:
    """Whether a folder is a corpus and not raw files."""
    return (path / MANIFEST).is_file() and (path / "card.yaml").is_file()


def regroup(path: Path, out: str | Path) -> Corpus:
    """Writes the corpus `out` with the rows of an older one.

    Args:
        path: the older corpus, which stays as it is.
        out: folder or URL that does not exist yet.

    Raises:
        DataError: the corpus has such files already.
        StorageError: it was altered, `out` exists, or the disk is full.
    """
    folder, manifest = open_artifact(path, KIND)
    old = Corpus(str(path), folder, manifest.sha256, verify=True)
    if old.card.array_rows:
        raise DataError(
            f"{path} has large files already, expected a corpus of an older release; use it as it is"
        )
    shards_per_file = PrepareConfig(shard_rows=old.card.shard_rows).shards_per_array_file
    array_rows = shards_per_file * old.card.shard_rows
    with new_artifact(out, KIND, {**manifest.about, "array_rows": array_rows}) as target:
        for split in ("labels", "train", "test"):
            if (folder / split).is_dir():
                _regroup_split(folder / split, target / split, shards_per_file)
        array_endings = tuple(f".{suffix}.npy" for suffix in ARRAY_SUFFIXES)
        for name in manifest.files:
            if name in _REPLACED or name.endswith(array_endings):
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target / name)
        np.save(target / "label_rank.npy", old.label_rank)
        dataclasses.replace(old.card, array_rows=array_rows).save(target / "card.yaml")
    return Corpus.open(out, verify=False)


def _regroup_split(old: Path, new: Path, shards_per_file: int) -> None:
    """Joins the arrays of all shards of one split."""
    array_files = ArrayFiles(new, shards_per_file)
    num_shards = len(list(old.glob("*.tokens.npy")))
    for shard in range(num_shards):
        arrays = {}
        for suffix in ARRAY_SUFFIXES:
            array = old / f"{shard_stem(shard)}.{suffix}.npy"
            if array.is_file():
                arrays[array.name] = array.read_bytes()
        array_files.add(shard, arrays)
    array_files.finish()
