"""Plans: bytes are those of the real objects, work is that of the real step, refusals give advice."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import runpy
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
import torch
from models import write_bert, write_family
from shell import Shell
from torch.utils.flop_counter import FlopCounterMode

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, ResourceError, StorageError
from xmcray.methods.astra import Astra
from xmcray.methods.registry import method_names
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, search_shard
from xmcray.negatives.version_folder import QueryBlock
from xmcray.nn.encoder import EncoderConfig, load_encoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning import refresh, sizes, tables
from xmcray.planning.counter import Counter, Operation
from xmcray.planning.data_size import DataSize, from_corpus, from_numbers
from xmcray.planning.device_search import ANYWHERE, APART, DeviceSearch
from xmcray.planning.devices import SPECS, device_rates
from xmcray.planning.encoders import KNOWN, planned_encoder
from xmcray.planning.estimate import (
    BETWEEN_STEPS,
    FIRST_REFRESH,
    INDEX,
    REFRESH,
    STEPS,
    Plan,
    estimate,
)
from xmcray.planning.plan import plan
from xmcray.planning.rates import Rates, load_rates
from xmcray.planning.stand_in import StandInData
from xmcray.planning.trace import on_line, trace
from xmcray.retrieval import exact
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Setup, build
from xmcray.training.placement import Nodes, place
from xmcray.training.run import ClusterConfig, RunConfig
from xmcray.types import Ragged

A100 = device_rates("a100-80gb")
ON_CPU = dataclasses.replace(A100, on_gpu=False)
ON_HOST = ("astra", "cluster.index_resource=CPU")  # a method, and indexes that stay off its devices


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpora.planted_corpus(tmp_path_factory.mktemp("planted"), side_width=5)


@functools.cache
def made(method: str = "astra", *settings: str, labels: float = 1e6, **options: Any) -> Plan:
    config = RunConfig.resolve(method, {}, settings)
    return plan(config, from_numbers(int(labels), 2_000_000, 12), A100, **options)


def built(config: RunConfig, corpus: Corpus, ranks: int = 1) -> Setup:
    data = TrainingData(corpus, config.data)
    partition = LabelPartition(data.num_labels, ranks, 0)
    return build(config, data, torch.device("cpu"), partition)


def size_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("astra", []),
        (
            "astra",
            [
                "method.classifier.kind=adam",
                "method.classifier.lr=0.01",
                "encoder.bigram_buckets=50",
            ],
        ),
        (
            "astra",
            [
                "method.classifier.storage=bfloat16",
                "method.classifier.kind=adagrad",
                "method.classifier.lr=0.05",
            ],
        ),
        ("renee", ["method.classifier.momentum=0", "optim.precision=float64"]),
        ("unidec", ["method.head_dim=6"]),
        ("unidec", ["method.balance=1"]),
        ("prime", ["method.free_vectors=8"]),
        ("dexml", ["method.columns=cache"]),
        ("rae", ["encoder.residual=false", "encoder.side=mix"]),
    ],
)
def test_what_lives_as_long_as_the_run_has_the_bytes_of_the_real_tensors(
    corpus: Corpus, method: str, settings: list[str]
) -> None:
    config = RunConfig.resolve(method, {}, ["encoder.dim=12", *settings])
    setup = built(config, corpus, ranks=2)
    planned = trace(config, from_corpus(corpus), ON_CPU, 2).tensors

    label_bytes = size_of(setup.method.state_tensors())
    for table in setup.method.tables.values():
        label_bytes += size_of(table.tensors()) + table.last_step_S.nbytes
    assert planned["label rows"] == label_bytes
    assert planned["encoder"] == size_of(setup.stepper.encoder.state_dict())
    modules = setup.method.modules.values()
    assert planned["modules of the method"] == sum(size_of(m.state_dict()) for m in modules)


def operations_of(config: RunConfig, size: DataSize, workers: int) -> list[Operation]:
    """What the step does, instead of its seconds."""
    counted: list[Operation] = []

    class Recorder(Rates):
        def step_seconds(self, operations: Any) -> dict[str, float]:
            counted.extend([] if counted else operations)
            return {}

    trace(config, size, Recorder(**vars(ON_CPU)), workers)
    return counted


def test_a_traced_step_has_the_products_of_the_real_one(corpus: Corpus) -> None:
    settings = ["encoder.dim=32", "optim.batch_size=50", "data.validation=0"]
    settings += ["negatives.uniform=40", "negatives.hard=0"]
    config = RunConfig.resolve("astra", {}, settings)
    setup = built(config, corpus)
    with FlopCounterMode(display=False) as counted:
        setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    planned = operations_of(config, from_corpus(corpus), 1)
    flop = sum(operation.flop for operation in planned)
    assert flop == pytest.approx(counted.get_total_flops(), rel=0.1)


def test_products_in_place_are_products() -> None:
    counter = Counter()
    with counter:
        torch.zeros(4, 8, device="meta").addmm_(
            torch.zeros(4, 2, device="meta"), torch.zeros(2, 8, device="meta")
        )
    assert [o.flop for o in counter.operations if o.kind == "product"] == [2 * 4 * 2 * 8]


def test_ranks_exchange_vectors_and_share_the_work() -> None:
    config = RunConfig.resolve("astra", {}, ["encoder.dim=64"])
    size = from_numbers(20_000, 20_000, 8)
    alone = operations_of(config, size, 1)
    shared = operations_of(config, size, 4)
    assert not any(o.kind == "collective" for o in alone)
    exchanged = [o.moved_bytes for o in shared if o.kind == "collective"]
    # A rank's share of 256 queries, 64 numbers each, goes to three others.
    assert 3 * 64 * 64 * 4 in exchanged
    assert sum(o.flop for o in shared) < 0.5 * sum(o.flop for o in alone)
    assert not torch.distributed.is_initialized()


def test_three_ranks_have_a_plan() -> None:
    config = RunConfig.resolve("prime", {}, ["encoder.dim=16"])
    assert trace(config, from_numbers(9_000, 9_000, 8), ON_CPU, 3).copy_bytes > 0


def test_integers_keep_their_values_and_floats_only_sizes() -> None:
    counter = Counter()
    with counter:
        ids = torch.tensor([3, 1, 3]).to("meta")
        rows_UD = torch.zeros(5, 4, device="meta").index_select(0, ids.unique())
        positive = rows_UD[rows_UD > 0]
    assert ids.tolist() == [3, 1, 3]
    assert rows_UD.shape == (2, 4)
    assert rows_UD.is_meta
    assert len(positive) == 8  # a comparison of values that do not exist selects all of them
    read = next(o for o in counter.operations if o.kind == "row read")
    assert read.moved_bytes == 2 * 16


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    counter = Counter()
    with counter:
        kept = torch.zeros(1000, device="meta")
        counter.restart()
        for _ in range(3):
            kept = kept + 1
    assert counter.live_bytes == 4000
    assert counter.peak_bytes == 8000


@pytest.mark.parametrize("dim", [0, 16, 5])
def test_a_planned_transformer_has_the_parameters_of_the_real_one(tmp_path: Path, dim: int) -> None:
    folder = write_bert(tmp_path / "bert", ["a", "b"], layers=2)
    with Counter():
        encoder = planned_encoder(EncoderConfig(name=str(folder), dim=dim), 7, on_gpu=False)
    projection = 16 * dim if dim == 5 else 0
    real = sum(p.numel() for p in load_encoder(folder).parameters()) + projection
    assert sum(p.numel() for p in encoder.parameters()) == real
    assert encoder.dim == (dim or 16)


def test_a_planned_encoder_decoder_is_its_encoder(tmp_path: Path) -> None:
    folder = write_family(tmp_path, ["a", "b"], "t5")
    with Counter():
        encoder = planned_encoder(EncoderConfig(name=str(folder), dim=0), 7, on_gpu=False)
        assert encoder(Ragged.from_rows([[1, 2], [3]])).shape == (2, 16)
    sizes = {name: p.numel() for name, p in encoder.named_parameters()}
    assert sizes == {name: p.numel() for name, p in load_encoder(folder).named_parameters()}


def test_a_step_does_not_run_a_frozen_transformer(tmp_path: Path) -> None:
    config = EncoderConfig(name=str(write_bert(tmp_path / "bert", ["a", "b"])), dim=5, frozen=True)
    counter = Counter()
    with counter:
        encoder = planned_encoder(config, 7, on_gpu=False)
        counter.restart()
        vector_BD = encoder(Ragged(np.array([1, 2, 1]), np.array([0, 1, 3])))
    assert vector_BD.shape == (2, 5)
    products = [o for o in counter.operations if o.kind == "product"]
    assert [o.flop for o in products] == [2 * 2 * 16 * 5]  # the projection alone


def test_known_encoders_have_their_published_number_of_parameters() -> None:
    with Counter():
        encoders = {
            name: planned_encoder(EncoderConfig(name=name, dim=0), 0, False) for name in KNOWN
        }
    counts = {name: sum(p.numel() for p in e.parameters()) for name, e in encoders.items()}
    assert counts["distilbert-base-uncased"] == 66_362_880
    assert counts["bert-base-uncased"] == 109_482_240 - 768 * 769  # without its pooler
    with pytest.raises(ConfigError, match="neither a transformer's folder"):
        planned_encoder(EncoderConfig(name="nobody/nothing", dim=0), 0, False)


def test_a_checkpoint_has_the_planned_size(corpus: Corpus, tmp_path: Path) -> None:
    config = RunConfig.resolve("astra", {}, ["encoder.dim=64", "cluster.workers=0"])
    setup = built(config, corpus)
    setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    writer = CheckpointWriter(tmp_path, setup.stepper, setup.partition, keep=1)
    writer.save(1, {"epoch": 0, "negatives": {}})
    writer.finish()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    planned = plan(config, from_corpus(corpus), ON_CPU, workers=1)
    assert planned.checkpoint == pytest.approx(written, rel=0.01)


def test_the_stand_in_batch_is_like_one_of_the_corpus(corpus: Corpus) -> None:
    config = RunConfig.resolve("astra", {}, ["optim.batch_size=50", "data.validation=0"])
    setup = built(config, corpus)
    steps = range(setup.sampler.steps_per_epoch - 1)
    batches = [setup.sampler.batch(step, 0, 1) for step in steps]
    stand_in = StandInData(from_corpus(corpus), augmented=True)
    drawn = [stand_in.batch(config, step, 1) for step in steps]
    tokens = sum(len(batch.tokens.values) for batch in batches)
    positives = sum(len(batch.positives.values) for batch in batches)
    assert sum(len(batch.tokens.values) for batch in drawn) == pytest.approx(tokens, rel=0.2)
    assert sum(len(batch.positives.values) for batch in drawn) == pytest.approx(positives, rel=0.2)
    planned = plan(config, from_corpus(corpus), ON_CPU, workers=1)
    assert planned.steps_per_epoch == pytest.approx(setup.sampler.steps_per_epoch, abs=1)


@pytest.mark.parametrize("method", method_names())
def test_every_method_has_a_plan_and_more_of_anything_takes_more(method: str) -> None:
    small = made(method, "encoder.dim=64", labels=4e3)
    assert small.step_seconds > 0
    assert json.loads(json.dumps(dataclasses.asdict(small)))["method"] == method
    larger = {
        "dimensions": made(method, "encoder.dim=128", labels=4e3),
        "queries": made(method, "encoder.dim=64", "optim.batch_size=512", labels=4e3),
        "labels": made(method, "encoder.dim=64", labels=16e3),
    }
    for changed in larger.values():
        assert changed.worker_bytes > 0.99 * small.worker_bytes
        assert changed.step_seconds > 0.95 * small.step_seconds
        assert changed.checkpoint >= small.checkpoint
    assert larger["dimensions"].worker_bytes > small.worker_bytes


@pytest.mark.parametrize("workers", [1, 8])
def test_labels_that_a_cache_adds_to_a_batch_are_planned(workers: int) -> None:
    size = from_numbers(40_000, 40_000, tokens_per_text=12)
    seconds = []
    for cache_hard in (64, 4096):
        settings = ["encoder.dim=32", "method.columns=cache", f"method.cache_hard={cache_hard}"]
        config = RunConfig.resolve("dexml", {}, [*settings, "optim.batch_size=64"])
        step_s = trace(config, size, device_rates("a100-80gb"), workers).step_s
        # Token vectors that are read, and updated.
        seconds.append(step_s["rows of tables"])
    assert 1.2 * seconds[0] < seconds[1]


def test_workers_share_label_rows_and_price_is_per_worker_and_hour() -> None:
    alone = made(workers=1, price_per_hour=2.0)
    eight = made(workers=8, price_per_hour=2.0)
    rows = alone.device_bytes["label rows"]
    assert eight.device_bytes["label rows"] == pytest.approx(rows / 8, rel=1e-4)
    assert eight.cost == pytest.approx(2.0 * 8 * eight.total_s / 3600)
    assert made(workers=1).cost is None


def test_very_many_labels_are_planned_on_a_straight_line() -> None:
    few = made("astra", "encoder.dim=16", labels=2e6, workers=1)
    many = made("astra", "encoder.dim=16", labels=5e7, workers=1)
    rows = few.device_bytes["label rows"]
    assert many.device_bytes["label rows"] == pytest.approx(25 * rows, rel=1e-6)
    assert many.step_seconds == pytest.approx(few.step_seconds, rel=0.3)


def test_pieces_of_all_labels_are_planned_on_a_straight_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece that a step encodes takes time to trace: 10^5 labels took minutes."""
    settings = ("encoder.dim=16", "optim.micro_batch=256")
    planned = made("dexml", *settings, labels=6000, workers=1)
    monkeypatch.setattr("xmcray.planning.estimate._TRACED_PIECES", 100)
    traced = made("dexml", *settings, labels=6000, workers=1)
    assert planned.step_seconds == pytest.approx(traced.step_seconds, rel=0.05)
    assert planned.worker_bytes == pytest.approx(traced.worker_bytes, rel=0.02)
    assert "straight line" in planned.assumptions[-1]


