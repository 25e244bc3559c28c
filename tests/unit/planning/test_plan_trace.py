"""The traced step of a plan: bytes are those of the real objects, work is that of the real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
import torch
from models import write_bert, write_family
from plan_rates import ON_CPU
from torch.utils.flop_counter import FlopCounterMode

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.nn.encoder import EncoderConfig, load_encoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.counter import Counter, Operation
from xmcray.planning.data_size import DataSize, from_corpus, from_numbers
from xmcray.planning.devices import device_rates
from xmcray.planning.encoders import KNOWN, planned_encoder
from xmcray.planning.plan import plan
from xmcray.planning.rates import Rates
from xmcray.planning.stand_in import StandInData
from xmcray.planning.trace import trace
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Ragged


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpora.planted_corpus(tmp_path_factory.mktemp("planted"), side_width=5)


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
