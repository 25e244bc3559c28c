"""The Python example of the first page of the documentation works as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import blocks
from planted import write_planted


@pytest.mark.soak
def test_the_example_of_index_md_prints_five_answers(
    cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_planted(tmp_path / "RAW", 101, 23)
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/index.md", "python")
    # The processes of the tests' cluster started in another folder.
    code = code.replace('"RAW"', f'"{tmp_path}/RAW"')
    exec(compile(code, "docs/index.md", "exec"), {})
    answers = [line for line in capsys.readouterr().out.splitlines() if " label" in line]
    assert len(answers) == 5
    assert (tmp_path / "run" / "bundle" / "manifest.json").is_file()