def test_work_of_more_labels_alone_is_on_the_line_too() -> None:
    assert on_line({}, {"sort": 0.25}, distance=3) == {"sort": 0.75}


def test_a_plan_that_fails_leaves_warnings_on_and_memory_untraced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(method: Astra) -> None:
        raise ResourceError("no room")

    monkeypatch.setattr(Astra, "start", fail)
    with pytest.raises(ResourceError, match="no room"):
        made(labels=1000)
    assert logging.getLogger("xmcray").isEnabledFor(logging.WARNING)
    assert not tracemalloc.is_tracing()


def test_what_cannot_fit_is_refused_with_settings_that_would() -> None:
    with pytest.raises(ResourceError) as caught:
        made("astra", "encoder.dim=256", labels=1e8, workers=1)
    message = str(caught.value)
    assert "label rows 205.2 GB" in message
    assert "raise --workers to 4" in message
    assert "set encoder.dim=64" in message
    made("astra", "encoder.dim=64", labels=1e8, workers=1)


def test_a_smaller_limit_is_obeyed() -> None:
    settings = (*ON_HOST, "optim.batch_size=32")
    fits = made(*settings, labels=1e5, workers=1).worker_bytes
    made(*settings, labels=1e5, workers=1, memory_bytes=fits + 1_000_000)
    with pytest.raises(ResourceError, match="raise --workers to 2"):
        made(*settings, labels=1e5, workers=1, memory_bytes=fits - 10_000_000)


