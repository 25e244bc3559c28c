"""House rules that a reader could check with grep. Forbidden words are spelled in parts, lest this file break them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from xmcray import settings_files
from xmcray.training.run_config import RunConfig

ROOT = Path(__file__).parents[2]
MACHINE_PATHS = re.compile("(?<![A-Za-z0-9_.-])/" + "(work|farm|root|Users)/")
UNSAFE_LOADS = re.compile(
    "|".join(
        [
            "pickle" + r"\.loads?\b",
            "torch" + r"\.load\(",
            "allow_pickle" + "=True",
            "trust_remote_code" + "=True",
        ]
    )
)
UNFINISHED = re.compile(
    r"\b("
    + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK", "raise Not" + "ImplementedError"])
    + r")\b"
)


def tracked() -> list[Path]:
    """Files of the project, new ones included, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout: nothing tells which files belong to the project")
    return [path for line in result.stdout.splitlines() if (path := ROOT / line).is_file()]


def lines_with(pattern: re.Pattern[str], suffixes: set[str], but_not: str = "") -> list[str]:
    found = []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if name.endswith("_pb2_grpc.py"):  # made by protoc
            continue
        if (suffixes and path.suffix not in suffixes) or (but_not and name.startswith(but_not)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{i}: {line.strip()[:80]}"
            for i, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    return found


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert MACHINE_PATHS.search("see /" + "work/x")
    assert lines_with(MACHINE_PATHS, suffixes=set()) == []


def test_nothing_is_unpickled_and_no_foreign_code_is_run() -> None:
    assert UNSAFE_LOADS.search("np.load(f, allow_pickle" + "=True)")
    assert lines_with(UNSAFE_LOADS, {".py"}, but_not="tests/") == []  # tests may make hostile files


def test_no_work_is_marked_unfinished() -> None:
    assert UNFINISHED.search("# TO" + "DO: later")
    assert lines_with(UNFINISHED, {".py", ".yaml", ".sh", ".toml"}) == []


def test_no_file_is_large() -> None:
    assert [p.name for p in tracked() if p.stat().st_size > 1 << 20] == []


def test_no_ignored_file_is_tracked() -> None:
    # A merge replaces ignored files without a word: a tracked .venv would delete the environment.
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout: nothing tells which files belong to the project")
    assert result.stdout.splitlines() == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in tracked() if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", settings_files.presets())
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    RunConfig.resolve(name.split("/")[0], settings_files.load_yaml(f"preset:{name}"))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "cluster").rglob("*.yaml")) + sorted((ROOT / "tune").rglob("*.yaml"))
)
def test_every_yaml_file_is_yaml(path: Path) -> None:
    assert any(
        document is not None for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    )


def test_constraints_pin_every_requirement_and_name_no_index() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(
        re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins
    )  # no URL, no "+cpu"
    pinned = {normal(pin.split("==")[0]) for pin in pins}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = project.split("dependencies = [", 1)[1].split("\n]", 1)[0]
    needed = {normal(name) for name in re.findall(r'^\s*"([A-Za-z0-9_.-]+)', base, flags=re.M)}
    assert len(needed) > 8
    assert needed <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_make_has_the_targets_that_the_documents_name() -> None:
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    )
    assert {"setup", "quickstart", "test", "check", "soak", "golden", "clean"} <= targets
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, flags=re.M))
        assert named <= targets, document
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
