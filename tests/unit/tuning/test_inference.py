"""Settings of finished bundles, swept on held-out queries without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from corpora import grown_corpora, planted_corpus
from shell import Shell

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.metrics import Metrics
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import TwoHeads
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import Memory, RememberedQueries
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild, ShardedIndex, VectorShard
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.memory import memory_bundle
from xmcray.training.run_config import RunConfig
from xmcray.tuning.inference import sweep_bundle
from xmcray.tuning.space import parse_space

LABELS = 47


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("corpus"), num_queries=900, num_labels=LABELS)


@pytest.fixture(scope="module")
def memory(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("memory")
    build_encoder(EncoderConfig(dim=16), corpus.tokenizer(), None, seed=0).save(folder / "encoder")
    memory_bundle(str(folder / "encoder"), corpus, folder / "bundle", MemoryConfig(keys=25))
    return str(folder / "bundle")


def of_two_heads(corpus: Corpus, folder: Path, config: RunConfig, text_share: float = 0.5) -> str:
    """A bundle as UniDEC makes it, whose rows are noise: only the label texts answer."""
    encoder = build_encoder(EncoderConfig(dim=16), corpus.tokenizer(), None, seed=0).eval()
    head = TwoHeads(16, 16, text_share=text_share)
    head.reset(0)
    with torch.no_grad():
        vectors = head.label_vectors(encoder(corpus.label_tokens(corpus.label_order))).numpy()
    noise = np.random.default_rng(0).standard_normal((LABELS, 16), np.float32)
    vectors[:, 16:] = noise / np.linalg.norm(noise, axis=1, keepdims=True)
    ids = np.arange(LABELS)
    about = {"config": config.to_dict(), "corpus_sha256": corpus.sha256}
    model = BundleModel(encoder=encoder, head=head, tokenizer=corpus.tokenizer(), method="unidec")
    labels = BundleLabels(
        uids=corpus.label_uids(ids),
        texts=corpus.label_texts(ids),
        order=corpus.label_order,
        vectors=[vectors],
    )
    write_bundle(folder / "bundle", model, labels, ShardBuild(spec=IndexSpec()), about)
    return str(folder / "bundle")


def without_held_out(retriever: Retriever, data: TrainingData) -> Retriever:
    """The bundle with a memory that never saw the validation queries."""
    train = data.corpus.split("train")
    kept = np.setdiff1d(np.flatnonzero(train.num_positives()), data.validation_rows)
    vectors = torch.from_numpy(retriever.encode(train.tokens(kept)))
    rows = ShardedIndex((VectorShard(0, len(kept), False, 1),), (Index(vectors, None),))
    return dataclasses.replace(
        retriever, memory=Memory(MemoryConfig(), rows, RememberedQueries(train.positives(kept)))
    )


def held_out_metrics(
    retriever: Retriever, data: TrainingData, config: MemoryConfig
) -> dict[str, float]:
    train = data.corpus.split("train")
    rows = data.validation_rows
    card = data.corpus.card
    metrics = Metrics(
        data.corpus.train_counts, card.num_train, card.propensity_a, card.propensity_b, LABELS
    )
    top = retriever.top_labels(
        train.tokens(rows), LABELS, exclude=train.filters(rows), memory=config
    )
    metrics.update(top, train.positives(rows))
    return metrics.result()


def test_a_memory_is_asked_as_if_it_had_not_seen_the_queries(corpus: Corpus, memory: str) -> None:
    space = parse_space(
        {
            "memory.weight": {"choice": [0.0, 0.3, 1.0]},
            "memory.keys": {"choice": [5, 40]},
            "memory.joint": {"choice": [True, False]},
        },
        "here",
    )
    swept = sweep_bundle(memory, corpus, space, 60, 0, "P@1")
    assert len(swept.settings) == 12, "each setting once"
    assert [one.metrics["P@1"] for one in swept.settings] == sorted(
        (one.metrics["P@1"] for one in swept.settings), reverse=True
    )
    grid = [
        MemoryConfig(**{name.partition(".")[2]: v for name, v in one.values.items()})
        for one in swept.settings
    ]
    data = TrainingData(corpus, DataConfig())
    retriever = without_held_out(Retriever.load(memory), data)
    for one, config in zip(swept.settings, grid, strict=True):
        expected = held_out_metrics(retriever, data, config)
        for name in ("P@1", "P@5", "PSP@5"):
            assert one.metrics[name] == pytest.approx(expected[name], abs=1e-6)
    expected = held_out_metrics(retriever, data, MemoryConfig(keys=25))
    assert swept.unchanged["P@1"] == pytest.approx(expected["P@1"], abs=1e-6)


def test_fusion_finds_the_half_that_answers(corpus: Corpus, tmp_path: Path) -> None:
    bundle = of_two_heads(corpus, tmp_path, RunConfig.resolve("unidec", {}))
    space = parse_space({"fusion.text_weight": {"uniform": [0, 1], "step": 0.25}}, "here")
    swept = sweep_bundle(bundle, corpus, space, 40, 0, "P@1")
    by_share = {one.values["fusion.text_weight"]: one.metrics for one in swept.settings}
    assert set(by_share) == {0, 0.25, 0.5, 0.75, 1}
    assert by_share[0.5] == swept.unchanged, "half and half is what the bundle does"
    assert by_share[1]["P@1"] > by_share[0]["P@1"] + 0.2
    assert swept.settings[0].metrics["P@1"] >= by_share[1]["P@1"]


def test_the_fastest_index_that_loses_nothing(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    bundle = of_two_heads(corpus, tmp_path, RunConfig.resolve("unidec", {}))
    space = parse_space(
        {"index.factory": {"choice": ["Flat", "IVF4,Flat"]}, "index.nprobe": {"choice": [1, 4]}},
        "here",
    )
    swept = sweep_bundle(bundle, corpus, space, 30, 0, "P@1")
    assert len(swept.settings) == 4
    assert all(one.queries_per_s > 0 for one in swept.settings)
    good = [one for one in swept.settings if one.metrics["P@1"] >= swept.unchanged["P@1"] - 0.001]
    assert swept.settings[0].queries_per_s == max(one.queries_per_s for one in good)


def test_what_cannot_be_swept(corpus: Corpus, memory: str, tmp_path: Path) -> None:
    weight, fusion = (
        parse_space({"memory.weight": {"uniform": [0, 1]}}, "f"),
        {"fusion.text_weight": {"uniform": [0, 1]}},
    )
    refitted = of_two_heads(
        corpus, tmp_path, RunConfig.resolve("unidec", {}, ["data.validation=0"])
    )
    with pytest.raises(ConfigError, match=r"trained on all training queries \(data.validation=0\)"):
        sweep_bundle(refitted, corpus, parse_space(fusion, "f"), 3, 0, "P@1")
    with pytest.raises(ConfigError, match="this bundle has one"):
        sweep_bundle(memory, corpus, parse_space(fusion, "f"), 3, 0, "P@1")
    with pytest.raises(ConfigError, match="bundles without a memory"):
        sweep_bundle(
            memory, corpus, parse_space({"index.nprobe": {"int": [1, 2]}}, "f"), 3, 0, "P@1"
        )
    two_heads = of_two_heads(corpus, tmp_path / "two", RunConfig.resolve("unidec", {}))
    memory_bundle(two_heads, corpus, tmp_path / "voting")
    with pytest.raises(ConfigError, match="bundles without a memory"):
        sweep_bundle(str(tmp_path / "voting"), corpus, parse_space(fusion, "f"), 3, 0, "P@1")
    with pytest.raises(ConfigError, match="unknown metric 'P@2'"):
        sweep_bundle(memory, corpus, weight, 3, 0, "P@2")
    with pytest.raises(ConfigError, match="settings of fusion and memory, expected one of them"):
        sweep_bundle(memory, corpus, {**weight, **parse_space(fusion, "f")}, 3, 0, "P@1")
    with pytest.raises(ConfigError, match=r"f: memory\.weight is 2\.0, expected at least 0"):
        sweep_bundle(
            memory,
            corpus,
            parse_space({"memory.weight": {"uniform": [0, 2]}}, "f"),
            3,
            0,
            "P@1",
            "f",
        )
    other = planted_corpus(tmp_path / "other", num_queries=900, num_labels=LABELS, seed=1)
    with pytest.raises(DataError, match="was made from another corpus"):
        sweep_bundle(memory, other, weight, 3, 0, "P@1")


def test_the_command(corpus: Corpus, memory: str, tmp_path: Path, shell: Shell) -> None:
    space, out = tmp_path / "space.yaml", tmp_path / "out"
    space.write_text("memory.weight: {uniform: [0, 1]}\nmemory.keys: {int: [1, 50]}\n")
    command = f"tune --bundle {memory} --data {corpus.path} --space {space} --out {out}"
    assert "--set memory.weight=" in shell.run(f"{command} --trials 8")
    best = yaml.safe_load((out / "best.yaml").read_text())
    results = json.loads((out / "results.json").read_text())
    assert (
        RunConfig.resolve("rae", best).memory.keys
        == results["settings"][0]["values"]["memory.keys"]
    )
    assert len(results["settings"]) == 8
    assert "Parallel coordinates" in (out / "report.html").read_text()
    again = json.loads(shell.run(f"{command} --trials 8 --json"))
    assert again == results, "the same samples, the same numbers"
    message = shell.error(f"{command} --trials 9")
    assert "holds a sweep of a bundle with trials = 8, now 9; use the same settings" in message
    assert json.loads((out / "results.json").read_text()) == results
    # The results of anything else are not replaced.
    (out / "bundle-sweep.json").unlink()
    message = shell.error(f"{command} --trials 8")
    assert "and no sweep of a bundle; choose another --out" in message


def test_a_metric_is_checked_before_anything_is_measured(
    corpus: Corpus, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retriever, "encode", lambda *_: pytest.fail("it measured"))
    weight = parse_space({"memory.weight": {"uniform": [0, 1]}}, "f")
    with pytest.raises(ConfigError, match="unknown metric 'P@2'"):
        sweep_bundle(memory, corpus, weight, 3, 0, "P@1+P@2")


def test_the_mean_of_metrics_decides(
    corpus: Corpus, memory: str, tmp_path: Path, shell: Shell
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("memory.weight: {choice: [0, 0.5, 1]}\n")
    out = tmp_path / "out"
    command = f"tune --bundle {memory} --data {corpus.path} --space {space} --out {out}"
    printed = shell.run(f"{command} --metric P@1+R@10")
    settings = json.loads((out / "results.json").read_text())["settings"]
    means = [(setting["P@1"] + setting["R@10"]) / 2 for setting in settings]
    assert means == sorted(means, reverse=True)
    assert f"P@1+R@10 {means[0]:.4f} on validation" in printed


def test_the_best_index_is_exported(corpus: Corpus, tmp_path: Path, shell: Shell) -> None:
    """The file that a sweep of indexes leaves is all that `export` needs."""
    faiss = pytest.importorskip("faiss")
    run, space, out, bundle = (tmp_path / name for name in ("run", "space.yaml", "sweep", "bundle"))
    settings = [
        "encoder.dim=8",
        "optim.epochs=1",
        "negatives.hard=0",
        "cluster.workers=0",
        "data.validation=0.2",
    ]
    train(corpus.path, run, RunConfig.resolve("renee", {}, settings))
    space.write_text("index.factory: {choice: [HNSW8]}\nindex.ef_search: {choice: [37]}\n")
    printed = shell.run(
        f"tune --bundle {run} --data {corpus.path} --space {space} --out {out} --trials 2"
    )
    (next_line,) = [line for line in printed.splitlines() if line.startswith("next: ")]
    export = next_line.removeprefix("next: xmcray ")
    shell.run(export.replace("BUNDLE", str(bundle)))
    shell.run(export.replace("BUNDLE", f"{tmp_path}/flat"), "--set", "index.factory=Flat")
    index = faiss.read_index(str(bundle / "index" / "00000.faiss"))
    assert isinstance(index, faiss.IndexHNSW)
    assert index.hnsw.efSearch == 37
    assert not (tmp_path / "flat" / "index").exists()


def test_a_memory_is_swept_on_the_queries_that_its_run_held_out(
    corpus: Corpus, tmp_path: Path
) -> None:
    lines = ["data.validation=0", "optim.epochs=1", "encoder.dim=8", "cluster.workers=0"]
    config = RunConfig.resolve("dexml", {}, [*lines, "log.validate_every=0"])
    train(corpus.path, tmp_path / "run", config)
    memory_bundle(str(tmp_path / "run"), corpus, tmp_path / "bundle")
    space = parse_space({"memory.weight": {"choice": [0.5]}}, "f")
    with pytest.raises(ConfigError, match="trained on all training queries"):
        sweep_bundle(str(tmp_path / "bundle"), corpus, space, 1, 0, "P@1")


def test_no_query_of_another_corpus_than_the_encoders_counts_as_held_out(tmp_path: Path) -> None:
    """Of a corpus that grew, other queries are held out: some that the encoder was trained on."""
    old, grown = grown_corpora(tmp_path, num_old=20)
    lines = ["data.validation=0.2", "optim.epochs=1", "encoder.dim=8", "cluster.workers=0"]
    config = RunConfig.resolve("dexml", {}, [*lines, "log.validate_every=0"])
    run = train(old.path, tmp_path / "run", config)
    export_run(run, tmp_path / "exported")
    space = parse_space({"memory.weight": {"choice": [0.5]}}, "f")
    for number, encoder in enumerate(["run", "exported"]):
        bundle = tmp_path / f"bundle{number}"
        memory_bundle(str(tmp_path / encoder), grown, bundle)
        with pytest.raises(ConfigError, match="or its encoder on another corpus"):
            sweep_bundle(str(bundle), grown, space, 1, 0, "P@1")


def test_labels_of_a_memory_have_no_weights_of_queries(corpus: Corpus, tmp_path: Path) -> None:
    bundle = of_two_heads(corpus, tmp_path / "two", RunConfig.resolve("unidec", {}), text_share=0.2)
    memory_bundle(bundle, corpus, tmp_path / "memory")
    retriever = Retriever.load(tmp_path / "memory")
    tokens = corpus.label_tokens(np.arange(LABELS))
    expected = retriever.query_encoder.encode_labels(tokens)
    vectors = retriever.labels.vectors_of(np.arange(LABELS))
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    # Both halves have the same length.
    halves = np.linalg.norm(vectors.reshape(LABELS, 2, 16), axis=2)
    np.testing.assert_allclose(halves, np.sqrt(0.5), rtol=1e-5)
