"""The one line that a mistake gets, after which everything is as it was."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus
from scipy import sparse
from shell import SMALL, Shell, contents

from xmcray.storage.work_folder import locked
from xmcray.training import outcome
from xmcray.training.run import RUN_FOLDER


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian", "unknown verb 'trian'; did you mean 'train'?"),
        ("train asrta --data C --out R", "unknown method 'asrta'; did you mean 'astra'?"),
        (
            "train astra --data C",
            "the following arguments are required: --out; see xmcray train --help",
        ),
        ("train astra --data C --out R --seed 1", "unrecognized arguments: --seed 1"),
        ("search B x -k many", "argument -k: invalid int value: 'many'"),
        ("search B x -k 0", "-k is 0, expected at least 1"),
        ("search B x", "B does not exist; expected a bundle folder"),
        ("evaluate R --data C", "R does not exist, expected a run (run.json) or a bundle"),
        ("export R --out B", "R is not a run: it has no run.json"),
        ("prepare RAW --out C", "RAW does not exist, expected a folder of raw files"),
        ("prepare . --out C --format jsnl", "unknown format 'jsnl'; did you mean"),
        ("train astra --data C --out R --config preset:astra/smaple", "unknown preset"),
        ("train astra --data C --out R --config a.yaml", "file a.yaml does not exist"),
        ("train astra --data C --out R --set optim.epoch=1", "did you mean 'optim.epochs'?"),
        ("train astra --data C --out R --set optim.epochs=x", "optim.epochs is 'x'"),
        ("train astra --data C --out R --workers -1", "cluster.workers is -1, expected"),
        ("train astra --data C --out R", "C does not exist; expected a corpus folder"),
    ],
)
def test_one_line_and_nothing_written(
    command: str,
    message: str,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in shell.error(command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prepare {}/raw --out file/c", "file/c cannot be written:"),
        ("prepare {}/raw --out c --propensity nan 1.5", "propensity A is nan, expected"),
        (
            "prepare {}/raw --out c --propensity 0.5 0",
            "propensity B is 0.0, expected at least 0.01",
        ),
        ("prepare {}/raw --out c --max-len 0", "max_len is 0, expected at least 1"),
        ("prepare {}/raw --out c --label-max-len -5", "label_max_len is -5, expected at least 1"),
        ("prepare {}/raw --out c --vocab-size 0", "vocab_size is 0, expected at least 1"),
        ("train astra --data {}/corpus --out r --config file", "unknown setting '1'"),
        (
            "train astra --data {}/corpus --out r --set optim.seed=9223372036854775808",
            "optim.seed is an integer beyond 64 bits, expected a smaller one",
        ),
        (
            "train astra --data {}/corpus --out r --set cluster.threads_per_process=5000",
            "cluster.threads_per_process is 5000, expected at least 0 and at most 4096",
        ),
        ("plan astra --labels 1e30 --queries 9", "--labels is 1e+30, expected at most 2.14748e+09"),
        (
            "plan astra --labels 9 --queries 9 --workers 65537",
            "workers is 65537, expected at least 0",
        ),
        ("export {}/run --out b --set index.factory=IVF0,Flat", "0 lists, expected at least 1"),
        ("export {}/run --out b --set index.factory=HNSW1", "1 links of a row, expected 2 to 1024"),
        (
            "train-reranker {}/run --data {}/corpus --out r --model m --seed -1",
            "seed is -1, expected at least 0",
        ),
        ("serve ={}/run/bundle --state-dir s", "a bundle has an empty name"),
        (
            "serve {}/raw --state-dir s",
            "raw is neither a run nor a bundle, expected a run (run.json)",
        ),
        (
            "serve {}/corpus --state-dir s",
            "expected a bundle; make one of a run with `xmcray export`",
        ),
        ("search {}/raw x", "not a complete bundle; make one of a run with `xmcray export`"),
        (
            "train astra --data {}/corpus --out r --config preset:dexml/sample",
            "the configuration is for method dexml, not for astra; train dexml, or choose one",
        ),
        ("export {}/run/bundle --out b", "a bundle or a corpus, expected a run; name the run"),
        ("train astra --data {}/raw --out r", "make one of raw files with `xmcray prepare`"),
        (
            "train dexml --data {}/corpus --out s3://bucket/run",
            "s3://bucket/run is a URL; a run is",
        ),
        ("mcp http://127.0.0.1 --port 65536", "--port is 65536, expected at least 1"),
        ("files cluster --out file", "file/cluster cannot be written (Not a directory)"),
        ("files cluster --out file/x", "file/x/cluster cannot be written (Not a directory)"),
        (
            "continual --out file --set data=c --set run=r --set state=s --once",
            "file cannot be written (File exists)",
        ),
        ("doctor --cluster http://[::1", "expected http://HOST:PORT of the dashboard"),
        (
            "continual --out c --set every_hours=.inf --set data=c --set run=r --set state=s",
            "every_hours is inf, expected at least 0.01 and at most 8760",
        ),
    ],
)
def test_numbers_and_paths_that_nobody_means_are_one_line(
    command: str,
    message: str,
    folder: Path,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("1: 2")
    assert message in shell.error(command.replace("{}", str(folder)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["loop", "x" * 300])
@pytest.mark.parametrize(
    "command",
    [
        "export {} --out b",
        "train astra --data {corpus} --out {}",
        "events export {} --data {corpus} --out b",
        "search {bundle} x --rerank {}",
        "files cluster --out {}",
        "serve {bundle} --state-dir {}",
        "continual --out {} --set data=c --set run=r --set state=s --once",
    ],
)
def test_paths_that_the_system_refuses_are_one_line(
    command: str,
    path: str,
    folder: Path,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    run = folder / "run"
    places = {"run": run, "bundle": run / "bundle", "corpus": folder / "corpus"}
    # Messages cut long paths, so the name itself may be missing.
    assert re.search(f"{path[:10]}|a name of 300", shell.error(command.format(path, **places)))
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("path", ["\udcffx", "a\0b"])
def test_a_run_whose_path_no_library_can_open_is_refused_at_the_start(
    path: str, folder: Path, shell: Shell, tmp_path: Path
) -> None:
    train = f"train astra --data {folder}/corpus {SMALL} --out"
    assert re.search("is not UTF-8|null character", shell.error(train, tmp_path / path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["search {}/run/bundle", "prepare {}/raw --out c --name"])
def test_an_argument_that_is_not_utf_8_is_refused(
    verb: str, folder: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = shell.error(verb.format(folder), os.fsdecode(b"caf\xe9"))
    expected = "is not UTF-8, expected text; rename the file, or type the text again"
    assert message == rf"argument 'caf\udce9' {expected}"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    ("artifact", "name", "command"),
    [
        ("corpus", "manifest.json", "train astra --data {} --out {}/r"),
        ("run", "run.json", "export {} --out {}/b"),
        ("run", "result.json", "export {} --out {}/b"),
        ("run", "bundle/manifest.json", "search {} x"),
        ("run/bundle", "manifest.json", "export {} --to parquet --out {}/b"),
    ],
)
def test_a_file_without_an_end_is_not_read(
    artifact: str,
    name: str,
    command: str,
    make: Callable[[Path], None],
    folder: Path,
    shell: Shell,
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / artifact, copy)
    (copy / name).unlink()
    make(copy / name)
    before = sorted(copy.rglob("*"))
    error = shell.error(command.replace("{}", str(copy)))
    assert f"{name} " in error
    assert sorted(copy.rglob("*")) == before


def test_a_run_does_not_wait_for_the_reader_of_a_pipe(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "lock")
    train = f"train astra --data {folder}/corpus {SMALL} --out"
    assert "lock cannot be used (No such device" in shell.error(train, tmp_path)


def test_the_root_is_not_empty(folder: Path, shell: Shell) -> None:
    assert "/ exists and is not empty" in shell.error(f"export {folder}/run --out /")


def test_k_beyond_the_labels(folder: Path, shell: Shell) -> None:
    assert (
        shell.error(f"search {folder}/run x -k 24")
        == "k is 24, expected 1 .. 23 (the number of labels)"
    )


def test_a_corpus_with_one_changed_byte(folder: Path, shell: Shell, tmp_path: Path) -> None:
    shutil.copytree(folder / "corpus", tmp_path / "corpus")
    shard = tmp_path / "corpus" / "labels" / "00000.parquet"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    for verb in (
        f"train astra --out {tmp_path}/run {SMALL}",
        f"evaluate {folder}/run",
    ):
        message = shell.error(f"{verb} --data {tmp_path}/corpus")
        assert "labels/00000.parquet was altered (SHA-256 differs from the manifest)" in message
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_run_directory_in_use(folder: Path, shell: Shell, tmp_path: Path) -> None:
    train = f"train astra --data {folder}/corpus --out {tmp_path}/r {SMALL}"
    with locked(tmp_path / "r", RUN_FOLDER):
        assert "is in use by another process; wait for it" in shell.error(train)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty(folder: Path, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    train = f"train astra --data {folder}/corpus {SMALL}"
    assert "holds notes.txt and no run" in shell.error(f"{train} --out {tmp_path}")
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    never = f"{train} --out {folder}/run --resume never"
    assert "is not empty and --resume never was given" in shell.error(never)


@pytest.mark.parametrize(
    "command",
    [
        f"train astra {SMALL} --data {{corpus}} --out {{}}",
        f"train astra --refit {SMALL} --data {{corpus}} --out {{}}",
        "tune astra --trials 1 --data {corpus} --out {}",
        "tune --bundle {run} --space space:index --data {corpus} --out {}",
        "auto --budget 60s --data {corpus} --out {}",
        "memory {run} --data {corpus} --out {}",
        "fuse {run} --data {corpus} --out {}",
        "distil {run} --into static --data {corpus} --out {}",
        "calibrate {run} --data {corpus} --out {}",
        "export {run} --out {}",
        "quickstart --out {}",
        "continual --out {} --set data=c --set run=r --set state=s --once",
        "serve {run}/bundle --state-dir {}",
    ],
)
@pytest.mark.parametrize("artifact", ["corpus", "run/bundle"])
def test_an_artifact_in_the_place_of_a_new_folder_stays_as_it_is(
    command: str, artifact: str, folder: Path, shell: Shell, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / artifact, other)
    before = contents(other)
    error = shell.error(command.format(other, corpus=folder / "corpus", run=folder / "run"))
    assert re.search("choose another --(out|state-dir)", error)
    assert contents(other) == before


def test_resume_with_another_corpus_or_configuration(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    before = contents(folder / "run")
    train = f"train astra --data {folder}/corpus --out {folder}/run {SMALL}"
    assert "was started without --refit, expected the same; leave" in shell.error(
        f"{train} --refit"
    )
    assert "was started with optim.epochs = 2, now 3; use" in shell.error(
        f"{train} --set optim.epochs=3"
    )
    planted_corpus(tmp_path, seed=1)
    other = f"--data {tmp_path}/corpus"
    assert "was trained on another corpus" in shell.error(f"{train} {other}")
    assert "is not the corpus" in shell.error(f"evaluate {folder}/run {other}")
    assert "has another vocabulary than the bundle" in shell.error(
        f"evaluate {folder}/run/bundle {other}"
    )
    assert contents(folder / "run") == before


def test_an_unfinished_run_is_not_measured(folder: Path, shell: Shell, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "bundle")
    (tmp_path / "run" / "result.json").unlink()
    expected = "is not finished; resume it with the same train command"
    assert expected in shell.error(f"evaluate {tmp_path}/run --data {folder}/corpus")
    assert expected in shell.error(f"export {tmp_path}/run --out {tmp_path}/b")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_hub_id_without_network(
    folder: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = "nobody/no-such-model"
    train = f"train astra --data {folder}/corpus --out {tmp_path}/r {SMALL}"
    assert name in shell.error(f"{train} --set encoder.name={name}")
    assert list(tmp_path.iterdir()) == []  # the same folder can be used with another encoder
    bad = shell.error(f"prepare {folder}/raw --out {tmp_path}/c --tokenizer {name}")
    assert name in bad
    assert list(tmp_path.iterdir()) == []


def test_predictions_of_other_queries(folder: Path, shell: Shell, tmp_path: Path) -> None:
    sparse.save_npz(tmp_path / "p.npz", sparse.csr_matrix(np.eye(3)))
    data = f"--data {folder}/corpus"
    assert "is 3 x 3, expected 20 queries x 23 labels" in shell.error(
        f"evaluate {tmp_path}/p.npz {data}"
    )
    for option in (f"--predictions {tmp_path}/q.npz", "--exact", "--rerank reranker"):
        mistake = shell.error(f"evaluate {tmp_path}/p.npz {data} {option}")
        assert "already holds the answers; name a run or a bundle" in mistake


def test_evaluate_refuses_a_file_it_cannot_write_before_it_measures(
    folder: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "measure_bundle", lambda *_, **__: pytest.fail("it measured"))
    (tmp_path / "file").write_text("mine")
    evaluate = f"evaluate {folder}/run --data {folder}/corpus"
    for option, name in (("--json", "m.json"), ("--predictions", "x.npz")):
        missing = shell.error(f"{evaluate} {option} {tmp_path}/missing/{name}")
        assert f"folder {tmp_path}/missing does not exist; make it" in missing
        assert f"folder {tmp_path}/file is not a folder" in shell.error(
            f"{evaluate} {option} {tmp_path}/file/{name}"
        )
        assert f"{tmp_path} is a folder, expected a file" in shell.error(
            f"{evaluate} {option} {tmp_path}"
        )
    assert contents(tmp_path) == {"file": b"mine"}
