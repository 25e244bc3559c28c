"""The verbs that change labels: what they refuse, and bundles that change at one moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import DIM, NEW, TEXTS
from shell import Shell

from xmcray.data.tokens import train_wordpiece
from xmcray.errors import BundleError, DataError, StorageError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import add_labels, remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.storage.artifact import exclusive, open_artifact
from xmcray.storage.manifest import finish_manifest


def fail_on_a_full_disk(*_: Any) -> None:
    raise OSError(28, "no space left")


@pytest.mark.parametrize("system", ["exchanges", "renames"])
def test_a_bundle_changes_at_one_moment(
    system: str,
    bundles: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if system == "renames":
        # Refused, as by a system without the call.
        monkeypatch.setattr("xmcray.storage.whole_files._RENAME_EXCHANGE", 1 << 20)
    bundle = tmp_path / "b"
    shutil.copytree(bundles("texts"), bundle)
    reader = Retriever.load(bundle)
    answers = reader.search(TEXTS[:5], 3)

    # Changes that fail leave the bundle as it is.
    monkeypatch.setattr(np, "save", fail_on_a_full_disk)
    with pytest.raises(StorageError, match="disk is full"):
        add_labels(bundle, NEW)
    monkeypatch.undo()
    in_use = pytest.raises(StorageError, match="is being changed by another process")
    with exclusive(bundle), in_use:
        remove_labels(bundle, ["u1"])
    _, manifest = open_artifact(bundle, "bundle")
    assert manifest.sha256 == reader.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["b"]

    ((best,),) = reader.search(TEXTS[:1], 1)
    remove_labels(bundle, [best.uid])
    assert reader.search(TEXTS[:5], 3) == answers, "a reader goes on with what it opened"
    assert Retriever.load(bundle).search(TEXTS[:5], 3) != answers
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


BAD = {
    "broken JSON": ('{"uid": "a", "te', "new.jsonl:2: broken JSON"),
    "no uid": ('{"text": "x"}', "new.jsonl:2: no uid"),
    "uid twice": ('{"uid": "new0", "text": "x"}', "new.jsonl:2: duplicate uid 'new0'"),
    "no text": ('{"uid": "a", "text": " "}', "new.jsonl:2: label 'a' has no text"),
    "no token": ('{"uid": "a", "text": "\\u0000"}', "has no token; reword it"),
    "known uid": ('{"uid": "u7", "text": "x"}', "label 'u7' is in "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_labels_are_one_line(
    name: str,
    bundles: Any,
    tmp_path: Path,
    shell: Shell,
) -> None:
    bad_line, message = BAD[name]
    good_line = json.dumps({"uid": "new0", "text": "sort"})
    file = tmp_path / "new.jsonl"
    file.write_text(f"{good_line}\n{bad_line}")

    command = f"labels add {bundles('texts')} {file} --out {tmp_path}/b"

    assert message in shell.error(command)
    assert [path.name for path in tmp_path.iterdir()] == ["new.jsonl"]


def test_other_mistakes_are_one_line(
    bundles: Any,
    tmp_path: Path,
    shell: Shell,
) -> None:
    bundle = bundles("texts")
    memory = bundles("memory")
    less = tmp_path / "less"
    remove_labels(memory, ["label1"], less)
    all_uids = " ".join(f"u{number}" for number in range(len(TEXTS)))
    message_of = {
        f"labels remove {bundle} u1 nobody": "label 'nobody' is not in",
        f"labels remove {bundle} {all_uids}": "these are all 560 labels",
        f"labels add {bundle} {tmp_path}/none.jsonl": "none.jsonl is no file",
        f"labels remove {bundle} u1 --out {bundle}": "exists and is not empty",
        "labels remove memory://b u1": "is a URL",
        f"labels remove {tmp_path}/none u1": "does not exist; expected a bundle",
        f"labels drop {bundle} u1": "invalid choice: 'drop'",
        f"evaluate {less} --data {memory.parent}/corpus": (
            "joined or were removed since the bundle was exported"
        ),
    }

    for command, message in message_of.items():
        assert message in shell.error(command)

    # A bundle of an older release has no label side.
    old = tmp_path / "old"
    ignored = shutil.ignore_patterns("label_side", "manifest.json")
    shutil.copytree(bundle, old, ignore=ignored)
    finish_manifest(old, "bundle", {}, {})
    with pytest.raises(BundleError, match=r"label side in .* cannot be read"):
        add_labels(old, NEW)

    without_texts = write_texts_without(tmp_path / "empty")
    with pytest.raises(DataError, match="no label of the bundle has a text"):
        add_labels(without_texts, NEW)


def write_texts_without(path: Path) -> Path:
    """A bundle of rows whose labels have no text."""
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    model = BundleModel(
        encoder=encoder,
        head=Head(DIM),
        tokenizer=tokenizer,
        label_side=LabelSide(DIM),
    )
    labels = BundleLabels(
        uids=map(str, range(DIM)),
        texts=[""] * DIM,
        order=np.arange(DIM),
        vectors=[np.eye(DIM, dtype=np.float32)],
    )
    write_bundle(
        path,
        model,
        labels,
        ShardBuild(spec=IndexSpec()),
        {},
    )
    return path


def test_the_command(
    bundles: Any,
    tmp_path: Path,
    shell: Shell,
) -> None:
    new = {
        "uid": "n",
        "title": "sort sort",
        "content": "norm norm",
    }
    file = tmp_path / "new.jsonl"
    file.write_text(json.dumps(new))
    bundle = tmp_path / "b"

    def best_answer() -> dict[str, Any]:
        printed = shell.run(f"search {bundle} 'sort sort norm norm' -k 1 --json")
        (answer,) = json.loads(printed)[0]["answers"]
        return answer

    printed = shell.run(f"labels add {bundles('rows')} {file} --out {bundle}")
    assert "has 561 labels" in printed
    best = best_answer()
    assert best["uid"] == "n"
    assert best["label_id"] == 560

    shell.run(f"labels remove {bundle} n")
    assert best_answer()["uid"] != "n"
