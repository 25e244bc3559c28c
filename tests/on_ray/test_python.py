"""`import xmcray`: the examples of its page and of the notebook work, and mistakes are one line."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from documents import ROOT
from heads import free_ports
from planted import write_planted

from xmcray import api
from xmcray.errors import XmcrayError


def blocks_of_page() -> str:
    """The Python code of the page, as one script."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))


def cells_of_notebook() -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / "examples" / "tables_to_answers.ipynb").read_text("utf-8"))
    cells: list[dict[str, Any]] = notebook["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_examples_of_the_page_work(
    cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_planted(tmp_path / "raw", 101, 23)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(blocks_of_page(), "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "did you mean 'optim.epochs'?" in printed
    assert names["corpus"].card.num_train == 80
    assert names["corpus"].card.max_len == 64
    # Every test query has the same answers with and without the index of so few labels.
    assert names["exact"].metrics["P@1"] == names["by_index"].metrics["P@1"]
    assert (tmp_path / "small" / "manifest.json").is_file()
    assert (tmp_path / "vectors" / "README.md").is_file()
    assert len(names["sweep"].settings) == 4
    assert names["choice"].queries > 0
    assert (tmp_path / "fused" / "manifest.json").is_file()
    labels = len(names["labels"])
    assert f"{labels + 1}\n101\n" in printed


def test_the_notebook_ends_with_an_answer(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The commands of this interpreter's environment come first.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    cells = cells_of_notebook()
    assert all(not cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace('"8000"', f'"{free_ports(1)[0]}"')
    names: dict[str, Any] = {}
    exec(compile(code, "tables_to_answers.ipynb", "exec"), names)
    assert names["metrics"]["R@100"] > 0.5
    answers = [answer.uid for answer in names["result"].answers]
    assert len(answers) == 3
    assert set(answers) <= set(names["labels"].uid)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"uid": ["a", "a"], "text": ["x", "y"], "labels": [["l"], ["l"]]},
            r"^tables \(train row 2\): duplicate uid 'a'; repair",
        ),
        ({"uid": ["a"], "body": ["x"]}, r"^tables \(train\) has no column text"),
        (None, "^there is no table train, expected labels, train and perhaps test; add it$"),
    ],
)
def test_a_mistake_in_a_table_names_the_table(
    tmp_path: Path, train: dict[str, list[object]] | None, message: str
) -> None:
    tables = {"labels": pd.DataFrame({"uid": ["l"], "text": ["label"]})}
    if train is not None:
        tables["train"] = pd.DataFrame(train)
    with pytest.raises(XmcrayError, match=message):
        api.prepare(tables, tmp_path / "out", progress=False)
