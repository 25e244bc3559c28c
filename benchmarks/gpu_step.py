"""Whole steps of the six methods on one GPU, with the labels of LF-AmazonTitles-1.3M and an encoder like DistilBERT.

    python benchmarks/gpu_step.py                     # on a machine with a CUDA device
    python benchmarks/gpu_step.py --quick --anyway    # does it work? also on a CPU

Texts and labels are random (planning/stand_in.py), and so are the weights of the encoder, which has
the size of DistilBERT. The settings are the presets of that set, with batches of 1,024 queries. DEXML
scores hard negatives, because its loss over all labels would encode 1.3 million texts in each step.
Batches are made before the steps, as a run makes them in a background thread.

Busy is the share of some steps in which the device computes or copies, by torch's profiler. Every
step is compared with its plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data_sets
import torch
from common import cuda_device, new_parser, refuse_if_busy, write_table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DistilBertConfig, DistilBertModel

from xmcray.nn.matmul import matmul_precision
from xmcray.nn.transformer import TransformerEncoder
from xmcray.parallel.partition import LabelPartition
from xmcray.planning.data_size import DataSize, from_numbers
from xmcray.planning.devices import SPECS, device_rates
from xmcray.planning.estimate import BETWEEN_STEPS, INDEX, estimate
from xmcray.planning.stand_in import StandInData
from xmcray.training.loop import Setup, assemble
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch

LIMIT_BUSY = 0.95
PRESET = "lf-amazontitles-1.3m"
NUM_LABELS = 1_305_265
NUM_QUERIES = 2_248_619
SETTINGS = {
    "astra": (),
    "renee": ("method.init=zeros",),
    "dexml": ("method.columns=hard", "method.hard_per_query=5", "negatives.hard=50"),
    "prime": (),
    "rae": (),
    "unidec": (),
}
COMMON = ("data.augment_with_labels=false", "optim.micro_batch=0")
WARM = 5
STEPS = 30
PROFILED = 5
HEADER = [
    "method",
    "queries of a step",
    "step, ms",
    "planned, ms",
    "queries/s",
    "busy",
    "peak, GB",
    "planned, GB",
]


def main() -> None:
    parser = new_parser(__doc__, out="gpu_step.md", anyway=True)
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--device", choices=SPECS, default="h100-80gb", help="of the plans")
    parser.add_argument("--quick", action="store_true", help="few labels and steps, printed only")
    arguments = parser.parse_args()
    device = cuda_device(arguments.anyway)
    load = refuse_if_busy(arguments.anyway)
    if arguments.quick:
        arguments.out = Path("/dev/null")
    table = []
    for method in arguments.methods:
        table.append(measure(method, device, arguments.device, arguments.quick))
        print(*table[-1], flush=True)
    steps = 1 if arguments.quick else STEPS
    notes = [
        f"means of {steps} steps; busy over {PROFILED} others (wanted: at least {LIMIT_BUSY})",
        f"plans are those of {arguments.device}; memory without CUDA's own",
        load,
    ]
    write_table(arguments.out, "Steps on a GPU", HEADER, table, notes)


def measure(method: str, device: torch.device, planned_device: str, quick: bool) -> list[object]:
    """The row of a method in the table."""
    num_labels = 2000 if quick else NUM_LABELS
    queries = 32 if quick else 1024
    num_train = num_labels if quick else NUM_QUERIES
    size = from_numbers(num_labels, num_train, tokens_per_text=12, positives_per_query=22)
    data: Any = StandInData(size, augmented=False)
    model = random_model(size, quick)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        settings = [*COMMON, f"optim.batch_size={queries}", f"encoder.name={folder}"]
        config = data_sets.preset(PRESET, [*settings, *SETTINGS[method]], method)
        rates = device_rates(planned_device, config.optim.matmul)
        plan = estimate(config, size, rates, workers=1)
    encoder = TransformerEncoder(model, tokenizer=None, pooling=config.encoder.pooling).to(device)
    setup = assemble(config, data, encoder, device, LabelPartition(num_labels, 1, 0))
    next_batch = itertools.cycle(batches(setup, config, data, 2 if quick else 8))

    def take(number: int) -> float:
        """Seconds of so many steps."""
        started = time.perf_counter()
        with matmul_precision(config.optim.matmul):
            for _ in range(number):
                setup.stepper.step(next(next_batch), data)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    take(1 if quick else WARM)
    num_steps = 1 if quick else STEPS
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = take(num_steps) / num_steps
    busy: object = "-"
    peak_gb: object = "-"
    if device.type == "cuda":
        peak_gb = torch.cuda.max_memory_allocated() / 1e9
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            seconds = take(PROFILED)
        busy = busy_seconds(profiled) / seconds
    num_bytes = {**plan.device_bytes}
    for other in ("CUDA", INDEX, BETWEEN_STEPS):
        num_bytes.pop(other, None)
    return [
        method,
        queries,
        1e3 * step_s,
        1e3 * plan.step_seconds,
        queries / step_s,
        busy,
        peak_gb,
        sum(num_bytes.values()) / 1e9,
    ]


def random_model(size: DataSize, quick: bool) -> DistilBertModel:
    """A DistilBERT with random weights, or a tiny one."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64} if quick else {}
    return DistilBertModel(DistilBertConfig(vocab_size=size.vocab_size, **sizes))


def batches(setup: Setup, config: RunConfig, data: Any, number: int) -> Sequence[Batch]:
    """Batches with the inputs of their losses."""
    made = []
    for step in range(number):
        batch = data.batch(config, step, workers=1)
        made.append(dataclasses.replace(batch, inputs=setup.method.prepare(batch, data)))
    return made


def busy_seconds(profiled: profile) -> float:
    """Seconds in which at least one kernel or copy ran."""
    total_us = 0.0
    end_us = 0.0
    for start, stop in sorted(device_spans(profiled)):
        total_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    return total_us / 1e6


def device_spans(profiled: profile) -> Iterator[tuple[float, float]]:
    """Start and end of everything that ran on the device, in microseconds."""
    for event in profiled.events() or []:
        if event.device_type == DeviceType.CUDA:
            yield event.time_range.start, event.time_range.end


if __name__ == "__main__":
    main()
