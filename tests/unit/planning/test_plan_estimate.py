"""Plans of every method: memory and time grow as they should; refusals and waits give advice."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_rates import A100, ON_CPU

from xmcray.errors import ResourceError
from xmcray.methods.astra import Astra
from xmcray.methods.registry import method_names
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, search_shard
from xmcray.negatives.version_folder import QueryBlock
from xmcray.planning import refresh, sizes
from xmcray.planning.data_size import from_numbers
from xmcray.planning.device_search import ANYWHERE, APART, DeviceSearch
from xmcray.planning.devices import device_rates
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
from xmcray.planning.trace import on_line
from xmcray.retrieval import exact
from xmcray.training.run_config import RunConfig

ON_HOST = ("astra", "cluster.index_resource=CPU")  # a method, and indexes that stay off its devices


@functools.cache
def made(method: str = "astra", *settings: str, labels: float = 1e6, **options: Any) -> Plan:
    config = RunConfig.resolve(method, {}, settings)
    return plan(config, from_numbers(int(labels), 2_000_000, 12), A100, **options)


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


def test_more_workers_are_advised_where_they_share_what_validation_needs() -> None:
    with pytest.raises(ResourceError, match=r"validations and versions.*raise --workers to 8"):
        made("rae", "negatives.hard=20", labels=2e8, workers=4)
    made("rae", "negatives.hard=20", labels=2e8, workers=8)


def test_the_index_actor_of_a_device_is_on_its_host_too() -> None:
    settings = ("encoder.dim=128", "negatives.hard=20")
    with pytest.raises(ResourceError, match=r"host needs 132.1 GB, .*: raise --workers, set"):
        made("astra", *settings, labels=2e8, workers=5)
    made("astra", *settings, labels=2e8, workers=6)


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
