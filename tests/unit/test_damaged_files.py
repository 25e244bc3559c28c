"""Every damaged or hostile file leads to the right answer or to one line, never to a traceback."""

from __future__ import annotations

import collections
import errno
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bundles import TEXTS, write_bundle_of

from xmcray.data import chunks
from xmcray.data.chunks import survey
from xmcray.data.formats import base, detect
from xmcray.data.rejected import earlier_rejected
from xmcray.data.tokens import TextTokenizer, train_wordpiece
from xmcray.errors import BundleError, DataError, RunError, StorageError
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.settings import ServeConfig
from xmcray.serving.state_folder import StateFolder
from xmcray.storage.artifact import new_artifact, open_artifact
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.storage.path_errors import disk_errors
from xmcray.training.launch import refit_config
from xmcray.training.records import Records, read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

TESTS = Path(__file__).parents[1]
TRIALS = 1  # of each file; benchmarks/soak_files.py makes thousands


def test_changed_files_lead_to_an_answer_or_to_one_line(tmp_path: Path) -> None:
    # In a process of its own: a library that crashes must not end the other tests.
    command = [sys.executable, str(TESTS / "damage.py"), str(tmp_path), "--trials", str(TRIALS)]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    assert process.returncode == 0, (lines[-1:], process.stderr[-2000:])
    outcomes = [json.loads(line) for line in lines if line.startswith('["tried"')]
    assert len(outcomes) >= 100
    faults = [outcome for outcome in outcomes if outcome[-1]["is_fault"]]
    assert not faults, faults[0]
    assert {outcome[-1]["kind"] for outcome in outcomes} >= {"same", "refused"}


def test_a_tokenizer_with_ids_outside_the_encoder_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    larger = train_wordpiece([*TEXTS, "unheard unheard of of"], vocab_size=4000)
    larger.save(bundle / "tokenizer")
    renew(bundle)
    with pytest.raises(BundleError, match=r"its tokenizer has \d+ token ids, its encoder \d+ rows"):
        Retriever.load(bundle)


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    files = train_wordpiece(TEXTS).to_files()
    body = json.loads(files["tokenizer.json"])
    special = {"id": "[X]", "ids": [10**6], "tokens": ["[X]"]}
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
        "special_tokens": {"[X]": special},
    }
    tokenizer = TextTokenizer.from_files({**files, "tokenizer.json": json.dumps(body)})
    with pytest.raises(BundleError, match="gives token id 1000000, expected less than"):
        tokenizer.encode(["matrix"])


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/a\0b", "null character"), ("/" + "a" * 4000, "4001 bytes long"), ("/\ud800", "UTF-8")],
)
def test_a_path_that_no_file_can_have_is_one_line(path: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        open_artifact(path, "bundle")
    with pytest.raises(StorageError, match=reason), new_artifact(path, "bundle", {}):
        raise AssertionError("the block must not begin")


def test_a_full_disk_while_a_tree_is_copied_is_one_line(tmp_path: Path) -> None:
    def copy() -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    with pytest.raises(StorageError, match="no space left while writing"), disk_errors("x"):
        copy()


def test_a_full_disk_while_a_resumed_run_cuts_its_records_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        records.add({"step": step})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no space left while writing"):
        records.truncate(2)
    assert [record["step"] for record in read_records(records.path)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [records.path]


@pytest.mark.parametrize("text", ['{"bundle": "/b", "conf', "[]", "[" * 100_000, "{}"])
def test_a_cut_record_of_what_was_swapped_in_is_one_line(tmp_path: Path, text: str) -> None:
    folder = StateFolder(ServeConfig(bundles={"m": "/b"}, state_dir=str(tmp_path)), "m")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "head.json").write_text(text)
    with pytest.raises(StorageError, match=r"head\.json is damaged.*; remove the file"):
        folder.bundle()


def test_a_record_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder = StateFolder(ServeConfig(bundles={"m": "/b"}, state_dir=str(tmp_path)), "m")
    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(StorageError, match=r"head\.json .*Permission denied"):
        folder.bundle()


@pytest.mark.parametrize(
    "record", ['{"step": 1, "epoch": 0, "nDCG@5": "x"}', '{"step": 1, "nDCG@5": 0.5}']
)
def test_a_damaged_record_that_chooses_the_epochs_is_one_line(record: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    selection = Run(run / "selection", "id", RunConfig.resolve("astra", {}, []), tmp_path, "")
    selection.path.mkdir(parents=True)
    (selection.path / "metrics.jsonl").write_text(record)
    with pytest.raises(StorageError, match=rf"metrics\.jsonl is damaged \(.*\); remove {run} and"):
        refit_config(selection)


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 3, "seconds": "x"}')
    run = Run(tmp_path, "id", RunConfig.resolve("astra", {}, []), tmp_path, "")
    with pytest.raises(RunError, match=r"result\.json is damaged .*; put a copy of it back"):
        run.result()


def test_a_gzip_of_newlines_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FREE_BYTES", 1 << 18)
    path = tmp_path / "train.jsonl.gz"
    # 40 MB of newlines: members of a gzip file follow each other.
    path.write_bytes(gzip.compress(b"\n" * (4 << 20), 9) * 10)
    lines = base.read_lines(path)
    with pytest.raises(DataError, match="more than 200 times its size: a decompression bomb"):
        collections.deque(itertools.islice(lines, 40 << 20), maxlen=0)


ROW = {"split": "train", "file": "train.jsonl", "line": 3, "reason": "no text"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]\n",
        "{\n",
        "[" * 100_000,
        "5\n",
        # Longer than any reason can be, so not all of it is read.
        json.dumps({**ROW, "reason": "x" * (1 << 20)}) + "\n",
        json.dumps({**ROW, "line": "3"}) + "\n",
        json.dumps({**ROW, "split": "x"}) + "\n",
        json.dumps({**ROW, "other": 1}) + "\n",
        json.dumps({**ROW, "reason": None}) + "\n",
        json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n",
    ],
)
def test_malformed_rows_that_a_corpus_left_out_are_one_line(text: str, tmp_path: Path) -> None:
    card: Any = SimpleNamespace(rejected={"train": 1})
    path = tmp_path / "rejected.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert [bad.line for _, bad in earlier_rejected(tmp_path, card)] == [3]
    path.write_text(text)
    with pytest.raises(DataError, match=r"rejected\.jsonl is damaged .*prepare the corpus again"):
        collections.deque(earlier_rejected(tmp_path, card), maxlen=0)


def test_rows_that_a_corpus_left_out_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "rejected.jsonl").write_text(json.dumps(ROW) + "\n{")
    card: Any = SimpleNamespace(rejected={"train": 2})
    rows = earlier_rejected(tmp_path, card)
    assert next(rows)[1].line == 3
    with pytest.raises(DataError, match="is damaged"):
        next(rows)


def test_rejected_rows_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MAX_PENDING", 1000)
    (tmp_path / "labels.jsonl").write_bytes(b'{"uid": "a"}\n')
    (tmp_path / "train.jsonl").write_bytes(b"\n" * 1002)
    with pytest.raises(DataError, match="so were 1,000 other rows"):
        list(survey(detect(tmp_path), cap=10, seed=0, skip=True, block_rows=100))


def renew(bundle: Path) -> None:
    """Makes the manifest fit the files, as whoever wrote a hostile bundle would."""
    manifest = read_manifest(bundle, "bundle")
    finish_manifest(bundle, "bundle", manifest.about, {})
