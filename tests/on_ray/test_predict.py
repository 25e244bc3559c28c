"""Batch prediction: rows in are rows out, as `search` answers them, whatever the files and whoever is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundles import WORDS, write_memory
from models import write_cross_encoder
from processes import When
from shell import Shell, run_command

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, RunError, StorageError
from xmcray.evaluation.predictions import predictions_to_top_labels, read_predictions
from xmcray.prediction import predict
from xmcray.retrieval.batch_predict import QueriesEnd, read_chunks
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.artifact import open_artifact

pytestmark = pytest.mark.usefixtures("cluster")
LABELS, ROWS, K = 47, 90, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory bundle, and queries as JSON lines and in Parquet files."""
    folder = tmp_path_factory.mktemp("predict")
    write_memory(folder).rename(folder / "bundle")
    corpus = Corpus.open(folder / "corpus")
    texts = corpus.split("train").texts(np.arange(ROWS))
    texts[5] = ""
    rows: list[dict[str, Any]] = [{"uid": f"q{i}", "text": text} for i, text in enumerate(texts)]
    title, content = texts[7].split(" ", 1)
    rows[7] = {"uid": 7, "title": title, "content": content}
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tables").mkdir()
    for name, part in (("a", texts[:40]), ("b", texts[40:])):
        pq.write_table(
            pa.table({"text": part, "other": range(len(part))}),
            folder / "tables" / f"{name}.parquet",
        )
    return folder


def expected(
    folder: Path, texts: list[str], memory: MemoryConfig | None = None
) -> list[list[tuple[int, str, float]]]:
    found = Retriever.load(folder / "bundle").search(texts, K, memory=memory)
    return [[(a.label_id, a.uid, a.score) for a in answers] for answers in found]


def texts_of(queries: Path) -> list[str]:
    (chunk, end) = read_chunks([queries], ROWS)
    assert end == QueriesEnd(1, ROWS)
    return chunk.texts


