"""`import xmcray`: light, complete, and typed; mistakes are raised as one line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from corpora import planted_corpus

import xmcray
from xmcray import api
from xmcray.errors import XmcrayError


def test_the_import_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, xmcray\n"
        "print(sorted(set(xmcray.__all__) - set(dir(xmcray))))\n"
        "xmcray.train, xmcray.prepare\n"
        "print(sorted({'torch', 'ray', 'pandas', 'pyarrow'} & sys.modules.keys()))\n"
        "print(xmcray.Retriever.load.__name__, hasattr(xmcray, 'trian'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[]", "[]", "load False"]


def test_every_function_has_types_and_describes_its_arguments() -> None:
    for name in ("distil", "evaluate", "export", "load", "plan", "prepare", "train"):
        function = getattr(xmcray, name)
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        for argument in signature.parameters.values():
            assert argument.annotation is not inspect.Parameter.empty
            assert f"    {argument.name}: " in function.__doc__, (name, argument.name)


def test_settings_come_from_files_and_values_the_later_over_the_earlier(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("optim: {epochs: 3, lr: 0.1}\n")
    sections = {"optim": {"batch_size": 8}}
    values = api.merged([file, sections, {"optim.epochs": 5}])
    assert values == {"optim": {"epochs": 5, "lr": 0.1, "batch_size": 8}}
    assert sections == {"optim": {"batch_size": 8}}
    assert api.merged("preset:astra/sample")["negatives"] == {"uniform": 500, "hard": 20}


def test_mistakes_are_raised_as_one_line(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path)
    table = pd.DataFrame({"uid": ["a"], "text": ["b"]})
    mistakes = {
        "unknown method 'astar'": lambda: xmcray.train("astar", corpus, tmp_path / "run"),
        "did you mean 'optim.lr'": lambda: xmcray.plan("astra", {"optim.lrr": 1}, data=corpus),
        "a table is 'queries'": lambda: xmcray.prepare({"queries": table}, tmp_path / "new"),
        "is as in": lambda: xmcray.prepare(
            tmp_path / "raw", tmp_path / "new", append_to=corpus, max_len=3
        ),
        "no run.json": lambda: xmcray.export(corpus, tmp_path / "bundle"),
        "does not exist": lambda: xmcray.evaluate(tmp_path / "none", corpus),
        "to is 'quadrant'": lambda: xmcray.export("run", "out", to="quadrant"),
    }
    for message, call in mistakes.items():
        with pytest.raises(XmcrayError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "new").exists()
