"""Artifacts of each kind before anything damages them, and uses that read all of each."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bundles import WORDS, write_bundle_of, write_fused, write_memory
from corpora import planted_corpus
from operations import BATCHES, add, operations_after

from xmcray.data.corpus import Corpus
from xmcray.data.text_splits import TextSplits
from xmcray.errors import XmcrayError
from xmcray.evaluation.predictions import (
    predictions_to_top_labels,
    read_predictions,
    write_predictions,
)
from xmcray.retrieval.labels import annotate_labels, remove_labels
from xmcray.serving.event_export import export_events
from xmcray.serving.event_log import EventLog
from xmcray.serving.events import FeedbackEvent, SearchEvent
from xmcray.serving.log_place import BEGINNING
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot
from xmcray.serving.state_folder import StateFolder
from xmcray.storage.manifest import MANIFEST
from xmcray.training.export import export_run
from xmcray.training.launch import refit_config, train
from xmcray.training.outcome import record
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.types import TopLabels


@dataclass(frozen=True)
class Artifact:
    """Something on disk, and how it is used.

    Attributes:
        path: its folder.
        use: reads everything of a copy of the folder and returns what can be compared.
        answer: what `use` returns for the intact folder.
    """

    name: str
    path: Path
    use: Callable[[Path], str]
    answer: str

    @classmethod
    def of(cls, name: str, path: Path, use: Callable[[Path], str]) -> Artifact:
        return cls(name, path, use, use(path))

    def files(self) -> list[str]:
        """All files by path relative to the folder."""
        return sorted(
            path.relative_to(self.path).as_posix()
            for path in self.path.rglob("*")
            if path.is_file() and path.name != "lock"
        )


def write_artifacts(folder: Path) -> dict[str, Artifact]:
    """A corpus, bundles, a run and a state folder."""
    corpus = planted_corpus(folder / "c", num_queries=60, num_labels=23)
    plain = write_bundle_of(folder / "plain", "textsIVF", shard_rows=300)
    annotate_labels(plain, {"u1": {"price": 1.5, "kind": "a"}, "u2": {"new": True}}, folder / "a")
    remove_labels(folder / "a", ["u7"], folder / "texts")
    write_bundle_of(folder / "prototypes", "prototypesHNSW")
    memory = write_memory(folder / "m")
    settings = [
        "encoder.dim=16",
        "optim.batch_size=32",
        "optim.epochs=3",
        "negatives.start_epoch=2",
        "negatives.hard=4",
        "negatives.uniform=10",
        "method.init=zeros",
        "cluster.workers=0",
        "cluster.threads_per_process=1",
    ]
    train(corpus.path, folder / "run", RunConfig.resolve("astra", {}, settings))
    state = folder / "state"
    config = ServeConfig(bundles={"m": str(plain)}, state_dir=str(state))
    with StateFolder(config, "m").open_log(BEGINNING) as log:
        for batch in BATCHES:
            log.append(batch)
    StateFolder(config, "m").remember(str(folder / "texts"), "0" * 64)
    for day in range(2):
        write_events(folder / "events", day)
    write_answers(folder / "answers")
    return {
        "corpus": Artifact.of("corpus", corpus.path, read_corpus),
        "bundle": Artifact.of("bundle", folder / "texts", search_bundle),
        "prototypes": Artifact.of("prototypes", folder / "prototypes", search_bundle),
        "memory": Artifact.of("memory", memory, search_bundle),
        "fused": Artifact.of("fused", write_fused(memory), search_bundle),
        "run": Artifact.of("run", folder / "run", lambda path: use_run(path, corpus)),
        "state": Artifact.of("state", state, lambda path: open_state(path, plain)),
        "events": Artifact.of("events", folder / "events", read_events),
        "answers": Artifact.of("answers", folder / "answers", read_answers),
    }


def read_corpus(path: Path) -> str:
    """Reads all of a corpus."""
    corpus = Corpus.open(path)
    labels = np.arange(corpus.card.num_labels)
    parts: list[Any] = [
        corpus.card,
        corpus.label_order.tolist(),
        corpus.label_rank.tolist(),
        corpus.train_counts.tolist(),
        corpus.label_texts(labels),
        corpus.label_uids(labels),
        corpus.label_tokens(labels).values.tolist(),
        corpus.tokenizer().encode(["w1 w2"]).values.tolist(),
    ]
    for name in ("train", "test"):
        split = corpus.split(name)
        rows = np.arange(len(split))
        for ragged in (split.tokens(rows), split.positives(rows), split.filters(rows)):
            parts += [ragged.values.tolist(), ragged.offsets.tolist()]
        parts += [split.texts(rows), split.uids(rows), split.short_texts(0).tolist()]
    return _fingerprint(parts)


def search_bundle(path: Path) -> str:
    """Loads a bundle as a server does, searches it, and adds a label."""
    snapshot = Snapshot.load(str(path), "m", 1)
    parts: list[Any] = []
    for current in (snapshot, snapshot.after([add("new", f"{WORDS[0]} {WORDS[3]} w1", price=2)])):
        has_memory = current.retriever.memory is not None
        texts = [f"{WORDS[2]} {WORDS[1]}", "w1 w2x0"]
        for answers in current.retriever.search(texts, 3, explain=has_memory):
            parts += [(answer.uid, answer.text, f"{answer.score:.4f}") for answer in answers]
        parts.append(current.attributes.of([0, 1, 2]))
    return _fingerprint(parts)


def use_run(path: Path, corpus: Corpus) -> str:
    """Reports on a finished run, chooses the epochs of its refit, exports it, and resumes it.

    A refusal of the other uses is raised after the run was resumed, so that each file is used.
    """
    run = Run.open(path)
    refusal = None
    parts: list[Any] = []
    try:
        record(run, corpus)
        report = (path / "report.html").read_text(encoding="utf-8")
        parts += [report, refit_config(run).to_dict(), _export(run)]
    except XmcrayError as error:
        refusal = error
    parts.append(_resume(path, run, corpus))
    if refusal is not None:
        raise refusal
    return _fingerprint(parts)


def _resume(path: Path, run: Run, corpus: Corpus) -> dict[str, str]:
    """Resumes a copy of a run, as if it had been killed before its end was noted, and exports it.

    With the newest checkpoint damaged, the epoch after the one before is trained again.
    """
    killed = path.with_name(f"{path.name}-killed")
    try:
        shutil.copytree(path, killed)
        (killed / "result.json").unlink(missing_ok=True)
        train(corpus.path, killed, run.config)
        return _export(Run.open(killed))
    finally:
        shutil.rmtree(killed, ignore_errors=True)


def _export(run: Run) -> dict[str, str]:
    """The SHA-256 of each file of a run's bundle, by name."""
    out = run.path.with_name(f"{run.path.name}-exported")
    try:
        export_run(run, out)
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        return {name: entry["sha256"] for name, entry in manifest["files"].items()}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def open_state(path: Path, bundle: Path) -> str:
    """Opens what a coordinator finds when it starts."""
    folder = StateFolder(ServeConfig(bundles={"m": str(bundle)}, state_dir=str(path)), "m")
    parts: list[Any] = [folder.bundle()]
    with folder.open_log(BEGINNING) as log:
        parts.append([operation.model_dump() for operation in operations_after(log, 0)])
    return _fingerprint(parts)