def check(out: Path, answers: list[list[tuple[int, str, float]]]) -> pa.Table:
    """Both results hold these answers in this order; returns the table."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("*.parquet"))])
    ids = [[label_id for label_id, _, _ in row] for row in answers]
    assert table["label_id"].to_pylist() == ids
    assert table["label_uid"].to_pylist() == [[uid for _, uid, _ in row] for row in answers]
    scores = np.array([[score for _, _, score in row] for row in answers])
    np.testing.assert_allclose(np.array(table["score"].to_pylist()), scores, atol=1e-6)
    matrix = read_predictions(out / "predictions.npz", len(answers), LABELS)
    top = predictions_to_top_labels(matrix, np.arange(len(answers)), K)
    np.testing.assert_allclose(top.scores, scores, atol=1e-6)
    assert [sorted(row) for row in top.ids.tolist()] == [sorted(row) for row in ids]
    open_artifact(out, "predictions")
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return table


def test_answers_equal_search_in_the_order_of_the_input(folder: Path, tmp_path: Path) -> None:
    texts = texts_of(folder / "queries.jsonl")
    assert texts[5] == ""
    out = tmp_path / "a"
    assert (
        predict(
            folder / "bundle", folder / "queries.jsonl", out, K, texts=True, chunk_rows=8, workers=2
        )
        == ROWS
    )
    table = check(out, expected(folder, texts))
    assert table["text"].to_pylist() == texts
    assert table["uid"].to_pylist() == [f"q{i}" if i != 7 else "7" for i in range(ROWS)]


def test_a_folder_of_tables_and_other_settings_of_the_memory(
    folder: Path, tmp_path: Path, shell: Shell
) -> None:
    printed = shell.run(
        f"predict {folder}/bundle {folder}/tables --out {tmp_path}/b -k {K}"
        " --set memory.weight=0 --set memory.keys=30"
    )
    assert f"{ROWS} queries answered" in printed
    table = check(
        tmp_path / "b",
        expected(folder, texts_of(folder / "queries.jsonl"), MemoryConfig(weight=0, keys=30)),
    )
    assert table.column_names == ["uid", "label_id", "label_uid", "score"]
    assert table["uid"].to_pylist() == [
        str(i) for i in range(ROWS)
    ]  # rows without a uid are counted through all files


def test_workers_find_a_reranker_by_a_relative_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cross_encoder(tmp_path / "reranker", WORDS)
    texts = texts_of(folder / "queries.jsonl")
    monkeypatch.chdir(tmp_path)
    predict(folder / "bundle", folder / "queries.jsonl", "r", K, rerank="reranker", workers=1)
    retriever = Retriever.load(folder / "bundle").reranked_by("reranker")
    found = [[answer.label_id for answer in answers] for answers in retriever.search(texts, K)]
    (table,) = (tmp_path / "r").glob("*.parquet")
    assert pq.read_table(table)["label_id"].to_pylist() == found


def test_killed_it_goes_on_with_what_is_finished(
    folder: Path, tmp_path: Path, other_driver: dict[str, str]
) -> None:
    out, queries = tmp_path / "c", folder / "queries.jsonl"
    work = tmp_path / ".c.predicting"
    script = textwrap.dedent(
        f"""
        from xmcray.prediction import predict
        predict({str(folder / "bundle")!r}, {str(queries)!r}, {str(out)!r}, {K}, chunk_rows=1, workers=2)
        """
    )
    first = subprocess.Popen(
        [sys.executable, "-c", script], env=other_driver, stderr=subprocess.DEVNULL
    )
    watcher = When(lambda: len(list(work.glob("[0-9]*.parquet"))) >= 3, first.kill)
    assert first.wait() == -9
    watcher.close()
    finished = sorted(work.glob("[0-9]*.parquet"))
    assert 3 <= len(finished) < ROWS
    assert not out.exists()
    with pytest.raises(RunError, match=r"unfinished work with another k \(7, now 8\)"):
        predict(folder / "bundle", queries, out, K + 1, chunk_rows=1)
    marked = pq.read_table(finished[1])
    marked = marked.set_column(0, "uid", pa.array(["not repeated"], pa.large_string()))
    pq.write_table(marked, finished[1])
    assert predict(folder / "bundle", queries, out, K, chunk_rows=1, workers=2) == ROWS
    table = check(out, expected(folder, texts_of(queries)))
    number = int(finished[1].stem)
    assert [i for i, uid in enumerate(table["uid"].to_pylist()) if uid == "not repeated"] == [
        number
    ]
    with pytest.raises(StorageError, match="exists and is not empty"):
        predict(folder / "bundle", queries, out, K, chunk_rows=1)


def lines(*rows: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "q.jsonl").write_text("".join(f"{row}\n" for row in rows))
        return folder / "q.jsonl"

    return write


def table(cut: int | None = None, **columns: list[Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(pa.table(columns), folder / "q.parquet")
        content = (folder / "q.parquet").read_bytes()
        (folder / "q.parquet").write_bytes(content[:cut])
        return folder / "q.parquet"

    return write


def both(folder: Path) -> Path:
    lines('{"text": "a"}')(folder)
    table(text=["a"])(folder)
    return folder


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (
        lambda folder: folder / "none",
        "none does not exist, expected a file or folder of queries",
    ),
    "no such kind": (lambda folder: folder, "holds no .parquet or .jsonl file"),
    "two kinds": (both, "holds both .parquet and .jsonl files"),
    "missing column": (
        table(uid=["a"]),
        "q.parquet has no column text, title or content (found: uid)",
    ),
    "truncated": (table(-9, text=["a"]), "q.parquet is not a complete Parquet file"),
    "empty table": (
        table(text=pa.array([], pa.string())),
        "q.parquet is empty, expected rows of queries",
    ),
    "empty file": (lines(), "q.jsonl is empty, expected rows of queries"),
    "missing field": (
        lines('{"text": "a"}', '{"uid": "b"}'),
        "q.jsonl:2: no text, expected it, or title and content",
    ),
    "broken JSON": (lines('{"text": "a"}', "{"), "q.jsonl:2: broken JSON"),
    "no string": (lines('{"text": 3}'), "q.jsonl:1: text or title or content is not a string"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_nothing_is_left(
    kind: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw").mkdir()
    write, message = BAD[kind]
    source = write(tmp_path / "raw")
    assert run_command(f"predict {folder}/bundle {source} --out {tmp_path}/out") == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("k", [0, LABELS + 1])
def test_k_out_of_range(k: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"k is {k}, expected 1 \.\. {LABELS}"):
        predict(folder / "bundle", folder / "queries.jsonl", tmp_path / "out", k)
    assert list(tmp_path.iterdir()) == []
