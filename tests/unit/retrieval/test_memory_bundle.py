"""Bundles with a memory answer with the probabilities of Eq. 8, and the verb that makes them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from corpora import planted_corpus
from dense_votes import dense
from models import write_bert
from numpy.testing import assert_allclose, assert_array_equal
from shell import Shell

from xmcray.data.corpus import Corpus
from xmcray.data.tokens import from_transformer
from xmcray.errors import BundleError, ConfigError, DataError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.retrieval import memory as memories
from xmcray.retrieval import predictors
from xmcray.retrieval import retriever as retrievers
from xmcray.retrieval.bundle import read_attributes
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import annotate_labels, remove_labels
from xmcray.retrieval.memory import memory_writer
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.training.memory import memory_bundle, open_encoder
from xmcray.types import WeightedRagged


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("memory")
    return planted_corpus(folder, num_queries=301, num_labels=47)


def make(
    corpus: Corpus,
    path: Path,
    spec: IndexSpec | None = None,
    config: MemoryConfig | None = None,
) -> Path:
    """A bundle of an untrained encoder with a memory of the training queries."""
    spec = spec or IndexSpec()
    config = config or MemoryConfig(keys=30)
    tokenizer = corpus.tokenizer()
    encoder = build_encoder(EncoderConfig(dim=24), tokenizer, None, seed=0).eval()
    head = Head(encoder.dim)
    encode = QueryEncoder(encoder, head, tokenizer, normalised=True).encode
    source_ids = np.arange(corpus.card.num_labels)
    label_tokens = corpus.label_tokens(corpus.label_order)
    labels = BundleLabels(
        uids=corpus.label_uids(source_ids),
        texts=corpus.label_texts(source_ids),
        order=corpus.label_order,
        vectors=[encode(label_tokens)],
    )
    write_bundle(
        path,
        BundleModel(
            encoder=encoder,
            head=head,
            tokenizer=tokenizer,
        ),
        labels,
        ShardBuild(spec=spec),
        {},
        predictor=memory_writer(corpus, encode, config, spec),
    )
    return path


@pytest.fixture(scope="module")
def bundle(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(corpus, tmp_path_factory.mktemp("bundles") / "b")


def expected_of(
    retriever: Retriever,
    corpus: Corpus,
    rows: Any,
    config: MemoryConfig,
) -> Any:
    """Probabilities of test queries by the formula, from the vectors that the bundle makes."""
    train = corpus.split("train")
    test = corpus.split("test")
    kept = np.flatnonzero(train.num_positives())
    positives = train.positives(kept)
    positive_NL = np.zeros((len(kept), corpus.card.num_labels))
    positive_NL[positives.row_ids, positives.values] = 1
    query_BD = retriever.encode(test.tokens(rows))
    key_ND = retriever.encode(train.tokens(kept))
    label_LD = retriever.encode(corpus.label_tokens(np.arange(47)))
    return dense(
        query_BD @ key_ND.T,
        query_BD @ label_LD.T,
        positive_NL,
        config,
    )


@pytest.mark.parametrize(
    "config",
    [
        None,
        MemoryConfig(weight=0, keys=9),
        MemoryConfig(
            weight=1,
            keys=9,
            temperature=1,
        ),
    ],
)
def test_a_bundle_answers_with_probabilities(
    corpus: Corpus,
    bundle: Path,
    config: MemoryConfig | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retriever = Retriever.load(bundle, threads=1)
    test = corpus.split("test")
    rows = np.arange(len(test))
    tokens = test.tokens(rows)
    used = config or MemoryConfig(keys=30)
    expected_BL = expected_of(retriever, corpus, rows, used)

    top = retriever.top_labels(tokens, 47, memory=config)

    is_every_label = np.sort(top.ids, axis=1) == np.arange(47)
    assert is_every_label.all(), "every label once: the list is completed"
    # Labels without votes complete the list with scores below 0.
    probabilities = np.maximum(top.scores, 0)
    expected = np.take_along_axis(expected_BL, top.ids, axis=1)
    assert_allclose(probabilities, expected, atol=1e-4)
    assert (np.diff(top.scores, axis=1) <= 0).all()

    monkeypatch.setattr(retrievers, "CHUNK", 7)
    monkeypatch.setattr(predictors, "VOTE_QUERIES", 3)
    in_blocks = retriever.top_labels(tokens, 47, memory=config)
    assert_allclose(in_blocks.scores, top.scores, atol=1e-5)


def test_weight_zero_is_the_dual_encoder(corpus: Corpus, bundle: Path) -> None:
    retriever = Retriever.load(bundle, threads=1)
    tokens = corpus.split("test").tokens(np.arange(20))
    query_BD = retriever.encode(tokens)

    top = retriever.top_labels(query_BD, 10, memory=MemoryConfig(weight=0))

    expected = retriever.labels.search_exported(query_BD, 10)
    assert_array_equal(top.ids, expected.ids)


@pytest.mark.parametrize("is_graded", [False, True])
def test_an_answer_names_who_voted(corpus: Corpus, bundle: Path, is_graded: bool) -> None:
    retriever = Retriever.load(bundle, threads=1)
    if is_graded:
        assert retriever.memory is not None
        queries = retriever.memory.queries
        positives = queries.positives
        grades = np.random.default_rng(0).choice([0.0, 0.1, 1.0, 5.0], len(positives.values))
        weighted = WeightedRagged(positives.values, positives.offsets, grades.astype(np.float32))
        queries = dataclasses.replace(queries, positives=weighted)
        memory = dataclasses.replace(retriever.memory, queries=queries)
        retriever = dataclasses.replace(retriever, memory=memory)
    train = corpus.split("train")
    rows = np.arange(len(train))
    uids = train.uids(rows)
    text_of = dict(zip(uids, train.texts(rows), strict=True))
    positives_of = dict(zip(uids, train.positives(rows), strict=True))
    texts = corpus.split("test").texts(np.arange(5))

    explained = retriever.search(
        texts,
        6,
        explain=True,
        memory=MemoryConfig(weight=1),
    )

    for answers in explained:
        assert answers[0].voters
        for answer in answers:
            assert answer.voters is not None
            weights = [voter.weight for voter in answer.voters]
            assert weights == sorted(weights, reverse=True)
            assert all(weight > 0 for weight in weights)
            share = sum(weights)
            if share > 1:
                share = 1 + math.log(share)
            # A label without votes has a score below 0.
            assert share == pytest.approx(max(answer.score, 0), abs=1e-6)
            for voter in answer.voters:
                assert voter.text == text_of[voter.uid]
                assert answer.label_id in positives_of[voter.uid]

    unexplained = retriever.search(texts, 1)
    assert unexplained[0][0].voters is None


def test_texts_of_voters_come_from_several_blocks(
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memories, "ROWS", 16)
    train = corpus.split("train")
    kept = np.flatnonzero(train.num_positives())
    last = len(kept) - 1
    uids = train.uids(kept)
    texts = train.texts(kept)

    memory = Retriever.load(make(corpus, tmp_path / "b")).memory

    assert memory is not None
    assert memory.queries.names([0, 15, 16, last, 16]) == {
        0: (uids[0], texts[0]),
        15: (uids[15], texts[15]),
        16: (uids[16], texts[16]),
        last: (uids[last], texts[last]),
    }
    expected = train.positives(kept)
    for row in range(len(kept)):
        assert_array_equal(memory.positives[row], expected[row])


def test_exact_search_does_without_the_index(
    corpus: Corpus,
    bundle: Path,
    tmp_path: Path,
) -> None:
    spec = IndexSpec(
        factory="IVF16,Flat",
        nprobe=1,
        candidates=1,
    )
    config = MemoryConfig(keys=5, weight=1)
    tokens = corpus.split("test").tokens(np.arange(40))

    indexed = Retriever.load(make(corpus, tmp_path / "b", spec))
    flat = Retriever.load(bundle)

    assert (tmp_path / "b" / "memory" / "index" / "00000.faiss").is_file()
    assert not indexed.is_exact
    assert flat.is_exact
    top = indexed.top_labels(tokens, 5, exact=True, memory=config)
    expected = flat.top_labels(tokens, 5, memory=config)
    assert_array_equal(top.ids, expected.ids)


def test_bundles_without_a_memory_say_so(
    corpus: Corpus,
    bundle: Path,
    tmp_path: Path,
) -> None:
    retriever = dataclasses.replace(Retriever.load(bundle), memory=None)

    with pytest.raises(ConfigError, match="no memory of training queries"):
        retriever.search(["w1"], 1, explain=True)
    with pytest.raises(ConfigError, match="no memory of training queries"):
        retriever.search(["w1"], 1, memory=MemoryConfig())

    ((answer,),) = retriever.search(["w1"], 1)
    assert answer.voters is None


def damage_settings(folder: Path) -> None:
    path = folder / "settings.json"
    settings = json.loads(path.read_text())
    settings["predictor"]["config"]["weight"] = 3
    path.write_text(json.dumps(settings))


def damage_labels(folder: Path) -> None:
    path = folder / "memory" / "labels.npy"
    labels = np.load(path)
    labels[0] = 1000
    np.save(path, labels)


def damage_offsets(folder: Path) -> None:
    path = folder / "memory" / "label_offsets.npy"
    np.save(path, np.zeros(3, np.int64))


@pytest.mark.parametrize("damage", [damage_settings, damage_labels, damage_offsets])
def test_a_memory_that_does_not_fit_is_refused(
    corpus: Corpus,
    tmp_path: Path,
    damage: Any,
) -> None:
    folder = make(corpus, tmp_path / "b")
    damage(folder)
    # A new manifest has the checksums of the damaged files.
    manifest = read_manifest(folder, "bundle")
    finish_manifest(folder, "bundle", manifest.about, {})

    with pytest.raises(BundleError, match="memory"):
        Retriever.load(folder)


def test_a_transformer_fits_the_tokens_it_was_trained_with(corpus: Corpus, tmp_path: Path) -> None:
    one = str(write_bert(tmp_path / "one", ["sort", "an", "array"]))
    other = str(write_bert(tmp_path / "other", ["array", "sort", "an"]))
    saved = tmp_path / "saved"
    tokenizer = from_transformer(one, max_len=16)
    prepared: Any = SimpleNamespace(tokenizer=lambda: tokenizer, path="corpus")

    encoder, head = open_encoder(one, prepared)
    assert encoder.dim == 16
    assert head.kind == "plain"

    encoder.save(saved)
    open_encoder(str(saved), prepared)
    # As `export --to sentence-transformers` writes it.
    (saved / "manifest.json").write_text("{}")
    open_encoder(str(saved), prepared)

    with pytest.raises(DataError, match="other tokens than encoder"):
        open_encoder(other, prepared)
    with pytest.raises(DataError, match="other tokens than encoder"):
        open_encoder(one, corpus)


class TestCommand:
    """`xmcray memory` with every kind of encoder, and `search --explain`."""

    def encoder(
        self,
        corpus: Corpus,
        folder: Path,
    ) -> Path:
        folder.mkdir()
        encoder = build_encoder(EncoderConfig(dim=24), corpus.tokenizer(), None, seed=0)
        encoder.save(folder)
        return folder

    def test_a_plain_encoder_and_a_bundle(
        self,
        corpus: Corpus,
        tmp_path: Path,
        shell: Shell,
    ) -> None:
        first = tmp_path / "first"
        second = tmp_path / "second"
        data = f"--data {corpus.path}"
        encoder = self.encoder(corpus, tmp_path / "encoder")
        test = corpus.split("test")

        shell.run(f"memory {encoder} {data} --out {first} --set memory.keys=30")
        shell.run(f"memory {first} {data} --out {second} --set memory.weight=0")

        of_encoder = Retriever.load(first)
        of_bundle = Retriever.load(second)
        assert of_encoder.memory is not None
        assert of_bundle.memory is not None
        assert of_encoder.memory.config == MemoryConfig(keys=30)
        assert of_bundle.memory.config == MemoryConfig(weight=0)
        # With equal settings they answer alike.
        tokens = test.tokens(np.arange(9))
        expected = of_encoder.top_labels(tokens, 5, memory=MemoryConfig())
        top = of_bundle.top_labels(tokens, 5, memory=MemoryConfig())
        assert_array_equal(top.ids, expected.ids)

        (text,) = test.texts(np.arange(1))
        search = f"search {first} '{text}' -k 2 --explain"
        (line,) = json.loads(shell.run(f"{search} --set memory.weight=1 --json"))
        voter = line["answers"][0]["voters"][0]
        assert voter.keys() == {"uid", "text", "weight"}
        assert "  by " in shell.run(search)
        shell.run(f"evaluate {first} {data}")

    def test_labels_of_a_bundle_of_the_corpus_keep_attributes_and_must_be_its_labels(
        self,
        corpus: Corpus,
        tmp_path: Path,
    ) -> None:
        encoder = self.encoder(corpus, tmp_path / "encoder")
        bundle = tmp_path / "first"
        memory_bundle(str(encoder), corpus, bundle)
        [uid] = corpus.label_uids(np.arange(1))
        annotate_labels(bundle, {uid: {"lang": "en"}})

        memory_bundle(str(bundle), corpus, f"file://{tmp_path}/second")

        labels = Retriever.load(tmp_path / "second").labels
        attributes = read_attributes(tmp_path / "second", labels.settings, labels.removed)
        assert attributes.of(np.arange(1)) == [{"lang": "en"}]
        remove_labels(bundle, [uid])
        with pytest.raises(DataError, match="labels joined or were removed"):
            memory_bundle(str(bundle), corpus, tmp_path / "third")

    def test_a_corpus_without_some_of_its_labels_is_another_one(
        self, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder = self.encoder(corpus, tmp_path / "encoder")
        memory_bundle(str(encoder), corpus, tmp_path / "first")
        monkeypatch.setattr(corpus, "removed_labels", np.arange(2))
        with pytest.raises(DataError, match="has removed labels that the bundle answers with, 2"):
            memory_bundle(str(tmp_path / "first"), corpus, tmp_path / "second")

    def test_mistakes_are_one_line(
        self,
        corpus: Corpus,
        tmp_path: Path,
        shell: Shell,
    ) -> None:
        other = planted_corpus(
            tmp_path / "other",
            num_queries=40,
            num_labels=47,
            seed=9,
        )
        encoder = self.encoder(corpus, tmp_path / "encoder")
        bundle = tmp_path / "b"
        memory_bundle(str(encoder), corpus, bundle)
        never = tmp_path / "never"
        data = f"--data {corpus.path} --out {never}"
        other_data = f"--data {other.path} --out {never}"
        message_of = {
            f"memory {encoder} {other_data}": "other tokens",
            f"memory {bundle} {other_data}": "other tokens",
            f"memory '{tmp_path}/nowhere/x y' {data}": "neither",
            f"memory {encoder} {data} --set memory.weight=2": "memory.weight is 2",
            f"memory {encoder} {data} --set memory.lambda=2": "memory.lambda",
            f"search {bundle} w1 -k 48": "k is 48",
            f"search {bundle} w1 --set memory.keys=0": "memory.keys is 0",
            f"search {bundle} w1 --set optim.lr=1": "setting 'optim'",
            f"search {bundle} w1 --memory weight=0": (
                "--memory weight=0 is now written --set memory.weight=0"
            ),
        }

        for command, message in message_of.items():
            assert message in shell.error(command)

        assert not never.exists()