def test_worker_parts_are_on_the_device_or_in_the_process() -> None:
    config = RunConfig.resolve("astra", {})
    data = from_numbers(10**6, 10**6, 8)
    on_gpu = estimate(config, data, A100, 1)
    assert "label rows" in on_gpu.device_bytes
    assert "negatives" in on_gpu.host_bytes
    on_cpu = estimate(config, data, ON_CPU, 1)
    assert not on_cpu.device_bytes
    assert {"label rows", "negatives"} <= on_cpu.host_bytes.keys()


def test_the_first_refresh_visits_more_lists() -> None:
    config = NegativesConfig(hard=50)
    work = refresh.Refresh(
        rates=ON_CPU, config=config, rows=400_000, dim=64, queries=20_000, found=58
    )
    assert work.total_s(ANYWHERE) > work.total_s(APART)
    assert work.build_s() > 0


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("positives", [1, 22])
def test_a_shard_finds_as_many_labels_as_planned(
    tmp_path: Path, positives: int, share: float
) -> None:
    config = NegativesConfig(hard=5, start_epoch=2, recall_queries=0, max_relative_score=share)
    version = Ledger(tmp_path).version(0)
    vectors = np.ones((3, 2), np.float32)
    version.write_queries(1, 0, QueryBlock(np.arange(3), vectors, np.full(3, positives)))
    version.write_rows(0, np.ones((100, 2), np.float32))
    spec = RefreshSpec(1, config, 0)
    search_shard(version, 0, 100, spec)
    hits = version.read_hits(spec.parts(100)[0], version.query_blocks[0])
    assert (hits.labels.lengths == sizes.num_found(config, positives)).all()


