"""The cycle: feedback becomes a bundle that is served, or the old one goes on; a stopped cycle goes on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import appended, corpus_of, grown_corpora
from planted import write_planted
from processes import kill_here, run_killed
from served import ADMIN, TOKEN, listening
from shell import run_command, set_options

from xmcray.client import Client
from xmcray.data import pipeline
from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import DataError
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.schema import Operation
from xmcray.training.outcome import measure_bundle

SMALL = ["encoder.dim=16", "optim.batch_size=32", "negatives.uniform=8", "negatives.hard=0"]
NUM_TEXTS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus `first` and the run `a` that was trained on it."""
    folder = tmp_path_factory.mktemp("continual")
    corpus, _ = grown_corpora(folder, 15)
    options = set_options([*SMALL, "optim.epochs=1"])
    train = f"train astra --workers 0 --data {corpus.path} --out {folder}/a {options}"
    assert run_command(train) == 0
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    """A client of a server that answers from the run `a` and collects events."""
    roots = (str(folder), str(tmp_path))
    bundles = {"m": folder / "a" / "bundle"}
    with (
        listening(tmp_path, bundles, collect_events=True, bundle_roots=roots) as url,
        Client(url, token=TOKEN, admin_token=ADMIN) as client,
    ):
        yield client


def test_an_append_that_was_killed_leaves_nothing_and_is_done_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus.open(folder / "first")
    out = tmp_path / "grown"
    with monkeypatch.context() as patch:
        # All files are written, but the manifest is not.
        patch.setattr("xmcray.storage.manifest.write_json", lambda *_: kill_here())
        run_killed(lambda: appended(corpus, folder / "new", out))
    assert not out.exists()
    assert Corpus.open(folder / "first").sha256 == corpus.sha256
    again = appended(corpus, folder / "new", out)
    assert again.sha256 == Corpus.open(folder / "second").sha256


