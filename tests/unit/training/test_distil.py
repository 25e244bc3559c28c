"""A static encoder takes the place of a bundle's transformer and answers nearly as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import corpus_of
from models import write_bert
from planted import WORDS_PER_LABEL, write_planted
from shell import run_command, set_options

import xmcray
from xmcray.data.corpus import Corpus
from xmcray.errors import XmcrayError
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import read_manifest
from xmcray.training.distil import TEMPERATURES, Distillation, _held_out, _lessons, _shares
from xmcray.training.memory import memory_bundle
from xmcray.types import Ragged

NUM_LABELS = 23
SMALL = {"epochs": 8, "batch_size": 32, "lr": 0.01, "bigram_buckets": 50, "random_labels": 5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """In the tokens of a random transformer, which is next to it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_planted(folder / "raw", 300, NUM_LABELS)
    words = [f"w{label}x{n}" for label in range(NUM_LABELS) for n in range(WORDS_PER_LABEL)]
    model = write_bert(folder / "model", words)
    return corpus_of(folder / "raw", folder / "corpus", str(model))


@pytest.fixture(scope="module")
def teacher(corpus: Corpus) -> Path:
    """The transformer, with training queries that vote."""
    path = corpus.path.parent / "teacher"
    memory_bundle(str(corpus.path.parent / "model"), corpus, path, MemoryConfig(weight=0.5))
    return path


@pytest.fixture(scope="module")
def student(corpus: Corpus, teacher: Path) -> Path:
    """Made by the command."""
    out = teacher.parent / "student"
    options = set_options(f"{name}={value}" for name, value in SMALL.items())
    command = f"distil {teacher} --into static --data {corpus.path} --out {out} {options}"
    assert run_command(command) == 0
    return out


def test_it_answers_like_the_transformer_and_only_the_encoder_is_new(
    corpus: Corpus, teacher: Path, student: Path
) -> None:
    slow = xmcray.load(teacher)
    fast = xmcray.load(student)
    assert fast.is_static
    assert not slow.is_static
    before = xmcray.evaluate(teacher, corpus).metrics["P@1"]
    after = xmcray.evaluate(student, corpus).metrics["P@1"]
    assert after >= 0.97 * before > 0.3
    tokens = corpus.split("test").tokens(np.arange(corpus.card.num_test))
    cosines = (slow.encode(tokens) * fast.encode(tokens)).sum(axis=1)
    assert cosines.mean() > 0.9
    old = read_manifest(teacher, KIND)
    new = read_manifest(student, KIND)
    assert new.about["distilled_from"] == old.sha256
    for name in old.files.keys() | new.files.keys():
        is_encoder = name.startswith("encoder/")
        assert is_encoder or old.files[name] == new.files[name], name


def test_the_same_call_writes_the_same_bytes(
    corpus: Corpus, teacher: Path, student: Path, tmp_path: Path
) -> None:
    outcome = xmcray.distil(teacher, corpus, tmp_path / "again", SMALL)
    again = read_manifest(tmp_path / "again", KIND)
    assert again.files == read_manifest(student, KIND).files
    assert outcome.unseen_by_teacher
    assert outcome.student[0] >= 0.9 * outcome.teacher[0]


@pytest.mark.parametrize("validation", [0.2, 0])
def test_label_texts_are_learned_also_if_the_teacher_did_not_train_on_them(
    validation: float, corpus: Corpus
) -> None:
    settings = {"validation": validation, "augment_with_labels": False}
    data, are_new = _held_out("bundle", {"config": {"data": settings}}, corpus)
    assert are_new == bool(validation)
    assert len(data.validation_rows)
    assert len(data.query_ids) == len(data.training_rows) + NUM_LABELS


def test_a_query_is_no_answer_to_itself(corpus: Corpus, teacher: Path) -> None:
    data, _ = _held_out("bundle", {}, corpus)
    retriever = Retriever.load(teacher)
    config = Distillation(candidates=NUM_LABELS)
    lessons = _lessons(retriever, data, config)
    own = data.excluded(lessons.ids)
    assert len(own.values)
    own_labels = corpus.label_order[own.values]
    taught = lessons.labels[own.row_ids]
    assert not (taught == own_labels[:, None]).any()
    # A temperature of a score that is no number would be the first of all.
    assert TEMPERATURES[0] < lessons.temperature < TEMPERATURES[-1]


def test_positives_count_by_their_relevance() -> None:
    positives = Ragged.from_rows([np.array([2, 5, 7]), np.array([5]), np.array([7])])
    weights = np.array([1.0, 3.0, 9.0, 0.0, 0.5])
    share_BC = _shares(positives, weights, np.array([2, 3, 5]))
    assert share_BC.tolist() == [[0.25, 0, 0.75], [0, 0, 0], [0, 0, 0]]


def test_mistakes_are_one_line_and_leave_nothing(
    corpus: Corpus, teacher: Path, tmp_path: Path
) -> None:
    static = write_memory_of(corpus, tmp_path / "static", dim=8, seed=0)
    other = corpus_of(corpus.path.parent / "raw", tmp_path / "other", vocab_size=100)
    mistakes = {
        "has no transformer, expected a bundle of one": (
            static,
            corpus,
            {},
            "static",
        ),
        "has another vocabulary": (teacher, other, {}, "static"),
        "did you mean 'epochs'": (teacher, corpus, {"epoch": 1}, "static"),
        "epochs is 0, expected": (teacher, corpus, {"epochs": 0}, "static"),
        "into is 'tiny', expected one of static": (teacher, corpus, {}, "tiny"),
    }
    for message, (path, data, settings, into) in mistakes.items():
        with pytest.raises(XmcrayError, match=message) as raised:
            xmcray.distil(path, data, tmp_path / "new", settings, into=into)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]