def test_a_plan_for_several_machines_says_what_it_assumes_of_their_network() -> None:
    def mentions_machines(workers: int) -> bool:
        return any("different machines" in note for note in made(workers=workers).assumptions)

    assert [mentions_machines(workers) for workers in (1, 8, 9)] == [False, False, True]


def test_the_coordinator_has_room_for_the_vectors_that_it_clusters() -> None:
    num_queries = 20_000
    dim = 64
    tracemalloc.start()
    vectors = np.random.default_rng(0).standard_normal((num_queries, dim), np.float32)
    balanced_clusters(vectors, 4, 0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes.cluster_bytes(num_queries, dim) == pytest.approx(peak_bytes, rel=0.15)
    all_queries = ("data.augment_with_labels=false", "data.validation=0")
    clustered = made("astra", "negatives.cluster_size=8", *all_queries)
    assert clustered.cluster_bytes == sizes.cluster_bytes(2_000_000, clustered.dim)
    assert made("astra").cluster_bytes == 0
    # On a CPU all processes share the machine.
    config = RunConfig.resolve("astra", {}, ["negatives.cluster_size=8"])
    data = from_numbers(10**5, 10**5, 12)
    with_clusters = estimate(config, data, ON_CPU, 1)
    without = estimate(RunConfig.resolve("astra", {}), data, ON_CPU, 1)
    assert with_clusters.limit_bytes < without.limit_bytes


# A twentieth of the queries takes less than the scores, and half of them more.
@pytest.mark.parametrize(
    ("method", "validation"), [("astra", 0.05), ("astra", 0.5), ("prime", 0.5)]
)
def test_a_device_has_room_for_a_validation(method: str, validation: float) -> None:
    settings = (f"data.validation={validation}", "negatives.hard=0", "encoder.dim=512")
    plan = made(method, *settings, labels=1e5, workers=2)
    activations = plan.device_bytes["activations and scores"]
    # The rows of ASTRA answer as they are. PRIME makes vectors of texts, and of those vectors of length 1.
    row_bytes = 0 if method == "astra" else 2 * 50_000 * plan.dim * 4
    query_bytes = round(validation * 2_000_000) * plan.dim * 4
    expected = row_bytes + max(query_bytes, exact.device_score_bytes(50_000))
    between_steps = activations + plan.device_bytes[BETWEEN_STEPS]
    assert between_steps == pytest.approx(expected, rel=0.02)
    without = made(method, *settings, "data.validation=0", labels=1e5, workers=2)
    assert BETWEEN_STEPS not in without.device_bytes


def test_a_worker_that_lacks_the_room_for_a_validation_is_told_to_hold_out_less() -> None:
    settings = ("astra", "data.validation=0.5", "negatives.hard=0", "encoder.dim=512")
    without = made(*settings, "data.validation=0", labels=1e5, workers=2)
    with pytest.raises(ResourceError, match=r"GB: lower data\.validation"):
        made(*settings, labels=1e5, workers=2, memory_bytes=without.worker_bytes + 1)


def test_indexes_are_on_the_devices_of_the_workers_where_they_fit() -> None:
    on_host = made(*ON_HOST, "negatives.refresh_every=1", labels=1e6, workers=2)
    shared = made("astra", "negatives.refresh_every=1", labels=1e6, workers=2)
    assert INDEX not in on_host.device_bytes
    # The vectors of half the labels, as many ids, and the context of another process.
    dim = RunConfig.resolve("astra", {}).encoder.dim
    assert shared.device_bytes[INDEX] > 500_000 * (4 * dim + 8) + (1 << 30)
    assert shared.run_s[REFRESH] < on_host.run_s[REFRESH]
    # Searches and steps take turns on the device.
    assert shared.run_s["one epoch"] > on_host.run_s[STEPS] + on_host.run_s["one validation"]
    room = on_host.worker_bytes + shared.device_bytes[INDEX] - 1
    narrow = made("astra", "negatives.refresh_every=1", labels=1e6, workers=2, memory_bytes=room)
    assert INDEX not in narrow.device_bytes
    assert INDEX not in made("astra", "negatives.index=IVF64,Flat", workers=2).device_bytes


def device_search(lists: int = 8192) -> DeviceSearch:
    """The search of one of eight shards of 120 million labels, for 370 million queries."""
    return DeviceSearch(
        rates=device_rates("a100-80gb", "bf16"),
        rows=15_000_000,
        dim=64,
        queries=370_000_000,
        lists=lists,
    )


def test_an_exact_search_of_many_labels_is_bound_by_the_traffic_of_scores() -> None:
    search = device_search(lists=0)
    # Each score is written once and read once.
    num_scores = 15_000_000 * 370_000_000
    moved_s = 8 * num_scores / search.rates.pass_bytes_s
    product_s = 2 * 64 * num_scores / search.rates.product_flop_s
    assert moved_s > 2 * product_s
    assert search.search_s(APART) > moved_s


def test_lists_on_a_device_compare_few_of_many_rows() -> None:
    search = device_search()
    all_rows_s = device_search(lists=0).search_s(APART)
    # Lists of 4 % of the rows, and 5 % that are long: what is left is a tenth of the scores.
    scores = search.list_work(APART).scores
    assert scores == pytest.approx(0.09 * search.rows * search.queries, rel=0.03)
    assert 8 * scores / search.rates.pass_bytes_s < search.search_s(APART) < all_rows_s / 8
    assert search.search_s(APART) < search.search_s(ANYWHERE) < all_rows_s
    # k-means of half a million rows is no work for a device.
    assert 0 < search.build_s() < 60


def test_a_search_takes_turns_with_the_steps_of_an_epoch() -> None:
    assert refresh.shared_device_s(10.0, 20.0, busy=0.5) == 15.0
    assert refresh.shared_device_s(10.0, 10.0, busy=0.5) == 15.0
    # Afterwards the trainers wait.
    assert refresh.shared_device_s(30.0, 10.0, busy=0.5) == 35.0


def test_late_versions_are_planned_with_the_time_to_wait_for_them() -> None:
    slow = dataclasses.replace(A100, search_flop_s=1e5)
    size = from_numbers(10_000, 20_000, 12)

    def advice(*settings: str) -> list[str]:
        config = RunConfig.resolve("astra", {}, ["encoder.dim=8", ON_HOST[1], *settings])
        return plan(config, size, slow).advice

    (line,) = advice()
    assert "a version of the negatives is up to" in line
    (setting,) = re.findall(r"negatives\.wait_s=\d+", line)
    assert advice(setting) == []
    assert advice("negatives.schedule=eager") == []


def slow_refreshes(*settings: str) -> Plan:
    """A plan in which a version of the negatives takes hours longer than an epoch."""
    slow = dataclasses.replace(A100, search_flop_s=1e5)
    fixed = ["encoder.dim=8", "negatives.wait_s=1e9", "optim.epochs=20", ON_HOST[1]]
    config = RunConfig.resolve("astra", {}, [*fixed, *settings])
    return plan(config, from_numbers(10_000, 20_000, 12), slow)


def test_training_waits_for_each_version_that_it_uses() -> None:
    def waited_s(*settings: str) -> float:
        with_versions = slow_refreshes(*settings)
        late_s = with_versions.run_s[REFRESH] - with_versions.run_s[STEPS]
        first_late_s = with_versions.run_s[FIRST_REFRESH] - with_versions.run_s[REFRESH]
        without = slow_refreshes(*settings, "negatives.start_epoch=20")
        return (with_versions.total_s - without.total_s - first_late_s) / late_s

    # Versions for the epochs 5, 10 and 15 of 20; and for 5, 14.
    assert waited_s() == pytest.approx(3)
    assert waited_s("negatives.refresh_every=9") == pytest.approx(2)
    # A training of 10 epochs does not use the version for epoch 10.
    assert waited_s("optim.stop_epoch=10") == pytest.approx(1)


def test_versions_that_no_epoch_uses_are_not_planned() -> None:
    short = slow_refreshes("optim.epochs=5")
    assert REFRESH not in short.run_s
    assert FIRST_REFRESH not in short.run_s
    assert not short.advice
    assert not any("index actors" in note for note in short.assumptions)
    assert short.total_s < slow_refreshes("optim.epochs=6").total_s / 5


def test_an_eager_schedule_waits_for_no_version() -> None:
    eager = slow_refreshes("negatives.schedule=eager")
    assert eager.run_s[REFRESH] > eager.run_s[STEPS]
    without = slow_refreshes("negatives.start_epoch=20")
    assert eager.total_s == pytest.approx(without.total_s)


@pytest.mark.parametrize(("every", "number"), [(0, 1), (1, 20), (3, 7), (20, 1), (30, 1)])
def test_the_last_epoch_ends_with_a_validation(every: int, number: int) -> None:
    settings = ("negatives.hard=0", f"log.validate_every={every}")
    planned = slow_refreshes(*settings)
    validation_s = planned.run_s["one validation"]
    assert validation_s > 0
    steps_s = planned.epochs * planned.run_s[STEPS]
    assert planned.total_s == pytest.approx(steps_s + number * validation_s)


def test_queries_that_cannot_be_held_out_are_trained_on_and_not_validated() -> None:
    def seconds(*settings: str) -> tuple[float, float]:
        planned = made("astra", "data.validation=0.5", "data.augment_with_labels=false", *settings)
        return planned.run_s[STEPS], planned.run_s["one validation"]

    num_queries = 2_000_000
    steps_s, validation_s = seconds()
    # Half of the second half.
    later_steps_s, later_validation_s = seconds(f"data.validation_from={num_queries // 2}")
    assert later_steps_s == pytest.approx(1.5 * steps_s, rel=0.01)
    assert later_validation_s < validation_s
    none_steps_s, none_validation_s = seconds(f"data.validation_from={num_queries}")
    assert none_steps_s == pytest.approx(2 * steps_s, rel=0.01)
    assert none_validation_s == 0


def test_clusters_alone_have_actors_without_an_index() -> None:
    settings = ["negatives.hard=0", "negatives.uniform=100"]
    alone = made("astra", *settings, "negatives.cluster_size=4", labels=2000)
    assert alone.index_bytes == A100.process_bytes[0]
    assert alone.index_on_disk == 0
    assert made("astra", *settings, labels=2000).index_bytes == 0


def test_actors_without_cores_wait_for_the_trainers() -> None:
    def seconds(cores: int) -> float:
        rates = dataclasses.replace(ON_CPU, cores=cores)
        return refresh.shared_cores_s(10.0, 15.0, rates, workers=2, niceness=5)

    assert seconds(0) == seconds(4) == 10.0
    assert seconds(4) < seconds(2) < seconds(1)


def test_rates_are_kept_and_read(tmp_path: Path) -> None:
    A100.save(tmp_path / "rates.json")
    assert load_rates(tmp_path / "rates.json") == A100
    (tmp_path / "other.json").write_text('{"version": 0}')
    with pytest.raises(ConfigError, match="not measured by this release"):
        load_rates(tmp_path / "other.json")
    with pytest.raises(StorageError, match="cannot be read"):
        load_rates(tmp_path / "missing.json")
    assert {"a100-80gb", "h100-80gb", "h200-141gb", "l4-24gb"} <= SPECS.keys()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("call_s", None, "call_s is None, expected a number"),
        ("call_s", "x", "call_s is 'x', expected a number"),
        ("pass_bytes_s", 0, "pass_bytes_s is 0, expected more than 0"),
        ("sort_s", -1, "sort_s is -1.0, expected at least 0"),
        ("process_bytes", [1, 0], "process_bytes is 0, expected more than 0"),
        ("threads", 0, "threads is 0, expected more than 0"),
        ("device", 1, "device is 1, expected str"),
    ],
)
def test_damaged_rates_are_one_line(
    name: str, value: object, reason: str, tmp_path: Path, shell: Shell
) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({**dataclasses.asdict(ON_CPU), name: value}))
    error = shell.error(f"plan astra {ON_THIS_MACHINE} --probe {file}")
    assert error.startswith(f"probe {file} was not measured by this release ({reason})")


