"""`promote`: a worse bundle is refused, an equal one is not, and a server answers from the better one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from bundles import write_bundle_of
from corpora import grown_corpora
from served import ADMIN, TOKEN, listening
from shell import run_command, set_options
from simulated import simulated_verdict

from xmcray.client import Client
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.retrieval.attributes import Scalar
from xmcray.retrieval.labels import (
    NewLabel,
    add_labels,
    annotate_labels,
    carry_attributes,
    remove_labels,
)
from xmcray.retrieval.retriever import Retriever
from xmcray.serving.schema import Operation
from xmcray.training.outcome import measure_bundle
from xmcray.training.promotion import NotPromotedError, lost_changes, measure_newest

DRAWS = 20
SMALL = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "negatives.uniform=8",
    "negatives.hard=0",
    "method.classifier.lr=0.05",  # so low that one epoch leaves much to learn
]


def test_a_bundle_that_is_a_point_worse_is_refused() -> None:
    verdicts = [simulated_verdict(seed, 0.01) for seed in range(DRAWS)]
    assert sum(not verdict.accepted for verdict in verdicts) >= 19


def test_an_equal_bundle_is_accepted() -> None:
    verdicts = [simulated_verdict(seed, 0.0) for seed in range(DRAWS)]
    assert sum(verdict.accepted for verdict in verdicts) >= 18


def test_too_few_queries_are_refused_although_they_are_answered_alike() -> None:
    alike = simulated_verdict(0, 0.0, share=0.0)
    assert alike.accepted
    few = dataclasses.replace(alike, num_queries=408)
    with pytest.raises(
        NotPromotedError, match=r"expected .* of at least 409 queries; test with more"
    ):
        few.check()
    # A bundle that loses all answers to 0.9 % of the queries goes unnoticed by all of so many.
    assert (1 - few.margin) ** 409 < 0.025 < (1 - few.margin) ** 408
    # With a wider margin fewer are enough.
    dataclasses.replace(few, margin=0.01).check()


def test_a_better_bundle_needs_fewer_queries_but_not_a_handful() -> None:
    equal = simulated_verdict(0, 0.0)
    row = dataclasses.replace(equal.row, difference=0.02, low=0.01, high=0.03)
    better = dataclasses.replace(equal, comparison=[row])
    assert dataclasses.replace(better, num_queries=50).accepted
    with pytest.raises(NotPromotedError, match="test with more queries"):
        dataclasses.replace(better, num_queries=49).check()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    """A folder with the runs `a`, and `b` with more queries and labels; the corpus of `b`."""
    folder = tmp_path_factory.mktemp("promote")
    old, new = grown_corpora(folder, 15)
    train = "train astra --workers 0 --no-evaluate"
    first = f"--data {old.path} --out {folder}/a {set_options(SMALL)} --set optim.epochs=1"
    second = f"--data {new.path} --out {folder}/b --from {folder}/a --set optim.epochs=8"
    assert run_command(f"{train} {first}") == 0
    assert run_command(f"{train} {second}") == 0
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
        state = tmp_path / "state"
        tokens = f"--token-file {state}/token --admin-token-file {state}/admin-token"
        # It has 30 test queries, which are too few for the usual margin.
        data = f"--data {corpus.path} --margin 12"

        def promote(arguments: str) -> int:
            return run_command(f"promote {arguments} --url {url} {tokens}")

        def served() -> Any:
            with Client(url, token=TOKEN, admin_token=ADMIN) as client:
                return client.models()[0]

        first = served()
        assert promote(f"{old} {new} {data} --metric P@6") == 2
        assert promote(f"{new} {old} {data}") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "the new bundle is not promoted: P@5 -" in error
        assert served() == first
        assert promote(f"{old} {new} {data}") == 0
        assert "to go back: xmcray promote" in capsys.readouterr().out
        assert served().num_labels == corpus.card.num_labels
        # A command that was killed after the swap is repeated.
        assert promote(f"{old} {new} {data}") == 0
        assert promote(f"{old} {new} --roll-back") == 0
        assert served().version == first.version
        assert promote(f"{new} {state}") == 2
        assert served().version == first.version
        # A compaction counts as the bundle that it was made of.
        with Client(url, token=TOKEN, admin_token=ADMIN) as client:
            client.change_labels([Operation(op="delete", uid="label0")])
            compacted = client.compact(f"{state}/compacted").bundle
            client.swap(compacted, recall_floor=0.0)
            assert served().version != served().compacted_from == first.version
            # It may also give way to that bundle.
            assert promote(f"{old} {compacted} --roll-back") == 0
            assert served().version == first.version
            client.swap(compacted, recall_floor=0.0)
        assert promote(f"{new} {old} --roll-back") == 0
        assert promote(f"{old} {new} {data}") == 0
        assert served().num_labels == corpus.card.num_labels - 1, "what was removed stays removed"


def test_labels_that_stay_keep_their_attributes(
    bundles: tuple[Path, Corpus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, corpus = bundles
    old = tmp_path / "old"
    new = tmp_path / "new"
    sets: dict[str, dict[str, Scalar]] = {
        "label1": {"price": 1.5},
        "label2": {"price": 7},
        "label3": {},
    }
    annotate_labels(folder / "a/bundle", sets, old)
    new.symlink_to(shutil.copytree(folder / "b/bundle", tmp_path / "new-1"))
    remove_labels(new.resolve(), ["label2"])
    with listening(tmp_path, {"m": old}, bundle_roots=(str(tmp_path),)) as url:
        state = tmp_path / "state"
        command = (
            f"promote {old} {new} --data {corpus.path} --margin 12 --url {url}"
            f" --token-file {state}/token --admin-token-file {state}/admin-token"
        )
        assert run_command(command) == 0
        assert (
            f"labels of {new} that got their attributes from {old}: 1\n" in capsys.readouterr().out
        )
        with Client(url, token=TOKEN) as client:
            assert client.label("label1").attributes == {"price": 1.5}
            assert client.models()[0].attributes == ["price"]
    assert new.is_symlink()
    assert carry_attributes(old, new) == 0, "it has attributes, which stay as they are"
    with pytest.raises(ConfigError, match="give them to a copy"):
        carry_attributes(old, f"file://{folder}/b/bundle")


def test_changes_of_the_bundle_in_use_that_the_new_one_lacks_are_named(
    bundles: tuple[Path, Corpus], tmp_path: Path
) -> None:
    folder, _ = bundles
    old, new, changed = folder / "a/bundle", folder / "b/bundle", tmp_path / "changed"
    assert lost_changes(str(old), str(new)) == []
    plain = write_bundle_of(tmp_path / "plain", "texts")
    [probabilities] = lost_changes(str(old), str(plain))
    assert f"{plain} gives no probabilities" in probabilities
    labels = [NewLabel("extra", "some words"), NewLabel("label20", "label 20")]
    add_labels(old, labels, changed)
    remove_labels(changed, ["label1", "label2"])
    add_labels(changed, [NewLabel("label2", "back again")])
    lacks, answers = lost_changes(str(changed), str(new))
    assert "lacks labels that joined" in lacks
    assert "(1, such as 'extra')" in lacks
    assert "answers labels that were removed" in answers
    assert "(1, such as 'label1')" in answers
