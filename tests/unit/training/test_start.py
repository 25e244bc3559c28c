"""`train --from`: a run goes on from another one on a corpus with more queries and labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import appended, corpus_of, grown_corpora
from processes import kill_here, run_killed
from safetensors.torch import load_file
from shell import Shell, run_command, set_options

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.training.checkpoint import row_blocks
from xmcray.training.probability_curves import FEW_QUERIES
from xmcray.training.run import Run
from xmcray.training.start import settings_from
from xmcray.training.step import Stepper

NUM_OLD = 15  # labels
SETTINGS = {
    "encoder.dim": 16,
    "optim.batch_size": 32,
    "optim.epochs": 2,
    "negatives.hard": 4,
    "negatives.uniform": 8,
    "cluster.threads_per_process": 1,
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    """A corpus, and the one that has more queries and labels."""
    return grown_corpora(tmp_path_factory.mktemp("start"), NUM_OLD)


def command(method: str, corpus: Corpus, out: Path, more: str = "", **settings: Any) -> str:
    options = set_options(f"{name}={value}" for name, value in settings.items())
    return f"train {method} --data {corpus.path} --out {out} --workers 0 {options} {more}"


@pytest.fixture(scope="module")
def astra(corpora: tuple[Corpus, Corpus], tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("astra") / "first"
    assert run_command(command("astra", corpora[0], out, **SETTINGS)) == 0
    return Run.open(out)


def rows_by_uid(run: Run, corpus: Corpus, folder: str, name: str) -> dict[str, dict[str, Any]]:
    """Tensors of each label in the newest checkpoint of a folder, by uid."""
    newest = sorted((run.path / folder).glob("step-*"))[-1]
    if not any(newest.glob(f"{name}-*")):
        return {}  # a method without state
    uids = corpus.label_uids(corpus.label_order)
    rows = {}
    for first, tensors in row_blocks(newest, name, 0, len(uids)):
        for place in range(len(next(iter(tensors.values())))):
            row = {key: tensor[place].numpy() for key, tensor in tensors.items()}
            rows[uids[first + place]] = row
    return rows


@pytest.mark.parametrize("method", method_names())
def test_every_method_goes_on_from_its_rows(
    method: str, corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    old, new = corpora
    assert run_command(command(method, old, tmp_path / "a", **SETTINGS)) == 0
    assert run_command(command(method, new, tmp_path / "b", f"--from {tmp_path}/a")) == 0
    first = Run.open(tmp_path / "a")
    second = Run.open(tmp_path / "b")
    assert second.start is not None
    assert second.start["id"] == first.id
    assert second.config.encoder == first.config.encoder
    compared = 0
    for name in ("classifier", "state"):
        trained = rows_by_uid(first, old, "checkpoints", name)
        started = rows_by_uid(second, new, "start", name)
        for uid, tensors in trained.items():
            for key, row in tensors.items():
                assert np.array_equal(started[uid][key], row), (uid, key)
                compared += 1
        for uid in started.keys() - trained.keys():
            assert all(np.isfinite(row).all() for row in started[uid].values())
            assert name == "state" or np.abs(started[uid]["weight"]).max() > 0
    assert compared or method in ("dexml", "rae")
    [before] = (tmp_path / "a/checkpoints").glob(f"step-{first.result()['steps']:08d}")  # type: ignore[index]
    for name in ("optimizer.safetensors", "encoder/model.safetensors"):
        tensors = load_file(before / name)
        for key, tensor in load_file(tmp_path / "b/start/step-00000000" / name).items():
            assert torch.equal(tensor, tensors[key]), key
    assert (tmp_path / "b/metrics.json").is_file()


def test_rows_of_new_labels_are_as_long_as_trained_ones_whatever_has_no_text(
    corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    old, _ = corpora
    raw = tmp_path / "raw"
    shutil.copytree(old.path.parent / "new", raw)
    labels = [json.loads(line) for line in (raw / "labels.jsonl").read_text().splitlines()]
    for label in labels[NUM_OLD + 1 :]:
        label["text"] = ""
    (raw / "labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    new = appended(old, raw, tmp_path / "corpus")
    # Long rows at the start, by which those without a text fall behind.
    more = {**SETTINGS, "method.classifier.lr": 0.3}
    assert run_command(command("unidec", old, tmp_path / "a", **more)) == 0
    assert run_command(command("unidec", new, tmp_path / "b", f"--from {tmp_path}/a")) == 0
    rows = rows_by_uid(Run.open(tmp_path / "b"), new, "start", "classifier")
    length = {uid: float(np.linalg.norm(row["weight"])) for uid, row in rows.items()}
    trained = np.mean([length[f"label{label}"] for label in range(NUM_OLD)])
    assert length[f"label{NUM_OLD + 1}"] < 0.8 * trained, "the usual start"
    assert length[f"label{NUM_OLD}"] == pytest.approx(trained, rel=0.05)


def test_new_labels_and_queries_are_new_to_the_run(
    corpora: tuple[Corpus, Corpus], astra: Run, tmp_path: Path
) -> None:
    old, new = corpora
    # Fewer than the first run has held out.
    more = f"--from {astra.path} --no-evaluate --set data.validation=0.06"
    assert run_command(command("astra", new, tmp_path / "b", more)) == 0
    config = Run.open(tmp_path / "b").config
    # New labels start with the rows that they would get in the bundle of the first run.
    new_ids = np.arange(NUM_OLD, new.card.num_labels)
    uids = new.label_uids(new_ids)
    added = map(NewLabel, uids, new.label_texts(new_ids))
    add_labels(astra.path / "bundle", list(added), tmp_path / "added")
    vectors = Retriever.load(tmp_path / "added").labels.vectors_of(new_ids)
    started = rows_by_uid(Run.open(tmp_path / "b"), new, "start", "classifier")
    rows = np.stack([started[uid]["weight"] for uid in uids])
    assert np.allclose(rows, vectors, rtol=1e-3, atol=1e-4 * np.abs(rows).max())
    held_out = TrainingData(new, config.data).validation_rows
    assert 0 < len(held_out) < FEW_QUERIES
    assert held_out.min() >= old.card.num_train
    # So few queries would make probabilities by chance.
    before = Retriever.load(astra.path / "bundle").calibration
    after = Retriever.load(tmp_path / "b" / "bundle").calibration
    assert before is not None
    assert after is not None
    assert after.curves == before.curves
    assert len(after.segment_L) == new.card.num_labels

    # Scores of other settings have probabilities of their own, and so has a run with more queries.
    for name, other in (("c", "method.init_std=0.5"), ("d", "data.validation=0.2")):
        assert run_command(command("astra", new, tmp_path / name, f"{more} --set {other}")) == 0
        of_other = Retriever.load(tmp_path / name / "bundle").calibration
        assert of_other is not None
        assert of_other.curves != before.curves


def test_queries_that_were_trained_on_and_may_be_held_out_are_counted(
    corpora: tuple[Corpus, Corpus], astra: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = corpora
    raw = tmp_path / "raw"
    shutil.copytree(old.path.parent / "old", raw)
    lines = (raw / "train.jsonl").read_text().splitlines(keepends=True)
    (raw / "train.jsonl").write_text("".join(lines[::-1]))
    turned = corpus_of(raw, tmp_path / "corpus", tokenizer=old.tokenizer())
    num_train = old.card.num_train
    assert settings_from(astra, "astra", new)["data"]["validation_from"] == num_train
    assert not caplog.messages
    assert settings_from(astra, "astra", turned)["data"]["validation_from"] == 0
    [message] = caplog.messages
    assert message.startswith(f"{num_train} of {num_train} training queries were trained on by ")


def test_queries_that_are_named_by_their_rows_are_compared_by_text(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(corpora[0].path.parent / "old", raw)
    rows = [json.loads(line) for line in (raw / "train.jsonl").read_text().splitlines()]
    unnamed = [{**row, "uid": None, "text": f"unique {n}"} for n, row in enumerate(rows)]

    def corpus(name: str, queries: list[dict[str, Any]]) -> Corpus:
        (raw / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
        return corpus_of(raw, tmp_path / name, tokenizer=corpora[0].tokenizer())

    old = corpus("old", unnamed)
    other = corpus("other", [{**row, "text": row["text"] + " other"} for row in unnamed])
    turned = corpus("turned", unnamed[::-1])
    monkeypatch.setattr("xmcray.training.start.open_corpus", lambda run: old)
    assert settings_from(astra, "astra", other)["data"]["validation_from"] == 0
    assert not caplog.messages
    assert settings_from(astra, "astra", turned)["data"]["validation_from"] == 0
    [message] = caplog.messages
    assert message.startswith(f"{len(rows)} of {len(rows)} training queries were trained on by ")


def test_labels_that_are_named_by_their_rows_are_compared_by_text(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shell: Shell,
) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(corpora[0].path.parent / "old", raw)
    texts = [json.loads(line)["text"] for line in (raw / "labels.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (raw / "train.jsonl").read_text().splitlines()]
    numbered = [{**row, "labels": [number % NUM_OLD]} for number, row in enumerate(rows)]
    (raw / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))

    def corpus(name: str, label_texts: list[str]) -> Corpus:
        lines = [json.dumps({"text": text}) + "\n" for text in label_texts]
        (raw / "labels.jsonl").write_text("".join(lines))
        return corpus_of(raw, tmp_path / name, tokenizer=corpora[0].tokenizer())

    old = corpus("old", texts)
    monkeypatch.setattr("xmcray.training.start.open_corpus", lambda run: old)
    turned = corpus("turned", texts[::-1])
    train = command("astra", turned, tmp_path / "b", f"--from {astra.path} --no-evaluate")
    message = f"14 of {NUM_OLD} labels of {turned.path} have another text than in the corpus of"
    assert message in shell.error(train)
    renamed = corpus("renamed", [*texts[:-1], "a new name"])
    train = command("astra", renamed, tmp_path / "c", f"--from {astra.path} --no-evaluate")
    shell.run(train)
    assert f"1 of {NUM_OLD} labels of {renamed.path} have another text" in caplog.text


@pytest.mark.parametrize("moment", ["start", "early", "late"])
def test_a_run_that_was_killed_ends_with_the_same_bytes(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    def train(name: str) -> int:
        more = f"--from {astra.path} --no-evaluate --set log.checkpoint_every=3"
        return run_command(command("astra", corpora[1], tmp_path / name, more))

    whole_step = Stepper.step
    num_steps = 0

    def step(self: Stepper, *arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == {"early": 2, "late": 5}[moment]:
            kill_here()
        return whole_step(self, *arguments)

    def created(*_: Any) -> None:
        kill_here()

    with monkeypatch.context() as patch:
        if moment == "start":
            patch.setattr(Run, "create", created)
        else:
            patch.setattr(Stepper, "step", step)
        run_killed(lambda: train("killed"))
    assert train("killed") == 0
    assert train("whole") == 0
    [killed] = sorted((tmp_path / "killed/checkpoints").glob("step-*"))[-1:]
    compared = sorted(killed.rglob("*.safetensors"))
    assert len(compared) == 3
    for path in compared:
        other = tmp_path / "whole" / path.relative_to(tmp_path / "killed")
        assert path.read_bytes() == other.read_bytes(), path


def test_a_passing_error_keeps_the_start_of_a_run_that_has_begun(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "first"
    shutil.copytree(astra.path, source)
    more = f"--from {source} --no-evaluate"
    train = command("astra", corpora[1], tmp_path / "b", more)
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", lambda *_: kill_here())
        run_killed(lambda: run_command(train))
    shutil.rmtree(source)
    # A GPU that this machine lacks, for example.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_command(f"{train} --set cluster.device=gpu") == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert run_command(train) == 0

    # What this call began is removed.
    more = f"--from {astra.path} --set cluster.device=gpu"
    assert run_command(command("astra", corpora[1], tmp_path / "c", more)) == 2
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("refit", ["", "--refit --set data.validation=0.2"])
def test_a_run_that_has_begun_goes_on_without_the_run_it_came_from(
    corpora: tuple[Corpus, Corpus], astra: Run, tmp_path: Path, refit: str
) -> None:
    source = tmp_path / "first"
    shutil.copytree(astra.path, source)
    train = command("astra", corpora[1], tmp_path / "b", f"--from {source} --no-evaluate {refit}")
    assert run_command(train) == 0
    run = Run.open(tmp_path / "b")
    result = run.result()
    (run.path / "result.json").unlink()
    shutil.rmtree(source)
    assert run_command(train) == 0
    again = run.result()
    assert result is not None
    assert again is not None
    assert (again["steps"], again["steps_here"]) == (result["steps"], 0)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("renee", {}, "was trained with astra, which cannot go on as renee"),
        ("astra", {"encoder.dim": 8}, "was trained with encoder.dim = 16, now 8, which cannot"),
        (
            "astra",
            {"method.classifier.kind": "adam", "method.classifier.lr": 0.01},
            "other settings of its classifier rows",
        ),
        ("astra", {"optim.precision": "float64"}, "was trained with optim.precision"),
    ],
)
def test_what_cannot_carry_over_is_refused_in_one_line(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    shell: Shell,
    method: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    train = command(method, corpora[1], tmp_path / "b", f"--from {astra.path}", **settings)
    assert message in shell.error(train)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("method", "before", "now", "missing"),
    [
        ("unidec", {"method.balance": 1}, {"method.balance": 0.5}, "classifier"),
        ("dexml", {"method.columns": "all"}, {"method.columns": "cache"}, "state"),
    ],
)
def test_what_the_run_before_had_not_is_refused_in_one_line(
    corpora: tuple[Corpus, Corpus],
    tmp_path: Path,
    shell: Shell,
    method: str,
    before: dict[str, Any],
    now: dict[str, Any],
    missing: str,
) -> None:
    small = {**SETTINGS, "optim.epochs": 1}
    shell.run(command(method, corpora[0], tmp_path / "a", "--no-evaluate", **small, **before))
    train = command(method, corpora[1], tmp_path / "b", f"--from {tmp_path}/a", **now)
    assert f"was trained without {missing} rows, which these settings" in shell.error(train)
    assert not (tmp_path / "b").exists()


def test_a_run_keeps_its_start(
    corpora: tuple[Corpus, Corpus],
    astra: Run,
    tmp_path: Path,
    shell: Shell,
) -> None:
    train = command("astra", corpora[1], tmp_path / "b", "--no-evaluate", **SETTINGS)
    shell.run(f"{train} --from {astra.path}")
    assert f"was started --from {astra.path}" in shell.error(train)
