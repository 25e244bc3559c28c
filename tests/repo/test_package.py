"""The wheel, outside the checkout: it has all files, its verbs find them, and its client is small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from bundles import write_memory

from xmcray import cli, config
from xmcray.methods.registry import method_names
from xmcray.training.run import RunConfig
from xmcray.training.settings_schema import settings_schema
from xmcray.tuning.space import parse_space

ROOT = Path(__file__).parents[2]
# Top-level packages that a program which only asks a server does without.
LARGE = ("torch", "ray", "numpy", "pyarrow", "transformers", "faiss", "scipy", "pandas", "fsspec")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel; the interpreter brings the libraries."""
    folder = tmp_path_factory.mktemp("package")
    make = ["make", "wheel", f"WHEELS={folder / 'wheels'}", "--old-file", ".venv/.installed"]
    subprocess.run(make, cwd=ROOT, check=True)
    (wheel,) = (folder / "wheels").iterdir()
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    return target


def run(installed: Path, *words: str) -> str:
    """What a Python with the wheel prints, in a folder without the checkout."""
    result = subprocess.run(
        [sys.executable, *words],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def verb(*words: str) -> tuple[str, ...]:
    return "-c", "import sys; from xmcray.cli import main; sys.exit(main())", *words


def test_the_wheel_has_the_files_of_the_checkout(installed: Path) -> None:
    assert run(installed, "-c", "import xmcray; print(xmcray.__file__)").startswith(str(installed))
    folders = {"spaces": "tune/spaces", "jobs": "jobs", "cluster": "cluster", "serve": "serve"}
    names = run(installed, *verb("files")).splitlines()
    tracked = subprocess.run(
        ["git", "ls-files", *folders.values()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(names) == len(tracked.stdout.splitlines())
    for name in names:
        folder, _, rest = name.partition("/")
        assert (ROOT / folders[folder] / rest).is_file(), name
    printed = run(installed, *verb("files", "cluster/aws.yaml"))
    assert printed == (ROOT / "cluster/aws.yaml").read_text(encoding="utf-8")
    help_text = run(installed, "-m", "xmcray.files.jobs.train_astra", "--help")
    assert "--workers" in help_text


def test_the_client_needs_neither_torch_nor_ray(installed: Path) -> None:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({LARGE}))"
    assert run(installed, "-c", f"{hidden}; from xmcray.client import Client; print(1)") == "1\n"


def test_a_bundle_is_tuned_with_a_space_of_the_package(installed: Path, tmp_path: Path) -> None:
    bundle = write_memory(tmp_path)
    sweep = tmp_path / "sweep"
    command = ["tune", "--bundle", str(bundle), "--space", "space:memory", "--trials", "2"]
    run(installed, *verb(*command, "--data", str(tmp_path / "corpus"), "--out", str(sweep)))
    best = yaml.safe_load((sweep / "best.yaml").read_text(encoding="utf-8"))
    assert "weight" in best["memory"]


def test_each_method_has_a_space_and_a_schema() -> None:
    for method in method_names():
        parse_space(config.load_yaml(f"space:{method}"), method)
        schema = jsonschema.Draft202012Validator(settings_schema(method))
        for name in config.presets():
            if name.startswith(f"{method}/"):
                schema.validate(config.load_yaml(f"preset:{name}"))
        assert not schema.is_valid({"optim": {"epoch": 3}})
        assert not schema.is_valid({"optim": {"epochs": "three"}})


def test_the_configuration_that_is_printed_gives_the_same_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "prime", "--data", "none", "--out", "none", "--print-config"]
    assert cli.main([*words, "--set", "optim.epochs=7"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = RunConfig.resolve("prime", {"optim": {"epochs": 7}})
    assert RunConfig.resolve("prime", printed) == expected


def test_a_shell_completes_verbs_and_options(installed: Path, tmp_path: Path) -> None:
    assert "xmcray" in run(installed, *verb("completion", "fish"))
    for line, expected in {
        "xmcray prom": "promote",
        "xmcray train --pri": "--print-config",
    }.items():
        out = tmp_path / expected
        shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
        command = [sys.executable, *verb()]
        environment = {**os.environ, **shell, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
        subprocess.run(command, env=environment, check=True)
        assert out.read_text(encoding="utf-8").strip() == expected


def test_the_page_of_the_index_has_no_links_into_the_checkout() -> None:
    assert "](" not in (ROOT / "docs/package.md").read_text(encoding="utf-8")