def test_labels_are_removed_whether_they_are_old_or_new(folder: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(folder / "new", raw)
    # The first corpus has 15 labels, and no corpus has the last one.
    uids = ["label3", "label20", "label99"]
    lines = [json.dumps({"uid": uid}) for uid in uids]
    (raw / "removed_labels.jsonl").write_text("\n".join(lines))

    grown = appended(Corpus.open(folder / "first"), raw, tmp_path / "grown")

    removed_uids = grown.label_uids(grown.removed_labels)
    assert removed_uids == ["label3", "label20"]


def test_graded_positives_may_be_removed(tmp_path: Path) -> None:
    write_planted(tmp_path / "all", 120, 23, graded=True)
    corpus = corpus_of(tmp_path / "all", tmp_path / "first")
    query = {"uid": "new", "text": "w0x0", "labels": ["label0"], "relevance": [1]}
    new = {
        "labels": [{"uid": "label0", "text": ""}],
        "train": [query],
        "removed_labels": [{"uid": f"label{number}"} for number in range(1, 12)],
    }
    (tmp_path / "new").mkdir()
    for name, rows in new.items():
        lines = [json.dumps(row) for row in rows]
        (tmp_path / "new" / f"{name}.jsonl").write_text("\n".join(lines))
    grown = appended(corpus, tmp_path / "new", tmp_path / "grown")
    bundle = write_memory_of(grown, tmp_path / "bundle", dim=16, seed=0)

    metrics = measure_bundle(Retriever.load(bundle), grown, "test").metrics

    # Queries whose only label was removed cannot judge a training.
    held_out = TrainingData(grown, DataConfig(validation=0.5)).validation_rows
    positives = grown.split("train").positives(held_out)
    assert (grown.answerable(positives).lengths > 0).all()
    unchanged = copy.copy(grown)
    unchanged.removed_labels = np.empty(0, np.int64)
    assert len(held_out) < len(TrainingData(unchanged, DataConfig(validation=0.5)).validation_rows)
    assert 0 < metrics["graded nDCG@5"] < 1


@pytest.mark.parametrize("line", ['{"uid": ', '["label1"]', "{}"])
def test_removed_labels_that_cannot_be_read_are_one_line(
    folder: Path, tmp_path: Path, line: str
) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(folder / "new", raw)
    (raw / "removed_labels.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"removed_labels.jsonl cannot be read"):
        appended(Corpus.open(folder / "first"), raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def accept(client: Client, corpus: Corpus, first: int) -> None:
    """Users like the best answers to texts that are nearly those of some training queries."""
    queries = corpus.split("train")
    for text in queries.texts(list(range(first, first + NUM_TEXTS))):
        search = client.search([f"{text} again"], k=2)
        for answer in search.results[0].answers:
            client.feedback(search.request_id, str(answer.uid), "accept")


def test_a_cycle_goes_on_where_it_stopped_and_promotes_or_keeps(
    folder: Path,
    client: Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def append(corpus: Corpus, _: Any, source: Any, out: str, **options: Any) -> Corpus:
        return appended(corpus, source.path, Path(out))

    # The reports name absolute paths all the same.
    monkeypatch.chdir(tmp_path)
    # Without Ray.
    monkeypatch.setattr(pipeline, "append", append)
    corpus = Corpus.open(folder / "first")
    cycles = tmp_path / "cycles"
    settings = {
        "data": str(corpus.path),
        "run": str(folder / "a"),
        "state": str(tmp_path / "state"),
        "model": "m",
        "url": client._url,
        "token_file": str(tmp_path / "state" / "token"),
        "admin_token_file": str(tmp_path / "state" / "admin-token"),
        "min_queries": 5,
        "events": ["--hold-out", "0.3"],
    }

    def cycle(margin: int, epochs: int = 1) -> tuple[int, str]:
        """Exit code and last line of a turn."""
        train = ["--workers", "0", "--set", f"optim.epochs={epochs}"]
        promote = ["--margin", str(margin)]
        config = tmp_path / "cycle.yaml"
        config.write_text(json.dumps({**settings, "train": train, "promote": promote}))
        code = run_command(f"continual --once --config {config} --out cycles")
        printed = capsys.readouterr()
        return code, (printed.err if code else printed.out).splitlines()[-1]

    first_version = client.models()[0].version
    assert cycle(100) == (0, "cycle 1 waits for feedback after event 0")
    assert not list(cycles.glob("cycle-*")), "a cycle that waits would be taken for the newest"
    accept(client, corpus, 0)
    client.change_labels([Operation(op="delete", uid="label0")])
    settings["events"] = ["--hold-out", "0"]
    nothing = f"{corpus.path} has none, and feedback after event 0 gave none"
    assert cycle(100) == (0, f"cycle 1 waits for a test query: {nothing}")
    settings["events"] = ["--hold-out", "0.3"]
    code, line = cycle(100, epochs=-1)
    assert (code, "optim.epochs" in line) == (2, True)
    corpus_file = cycles / "cycle-0001" / "corpus" / "manifest.json"
    written = corpus_file.stat().st_mtime_ns
    assert client.models()[0].version == first_version

    swap = Client.swap

    def swap_and_die(*arguments: Any, **options: Any) -> None:
        swap(*arguments, **options)
        kill_here()

    for last_step in (lambda *_, **__: kill_here(), swap_and_die):
        assert client.models()[0].version == first_version
        with monkeypatch.context() as patch:
            patch.setattr(Client, "swap", last_step)
            run_killed(lambda: cycle(100))
    # It answers from the new bundle, and the cycle learns of it.
    second_version = client.models()[0].version
    assert client.search(["text"]).version == second_version != first_version
    code, line = cycle(100)
    assert code == 0
    assert line.startswith("cycle 1: ")
    assert line.endswith(": promoted")
    assert corpus_file.stat().st_mtime_ns == written, "the step was not done again"
    assert client.models()[0].version == second_version
    grown = Corpus.open(cycles / "cycle-0001" / "corpus")
    assert grown.card.num_train + grown.card.num_test == corpus.card.num_train + NUM_TEXTS
    assert cycle(100)[1].startswith("cycle 2 waits for feedback after event ")

    # What was removed from the server is in no later bundle, although the corpus keeps its id.
    run = cycles / "cycle-0001" / "run"
    assert "label0" not in Retriever.load(str(run / "bundle")).labels.ids_by_uid()
    assert grown.removed_labels.tolist() == [0]
    assert run_command(f"evaluate {run} --data {grown.path} --json") == 0

    # A corpus cannot learn again what it has removed, and says so.
    client.change_labels([Operation(op="add", uid="label0", text="again")])
    client.feedback(client.search(["again"]).request_id, "label0", "accept")
    accept(client, corpus, NUM_TEXTS)
    code, line = cycle(0)
    assert code == 0
    assert "cycle 2: " in line
    assert json.loads((cycles / "cycle-0002" / "report.json").read_text())["gone"] == 1
    assert "the new bundle is not promoted" in line
    assert client.models()[0].version == second_version
    assert Corpus.open(cycles / "cycle-0002" / "corpus").removed_labels.tolist() == [0]
    report = json.loads((cycles / "cycle-0002" / "report.json").read_text())
    assert report["run"] == str(cycles / "cycle-0001" / "run")
    (cycles / "cycle-0002" / "report.json").write_text("{")
    code, line = cycle(0)
    assert (code, "report.json is damaged" in line) == (2, True)
