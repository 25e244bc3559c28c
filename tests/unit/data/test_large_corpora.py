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
    label_tokens = corpus.label_tokens(labels)
    parts: list[object] = [
        corpus.label_order.tolist(),
        corpus.label_rank.tolist(),
        label_tokens.values.tolist(),
    ]
    for name in ("train", "test"):
        split = corpus.split(name)
        rows = np.arange(len(split))
        tokens = split.tokens(rows)
        positives = split.positives(rows)
        filters = split.filters(rows)
        parts += [
            tokens.values.tolist(),
            tokens.offsets.tolist(),
            positives.values.tolist(),
            positives.offsets.tolist(),
            filters.values.tolist(),
            split.texts(rows),
        ]
    return parts


def copy_files(
    corpus: Corpus,
    folder: Path,
    without: list[str],
) -> None:
    """Copies the files of a corpus except those with some names."""
    for file in corpus.path.rglob("*"):
        if file.is_dir() or file.name in without:
            continue
        target = folder / file.relative_to(corpus.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())


def as_older_release(corpus: Corpus, out: Path) -> Corpus:
    """The corpus as older releases wrote it; its shards must be its array files."""
    assert corpus.card.array_rows == corpus.card.shard_rows
    about = {"made_by": "tests"}
    with new_artifact(out, KIND, about) as folder:
        copy_files(corpus, folder, without=["manifest.json", "label_rank.npy"])
        card = folder / "card.yaml"
        lines = card.read_text().splitlines()
        known = [line for line in lines if not line.startswith("array_rows")]
        card.write_text("\n".join(known))
    return Corpus.open(out)


