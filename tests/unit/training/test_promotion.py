"""`promote`: a worse bundle is refused, an equal one is not, and a server answers from the better one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpora import grown_corpora
from served import ADMIN, TOKEN, listening
from simulated import simulated_verdict

from xmcray.cli import main
from xmcray.client import Client
from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.training.outcome import measure_bundle
from xmcray.training.promotion import measure_newest

DRAWS = 20
SMALL = ["encoder.dim=16", "optim.batch_size=32", "negatives.uniform=8", "negatives.hard=0"]


def test_a_bundle_that_is_a_point_worse_is_refused() -> None:
    verdicts = [simulated_verdict(seed, 0.01) for seed in range(DRAWS)]
    assert sum(not verdict.accepted for verdict in verdicts) >= 19


def test_an_equal_bundle_is_accepted() -> None:
    verdicts = [simulated_verdict(seed, 0.0) for seed in range(DRAWS)]
    assert sum(verdict.accepted for verdict in verdicts) >= 18


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    """A folder with the runs `a`, and `b` with more queries and labels; the corpus of `b`."""
    folder = tmp_path_factory.mktemp("promote")
    old, new = grown_corpora(folder, 15)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    train = ["train", "astra", "--workers", "0", "--no-evaluate"]
    first = ["--data", str(old.path), "--out", f"{folder}/a", *settings]
    second = ["--data", str(new.path), "--out", f"{folder}/b", "--from", f"{folder}/a"]
    assert main([*train, *first, "--set", "optim.epochs=1"]) == 0
    assert main([*train, *second, "--set", "optim.epochs=8"]) == 0
    return folder, new


def test_answers_are_matched_by_uid(bundles: tuple[Path, Corpus]) -> None:
    folder, corpus = bundles
    bundle = f"{folder}/b/bundle"
    whole = measure_bundle(Retriever.load(bundle), corpus, "test")
    newest = measure_newest(bundle, corpus)
    assert newest.metrics == pytest.approx(whole.metrics)
    last = measure_newest(bundle, corpus, last=7)
    assert last.queries <= 7
    # A bundle that lacks some of the labels has fewer answers to give.
    assert measure_newest(f"{folder}/a/bundle", corpus).queries == newest.queries


def test_a_server_answers_from_the_new_bundle_and_goes_back(
    bundles: tuple[Path, Corpus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, corpus = bundles
    old = folder / "a/bundle"
    new = folder / "b/bundle"
    roots = {"bundle_roots": (str(folder),)}
    with listening(tmp_path, {"m": old}, **roots) as url:
        end = ["--url", url, "--admin-token-file", f"{tmp_path}/state/admin-token"]
        end += ["--token-file", f"{tmp_path}/state/token"]
        data = ["--data", str(corpus.path)]

        def promote(*words: object) -> int:
            return main(["promote", *map(str, words), *end])

        def served() -> Any:
            with Client(url, token=TOKEN, admin_token=ADMIN) as client:
                return client.models()[0]

        first = served()
        assert promote(old, new, *data, "--metric", "P@6") == 2
        assert promote(new, old, *data) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "the new bundle is not promoted: P@5 -" in error
        assert served() == first
        assert promote(old, new, *data) == 0
        assert "to go back: xmcray promote" in capsys.readouterr().out
        assert served().num_labels == corpus.card.num_labels
        # A command that was killed after the swap is repeated.
        assert promote(old, new, *data) == 0
        assert promote(old, new, "--roll-back") == 0
        assert served().version == first.version
        assert promote(new, tmp_path / "state") == 2
        assert served().version == first.version
