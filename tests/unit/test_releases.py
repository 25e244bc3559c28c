"""What each released version has stored still opens, answers as it did, and goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from served import served

RELEASES = Path(__file__).parents[1] / "releases"
sys.path.insert(0, str(RELEASES))

from write import (  # noqa: E402
    BUNDLES,
    SERVED,
    Answers,
    add_one,
    answers_of,
    served_answers,
    train_command,
)

from xmcray import __version__, cli  # noqa: E402
from xmcray.data.corpus import Corpus  # noqa: E402
from xmcray.errors import XmcrayError  # noqa: E402
from xmcray.storage.artifact import new_artifact  # noqa: E402

VERSIONS = sorted(path.name for path in RELEASES.iterdir() if (path / "answers.json").is_file())


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version has stored."""
    return Path(shutil.copytree(RELEASES / request.param, tmp_path / "stored"))


def assert_equal_answers(answers: Answers, expected: Answers) -> None:
    for one, then in zip(answers, expected, strict=True):
        assert [uid for uid, _ in one] == [uid for uid, _ in then]
        scores = [score for _, score in one]
        np.testing.assert_allclose(scores, [score for _, score in then], atol=1e-6)


@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_bundle_answers_as_it_did(stored: Path, bundle: str) -> None:
    expected = json.loads((stored / "answers.json").read_text())
    assert_equal_answers(answers_of(stored / bundle), expected[bundle])


def test_a_server_goes_on_with_its_state(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((stored / "answers.json").read_text())[SERVED]
    # The state folder names the bundles by paths that are relative to this folder.
    monkeypatch.chdir(stored)

    async def main() -> None:
        async with served(Path(), {"default": Path("bundle")}) as server:
            assert_equal_answers(await served_answers(server), expected)
            # Three operations are in the log, the last of them only there.
            assert await add_one(server, "later", "w0x0 w0x1") == 4
            again = {"op": "add", "uid": "after", "text": "w3x1"}
            assert "which is there already" in (await server.change(again)).text
            newest = await served_answers(server)
            assert "later" in {uid for uid, _ in newest[0]}

    asyncio.run(main())


def test_a_run_goes_on_with_its_corpus(stored: Path) -> None:
    assert Corpus.open(stored / "corpus").card.num_labels == 20
    before = (stored / "run" / "metrics.jsonl").read_bytes()
    command = train_command(str(stored / "corpus"), str(stored / "run"))
    assert cli.main(command) == 0
    records = (stored / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(records[-1])
    then = json.loads(before.splitlines()[-1])
    assert last["step"] == then["step"]
    assert json.loads((stored / "run" / "metrics.json").read_text())
    results = answers_of(stored / "run" / "bundle")
    assert [answers[0][0] for answers in results[:2]] == [
        answers[0][0] for answers in answers_of(stored / "bundle")[:2]
    ]


@pytest.mark.parametrize("file", ["corpus/manifest.json", "bundle/manifest.json"])
def test_what_a_later_version_has_stored_is_refused_with_advice(stored: Path, file: str) -> None:
    manifest = json.loads((stored / file).read_text())
    manifest["schema_version"] += 1
    (stored / file).write_text(json.dumps(manifest))
    opened = Corpus.open if file.startswith("corpus") else answers_of
    with pytest.raises(XmcrayError, match="use the release that wrote it"):
        opened((stored / file).parent)
    manifest["release"] = "7.8.9"
    (stored / file).write_text(json.dumps(manifest))
    with pytest.raises(XmcrayError) as raised:
        opened((stored / file).parent)
    assert f"has format 2, xmcray {__version__} reads format 1; use xmcray 7.8.9," in str(
        raised.value
    )
    assert "\n" not in str(raised.value)


def test_an_artifact_names_the_release_that_wrote_it(tmp_path: Path) -> None:
    with new_artifact(tmp_path / "new", "corpus", {}) as folder:
        (folder / "file").write_text("content")
    assert json.loads((tmp_path / "new" / "manifest.json").read_text())["release"] == __version__


def test_each_release_has_kept_what_it_stores() -> None:
    assert __version__ in VERSIONS, "run: python tests/releases/write.py"
    for version in VERSIONS:
        files = [path for path in (RELEASES / version).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 300_000