def test_arrays_of_many_shards_are_one_file(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"

    # 101 queries are 21 shards of 5 and 7 array files of at most 3 shards.
    small = corpus_of(
        raw,
        tmp_path / "small",
        vocab_size=2000,
        shard_rows=5,
        array_rows=17,
    )

    train = small.path / "train"
    assert len(list(train.glob("*.parquet"))) == 21
    for suffix in ("tokens", "token_offsets", "labels", "label_offsets"):
        files = list(train.glob(f"*.{suffix}.npy"))
        assert len(files) == 7
    folders = [path.name for path in train.iterdir() if path.is_dir()]
    assert folders == []
    assert contents(small) == contents(corpus)


def test_older_corpora_are_read_and_migrated_by_one_command(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"
    shards = corpus_of(
        raw,
        tmp_path / "s",
        vocab_size=2000,
        shard_rows=5,
        array_rows=5,
    )
    direct = corpus_of(raw, tmp_path / "direct", vocab_size=2000, shard_rows=5)

    old = as_older_release(shards, tmp_path / "old")
    assert contents(old) == contents(corpus)

    assert run_command(f"prepare {old.path} --out {tmp_path}/new --json") == 0
    new = Corpus.open(tmp_path / "new")
    files = list((new.path / "train").glob("*.tokens.npy"))
    assert len(files) == 1
    assert contents(new) == contents(corpus)

    # The files are those of a corpus that this release prepared from the raw files.
    for file in direct.path.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            migrated = new.path / file.relative_to(direct.path)
            assert migrated.read_bytes() == file.read_bytes()


def test_a_new_corpus_is_not_migrated(
    corpus: Corpus,
    tmp_path: Path,
    shell: Shell,
) -> None:
    command = f"prepare {corpus.path} --out {tmp_path}/x"
    assert "has large files already" in shell.error(command)
    assert "max_len is for raw files" in shell.error(f"{command} --max-len 8")


@pytest.mark.parametrize("name", ["label_order.npy", "label_rank.npy"])
def test_label_orders_that_do_not_belong_together_are_refused(
    corpus: Corpus,
    tmp_path: Path,
    name: str,
) -> None:
    with new_artifact(tmp_path / "c", KIND, {}) as folder:
        copy_files(corpus, folder, without=["manifest.json"])
        order = np.load(folder / name)
        order[[3, 4]] = order[[4, 3]]
        np.save(folder / name, order)

    with pytest.raises(DataError, match="not the inverse"):
        Corpus.open(tmp_path / "c")


def ids_of_epoch(sampler: BatchSampler, epoch: int) -> np.ndarray:
    """The query ids of all steps of an epoch, in their order."""
    first = epoch * sampler.steps_per_epoch
    steps = range(first, first + sampler.steps_per_epoch)
    return np.concatenate([sampler.query_ids(step) for step in steps])


def test_an_epoch_of_a_keyed_order_has_every_query_once(
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xmcray.permutations.MAX_STORED_SIZE", 10)
    data = TrainingData(corpus, DataConfig(validation=0.1))
    every_query = data.query_ids[:]
    assert not set(every_query) & set(data.validation_rows)

    # Each epoch by a sampler of its own.
    first = ids_of_epoch(BatchSampler(data, 16, seed=0), 0)
    second = ids_of_epoch(BatchSampler(data, 16, seed=0), 1)

    assert np.array_equal(np.sort(first), every_query)
    assert np.array_equal(np.sort(second), every_query)
    assert not np.array_equal(first, second)


def test_kept_ids_are_the_ids_without_those_left_out() -> None:
    cases = [
        [],
        [0],
        [9],
        [0, 1, 2],
        [3, 4, 8],
        list(range(10)),
    ]
    for left_out in cases:
        expected = np.setdiff1d(np.arange(10), left_out)

        kept = KeptIds(10, np.array(left_out, np.int64))

        assert len(kept) == len(expected)
        assert kept[:].tolist() == expected.tolist()
        assert kept[::-1].tolist() == expected[::-1].tolist()
        assert np.asarray(kept).tolist() == expected.tolist()
        past_the_end = np.array([len(expected)])
        with pytest.raises(IndexError):
            kept[past_the_end]


def test_filters_are_not_looked_up_where_there_are_none(
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = TrainingData(corpus, DataConfig())
    split_class = type(corpus.split("train"))
    monkeypatch.setattr(split_class, "has_filters", False)
    # A look-up would fail.
    monkeypatch.setattr(split_class, "filters", None)

    excluded = data.excluded(data.query_ids[:5])

    assert excluded.lengths.tolist() == [0] * 5


def test_damaged_offsets_are_refused_where_rows_are_read(corpus: Corpus, tmp_path: Path) -> None:
    raw = corpus.path.parent / "raw"
    damaged = corpus_of(raw, tmp_path / "c", vocab_size=2000)
    path = damaged.path / "train" / "00000.token_offsets.npy"
    offsets = np.load(path)
    offsets[50] = 1 << 60
    np.save(path, offsets)

    train = Corpus.open(damaged.path, verify=False).split("train")

    # The damaged offset is where row 49 stops and row 50 starts.
    assert train.tokens(np.arange(40)).lengths.any()
    for row in (49, 50):
        with pytest.raises(DataError, match="offsets that are not those of its rows"):
            train.tokens(np.array([row]))
    with pytest.raises(DataError, match="offsets that are not those of its rows"):
        len(train.short_texts(0))


def test_a_large_corpus_takes_few_mappings_and_no_array_of_all_queries(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The benchmark opens 370 million queries; this is the same at a thousandth of the size.
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    large_corpus = importlib.import_module("large_corpus")
    config = PrepareConfig(shard_rows=1 << 10, array_rows=1 << 16)
    monkeypatch.setattr(large_corpus, "SETTINGS", config)
    monkeypatch.setattr("xmcray.permutations.MAX_STORED_SIZE", 1 << 14)

    large_corpus.write_corpus(tmp_path / "c", 370_000, 120_000)
    measured = large_corpus.read(tmp_path / "c")

    # 6 files of 65,536 queries and 2 of labels, and the three arrays of labels.
    assert measured["corpus_mappings"] <= 6 * 4 + 2 * 2 + 3
    # An order in memory would take 3.7 MB, and another 3.9 MB for the ids in that order.
    assert measured["order_bytes"] < 1 << 20


def test_a_card_of_an_older_release_has_an_array_file_for_each_shard(corpus: Corpus) -> None:
    card = dataclasses.replace(corpus.card, array_rows=0)

    assert card.rows_per_array_file == card.shard_rows
