"""Plans: sizes are those of the real objects, numbers move the right way, what cannot fit is refused with advice."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import corpora
import pytest
import torch
from models import write_bert

from xmcray.cli import main
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, ResourceError, StorageError
from xmcray.methods.registry import method_names
from xmcray.nn.encoder import EncoderConfig, load_encoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning import refresh, sizes
from xmcray.planning.costs import COSTS
from xmcray.planning.data_size import from_corpus, from_numbers
from xmcray.planning.devices import SPECS, device_rates
from xmcray.planning.encoders import KNOWN, encoder_shape
from xmcray.planning.model import StepTime
from xmcray.planning.plan import Plan, plan, worker_parts
from xmcray.planning.rates import SORTED, TOP_COLUMNS, TOP_KEPT, between, load_rates
from xmcray.planning.workload import distinct_rows, workload
from xmcray.training.loop import Setup, build
from xmcray.training.run import RunConfig

A100 = device_rates("a100-80gb")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpora.planted_corpus(tmp_path_factory.mktemp("planted"))


def made(method: str = "astra", *settings: str, labels: float = 1e6, **options: object) -> Plan:
    config = RunConfig.resolve(method, {}, settings)
    return plan(config, from_numbers(int(labels), 2_000_000, 12), A100, **options)  # type: ignore[arg-type]


def tensors_of(setup: Setup) -> int:
    """Bytes of all label rows with their state."""
    return sum(
        tensor.nbytes
        for table in setup.method.tables.values()
        for tensor in (*table.tensors().values(), table.last_step_S)
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("astra", []),
        (
            "astra",
            ["method.classifier.kind=adam", "encoder.residual=false", "encoder.bigram_buckets=50"],
        ),
        ("astra", ["method.classifier.storage=bfloat16", "method.classifier.kind=adagrad"]),
        ("renee", ["method.classifier.momentum=0", "optim.precision=float64"]),
        ("unidec", ["method.head_dim=6"]),
        ("unidec", ["method.balance=1"]),
        ("prime", ["method.free_vectors=8"]),
        ("dexml", ["method.columns=cache"]),
        ("rae", []),
    ],
)
def test_what_lives_as_long_as_the_run_has_the_bytes_of_the_real_tensors(
    corpus: Corpus, method: str, settings: list[str]
) -> None:
    config = RunConfig.resolve(method, {}, ["encoder.dim=12", *settings])
    data = TrainingData(corpus, config.data)
    part = LabelPartition(data.num_labels, 2, 0)
    setup = build(config, data, torch.device("cpu"), part)
    shape = encoder_shape(config.encoder, corpus.tokenizer().vocab_size)
    value = 8 if config.optim.precision == "float64" else 4
    shard = sizes.Shard(workers=2, labels=part.size, queries=0, value=value)

    assert sizes.label_rows(config, shape.dim, shard) == tensors_of(setup)
    encoder = setup.stepper.encoder
    assert sizes.encoder(shape, value) == sum(
        tensor.nbytes for tensor in encoder.state_dict().values()
    )
    modules = sum(
        t.nbytes for module in setup.method.modules.values() for t in module.state_dict().values()
    )
    assert sizes.method_modules(config, shape, data.num_labels, value) == modules
    optimiser = setup.stepper.optimizer
    dense = sum(p.nbytes for p in optimiser.dense.values())
    sparse = sum(t.nbytes for rows in optimiser.tables.values() for t in rows.state.values())
    counts = sum(
        rows.last_step_S.nbytes + rows.touches_S.nbytes for rows in optimiser.tables.values()
    )
    assert sizes.optimiser(config, shape, data.num_labels, value) == 3 * dense + sparse + counts


@pytest.mark.parametrize("dim", [0, 16, 5])
def test_the_shape_of_a_transformer_counts_its_parameters(tmp_path: Path, dim: int) -> None:
    folder = write_bert(tmp_path / "bert", ["a", "b"], layers=2)
    shape = encoder_shape(EncoderConfig(name=str(folder), dim=dim), 7)
    projection = 16 * dim if dim == 5 else 0
    assert shape.dense == sum(p.numel() for p in load_encoder(folder).parameters()) + projection
    assert shape.dim == (dim or 16)


def test_known_encoders_have_their_published_number_of_parameters() -> None:
    counts = {name: encoder_shape(EncoderConfig(name=name, dim=0), 0).dense for name in KNOWN}
    assert counts["distilbert-base-uncased"] == 66_362_880
    assert counts["bert-base-uncased"] == 109_482_240 - 768 * 769  # without its pooler
    with pytest.raises(ConfigError, match="neither a transformer's folder"):
        encoder_shape(EncoderConfig(name="nobody/nothing", dim=0), 0)


def test_a_checkpoint_has_the_planned_size(corpus: Corpus, tmp_path: Path) -> None:
    from xmcray.training import checkpoint

    config = RunConfig.resolve("astra", {}, ["encoder.dim=64", "cluster.workers=0"])
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    setup.stepper.step(setup.sampler.batch(0, 0, 1), None)
    checkpoint.save(tmp_path, 1, setup.stepper, setup.partition, {"epoch": 0, "negatives": {}}, 1)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    shape = encoder_shape(config.encoder, corpus.tokenizer().vocab_size)
    assert sizes.checkpoint(config, from_corpus(corpus), shape) == pytest.approx(written, rel=0.01)


def test_the_step_of_a_corpus_is_the_one_that_is_sampled(corpus: Corpus) -> None:
    config = RunConfig.resolve(
        "astra", {}, ["optim.batch_size=50", "data.validation=0", "cluster.workers=0"]
    )
    size, data = from_corpus(corpus), TrainingData(corpus, config.data)
    load = workload(config, size, 1)
    setup = build(config, data, torch.device("cpu"))
    batches = [setup.sampler.batch(step, 0, 1) for step in range(setup.sampler.steps_per_epoch - 1)]
    assert load.steps_per_epoch == pytest.approx(setup.sampler.steps_per_epoch, abs=1)
    tokens = sum(len(batch.tokens.values) for batch in batches) / len(batches)
    positives = sum(len(batch.positives.values) for batch in batches) / len(batches)
    assert load.tokens == pytest.approx(tokens, rel=0.2)
    assert load.positives == pytest.approx(positives, rel=0.2)
    assert distinct_rows(size, config, 1e9, 1) <= size.vocab_size


@pytest.mark.parametrize("method", COSTS)
def test_every_method_has_a_plan_and_more_of_anything_takes_more(method: str) -> None:
    small = made(method, "encoder.dim=64", labels=1e5)
    assert small.step_seconds > 0
    assert small.worker_bytes > 0
    assert json.loads(json.dumps(dataclasses.asdict(small)))["method"] == method
    for changed in (
        made(method, "encoder.dim=128", labels=1e5),
        made(method, "encoder.dim=64", "optim.batch_size=512", labels=1e5),
        made(method, "encoder.dim=64", labels=1e6),
    ):
        assert changed.worker_bytes > small.worker_bytes
        assert changed.step_seconds > 0.99 * small.step_seconds
        assert changed.checkpoint >= small.checkpoint


def test_every_method_has_costs() -> None:
    assert list(COSTS) == method_names()


def test_workers_share_label_rows_and_price_is_per_worker_and_hour() -> None:
    one, eight = made(workers=1, price_per_hour=2.0), made(workers=8, price_per_hour=2.0)
    assert eight.device_bytes["classifier shard"] == pytest.approx(
        one.device_bytes["classifier shard"] / 8, rel=1e-4
    )
    assert eight.cost == pytest.approx(2.0 * 8 * eight.total_s / 3600)
    assert made(workers=1).cost is None


def test_what_cannot_fit_is_refused_with_settings_that_would() -> None:
    with pytest.raises(ResourceError) as caught:
        made("astra", "encoder.dim=256", labels=1e8, workers=1)
    message = str(caught.value)
    assert "classifier shard 205.2 GB" in message
    assert "raise --workers to 4" in message
    assert "set encoder.dim=64" in message
    made("astra", "encoder.dim=256", labels=1e8, workers=4)
    made("astra", "encoder.dim=64", labels=1e8, workers=1)
    with pytest.raises(ResourceError, match=r"optim\.micro_batch=|optim\.batch_size="):
        made("dexml", "encoder.name=bert-base-uncased", "encoder.dim=0", "method.columns=in_batch",
             "optim.batch_size=65536", labels=1e5, workers=1)  # fmt: skip


def test_a_smaller_limit_is_obeyed() -> None:
    fits = made(workers=1).worker_bytes
    made(workers=1, memory_bytes=fits)
    with pytest.raises(ResourceError, match="raise --workers to 2"):
        made(workers=1, memory_bytes=fits - 1_000_000)


def test_worker_parts_are_on_the_device_or_in_the_process() -> None:
    config, data = RunConfig.resolve("astra", {}), from_numbers(10**6, 10**6, 8)
    device, host = worker_parts(config, data, A100, 1)
    assert "classifier shard" in device
    assert "negatives" in host
    device, host = worker_parts(config, data, dataclasses.replace(A100, on_gpu=False), 1)
    assert not device
    assert {"classifier shard", "negatives"} <= host.keys()


def test_the_first_refresh_visits_more_lists_and_actors_without_cores_wait_for_the_trainer() -> (
    None
):
    config, data = (
        RunConfig.resolve("astra", {}, ["encoder.dim=64"]),
        from_numbers(400_000, 20_000, 8),
    )
    alone = dataclasses.replace(A100, on_gpu=False)
    load, shape = workload(config, data, 2), encoder_shape(config.encoder, data.vocab_size)
    shard = sizes.shard_of(config, data, load, 2)

    def seconds(cores: int, spread: refresh.Spread) -> float:
        rates = dataclasses.replace(alone, cores=cores)
        step = StepTime(config=config, shape=shape, data=data, load=load, shard=shard, rates=rates)
        return refresh.refresh(step, spread)

    assert seconds(0, refresh.ANYWHERE) > seconds(0, refresh.APART)
    assert seconds(0, refresh.APART) == seconds(4, refresh.APART)
    assert seconds(4, refresh.APART) < seconds(2, refresh.APART) < seconds(1, refresh.APART)


def test_the_rounds_of_a_search_meet_each_visited_list_and_long_row_once() -> None:
    spread = refresh.Spread(visited=0.1, long=0.05)
    rounds = list(refresh.rounds(lists=1024, number=102.4, rows=100_000, spread=spread))
    assert sum(lists for lists, _ in rounds) == pytest.approx(102.4)
    assert sum(rows for _, rows in rounds) == pytest.approx(95_000 * 0.1 + 5_000)


def test_selecting_costs_a_pass_and_the_order_of_what_is_kept() -> None:
    rates = dataclasses.replace(A100, on_gpu=False, top_s=8e-9, sort_s=5e-8)
    assert rates.top(1, TOP_COLUMNS, TOP_KEPT) == pytest.approx(
        TOP_COLUMNS * 8e-9
    )  # as it was measured
    assert rates.top(1, 256, 100) > 256 * 8e-9
    assert rates.order(SORTED) == pytest.approx(SORTED * 5e-8)


def test_rates_are_kept_and_read(tmp_path: Path) -> None:
    A100.save(tmp_path / "rates.json")
    assert load_rates(tmp_path / "rates.json") == A100
    (tmp_path / "other.json").write_text('{"version": 0}')
    with pytest.raises(ConfigError, match="not measured by this release"):
        load_rates(tmp_path / "other.json")
    with pytest.raises(StorageError, match="cannot be read"):
        load_rates(tmp_path / "missing.json")
    assert between(((1.0, 10.0), (100.0, 1000.0)), 10.0) == pytest.approx(100.0)
    assert {"a100-80gb", "h100-80gb", "h200-141gb", "l4-24gb"} <= SPECS.keys()


SIZE = [
    "--labels",
    "1.3e6",
    "--queries",
    "2.2e6",
    "--tokens-per-text",
    "12",
    "--device",
    "a100-80gb",
]


def test_the_verb_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    preset = [
        "--config",
        "preset:astra/lf-amazontitles-1.3m",
        "--workers",
        "8",
        "--price-per-hour",
        "2",
    ]
    assert main(["plan", "astra", *SIZE, *preset, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["labels"], found["workers"], found["source"]) == (1_300_000, 8, "published specs")
    assert found["cost"] == pytest.approx(16 * found["total_s"] / 3600)
    assert main(["plan", "astra", *SIZE, *preset]) == 0
    printed = capsys.readouterr().out
    assert "device: classifier shard" in printed
    assert "assumed: device rates are published specs" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["astra"], "nothing says how large the data is"),
        (["astr", *SIZE], "did you mean 'astra'"),
        (["astra", *SIZE[:-1], "a100-81gb"], "did you mean 'a100-80gb'"),
        (["astra", *SIZE, "--memory-gb", "1"], "a worker needs"),
        (["astra", *SIZE, "--workers", "0"], "--workers is 0, expected more than 0"),
        (["astra", *SIZE, "--labels", "many"], "not a number"),
        (["astra", *SIZE, "--labels", "0"], "--labels is 0, expected at least 1"),
        (["astra", "--data", "no-such-corpus"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_page_on_scale_is_up_to_date() -> None:
    root = Path(__file__).parents[3]
    script = runpy.run_path(str(root / "benchmarks" / "scale_plans.py"))
    assert (root / "docs" / "scale.md").read_text(encoding="utf-8") == script["page"](), (
        "run: python benchmarks/scale_plans.py"
    )
