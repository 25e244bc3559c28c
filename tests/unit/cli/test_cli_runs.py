"""What commands write and print of a finished run: its answers, metrics and bundles."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from shell import SMALL, Shell, contents

from xmcray import api
from xmcray.data.corpus import Corpus
from xmcray.training import outcome
from xmcray.training.run import Run


def test_a_finished_run_has_everything(folder: Path) -> None:
    run = folder / "run"
    assert {"bundle", "metrics.json", "report.html", "result.json", "config.yaml"} <= {
        p.name for p in run.iterdir()
    }
    metrics = json.loads((run / "metrics.json").read_text())
    assert {
        "P@1",
        "PSP@5",
        "R@100",
        "macroF1@5(0,10]",
        "queries",
        "left_out",
        "A",
        "B",
        "intervals",
    } <= metrics.keys()
    page = (run / "report.html").read_text()
    assert Run.open(run).corpus_sha256 in page
    assert "Validation precision" in page


def test_the_same_command_finds_the_finished_run(folder: Path, shell: Shell) -> None:
    before = (folder / "run" / "result.json").read_bytes()
    printed = shell.run(f"train astra --data {folder}/corpus --out {folder}/run {SMALL} --json")
    assert json.loads(printed) == json.loads((folder / "run" / "metrics.json").read_text())
    assert (folder / "run" / "result.json").read_bytes() == before


def test_refit_trains_on_everything_for_the_best_number_of_epochs(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    shell.run(f"train astra --data {folder}/corpus --out {tmp_path}/r {SMALL} --refit")
    run = Run.open(tmp_path / "r")
    assert run.config.data.validation == 0
    assert 1 <= run.config.optim.stop_epoch <= 2
    assert (
        "Validation precision" in (tmp_path / "r" / "report.html").read_text()
    )  # of the run that chose
    again = f"train astra --data {folder}/corpus --out {tmp_path}/r {SMALL} --refit"
    assert "is not empty and --resume never" in shell.error(f"{again} --resume never")
    expected = "was started with --refit, expected the same; give --refit or choose another --out"
    assert expected in shell.error(again.removesuffix(" --refit"))

    # The weights of a fused bundle are chosen by the run that did not see the held-out queries.
    data = f"--data {folder}/corpus"
    out = tmp_path / "fused"
    choice = json.loads(shell.run(f"fuse {tmp_path}/r {data} --out {out} --json"))
    assert choice["queries"] == 5
    refitted = contents(tmp_path / "r" / "bundle")
    fused = contents(out)
    assert all(refitted[name] == fused[name] for name in refitted if name.startswith("vectors/"))
    # So are the probabilities of the refit's own bundle.
    curves = "calibration/curves.json"
    assert refitted[curves] == contents(tmp_path / "r" / "selection" / "bundle")[curves]
    assert refitted[curves] != fused[curves]
    shell.run(f"calibrate {tmp_path}/r {data} --out {tmp_path}/again")
    assert contents(tmp_path / "again")[curves] == refitted[curves]
    error = shell.error(f"fuse {tmp_path}/r/bundle {data} --out {tmp_path}/x")
    assert "was trained on all training queries" in error
    assert not (tmp_path / "x").exists()


def test_fuse_writes_a_bundle_and_says_what_each_part_is_worth(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    data = f"--data {folder}/corpus"
    out = tmp_path / "fused"
    printed = shell.run(f"fuse {folder}/run {data} --out {out} --metric P@1")
    assert "labels alone" in printed
    assert "without words" in printed
    answers = json.loads(shell.run(f"search {out} 'w1 w2' --explain --json"))[0]["answers"]
    parts = answers[0]["parts"]
    assert sum(parts.values()) == pytest.approx(answers[0]["score"], abs=1e-5)
    table = shell.run(f"search {out} 'w1 w2' --explain -k 1")
    assert all(part in table for part in parts)
    measured = json.loads(shell.run(f"evaluate {out} {data} --json"))
    assert 0 <= measured["P@1"] <= 1
    error = shell.error(f"fuse {folder}/run {data} --out {tmp_path}/x --metric P@2")
    assert "unknown metric 'P@2'" in error
    assert "is not empty" in shell.error(f"fuse {folder}/run {data} --out {out}")


def test_answers_have_probabilities_once_a_bundle_is_calibrated(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    data = f"--data {folder}/corpus"
    bundle = tmp_path / "memory"
    shell.run(f"memory {folder}/run {data} --out {bundle}")
    search = f"search {bundle} 'w1 w2' --json"
    assert "probability" not in json.loads(shell.run(search))[0]["answers"][0]
    error = shell.error(f"{search} --min-probability 0.5")
    assert "xmcray calibrate" in error
    assert "5 held-out queries" in shell.run(f"calibrate {bundle} {data}")
    answers = json.loads(shell.run(search))[0]["answers"]
    level = max(answer["probability"] for answer in answers)
    probable = json.loads(shell.run(f"{search} --min-probability {level}"))[0]["answers"]
    assert probable == [answer for answer in answers if answer["probability"] >= level]
    assert "Probabilities, in percent: ECE@1" in shell.run(f"evaluate {bundle} {data}")
    assert "ECE@5" in json.loads(shell.run(f"evaluate {bundle} {data} --json"))["calibration"]


def test_evaluate_measures_run_bundle_and_predictions_alike(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    data = f"--data {folder}/corpus"
    of_run = shell.run(f"evaluate {folder}/run {data} --json --predictions {tmp_path}/p.npz")
    of_bundle = shell.run(f"evaluate {folder}/run/bundle {data} --json --exact")
    of_file = shell.run(f"evaluate {tmp_path}/p.npz {data} --json")
    metrics = json.loads(of_run)
    assert metrics == json.loads(of_bundle)
    # A file of predictions has scores alone.
    del metrics["calibration"]
    assert metrics == json.loads(of_file)
    assert sparse.load_npz(tmp_path / "p.npz").shape == (20, 23)
    table = shell.run(
        f"evaluate {folder}/run {data} --compare {tmp_path}/p.npz --json {tmp_path}/m.json"
    )
    written = json.loads((tmp_path / "m.json").read_text())
    (comparison,) = written.pop("comparisons")
    assert written == json.loads(of_run)
    assert comparison["other"] == f"{tmp_path}/p.npz"
    assert comparison["metrics"][0]["metric"] == "P@1"
    assert comparison["metrics"][0]["difference"] == 0
    assert "Paired comparison" in table
    assert "p.npz" in table
    # Stored answers are compared with as they are.
    again = shell.run(f"evaluate {folder}/run {data} --exact --compare {tmp_path}/p.npz --json")
    assert json.loads(again)["comparisons"] == [comparison]


def test_compared_bundles_have_names_that_differ(
    folder: Path, shell: Shell, tmp_path: Path
) -> None:
    shell.run(f"export {folder}/run --out {tmp_path}/b/bundle")
    compared = f"--compare {tmp_path}/b/bundle"
    table = shell.run(f"evaluate {folder}/run/bundle --data {folder}/corpus {compared}")
    assert "run/bundle" in table
    assert "b/bundle" in table


def test_a_file_with_few_answers_is_named(
    folder: Path, shell: Shell, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queries = tmp_path / "queries.jsonl"
    texts = Corpus.open(folder / "corpus").split("test").texts(np.arange(20))
    queries.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shell.run(f"predict {folder}/run {queries} --out {tmp_path}/few -k 5 --workers 1")
    shell.run(f"evaluate {tmp_path}/few/predictions.npz --data {folder}/corpus")
    assert "has at most 5 answers per query, so metrics of more, such as R@100" in caplog.text


def test_the_bundle_of_a_run_is_served(folder: Path, tmp_path: Path) -> None:
    class ReadyError(Exception):
        pass

    def ready(*_: object) -> None:
        raise ReadyError

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ReadyError):
        api.serve(folder / "run", {"state_dir": f"{tmp_path}/s"}, port=port, ready=ready)


def test_a_known_query_finds_its_label(folder: Path, shell: Shell, tmp_path: Path) -> None:
    shell.run(f"export {folder}/run --out {tmp_path}/b")
    assert contents(tmp_path / "b") == contents(folder / "run" / "bundle")
    answers = json.loads(shell.run(f"search {tmp_path}/b 'w0x0 w0x1' 'w1x2 w1x3' -k 3 --json"))
    assert [a["query"] for a in answers] == ["w0x0 w0x1", "w1x2 w1x3"]
    assert answers == json.loads(
        shell.run(f"search {folder}/run 'w0x0 w0x1' 'w1x2 w1x3' -k 3 --json")
    )
    assert all(len(a["answers"]) == 3 for a in answers)
    assert all(
        answer["uid"] == f"label{answer['label_id']}" for a in answers for answer in a["answers"]
    )
    first = answers[0]["answers"][0]
    assert first["uid"] in shell.run(f"search {tmp_path}/b 'w0x0 w0x1' -k 1")


def test_evaluate_compares_with_several_runs_and_measures_slices(
    folder: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = Corpus.open(folder / "corpus").split("test")
    uids = queries.uids(np.arange(len(queries)))
    lines = [{"uid": uid, "attributes": {"part": i % 2}} for i, uid in enumerate(uids)]
    slices = tmp_path / "slices.jsonl"
    slices.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bundle = folder / "run" / "bundle"
    data = f"--data {folder}/corpus"
    printed = shell.run(
        f"evaluate {bundle} {data} --slices {slices} --compare {bundle} --compare {bundle}"
    )
    assert printed.count("p (sign flip, Holm for 2)") == 2
    assert "Slices of the queries" in printed
    measured = json.loads(shell.run(f"evaluate {bundle} {data} --slices {slices} --json"))
    assert [row["value"] for row in measured["slices"]] == [0, 1]
    monkeypatch.setattr(outcome, "measure_bundle", lambda *_, **__: pytest.fail("it measured"))
    slices.write_text('{"attributes": {}}\n')
    mistake = shell.error(f"evaluate {bundle} {data} --slices {slices}")
    assert mistake == f"{slices}:1: no uid, expected that of a query"
    slices.write_text('{"uid": "of another split", "attributes": {"part": 1}}\n')
    mistake = shell.error(f"evaluate {bundle} {data} --slices {slices}")
    assert mistake == "none of 20 queries has an attribute, expected uids of this split"
