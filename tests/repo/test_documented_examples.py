"""Examples of the pages that are no commands of ours: Python, requests, settings, and other programs' commands.

docs/python.md, the first page and the notebook are run by tests/on_ray, the retrievers by
tests/unit/serving/test_recipes.py, and the commands of docs/package.md by test_package.py.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
import yaml
from bundles import write_bundle_of
from documents import PAGES, ROOT, blocks
from packaging.requirements import Requirement
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli
from served import listening

from xmcray import cli, config
from xmcray.cli.continual import ContinualConfig
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.settings import ServeConfig
from xmcray.training.run_config import RunConfig
from xmcray.tuning.space import parse_space

ALL_PAGES = [
    *PAGES,
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
# Which test runs the Python blocks of a page.
PYTHON = {
    "docs/index.md": "tests/on_ray/test_first_page.py",
    "docs/integrations.md": "tests/unit/serving/test_recipes.py",
    "docs/package.md": "tests/repo/test_package.py",
    "docs/python.md": "tests/on_ray/test_python.py",
    "docs/serving.md": "tests/repo/test_documented_examples.py",
}
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server whose state is where the pages say."""
    bundle = write_bundle_of(tmp_path / "b", "texts")
    (tmp_path / "serve-state").symlink_to("state")
    with listening(tmp_path, {"m": bundle}, collect_events=True) as url:
        yield url


def run_shell(code: str, folder: Path) -> str:
    return subprocess.run(
        ["bash", "-ec", code], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_each_python_block_is_run_by_a_test() -> None:
    pages = {page for page in ALL_PAGES if blocks(page, "python")}
    assert pages == set(PYTHON)
    for page, test in PYTHON.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_the_python_client_of_the_serving_page(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/serving.md", "python")
    exec(compile(code.replace(ADDRESS, address), "docs/serving.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_requests_by_curl(address: str, tmp_path: Path) -> None:
    search, swap = [code for code in blocks("docs/serving.md") if code.startswith("curl")]
    answer = json.loads(run_shell(search.replace(ADDRESS, address), tmp_path))
    first = answer["results"][0]["answers"]
    assert len(first) == 5
    (feedback,) = [code for code in blocks("docs/continual.md") if code.startswith("curl")]
    for known, ours in (
        (ADDRESS, address),
        ("4b1c...", answer["request_id"]),
        ("u7", first[0]["uid"]),
    ):
        assert known in feedback
        feedback = feedback.replace(known, ours)
    assert json.loads(run_shell(feedback, tmp_path))["number"] > 0
    new = write_bundle_of(tmp_path / "new", "texts", shard_rows=400)
    for known, ours in ((ADDRESS, address), ("bundles/new", str(new))):
        assert known in swap
        swap = swap.replace(known, ours)
    assert json.loads(run_shell(swap, tmp_path))["version"] == Retriever.load(new).sha256


def test_settings_in_yaml() -> None:
    for code in blocks("docs/encoders.md", "yaml"):
        RunConfig.resolve("astra", yaml.safe_load(code))
    (served,) = blocks("docs/reranking.md", "yaml")
    ServeConfig(bundles={"a": "b"}, **yaml.safe_load(served))
    (cycle,) = blocks("docs/continual.md", "yaml")
    config.build(ContinualConfig, yaml.safe_load(cycle))
    tuning = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    (space,) = re.findall(r"((?:^    [\w.]+: \{.*\n)+)", tuning, re.MULTILINE)
    assert len(parse_space(yaml.safe_load(space), "docs/tuning.md")) == 5


def test_the_tool_in_the_settings_of_an_agent() -> None:
    (code,) = blocks("docs/integrations.md", "json")
    (tool,) = json.loads(code)["mcpServers"].values()
    assert tool["command"] == "xmcray"
    cli.parser().parse_args(tool["args"])


def other_commands() -> list[list[str]]:
    """The words of each command of a block that is not ours."""
    commands = []
    for page in ALL_PAGES:
        for code in [*blocks(page), *blocks(page, "sh")]:
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith(("ray ", "serve ", "pip ", "make ", "docker ", "kubectl ")):
                    words = shlex.split(line.split(" && ")[0].rstrip("|"), comments=True)
                    commands.append(words)
    return commands


OTHERS = [*dict.fromkeys(map(tuple, other_commands()))]


@pytest.mark.parametrize("words", OTHERS, ids=shlex.join)
def test_a_command_of_another_program_exists(words: tuple[str, ...]) -> None:
    """Ray's own parser takes its commands; files, targets and extras that a command names are there."""
    program, *arguments = words
    if program in ("ray", "serve"):
        parse(ray_cli if program == "ray" else serve_cli, program, arguments)
    if program == "make":
        targets = re.findall(
            r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(arguments) <= set(targets)
    if program == "pip":
        extras = set(metadata.metadata("xmcray").get_all("Provides-Extra") or ())
        for word in arguments[1:]:
            if not word.startswith("-"):
                assert Requirement(word.replace(".[", "xmcray[")).extras <= extras
    for word in arguments:
        if word.startswith(("cluster/", "serve/", "jobs/")):
            assert (ROOT / word).exists()


def parse(group: click.Command, name: str, arguments: list[str]) -> None:
    """Raises click.UsageError if a command or an option does not exist; runs nothing."""
    context = group.make_context(name, list(arguments))
    while isinstance(group, click.Group):
        rest = [*context._protected_args, *context.args]
        command_name, command, rest = group.resolve_command(context, rest)
        assert command is not None
        group = command
        context = group.make_context(command_name, rest, parent=context)


def test_a_wrong_command_of_another_program_is_found() -> None:
    for arguments in (
        ["upp", "cluster/aws.yaml"],
        ["start", "--heads"],
        ["job", "submit", "--dir"],
    ):
        with pytest.raises(click.UsageError):
            parse(ray_cli, "ray", arguments)
    assert len(OTHERS) > 20
