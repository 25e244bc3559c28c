"""What was swapped in is served until another bundle is configured, however its path is written."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from xmcray.errors import ConfigError
from xmcray.serving.settings import ServeConfig, with_absolute_paths
from xmcray.serving.state_folder import StateFolder, folder_name


@pytest.mark.parametrize("was_relative", [False, True])
def test_a_swap_stays_when_the_path_of_the_configured_bundle_is_absolute_now(
    was_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray it is; in one process it is as given, and earlier versions wrote it down like that."""
    monkeypatch.chdir(tmp_path)
    relative = ServeConfig(bundles={"a": "bundles/b"}, state_dir=str(tmp_path))
    (tmp_path / "a").mkdir()
    StateFolder(relative, "a").remember("other", "0" * 64)
    head = tmp_path / "a" / "head.json"
    if was_relative:
        head.write_text(head.read_text().replace(f"{tmp_path}/bundles/b", "bundles/b"))
        assert '"bundles/b"' in head.read_text()
    for config in (relative, with_absolute_paths(relative)):
        assert StateFolder(config, "a").bundle() == ("other", "0" * 64)
    for another in ("bundles/c", "b", "s3://bundles/b"):
        config = dataclasses.replace(relative, bundles={"a": another})
        assert StateFolder(config, "a").bundle()[1] is None


@pytest.mark.parametrize(("before", "now"), [("{}/", "{}"), (".", "{}"), ("{}", "{}/")])
def test_a_swap_stays_however_the_path_of_the_configured_bundle_was_written(
    before: str, now: str, tmp_path: Path
) -> None:
    """Earlier versions wrote it down as it was given."""
    folder = str(tmp_path / "b")
    config = ServeConfig(bundles={"a": now.format(folder)}, state_dir=str(tmp_path))
    (tmp_path / "a").mkdir()
    head = {"configured": before.format(folder), "bundle": "other", "version": "0" * 64}
    (tmp_path / "a" / "head.json").write_text(json.dumps(head))
    assert StateFolder(config, "a").bundle() == ("other", "0" * 64)


def test_a_folder_has_the_name_of_its_model_where_a_disk_takes_it() -> None:
    longest = "a" * 100
    assert folder_name(longest) == longest
    hashed = [folder_name(name) for name in ("../a", ".a", "a/b", "\U0001f600" * 100)]
    assert all(re.fullmatch("model-[0-9a-f]{16}", name) for name in hashed)
    assert len(set(hashed)) == len(hashed)
    with pytest.raises(
        ConfigError, match=r"a name of 101 letters, 'a{20}'..., expected at most 100"
    ):
        ServeConfig(bundles={"b": "x", f"{longest}a": "y"})
