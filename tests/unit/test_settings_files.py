"""Files of settings: what is wrong with one gets one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from xmcray import settings_files
from xmcray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [1\nb: 2\n", "is not valid YAML"),
        (
            b"optim:\n  lr: 1\noptim:\n  epochs: 2\n",
            "found 'optim' twice, expected it once .* line 3",
        ),
        (b"optim: {lr: 1, lr: 2}\n", "found 'lr' twice, expected it once"),
        (b"- a\n", "holds a list, expected a mapping of settings"),
        (b"a: \xff\n", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_settings(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        settings_files.load_yaml(str(path))
    assert "\n" not in str(caught.value)
    path.write_text("# nothing yet\n")
    assert settings_files.load_yaml(str(path)) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.yaml", "none.yaml does not exist, expected a YAML file; check the path"),
        ("astra/sample", "expected a YAML file; the preset of that name is preset:astra/sample"),
        ("index", "expected a YAML file; the space of that name is space:index"),
        (".", r"file . cannot be read \(Is a directory\), expected a YAML file"),
    ],
)
def test_a_file_that_is_not_there(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        settings_files.load_yaml(name)
