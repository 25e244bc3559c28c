"""The retrievers of docs/integrations.md, with the packages that they are for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xmcray.serving.schema import Answer, Result

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"


class Client:
    """Answers as xmcray.client.Client does."""

    def search(self, texts: list[str], k: int) -> Any:
        answers = [
            Answer(uid=f"u{place}", text=f"{texts[0]} {place}", score=-place) for place in range(k)
        ]
        return SimpleNamespace(results=[Result(answers=answers, truncated=False)])


def retriever_of(package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that the page's example for a package makes."""
    monkeypatch.setattr("xmcray.client.Client", Client)
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        if package in block
    ]
    names: dict[str, Any] = {}
    # Without the future of this file, which would make its annotations strings.
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), names)
    return names["LabelRetriever"]


def test_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = retriever_of("langchain_core", monkeypatch)(client=Client(), k=2).invoke("sort")
    assert [document.page_content for document in documents] == ["sort 0", "sort 1"]
    assert documents[1].metadata["uid"] == "u1"


def test_llama_index(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = retriever_of("llama_index", monkeypatch)(Client(), 2).retrieve("sort")
    assert [(node.node.node_id, node.score) for node in nodes] == [("u0", 0.0), ("u1", -1.0)]
