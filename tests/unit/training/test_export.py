"""A bundle answers with the vectors of the last checkpoint, and only a finished run has one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_decoder
from safetensors.torch import load_file, save_file

from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError, RunError, StorageError
from xmcray.nn.encoder import Encoder, build_encoder, load_encoder
from xmcray.nn.label_side import LabelSide
from xmcray.retrieval.new_vectors import new_vectors
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.training.export import export_run, last_checkpoint
from xmcray.training.launch import train
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=32",
    "optim.epochs=2",
    "negatives.hard=0",
    "negatives.uniform=10",
]
SETTINGS += ["cluster.workers=0", "cluster.threads_per_process=1"]


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        corpus.path, tmp_path_factory.mktemp("run") / "r", RunConfig.resolve("astra", {}, SETTINGS)
    )


def test_a_bundle_needs_nothing_of_the_model_that_training_started_from(tmp_path: Path) -> None:
    corpus, model = planted_decoder(tmp_path)
    settings = [*SETTINGS, f"encoder.name={model}", "optim.epochs=1"]
    finished = train(corpus.path, tmp_path / "run", RunConfig.resolve("astra", {}, settings))
    shutil.rmtree(model)
    export_run(finished, tmp_path / "bundle")
    last = last_checkpoint(finished)
    tokens = corpus.split("test").tokens(np.arange(3))
    with torch.no_grad():
        query_BD = load_encoder(last.path / "encoder").eval()(tokens)
    retriever = Retriever.load(tmp_path / "bundle")
    row_LD = retriever.labels.vectors_of(np.arange(retriever.num_labels))
    best_B = (query_BD.numpy() @ row_LD.T).max(axis=1)
    np.testing.assert_allclose(retriever.top_labels(tokens, 1).scores[:, 0], best_B, rtol=1e-5)


def test_scores_are_those_of_the_checkpoint(run: Run, corpus: Corpus, tmp_path: Path) -> None:
    export_run(run, tmp_path / "b")
    retriever = Retriever.load(tmp_path / "b")
    last = last_checkpoint(run)
    (rows,) = [
        load_file(path)["weight"] for path in last.path.glob("classifier-*.safetensors")
    ]  # internal order
    test = corpus.split("test")
    tokens = test.tokens(np.arange(len(test)))
    with torch.no_grad():
        score_QL = (load_encoder(last.path / "encoder").eval()(tokens) @ rows.T).numpy()[
            :, corpus.label_rank
        ]
    top = retriever.top_labels(tokens, 23)
    np.testing.assert_allclose(
        top.scores, np.take_along_axis(score_QL, top.ids, 1), rtol=1e-5, atol=1e-6
    )
    assert (np.diff(top.scores, axis=1) <= 0).all()
    answer = retriever.search(["w3x0"], 1)[0][0]
    assert (answer.uid, answer.text) == (
        corpus.label_uids(np.array([answer.label_id]))[0],
        corpus.label_texts(np.array([answer.label_id]))[0],
    )


def test_labels_with_rows_of_their_own_are_encoded_by_them(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, "encoder.separate_labels=true"])
    run = train(corpus.path, tmp_path / "r", config)
    export_run(run, tmp_path / "b")
    retriever = Retriever.load(tmp_path / "b")
    labels = np.arange(corpus.card.num_labels)
    tokens = corpus.label_tokens(labels)
    # A label that joins later is encoded in the same way.
    joining = new_vectors(retriever, LabelSide(), retriever.labels.texts(labels))
    np.testing.assert_allclose(retriever.labels.vectors_of(labels), joining, rtol=1e-5, atol=1e-6)
    assert not np.allclose(retriever.encode(tokens), joining, atol=1e-4)


def test_the_manifest_says_what_made_it(run: Run, tmp_path: Path) -> None:
    export_run(run, tmp_path / "b")
    about = read_manifest(tmp_path / "b", "bundle").about
    assert (about["run"], about["corpus_sha256"]) == (run.id, run.corpus_sha256)
    assert about["step"] == run.result()["steps"]  # type: ignore[index]
    assert RunConfig.resolve("astra", about["config"]) == run.config


def test_it_is_the_same_whatever_ranks_wrote_the_checkpoint(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "two")
    path = next(iter(sorted((tmp_path / "two" / "checkpoints").iterdir(), reverse=True)))
    whole = load_file(path / "classifier-0000000000.safetensors")
    save_file(
        {k: v[:9].contiguous() for k, v in whole.items()},
        path / "classifier-0000000000.safetensors",
    )
    save_file(
        {k: v[9:].contiguous() for k, v in whole.items()},
        path / "classifier-0000000009.safetensors",
    )
    finish_manifest(path, "checkpoint", {"step": last_checkpoint(run).step}, {})
    export_run(run, tmp_path / "a")
    export_run(Run.open(tmp_path / "two"), tmp_path / "b")
    assert (
        read_manifest(tmp_path / "a", "bundle").sha256
        == read_manifest(tmp_path / "b", "bundle").sha256
    )


def test_weights_that_are_no_numbers_are_one_line(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    checkpoint = sorted((tmp_path / "copy" / "checkpoints").iterdir())[-1]
    weights = checkpoint / "encoder" / "model.safetensors"
    broken = {name: torch.full_like(value, torch.nan) for name, value in load_file(weights).items()}
    save_file(broken, weights)
    finish_manifest(checkpoint, "checkpoint", {"step": last_checkpoint(run).step}, {})
    with pytest.raises(
        BundleError, match=r"none of \d+ queries held out of training gets an answer"
    ):
        export_run(Run.open(tmp_path / "copy"), tmp_path / "bundle")


def test_blocks_of_labels_share_one_encoder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(run, tmp_path / "whole")
    encoders: list[Encoder] = []

    def counted(*arguments: Any) -> Encoder:
        encoders.append(build_encoder(*arguments))
        return encoders[-1]

    monkeypatch.setattr("xmcray.training.loop.build_encoder", counted)
    monkeypatch.setattr("xmcray.training.export._ROWS", 9)  # 23 labels are three blocks
    export_run(run, tmp_path / "blocks")
    assert len(encoders) == 1
    hashes = {read_manifest(tmp_path / name, "bundle").sha256 for name in ("whole", "blocks")}
    assert len(hashes) == 1


def test_only_the_last_step_of_a_finished_run_is_exported(
    run: Run, corpus: Corpus, tmp_path: Path
) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    copy = Run.open(tmp_path / "copy")
    newest = sorted(copy.checkpoints.iterdir())[-1]
    weights = newest / "classifier-0000000000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(
        ConfigError, match="an export takes settings of the index alone, found 'method'; give it to"
    ):
        export_run(run, tmp_path / "b", settings={"method": {}})
    with pytest.raises(
        ConfigError, match=r"unknown setting 'index\.nprob'; did you mean 'index\.nprobe'"
    ):
        export_run(run, tmp_path / "b", settings={"index": {"nprob": 1}})
    with pytest.raises(RunError, match="no intact checkpoint of its last step"):
        export_run(copy, tmp_path / "b")
    (copy.path / "result.json").unlink()
    with pytest.raises(RunError, match="is not finished; resume it"):
        export_run(copy, tmp_path / "b")
    other = dataclasses.replace(run, corpus_sha256="0" * 64)
    with pytest.raises(RunError, match="is not the corpus"):
        export_run(other, tmp_path / "b", corpus)
    with pytest.raises(RunError, match="which does not exist; name the corpus with --data"):
        export_run(dataclasses.replace(run, corpus=tmp_path / "gone"), tmp_path / "b")
    with pytest.raises(StorageError, match="exists and is not empty"):
        export_run(run, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
