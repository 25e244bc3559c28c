"""CONTRIBUTING's recipe for a new index type: a factory string of FAISS, from training to search."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from corpora import planted_corpus
from shell import SMALL_SETTINGS, Shell, set_options

from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever

FACTORY = "IVF4,SQ6"
ROOT = Path(__file__).parents[3]
SETTINGS = [
    "optim.epochs=3",
    "negatives.start_epoch=2",
    f"negatives.index={FACTORY}",
]


def test_the_code_does_not_know_the_factory() -> None:
    sources = (ROOT / "xmcray").rglob("*.py")
    assert not any(FACTORY in path.read_text(encoding="utf-8") for path in sources)


def test_it_trains_exports_and_answers(tmp_path: Path, shell: Shell) -> None:
    planted_corpus(tmp_path)
    run = tmp_path / "run"
    bundle = tmp_path / "bundle"
    options = f"--workers 0 {SMALL_SETTINGS} {set_options(SETTINGS)}"
    shell.run(f"train astra --data {tmp_path}/corpus --out {run} {options}")
    shell.run(f"export {run} --out {bundle} --set index.factory={FACTORY}")
    assert list((bundle / "index").glob("*.faiss"))
    found = json.loads(shell.run(f"search {bundle} 'w0x0 w0x1' -k 3 --json"))
    answers = found[0]["answers"]
    exact = Retriever.load(run / "bundle").search(["w0x0 w0x1"], k=3)[0]
    assert [answer["uid"] for answer in answers] == [answer.uid for answer in exact]


def test_its_scores_are_inner_products() -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((500, 16), dtype=np.float32)
    queries = generator.standard_normal((8, 16), dtype=np.float32)
    top = build_index(rows, IndexSpec(factory=FACTORY)).search(queries, 5)
    scores, ids = (top.scores, top.ids) if hasattr(top, "scores") else top
    expected = np.take_along_axis(queries @ rows.T, ids, axis=1)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
