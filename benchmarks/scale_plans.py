"""Writes docs/scale.md: plans of trainings that are too large for this machine, with what they assume.

    python benchmarks/scale_plans.py

Nothing is measured: the rates are those of published specifications, so that the page is the same wherever it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmcray import settings_files
from xmcray.errors import ResourceError
from xmcray.planning.data_size import from_numbers
from xmcray.planning.devices import device_rates
from xmcray.planning.estimate import Plan
from xmcray.planning.plan import plan
from xmcray.planning.tables import sections
from xmcray.training.run_config import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        title, text: of its section. method, preset, settings: as for `xmcray plan`. price: of a GPU-hour, an example.
    """

    title: str
    text: str
    labels: float
    queries: float
    tokens: float
    positives: float
    device: str
    workers: int
    settings: tuple[str, ...] = ()
    method: str = "astra"
    preset: str = ""
    price: float = 2.0

    @property
    def command(self) -> str:
        parts = [
            f"xmcray plan {self.method}",
            f"--labels {round(self.labels)} --queries {round(self.queries)}",
        ]
        parts += [f"--tokens-per-text {self.tokens:g} --positives {self.positives:g}"]
        parts += [f"--config preset:{self.preset}"] if self.preset else []
        # A later setting replaces an earlier one.
        by_name = dict(setting.split("=", 1) for setting in self.settings)
        parts += [f"--set {name}={value}" for name, value in by_name.items()]
        parts += [
            f"--workers {self.workers} --device {self.device} --price-per-hour {self.price:g}"
        ]
        return " \\\n    ".join(parts)


# Bottleneck of 64, rows in bfloat16 with one state of the optimiser or none, label texts not added as queries: what a
# set with more labels than 10^8 leaves room for.
LARGE = (
    "encoder.name=distilbert-base-uncased",
    "encoder.dim=64",
    "data.augment_with_labels=false",
    "data.validation=0.00001",
    "negatives.hard=20",
    "negatives.uniform=4000",
    "negatives.start_epoch=2",
    "negatives.refresh_every=2",
    "optim.epochs=5",
    "optim.matmul=bf16",
    "log.checkpoint_every=20000",
    "log.keep=1",
)
CASES = (
    Case(
        "LF-AmazonTitles-1.3M",
        "ASTRA with the paper's settings: 2,248,619 queries and 1,305,265 labels, which are added as queries.",
        1_305_265,
        2_248_619,
        12,
        22.2,
        "a100-80gb",
        8,
        preset="astra/lf-amazontitles-1.3m",
    ),
    Case(
        "370 million queries, 120 million labels",
        "Rows of 64 dimensions on eight GPUs, five epochs. Rows start as vectors of the labels' texts, which are encoded once;"
        " the plan does not count that. From a random start, the first version would visit ten times as many lists.",
        120e6,
        370e6,
        12,
        5,
        "a100-80gb",
        8,
        (*LARGE, "optim.batch_size=8192", "method.init=texts"),
    ),
    Case(
        "450 million labels",
        "As many queries as labels, rows in bfloat16 without momentum, one epoch on sixteen GPUs with uniform negatives"
        " alone.",
        450e6,
        450e6,
        10,
        1,
        "h100-80gb",
        16,
        (
            *LARGE,
            "optim.batch_size=16384",
            "negatives.hard=0",
            "optim.epochs=1",
            "method.classifier.storage=bfloat16",
            "method.classifier.momentum=0",
        ),
    ),
)
REFUSED = Case(
    "What does not fit",
    "",
    450e6,
    450e6,
    10,
    1,
    "a100-40gb",
    8,
    (
        "encoder.name=distilbert-base-uncased",
        "encoder.dim=768",
        "data.augment_with_labels=false",
        "data.validation=0.00001",
    ),
)
HEAD = """# Scale

What large trainings would take, by `xmcray plan`. This page is written by `python benchmarks/scale_plans.py`; the same
command line prints the same plan. **Nothing on it was measured on the devices named, and none of these trainings has
run**: rates of devices are published specifications, and each plan lists what it assumes. The largest training that has
run has 10^7 labels of 64 dimensions, on [2 CPU cores](results.md#what-has-run-where).

On the machine at hand (`--device cpu`) a plan is calibrated by a probe of half a minute.
[benchmarks/plan.py](../benchmarks/plan.py) compares such plans with trainings, and
[benchmarks/scale.py](../benchmarks/scale.py) trains 10^5 to 10^7 labels on one machine next to its plans. There
([table](../benchmarks/results/scale.md)) a step was planned within 13 % of what it took, a worker's memory within 6 %, a
refresh of the negatives within 20 %, and the memory of an index actor between 18 % too low and 35 % too high.

A plan traces the real code: it builds the run as one of its workers would, on tensors that have a size and no values,
and runs a step of the planned size. Bytes of weights, rows and optimisers are exact; those of a step are its largest
moment. A step's seconds are the sum of its operations, one after another. A refresh of the negatives runs while
training goes on, and only what it takes longer than an epoch is added to one. Costs are in the currency of
`--price-per-hour`, which is the price of one device; 2 is an example.
"""


def planned(case: Case) -> Plan:
    """The plan of a training.

    Raises:
        ResourceError: it does not fit.
    """
    values = settings_files.load_yaml(f"preset:{case.preset}") if case.preset else {}
    config = RunConfig.resolve(case.method, values, case.settings)
    data = from_numbers(round(case.labels), round(case.queries), case.tokens, case.positives)
    rates = device_rates(case.device, config.optim.matmul)
    return plan(config, data, rates, case.workers, price_per_hour=case.price)


def markdown(made: Plan) -> list[str]:
    """The tables and assumptions of a plan."""
    lines: list[str] = []
    for title, rows in sections(made).items():
        lines += ["", f"| {title} | |", "| --- | ---: |"]
        lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", *(f"- assumed: {line}" for line in made.assumptions)]
    return [*lines, *(f"- advice: {line}" for line in made.advice)]


def section(case: Case, made: Plan) -> list[str]:
    """Lines about one training and its plan."""
    return [f"## {case.title}", "", case.text, "", "```", case.command, "```", *markdown(made), ""]


def page() -> str:
    lines = [HEAD]
    for case in CASES:
        lines += section(case, planned(case))
    lines += [f"## {REFUSED.title}", "", "```", REFUSED.command]
    try:
        planned(REFUSED)
    except ResourceError as error:
        lines += [f"error: {error}"]
    lines += ["```", "", "The exit code is 2. Each piece of advice is enough by itself.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
