"""Texts of a corpus are shown in a terminal, but never obeyed by it."""

from __future__ import annotations

import io

from rich.console import Console

from xmcray.evaluation.table import answer_table


def test_control_characters_are_shown_as_escapes() -> None:
    output = io.StringIO()
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\nred\u200c"
    table = answer_table(f"query {hostile}", [(0.5, f"uid {hostile}", f"text {hostile}")])
    Console(file=output, width=200).print(table)
    printed = output.getvalue()
    assert printed.count(r"\x1b]0;title\x07\x1b[2J\x9b31m\nred") == 3
    assert not set("\x1b\x07\x9b") & set(printed)
