"""The wheel, outside the checkout: it has all files, its verbs find them, and its client is small."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from bundles import write_bundle_of, write_memory
from documents import blocks
from heads import free_ports
from planted import write_planted
from served import listening

from xmcray import cli, settings_files
from xmcray.methods.registry import method_names
from xmcray.training.run_config import RunConfig
from xmcray.training.settings_schema import settings_schema
from xmcray.tuning.space import parse_space

ROOT = Path(__file__).parents[2]
# Top-level packages that a program which only asks a server does without.
LARGE = ("torch", "ray", "numpy", "pyarrow", "transformers", "faiss", "scipy", "pandas", "fsspec")


def build_wheel(folder: Path) -> Path:
    """Builds in the checkout, so only the tests of this module, which run in turn, may call it."""
    make = ["make", "wheel", f"WHEELS={folder}", "--old-file", ".venv/.installed"]
    subprocess.run(make, cwd=ROOT, check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel; the interpreter brings the libraries."""
    target = tmp_path_factory.mktemp("package") / "installed"
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


def test_the_source_distribution_has_the_files_of_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as source:
        names = {member.name.partition("/")[2] for member in source if member.isfile()}
    folder = installed / "xmcray"
    of_wheel = {
        path.relative_to(installed).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert of_wheel <= names
    assert {"pyproject.toml", "LICENSE", "docs/package.md"} <= names  # what a build reads


def test_two_builds_of_the_wheel_are_equal(wheel: Path, tmp_path: Path) -> None:
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def copied_by_the_build_stage() -> list[str]:
    """Files and folders of the checkout from which the image builds the package."""
    stage = (ROOT / "cluster/Dockerfile").read_text(encoding="utf-8").split("AS source\n")[1]
    paths = []
    for line in stage.split("FROM ")[0].splitlines():
        if line.startswith("COPY "):
            *sources, _target = line.split()[1:]
            paths += sources
    return paths


def test_the_image_builds_the_same_wheel_as_the_checkout(wheel: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    for path in copied_by_the_build_stage():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_file():
            shutil.copy(ROOT / path, target)
        else:
            # Links stay links, as COPY leaves them.
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, target, symlinks=True, ignore=ignored)
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=source, check=True)
    (built,) = tmp_path.glob("*.whl")
    assert contents(built) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


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
        parse_space(settings_files.load_yaml(f"space:{method}"), method)
        schema = jsonschema.Draft202012Validator(settings_schema(method))
        for name in settings_files.presets():
            if name.startswith(f"{method}/"):
                schema.validate(settings_files.load_yaml(f"preset:{name}"))
        assert not schema.is_valid({"optim": {"epoch": 3}})
        assert not schema.is_valid({"optim": {"epochs": "three"}})


def test_a_schema_has_the_defaults_of_the_method() -> None:
    for method in method_names():
        sections = settings_schema(method)["properties"]
        own = RunConfig.resolve(method, {}).to_dict()
        assert sections.keys() == own.keys()
        del own["method_name"]
        for name, values in own.items():
            assert defaults_of(sections[name]) == json.loads(json.dumps(values)), (method, name)


def defaults_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The defaults that the schema of a section states, those of the sections in it included."""
    values = {}
    for name, setting in schema["properties"].items():
        is_section = "properties" in setting
        values[name] = defaults_of(setting) if is_section else setting["default"]
    # Tuples are lists in JSON.
    return json.loads(json.dumps(values))


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


class Empty:
    """A virtual environment with nothing in it, outside the checkout.

    Attributes:
        folder: working directory of its commands.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self._wheel = wheel
        venv.create(folder / "environment")
        self._settings = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        self._settings["PATH"] = f"{folder}/environment/bin:{os.environ['PATH']}"

    def words(self, command: str) -> list[str]:
        """The words of a documented command; the wheel stands for the package on an index."""
        words = shlex.split(command, comments=True)
        if words[:2] != ["pip", "install"]:
            return words
        # The pip of this environment, because a copy of it takes seconds to install.
        pip = [sys.executable, "-m", "pip", "--python", f"{self.folder}/environment/bin/python"]
        limits = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
        wanted = [word.replace("xmcray", str(self._wheel), 1) for word in words[2:]]
        return [*pip, "install", *limits, *wanted]

    def run(self, command: str) -> str:
        """What a command prints."""
        result = subprocess.run(
            self.words(command),
            cwd=self.folder,
            env=self._settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (
            f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
        return result.stdout

    @contextlib.contextmanager
    def running(self, command: str, says: str) -> Iterator[None]:
        """A command in the background, once it has printed a text."""
        process = subprocess.Popen(
            self.words(command),
            cwd=self.folder,
            env=self._settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            printed = ""
            while says not in printed:
                line = process.stdout.readline()
                assert line, f"{command} ended: {printed[-4000:]}"
                printed += line
            yield
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_the_client_alone_installs_and_asks_as_documented(wheel: Path, tmp_path: Path) -> None:
    empty = Empty(tmp_path, wheel)
    (example,) = blocks("docs/package.md", "python")
    installation = blocks("docs/package.md")[-1]
    # The first page of the documentation says the same.
    assert installation in blocks("docs/index.md")
    for command in installation.splitlines():
        empty.run(command)
    (tmp_path / "serve-state").symlink_to("state")
    with listening(tmp_path, {"m": write_bundle_of(tmp_path / "b", "texts")}) as address:
        (tmp_path / "example.py").write_text(example.replace("http://127.0.0.1:8000", address))
        assert len(empty.run("python example.py").splitlines()) == 5
    packages = tmp_path.glob("environment/lib/python*/site-packages/*.dist-info")
    names = {package.name.split("-")[0] for package in packages}
    assert {"xmcray", "httpx", "pydantic"} <= names
    assert names.isdisjoint(LARGE)


@pytest.mark.soak
@pytest.mark.timeout(3600)  # eleven minutes on two cores that six other processes kept busy
def test_the_documented_commands_work_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    empty = Empty(tmp_path, wheel)
    write_planted(tmp_path / "RAW", 101, 23)
    first, own_data, _ = blocks("docs/package.md")
    *commands, serve = [*first.splitlines(), *own_data.splitlines()]
    for command in commands:
        empty.run(command)
    assert "report.html" in {path.name for path in (tmp_path / "runs/quickstart/run").iterdir()}

    empty.run("xmcray tune astra --data corpus --out sweep --trials 2 --set optim.stop_epoch=2")
    best = yaml.safe_load((tmp_path / "sweep/best.yaml").read_text(encoding="utf-8"))
    assert "optim" in best
    job = "python -m xmcray.files.jobs.train_astra --data corpus --out job --workers 2"
    empty.run(f"{job} --set optim.epochs=2")
    assert (tmp_path / "job/bundle/manifest.json").is_file()

    # What docs/serving.md asks for, because the client's httpx is no requirement of a server.
    empty.run("pip install 'xmcray[serve]'")
    port = free_ports(1)[0]
    (example,) = blocks("docs/package.md", "python")
    (tmp_path / "example.py").write_text(example.replace("8000", str(port)))
    with empty.running(serve.replace("8000", str(port)), f"http://127.0.0.1:{port}"):
        assert len(empty.run("python example.py").splitlines()) == 5


def test_the_page_of_the_index_has_no_links_into_the_checkout() -> None:
    assert "](" not in (ROOT / "docs/package.md").read_text(encoding="utf-8")