def write_events(path: Path, day: int) -> None:
    """Collects some events, in a file of their own."""
    # Each start one day later begins another file.
    clock = functools.partial(float, 2e9 + 86_400 * day)
    folder = path / "m" / "events"
    with EventLog(folder, "m", redact=False, max_days=5, max_bytes=1 << 30, clock=clock) as log:
        for number in range(5):
            name = f"{day}-{number}"
            log.note(SearchEvent(request=name, version="v", texts=[name], answers=[["u1", "u2"]]))
            feedback = FeedbackEvent(
                request=name, text=0, label="u1", label_text="one", event="click"
            )
            log.add_feedback(feedback).result()


def read_events(path: Path) -> str:
    """Exports an event log."""
    out = path.with_name(f"{path.name}-exported")
    try:
        exported = export_events(path, "m", out, split_of=TextSplits(0.1))
        files = sorted(out.glob("*.jsonl"))
        return _fingerprint([exported, *(file.read_text() for file in files)])
    finally:
        shutil.rmtree(out, ignore_errors=True)


def write_answers(path: Path) -> None:
    """Predictions of 6 queries."""
    path.mkdir()
    ids = np.arange(18).reshape(6, 3)
    scores = np.linspace(1, -1, 18, dtype=np.float32).reshape(6, 3)
    write_predictions(path / "answers.npz", [TopLabels(ids, scores)], num_labels=18)


def read_answers(path: Path) -> str:
    """Reads predictions as an evaluation does."""
    matrix = read_predictions(path / "answers.npz", 6, 18)
    top = predictions_to_top_labels(matrix, np.arange(6), 3)
    return _fingerprint([top.ids.tolist(), top.scores.tolist()])


def _fingerprint(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
