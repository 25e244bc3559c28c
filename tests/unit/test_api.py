"""`import xmcray`: light, complete, and typed; mistakes are raised as one line."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import pandas as pd
import pytest
from corpora import planted_corpus

import xmcray
from xmcray import api, cli
from xmcray.api import preparing
from xmcray.api.settings_sources import merged
from xmcray.data.formats import detect
from xmcray.errors import ConfigError, DataError, XmcrayError

CLASSES = {"Client", "Retriever"}
FUNCTIONS = sorted(set(xmcray.__all__) - CLASSES)
# Verbs that need no function: they are about a shell or a machine, or run other verbs.
VERBS_ALONE = {"completion", "continual", "doctor", "files", "mcp", "quickstart", "schema"}
# The function of a verb that has another name.
OTHER_NAMES = {"search": "load"}


class CalledError(Exception):
    """Raised in place of what a function does, with its name."""


def raiser(name: str) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise CalledError(name)

    return call


def test_the_import_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, xmcray\n"
        "print(sorted(set(xmcray.__all__) - set(dir(xmcray))))\n"
        "xmcray.train, xmcray.prepare\n"
        "print(sorted({'torch', 'ray', 'pandas', 'pyarrow'} & sys.modules.keys()))\n"
        "print(xmcray.Retriever.load.__name__, hasattr(xmcray, 'trian'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[]", "[]", "load False"]


def test_every_function_has_types_and_describes_its_arguments() -> None:
    for name in FUNCTIONS:
        function = getattr(xmcray, name)
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        for argument in signature.parameters.values():
            assert argument.annotation is not inspect.Parameter.empty
            assert f"    {argument.name}: " in function.__doc__, (name, argument.name)


def test_no_module_hides_a_function() -> None:
    """`import xmcray.NAME` would put the module in the place of the function."""
    modules = {path.stem for path in Path(xmcray.__file__).parent.iterdir()}
    assert modules & set(xmcray.__all__) == set()


def test_each_verb_has_a_function_or_a_reason() -> None:
    names = {
        OTHER_NAMES.get(verb, verb.replace("-", "_")) for verb in cli.VERBS.keys() - VERBS_ALONE
    }
    # A sweep of a bundle is an option of the verb tune.
    assert names | {"tune_bundle"} == set(FUNCTIONS)
    assert cli.VERBS.keys() > VERBS_ALONE


@pytest.mark.parametrize("verb", sorted(cli.VERBS.keys() - VERBS_ALONE))
def test_a_verb_calls_its_function(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FUNCTIONS:
        monkeypatch.setattr(api, name, raiser(name))
    monkeypatch.chdir(tmp_path)
    # `evaluate` looks whether its runs exist.
    for run in ("runs/a", "runs/b"):
        Path(run).mkdir(parents=True)
        (Path(run) / "run.json").touch()
    options = cli.parser().parse_args(shlex.split(cli.VERBS[verb].example)[1:])
    with pytest.raises(CalledError) as called:
        options.run(options)
    assert str(called.value) == OTHER_NAMES.get(verb, verb.replace("-", "_"))


def test_tune_with_a_bundle_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "tune_bundle", raiser("tune_bundle"))
    words = "tune --bundle b --data c --space space:memory --out o"
    options = cli.parser().parse_args(words.split())
    with pytest.raises(CalledError, match="tune_bundle"):
        options.run(options)


def test_mistakes_are_reported_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "card.yaml").touch()
    code = (
        "import sys, xmcray\n"
        "from xmcray.errors import XmcrayError\n"
        "calls = [\n"
        "    lambda: xmcray.train('astar', 'c', 'o'),\n"
        "    lambda: xmcray.tune('astar', 'c', 'o'),\n"
        "    lambda: xmcray.auto('c', 'o', budget='soon'),\n"
        "    lambda: xmcray.push('corpus', 'hf://acme/docs'),\n"
        "    lambda: xmcray.promote('a', 'b', roll_back=True),\n"
        "    lambda: xmcray.promote('a', 'b'),\n"
        "    lambda: xmcray.labels('rename', 'b', []),\n"
        "    lambda: xmcray.labels('remove', 'b', '12'),\n"
        "    lambda: xmcray.fuse('b', 'c', 'o'),\n"
        "    lambda: xmcray.events('s', 'o', after=-1),\n"
        "]\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except XmcrayError as error: print(str(error).count('\\n'))\n"
        "print(sorted({'torch', 'ray'} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout.splitlines() == ["0"] * 10 + ["[]"]


def test_settings_come_from_files_and_values_the_later_over_the_earlier(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("optim: {epochs: 3, lr: 0.1}\n")
    sections = {"optim": {"batch_size": 8}}
    values = merged([file, sections, {"optim.epochs": 5}])
    assert values == {"optim": {"epochs": 5, "lr": 0.1, "batch_size": 8}}
    assert sections == {"optim": {"batch_size": 8}}
    # Names in a file may be dotted too, and no source need be a dict.
    file.write_text("optim: {lr: 0.1}\noptim.epochs: 3\n")
    read_only = MappingProxyType({"optim": MappingProxyType({"epochs": 4})})
    assert merged([file, read_only]) == {"optim": {"epochs": 4, "lr": 0.1}}
    file.write_text("optim: 3\n")
    with pytest.raises(ConfigError, match="'optim' is a value, not a section"):
        merged([file, sections])
    preset = merged("preset:astra/sample")
    assert preset["negatives"] == {"uniform": 500, "hard": 20}
    assert preset["method_name"] == "astra"


def test_mistakes_are_raised_as_one_line(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path)
    table = pd.DataFrame({"uid": ["a"], "text": ["b"]})
    mistakes = {
        "unknown method 'astar'": lambda: xmcray.train("astar", corpus, tmp_path / "run"),
        "did you mean 'optim.lr'": lambda: xmcray.plan("astra", {"optim.lrr": 1}, data=corpus),
        "a table is 'queries'": lambda: xmcray.prepare({"queries": table}, tmp_path / "new"),
        "is as in": lambda: xmcray.prepare(
            tmp_path / "raw", tmp_path / "new", append_to=corpus, max_len=3
        ),
        "licence is as in": lambda: xmcray.prepare(
            tmp_path / "raw", tmp_path / "new", append_to=corpus, licence="MIT"
        ),
        "licence is for raw files": lambda: xmcray.prepare(
            corpus.path, tmp_path / "new", licence="MIT"
        ),
        "no run.json": lambda: xmcray.export(corpus, tmp_path / "bundle"),
        "does not exist": lambda: xmcray.evaluate(tmp_path / "none", corpus),
        "to is 'quadrant'": lambda: xmcray.export("run", "out", to="quadrant"),
        "resume is 'always'": lambda: xmcray.train(
            "astra", corpus, tmp_path / "run", workers=0, resume="always"
        ),
        "paths is an empty list": lambda: xmcray.fuse([], corpus, tmp_path / "new"),
        "data is an empty list": lambda: xmcray.fuse(["run"], [], tmp_path / "new"),
        "format is for raw files": lambda: xmcray.prepare(
            {"labels": table}, tmp_path / "new", format="lf"
        ),
        "splits is for raw files": lambda: xmcray.prepare(
            {"labels": table}, tmp_path / "new", splits={"train": "x"}
        ),
        "budget is 0": lambda: xmcray.auto(corpus, tmp_path / "new", budget=0),
    }
    for message, call in mistakes.items():
        with pytest.raises(XmcrayError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("uid", ["12", Path("12")])
def test_a_single_uid_or_path_is_no_list(uid: str | Path, tmp_path: Path) -> None:
    """A text would be taken for a list of its letters: labels "1" and "2"."""
    with pytest.raises(ConfigError, match=r"what is '12', expected a list; write \['12'\]"):
        xmcray.labels("remove", tmp_path / "bundle", uid)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"paths is '12', expected a list; write \['12'\]"):
        xmcray.fuse(uid, "corpus", tmp_path / "fused")  # type: ignore[arg-type]


def test_labels_of_tables_are_uids_also_if_they_are_integers() -> None:
    labels = pd.DataFrame({"uid": [2, 0, 1], "text": ["two", "zero", "one"]})
    train = pd.DataFrame({"text": ["about two", "about zero"], "labels": [[2], [0]]})
    tables = {"labels": labels, "train": train}

    with preparing._raw_tables(tables, None, None, None, False) as folder:
        queries = list(detect(folder).queries("train", 3, pytest.fail))

    found = [labels["text"][query.label_ids[0]] for query in queries]
    assert found == ["two", "zero"]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_of_labels_in_tables_are_refused(kind: type) -> None:
    table = pd.DataFrame({"uid": [2], "text": ["two"], "labels": [kind([2])]})
    with (
        pytest.raises(
            DataError, match=f"table train has a {kind.__name__} of labels, expected a list"
        ),
        preparing._raw_tables(
            {"labels": table[["uid", "text"]], "train": table}, None, None, None, False
        ),
    ):
        pass


def test_a_table_with_mixed_types_is_one_line() -> None:
    table = pd.DataFrame({"uid": [1, "a"], "text": ["x", "y"]})
    with (
        pytest.raises(DataError, match="table labels cannot be read"),
        preparing._raw_tables({"labels": table, "train": table}, None, None, None, False),
    ):
        pass
