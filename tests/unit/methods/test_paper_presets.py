"""Presets for the papers' data sets hold the papers' figures, in our units.

Our batch sizes are global, and our loss is the mean over the global batch. Two papers print figures
of one of 16 GPUs and a learning rate of the classifier for a loss that is summed over the batch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from xmcray import settings_files
from xmcray.errors import ConfigError
from xmcray.training.run_config import RunConfig

NUM_GPUS = 16

# batch of a GPU, epochs, lr of the encoder, lr of the classifier, dropout, warm-up steps,
# weight decay of the classifier; then, for each of 16 shards: random and hard negatives, positives.
ASTRA = {
    "lf-amazontitles-131k": (32, 75, 1e-5, 0.05, 0.85, 3000, 1e-4, 400, 50, 7),
    "lf-amazon-131k": (32, 100, 1e-4, 0.05, 0.75, 5000, 1e-4, 100, 15, 7),
    "lf-wikipedia-500k": (128, 40, 1e-4, 0.002, 0.7, 2500, 1e-3, 200, 30, 13),
    "lf-amazontitles-1.3m": (64, 100, 3e-6, 0.01, 0.75, 5000, 1e-4, 100, 15, 79),
    "amazon-670k": (16, 70, 4e-5, 0.01, 0.8, 10000, 1e-3, 400, 50, 7),
    "amazon-3m": (16, 60, 4e-5, 0.01, 0.75, 10000, 1e-3, 400, 50, 50),
}

# batch of a GPU, lr and weight decay of the classifier in the authors' commands.
RENEE = {
    "lf-amazontitles-131k": (32, 0.05, 1e-4),
    "lf-amazon-131k": (32, 0.05, 1e-4),
    "ngame-lf-amazon-131k": (32, 0.05, 1e-4),
    "lf-wikipedia-500k": (128, 0.002, 1e-3),
    "wiki-500k": (128, 0.002, 1e-3),
    "lf-wikiseealso-320k": (128, 0.1, 1e-4),
    "lf-amazontitles-1.3m": (64, 0.01, 1e-4),
    "amazon-670k": (16, 0.01, 1e-3),
    "amazontitles-670k": (16, 0.001, 1e-3),
    "amazon-3m": (16, 0.01, 1e-3),
}

# lr, batch, dropout on the embeddings, eta_m, tau.
DEXML = {
    "eurlex-4k": (2e-4, 1024, 0.1, 4096, 0.05),
    "lf-amazontitles-131k": (4e-4, 4096, 0.0, 2048, 0.05),
    "lf-wikipedia-500k": (4e-4, 4096, 0.1, 2048, 1.0),
    "lf-amazontitles-1.3m": (8e-4, 8192, 0.1, 1024, 1.0),
}

# beta, eta, batch. The paper prints them for three sets; the others take the figures of a set that
# is like them, as their presets say.
UNIDEC = {
    "lf-amazon-131k": (3, 6, 576),
    "lf-amazontitles-131k": (3, 6, 576),
    "lf-wikiseealso-320k": (3, 6, 677),
    "lf-wikiseealsotitles-320k": (3, 6, 677),
    "lf-wikititles-500k": (3, 6, 677),
    "lf-amazontitles-1.3m": (1, 6, 1098),
}

# batch of one of 8 GPUs, lr, steps, steps between refreshes, shortlist, training queries.
RAE = {
    "lf-amazontitles-131k": (896, 3e-4, 3_000, 1_000, 50, 294_805),
    "lf-wikiseealso-320k": (576, 2e-4, 3_000, 1_000, 50, 693_082),
    "lf-wikipedia-500k": (400, 2e-4, 28_000, 7_000, 25, 1_813_391),
    "lf-amazontitles-1.3m": (896, 3e-4, 40_000, 8_000, 50, 2_248_619),
}

# lr, batch, epochs, free vectors.
PRIME = {
    "lf-amazon-131k": (3e-4, 512, 300, 65_536),
    "lf-amazontitles-131k": (3e-4, 3200, 300, 65_536),
    "lf-amazontitles-1.3m": (3e-4, 3200, 300, 131_072),
    "lf-wikiseealso-320k": (1e-4, 1024, 200, 65_536),
    "lf-wikipedia-500k": (1e-4, 512, 50, 65_536),
    "lf-wikititles-500k": (2e-4, 3200, 300, 65_536),
}


def preset(method: str, name: str) -> Any:
    return RunConfig.resolve(method, settings_files.load_yaml(f"preset:{method}/{name}"))


@pytest.mark.parametrize("name", ASTRA)
def test_astra_has_the_figures_of_all_gpus_and_rates_of_a_mean(name: str) -> None:
    gpu_batch, epochs, lr, row_lr, dropout, warmup, decay, random, hard, positives = ASTRA[name]
    run = preset("astra", name)
    batch = NUM_GPUS * gpu_batch
    assert run.optim.batch_size == batch
    assert run.optim.epochs == epochs
    assert run.optim.lr == lr
    assert run.optim.warmup_steps == warmup
    assert run.method.dropout == dropout
    assert run.method.max_positives == NUM_GPUS * positives
    assert run.negatives.uniform == NUM_GPUS * random
    assert run.negatives.hard == NUM_GPUS * hard
    rows = run.method.classifier
    # The gradient of a mean is smaller by the batch. Decoupled decay multiplies rows by
    # 1 - lr * weight_decay, which has to stay what it is.
    assert rows.lr == pytest.approx(row_lr * batch)
    assert rows.weight_decay == pytest.approx(decay / batch, rel=1e-3)
    assert rows.lr * rows.weight_decay == pytest.approx(row_lr * decay, rel=1e-3)


@pytest.mark.parametrize("name", RENEE)
def test_renee_has_rates_of_a_mean(name: str) -> None:
    gpu_batch, row_lr, decay = RENEE[name]
    run = preset("renee", name)
    batch = NUM_GPUS * gpu_batch
    rows = run.method.classifier
    assert run.optim.batch_size == batch
    assert rows.lr == pytest.approx(row_lr * batch)
    # The authors' decay is a part of the gradient, so momentum 0.9 sums ten steps of it.
    sum_of_momentum = 1 / (1 - rows.momentum)
    assert rows.weight_decay == pytest.approx(sum_of_momentum * decay / batch, rel=1e-3)


@pytest.mark.parametrize("name", DEXML)
def test_dexml_drops_on_the_embeddings_and_leaves_the_transformer_its_rates(name: str) -> None:
    lr, batch, dropout, texts, temperature = DEXML[name]
    run = preset("dexml", name)
    assert run.method.dropout == dropout
    assert run.encoder.dropout is None
    assert run.method.temperature == temperature
    assert run.optim.lr == lr
    assert run.optim.batch_size == batch
    assert run.optim.micro_batch == texts
    assert run.optim.epochs == 100


@pytest.mark.parametrize("name", UNIDEC)
def test_unidec_has_the_batches_of_table_2(name: str) -> None:
    beta, eta, batch = UNIDEC[name]
    run = preset("unidec", name)
    assert run.optim.batch_size == batch
    assert run.method.num_positives == beta
    assert run.method.hard_per_query == eta
    assert run.negatives.hard == eta * run.negatives.refresh_every
    assert run.method.classifier_positives == 0  # the headline of each set is without pos-clf
    assert run.optim.lr == 1e-4
    assert run.optim.lr * run.method.head_lr == 2e-4
    assert run.method.classifier.lr == 1e-3
    assert run.optim.epochs == 150


@pytest.mark.parametrize("name", RAE)
def test_rae_trains_about_as_many_steps_as_printed(name: str) -> None:
    gpu_batch, lr, steps, steps_between, shortlist, num_queries = RAE[name]
    run = preset("rae", name)
    assert run.optim.batch_size == 8 * gpu_batch
    assert run.optim.lr == lr
    assert run.negatives.hard == shortlist
    assert run.method.hard_per_query == 2
    # Whole epochs come as close to the printed steps as they can.
    steps_per_epoch = math.ceil(num_queries / run.optim.batch_size)
    assert abs(run.optim.epochs * steps_per_epoch - steps) <= steps_per_epoch
    assert abs(run.negatives.refresh_every * steps_per_epoch - steps_between) <= steps_per_epoch


@pytest.mark.parametrize("name", PRIME)
def test_prime_lite_has_one_positive_and_half_the_batch(name: str) -> None:
    lr, batch, epochs, vectors = PRIME[name]
    for suffix, num_positives, share in (("", 2, 1), ("-lite", 1, 2)):
        run = preset("prime", name + suffix)
        assert run.method.num_positives == num_positives
        assert run.optim.batch_size == batch // share
        assert run.optim.lr == lr
        assert run.optim.epochs == epochs
        assert run.method.free_vectors == vectors


@pytest.mark.parametrize("method", ["astra", "renee"])
def test_the_default_rate_of_rows_is_that_of_a_summed_loss(method: str) -> None:
    run = RunConfig.resolve(method, {}, [])
    assert run.method.classifier.lr == 0.05 * run.optim.batch_size


@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_other_optimisers_of_rows_need_a_rate_of_their_own(kind: str) -> None:
    settings = [f"method.classifier.kind={kind}"]
    with pytest.raises(ConfigError, match=f"is a rate for sgd; set one for {kind}"):
        RunConfig.resolve("astra", {}, settings)
    RunConfig.resolve("astra", {}, [*settings, "method.classifier.lr=0.01"])
