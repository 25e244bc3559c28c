"""The registry finds methods without importing them, and names what is wrong with a foreign one."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from third_party_package import install

from xmcray import settings_files
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name, method_entry, method_names


def test_names_come_without_torch() -> None:
    code = (
        "import sys; from xmcray.methods.registry import method_names, check_method_name\n"
        "assert 'astra' in method_names(); check_method_name('rae')\n"
        "assert not {'torch', 'ray', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_method_has_its_entry_and_a_preset() -> None:
    for name in method_names():
        entry = method_entry(name)
        assert entry.config_type.__module__ == entry.factory.__module__
        assert any(preset.startswith(f"{name}/") for preset in settings_files.presets())


def test_an_unknown_name_gets_the_nearest_one() -> None:
    for function in (method_entry, check_method_name):
        with pytest.raises(ConfigError, match="unknown method 'astro'; did you mean 'astra'"):
            function("astro")


def test_an_installed_package_adds_a_method_and_its_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site"))
    assert method_names()[-1] == "seventh"
    assert method_entry("seventh").config_type().temperature == 0.05
    assert "seventh/planted" in settings_files.presets()
    assert settings_files.load_yaml("preset:seventh/planted")["encoder"] == {"dim": 24}


def test_the_entry_points_of_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = method_names()
    monkeypatch.setattr(metadata, "entry_points", lambda **_: pytest.fail("all were read again"))
    assert method_names() == names


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("seventh = missing_package.seventh:ENTRY", "cannot be loaded .*No module named"),
        ("seventh = their_package.seventh:NOTHING", "cannot be loaded .*has no attribute"),
        ("seventh = their_package.seventh:Seventh", "is a ABCMeta, expected a MethodEntry"),
    ],
)
def test_a_broken_entry_point_is_one_line(
    entry_point: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", entry_point))
    with pytest.raises(ConfigError, match=message) as raised:
        method_entry("seventh")
    assert "\n" not in str(raised.value)
    assert settings_files.presets()  # other presets are still found


def test_two_packages_with_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", "astra = their_package.seventh:ENTRY"))
    with pytest.raises(ConfigError, match=r"astra is registered as .*; uninstall one"):
        method_names()