@pytest.mark.parametrize(
    "content",
    ["{}", "nojson", "[1]", '{"model_type": "foo"}', '{"model_type": "bert", "hidden_size": "x"}'],
)
def test_a_damaged_transformer_is_one_line(content: str, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "config.json").write_text(content)
    error = shell.error(f"plan astra {SIZE} --set encoder.name={tmp_path}")
    assert f"encoder.name is '{tmp_path}', whose config.json is no transformer's (" in error


def test_an_index_that_could_not_be_built_is_refused(shell: Shell) -> None:
    plan = "plan astra --labels 1000 --queries 1000 --device a100-80gb --workers 2"
    expected = "negatives.index is 'Foo', expected a FAISS factory string"
    assert expected in shell.error(f"{plan} --set negatives.index=Foo")
    expected = "negatives.index is 'IVF600,Flat' with 600 lists, found 500 labels in an index"
    assert expected in shell.error(f"{plan} --set negatives.index=IVF600,Flat")


SIZE = "--labels 1.3e6 --queries 2.2e6 --device a100-80gb"


def test_the_verb_prints_a_plan(shell: Shell) -> None:
    plan = f"plan astra {SIZE} --workers 8 --price-per-hour 2"
    planned = json.loads(shell.run(f"{plan} --json"))
    sizes = planned["labels"], planned["workers"], planned["source"]
    assert sizes == (1_300_000, 8, "published specs")
    assert planned["cost"] == pytest.approx(16 * planned["total_s"] / 3600)
    printed = shell.run(plan)
    assert "device: label rows" in printed
    assert "assumed: device rates are published specs" in printed
    assert "16 tokens in each text (no --tokens-per-text was given)" in printed
    assert "12.9 tokens in each text" in shell.run(f"{plan} --tokens-per-text 12.9")


