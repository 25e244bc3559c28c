"""Corpora of 10^8 rows: few files, no array of all rows, and the same rows as before."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of, planted_corpus
from shell import Shell, run_command

from xmcray.data.batches import BatchSampler, DataConfig, TrainingData
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.kept_ids import KeptIds
from xmcray.data.writer import PrepareConfig
from xmcray.errors import DataError
from xmcray.storage.artifact import new_artifact

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
QUERIES = 101


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("large"), QUERIES)


def contents(corpus: Corpus) -> list[object]:
    """All that a training reads of a corpus."""
    labels = np.arange(corpus.card.num_labels)
    parts: list[object] = [corpus.label_order.tolist(), corpus.label_rank.tolist()]
    for name in ("train", "test"):
        split = corpus.split(name)
        rows = np.arange(len(split))
        parts += [split.tokens(rows).values.tolist(), split.positives(rows).values.tolist()]
        parts += [split.tokens(rows).offsets.tolist(), split.positives(rows).offsets.tolist()]
        parts += [split.filters(rows).values.tolist(), split.texts(rows)]
    return [*parts, corpus.label_tokens(labels).values.tolist()]


def as_older_release(corpus: Corpus, out: Path) -> Corpus:
    """The corpus as older releases wrote it; its shards must be its array files."""
    assert corpus.card.array_rows == corpus.card.shard_rows
    about = {"made_by": "tests"}
    with new_artifact(out, KIND, about) as folder:
        for file in corpus.path.rglob("*"):
            target = folder / file.relative_to(corpus.path)
            if file.is_file() and file.name not in ("manifest.json", "label_rank.npy"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        card = (folder / "card.yaml").read_text()
        without = [line for line in card.splitlines() if not line.startswith("array_rows")]
        (folder / "card.yaml").write_text("\n".join(without))
    return Corpus.open(out)


def test_arrays_of_many_shards_are_one_file(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"
    # 101 queries are 21 shards of 5 and 7 array files of at most 3 shards.
    small = corpus_of(raw, tmp_path / "small", vocab_size=2000, shard_rows=5, array_rows=17)
    train = small.path / "train"
    assert len(list(train.glob("*.parquet"))) == 21
    for suffix in ("tokens", "token_offsets", "labels", "label_offsets"):
        assert len(list(train.glob(f"*.{suffix}.npy"))) == 7
    assert [path.name for path in train.iterdir() if path.is_dir()] == []
    assert contents(small) == contents(corpus)


def test_older_corpora_are_read_and_migrated_by_one_command(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"
    shards = corpus_of(raw, tmp_path / "s", vocab_size=2000, shard_rows=5, array_rows=5)
    old = as_older_release(shards, tmp_path / "old")
    assert contents(old) == contents(corpus)
    assert run_command(f"prepare {old.path} --out {tmp_path}/new --json") == 0
    new = Corpus.open(tmp_path / "new")
    assert len(list((new.path / "train").glob("*.tokens.npy"))) == 1
    assert contents(new) == contents(corpus)
    direct = corpus_of(raw, tmp_path / "direct", vocab_size=2000, shard_rows=5)
    for file in direct.path.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            assert (new.path / file.relative_to(direct.path)).read_bytes() == file.read_bytes()


def test_a_new_corpus_is_not_migrated(corpus: Corpus, tmp_path: Path, shell: Shell) -> None:
    command = f"prepare {corpus.path} --out {tmp_path}/x"
    assert "has large files already" in shell.error(command)
    assert "max_len is for raw files" in shell.error(f"{command} --max-len 8")


@pytest.mark.parametrize("name", ["label_order.npy", "label_rank.npy"])
def test_label_orders_that_do_not_belong_together_are_refused(
    corpus: Corpus, tmp_path: Path, name: str
) -> None:
    with new_artifact(tmp_path / "c", KIND, {}) as folder:
        for file in corpus.path.rglob("*"):
            target = folder / file.relative_to(corpus.path)
            if file.is_file() and file.name != "manifest.json":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        order = np.load(folder / name)
        order[[3, 4]] = order[[4, 3]]
        np.save(folder / name, order)
    with pytest.raises(DataError, match="not the inverse"):
        Corpus.open(tmp_path / "c")


def test_an_epoch_of_a_keyed_order_has_every_query_once(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmcray.permutations.MAX_STORED_SIZE", 10)
    data = TrainingData(corpus, DataConfig(validation=0.1))
    assert not set(data.query_ids[:]) & set(data.validation_rows)
    epochs = []
    for epoch in range(2):
        sampler = BatchSampler(data, 16, seed=0)
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        ids = np.concatenate([sampler.query_ids(step) for step in steps])
        assert np.array_equal(np.sort(ids), data.query_ids[:])
        epochs.append(ids)
    assert not np.array_equal(epochs[0], epochs[1])


def test_kept_ids_are_the_ids_without_those_left_out() -> None:
    for left_out in ([], [0], [9], [0, 1, 2], [3, 4, 8], list(range(10))):
        kept = KeptIds(10, np.array(left_out, np.int64))
        expected = np.setdiff1d(np.arange(10), left_out)
        assert len(kept) == len(expected)
        assert kept[:].tolist() == expected.tolist()
        assert kept[::-1].tolist() == expected[::-1].tolist()
        assert np.asarray(kept).tolist() == expected.tolist()
        with pytest.raises(IndexError):
            kept[np.array([len(expected)])]


def test_filters_are_not_looked_up_where_there_are_none(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TrainingData(corpus, DataConfig())
    split = corpus.split("train")
    monkeypatch.setattr(type(split), "has_filters", False)
    monkeypatch.setattr(type(split), "filters", None)
    query_ids = data.query_ids[:5]
    assert data.excluded(query_ids).lengths.tolist() == [0] * 5


def test_damaged_offsets_are_refused_where_rows_are_read(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"
    damaged = corpus_of(raw, tmp_path / "c", vocab_size=2000)
    path = damaged.path / "train" / "00000.token_offsets.npy"
    offsets = np.load(path)
    offsets[50] = 1 << 60
    np.save(path, offsets)
    train = Corpus.open(damaged.path, verify=False).split("train")
    assert train.tokens(np.arange(40)).lengths.any()
    for row in (49, 50):
        with pytest.raises(DataError, match="offsets that are not those of its rows"):
            train.tokens(np.array([row]))
    with pytest.raises(DataError, match="offsets that are not those of its rows"):
        len(train.rows_without_tokens)


def test_a_large_corpus_takes_few_mappings_and_no_array_of_all_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The benchmark opens 370 million queries; this is the same at a thousandth of the size.
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    large_corpus = importlib.import_module("large_corpus")
    monkeypatch.setattr("xmcray.permutations.MAX_STORED_SIZE", 1 << 14)
    config = PrepareConfig(shard_rows=1 << 10, array_rows=1 << 16)
    monkeypatch.setattr(large_corpus, "SETTINGS", config)
    large_corpus.write_corpus(tmp_path / "c", 370_000, 120_000)
    measured = large_corpus.read(tmp_path / "c")
    # 6 files of 65,536 queries and 2 of labels, and the three arrays of labels.
    assert measured["corpus_mappings"] <= 6 * 4 + 2 * 2 + 3
    # An order in memory would take 3.7 MB, and another 3.9 MB for the ids in that order.
    assert measured["order_bytes"] < 1 << 20


def test_a_card_of_an_older_release_has_an_array_file_for_each_shard(corpus: Corpus) -> None:
    card = dataclasses.replace(corpus.card, array_rows=0)
    assert card.rows_per_array_file == card.shard_rows