ON_THIS_MACHINE = "--labels 1000 --queries 1000 --set encoder.dim=8"


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [
        ("--workers 2", 2),  # as many index actors as workers
        ("--workers 2 --set negatives.hard=0", 4),
        ("--set cluster.workers=0", 4),  # a half for the steps, a half for the index
        ("--workers 2 --set cluster.threads_per_process=3", 3),
    ],
)
def test_a_machine_is_measured_with_the_threads_of_a_training(
    arguments: str,
    threads: int,
    tmp_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(threads: int) -> Rates:
        return dataclasses.replace(ON_CPU, source="measured", threads=threads, cores=8)

    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("xmcray.planning.probe.probe", measured)
    file = tmp_path / "rates.json"
    command = f"plan astra {ON_THIS_MACHINE} {arguments} --probe {file}"
    note = f"assumed: {threads} threads in each process (cluster.threads_per_process)"
    assert note in shell.run(command)
    assert load_rates(file).threads == threads
    assert note in shell.run(command)
    problem = f"probe {file} was measured with {threads} threads, but processes of this training"
    error = shell.error(f"{command} --set cluster.threads_per_process=7")
    assert error.startswith(f"{problem} have 7; measure into another file, or")


def test_a_probe_is_for_this_machine_alone(tmp_path: Path, shell: Shell) -> None:
    file = tmp_path / "probe.json"
    command = f"plan astra --labels 1000 --queries 1000 --device a100-80gb --probe {file}"
    assert shell.error(command).startswith(f"probe is {file}, expected none")
    assert not file.exists()


@pytest.mark.parametrize("settings", [{}, {"threads_per_process": 3}])
@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_plan_has_the_threads_of_the_placement(
    settings: dict[str, int], num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    cluster = ClusterConfig(workers=2, cpus_per_worker=1, **settings)
    nodes = Nodes({"a": {"CPU": 8.0}}, [], autoscaled=False)
    threads = place(cluster, nodes, num_shards).threads
    assert threads == cluster.threads_on_one_machine(2, num_shards)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("astra", "the size of the data is not known"),
        (f"astr {SIZE}", "did you mean 'astra'"),
        (f"astra {SIZE[:-4]}81gb", "did you mean 'a100-80gb'"),
        (f"astra {SIZE} --memory-gb 1", "a worker needs"),
        (f"astra {SIZE} --workers 0", "workers is 0, expected more than 0"),
        (f"astra {SIZE} --labels many", "not a number"),
        (f"astra {SIZE} --labels 0", "--labels is 0, expected at least 1"),
        (f"astra {SIZE} --labels 1.5", "'1.5' is not an integer"),
        (f"astra {SIZE} --labels inf", "'inf' is not an integer"),
        (f"astra {SIZE} --memory-gb inf", "memory_gb is inf, expected at most 1e+09"),
        (f"astra {SIZE} --memory-gb nan", "memory_gb is nan, expected more than 0"),
        (f"astra {SIZE} --price-per-hour inf", "price_per_hour is inf, expected at most 1e+09"),
        (f"astra {SIZE} --data C", "labels is 1.3e+06, but data is counted; leave out labels, or"),
        ("astra --data C --positives 5", "positives is 5, but data is counted"),
        ("astra --data no-such-corpus", "does not exist"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str, shell: Shell) -> None:
    assert said in shell.error(f"plan {arguments}")


def test_the_page_on_scale_is_up_to_date_and_its_refresh_is_shorter_than_an_epoch() -> None:
    root = Path(__file__).parents[3]
    script = runpy.run_path(str(root / "benchmarks" / "scale_plans.py"))
    page = (root / "docs" / "scale.md").read_text(encoding="utf-8")
    advice = "run: python benchmarks/scale_plans.py"
    assert page.startswith(script["HEAD"]), advice
    assert all(case.command in page for case in script["CASES"]), advice
    # One of them is enough: the others take a minute.
    (case,) = (case for case in script["CASES"] if case.title.startswith("370 million queries"))
    made = script["planned"](case)
    section = page.split(f"## {case.title}")[1].split("\n## ")[0]
    # These include what Python allocates for itself, which varies a little.
    varying = ("| process: copies for start", "| process: in all")
    for line in script["section"](case, made)[1:]:
        assert line in section or line.startswith(varying), advice
    assert made.run_s[FIRST_REFRESH] == made.run_s[REFRESH] < made.run_s[STEPS]
    assert not made.advice


def test_device_contexts_work_after_a_plan() -> None:
    # In a process of its own, because torch lists its constructors once.
    code = (
        "import torch\n"
        "from xmcray.cli import main\n"
        "main('plan astra --labels 100 --queries 100 --tokens-per-text 8 --device a100-80gb'.split())\n"
        "with torch.device('meta'):\n"
        "    assert torch.tensor([]).device.type == 'meta'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (999_400_000, "999 MB"),
        (999_600_000, "1 GB"),
        (12_340_000_000, "12.3 GB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_amounts_have_three_digits_and_no_exponent(num_bytes: int, text: str) -> None:
    assert tables._text(num_bytes, tables._BYTES) == text
