"""A claim of a paper as an experiment: variants, measured once for each seed; comparisons; a verdict from intervals.

A script of this folder defines `claim(full)` and calls `main(claim)`:

    python benchmarks/claims/c05_marked_token.py                     # measures what is missing, prints the section
    python benchmarks/claims/c05_marked_token.py --only softmax --seeds 5
    python benchmarks/claims/c05_marked_token.py --full              # sizes for a GPU

Every finished measurement is a JSON file in the cache (`data_sets.CACHE`), so a script can be stopped and started
again. `all.py` runs all scripts and writes docs/claims.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other benchmarks' parts

import data_sets
from common import mean_and_half_width
from pictures import rows_of_intervals

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.errors import XmcrayError
from xmcray.evaluation.charts import short_number
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import Run, RunConfig

Result = Mapping[str, Any]
"""Measures by name: numbers (those with an @ are shares and shown in percent), or lists of numbers for a curve."""

HOLDS = "holds"
FAILS = "fails"
INCONCLUSIVE = "inconclusive"
MISSING = "not measured"


class Variant(Protocol):
    """Something measured once for each seed."""

    def key(self, seed: int) -> str:
        """Names the measurement: equal for equal settings and data."""

    def measure(self, seed: int) -> Result:
        """Measures it; may take minutes."""


def present(*names: str) -> list[str]:
    """Those corpora that this machine has or can make; says which are missing."""
    return [name for name in names if data_sets.corpus(name) is not None]


def answers(
    run: Run, corpus: Corpus, split: str = "test", bundle: str = "bundle"
) -> dict[str, float]:
    """The metrics of a finished run by exact search; `bundle` is its folder in the run's."""
    folder = run.path / bundle
    if not folder.exists():
        export_run(run, folder, corpus)
    found = measure_bundle(Retriever.load(folder), corpus, split, exact=True)
    return {name: value for name, value in found.metrics.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training in this process, measured with exact search.

    Attributes:
        method: its name. corpus: a name that `data_sets.corpus` knows, or the corpus of a seed.
        preset: "METHOD/NAME" of shipped settings, "" for the defaults. settings: dotted overrides, or those of a seed.
        measure_run: what is kept of the finished run (`run.path / "metrics.jsonl"` has its curves); its name is part
            of the key. full: on a GPU if there is one.
    """

    method: str
    corpus: str | Callable[[int], Corpus] = "sample"
    preset: str = ""
    settings: Sequence[str] | Callable[[int], Sequence[str]] = ()
    measure_run: Callable[[Run, Corpus], Result] = answers
    full: bool = False

    def config(self, seed: int) -> RunConfig:
        common = [
            f"optim.seed={seed}",
            "data.validation=0",
            "cluster.workers=0",
            f"cluster.device={'auto' if self.full else 'cpu'}",
            f"cluster.threads_per_process={torch.get_num_threads()}",
            "log.validate_every=0",
            "log.keep=1",
            f"log.checkpoint_every={10**9}",
        ]
        values = configs.load_yaml(f"preset:{self.preset}") if self.preset else {}
        settings = self.settings(seed) if callable(self.settings) else self.settings
        return RunConfig.resolve(self.method, values, [*common, *settings])

    def open(self, seed: int) -> Corpus:
        found = self.corpus(seed) if callable(self.corpus) else data_sets.corpus(self.corpus)
        if found is None:
            raise SystemExit(2)  # the message is printed
        return found

    def key(self, seed: int) -> str:
        return f"{data_sets.fingerprint(self.config(seed), self.open(seed))}-{self.measure_run.__name__}"

    def measure(self, seed: int) -> Result:
        corpus = self.open(seed)
        config = self.config(seed)
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        try:
            run = train(corpus.path, folder / "run", config)
            return {**self.measure_run(run, corpus), "training_s": run.result()["seconds"]}  # type: ignore[index]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A function of a seed and of settings that JSON can hold."""

    function: Callable[..., Result]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def key(self, seed: int) -> str:
        text = json.dumps([self.function.__name__, dict(self.settings), seed], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{self.function.__name__}"

    def measure(self, seed: int) -> Result:
        return self.function(seed, **self.settings)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the paper says about a variant, or about the difference of two, as a range for our number.

    Attributes:
        of, metric: the variant and its measure.
        against: the variant it is compared with, seed by seed; "" takes the value itself.
        against_metric: where it is not the same measure.
        ratio: the quotient instead of the difference.
        low, high: where the claim puts the number, in percent points for shares.
        paper: the paper's numbers.
    """

    of: str
    metric: str = "P@1"
    against: str = ""
    against_metric: str = ""
    ratio: bool = False
    low: float = -math.inf
    high: float = math.inf
    paper: str = ""

    def values(self, results: Mapping[str, Mapping[int, Result]]) -> list[float]:
        """Our number of each seed that has all it needs."""
        ours = results.get(self.of, {})
        scale = 100.0 if "@" in self.metric and not self.ratio else 1.0
        other = self.against_metric or self.metric
        if not self.against and not self.against_metric:
            return [scale * ours[seed][self.metric] for seed in sorted(ours)]
        theirs = results.get(self.against or self.of, {})
        pairs = [
            (ours[seed][self.metric], theirs[seed][other])
            for seed in sorted(ours)
            if seed in theirs
        ]
        return [a / b if self.ratio else scale * (a - b) for a, b in pairs]

    def verdict(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """`holds` if the whole interval is in the range, `fails` if none of it is; fewer than two seeds have none."""
        values = self.values(results)
        if len(values) < 2:
            return MISSING
        mean, half = mean_and_half_width(values)
        if self.low <= mean - half and mean + half <= self.high:
            return HOLDS
        return FAILS if mean + half < self.low or mean - half > self.high else INCONCLUSIVE

    @property
    def name(self) -> str:
        words = f"{self.metric} of {self.of}"
        if self.against or self.against_metric:
            theirs = f"{self.against_metric} of " if self.against_metric else ""
            words += f"{' / ' if self.ratio else ' - '}{theirs}{self.against or self.of}"
        return words

    @property
    def wanted(self) -> str:
        bounds = [("≥", self.low), ("≤", self.high)]
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
        number: in the list of claims. title: a few words. statement: what the paper says. source: where.
        variants: what is measured, by name. comparisons: what must hold of them.
        setup: data and settings of our experiment, in a sentence or two.
        metrics: columns of the table.
        seeds: at least so many are measured; more than 3 where seeds differ much.
        reason: why it likely fails, if it does. Written by hand; verdicts never are.
        plot: results -> titles and charts of xmcray.evaluation.charts; bars of `metrics` if not given.
    """

    number: int
    title: str
    statement: str
    source: str
    variants: Mapping[str, Variant]
    comparisons: Sequence[Comparison]
    setup: str
    metrics: Sequence[str] = ("P@1",)
    seeds: int = 3
    reason: str = ""
    plot: Callable[[Mapping[str, Mapping[int, Result]]], str] | None = None

    def verdict(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """`fails` if one comparison does, `holds` if all do; not before all are measured."""
        found = {comparison.verdict(results) for comparison in self.comparisons}
        order = (FAILS, MISSING, INCONCLUSIVE, HOLDS)
        return next(verdict for verdict in order if verdict in found)

    def chart(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """The plot, as the charts give it."""
        if self.plot is not None:
            return self.plot(results)
        blocks: dict[str, dict[str, tuple[float, float]]] = {}
        for metric in self.metrics:
            found = {name: shown(by_seed, metric) for name, by_seed in results.items()}
            blocks[metric] = {
                name: mean_and_half_width(values) for name, values in found.items() if values
            }
        return rows_of_intervals(self.title, blocks)


def shown(by_seed: Mapping[int, Result], metric: str) -> list[float]:
    """The values of the seeds, in percent for shares."""
    return [
        (100.0 if "@" in metric else 1.0) * found[metric]
        for found in by_seed.values()
        if metric in found
    ]


def mean(by_seed: Mapping[int, Result], metric: str) -> float:
    """The mean over seeds, in percent for shares; nan if it was not measured."""
    values = shown(by_seed, metric)
    return float(np.mean(values)) if values else math.nan


def _folder() -> Path:
    folder = data_sets.CACHE / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def result_file(variant: Variant, seed: int) -> Path:
    return _folder() / f"{variant.key(seed)}.json"


def measured(variant: Variant, seed: int) -> Result:
    """The cached measurement, made now if there is none."""
    path = result_file(variant, seed)
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    started = sum(os.times()[:4])  # its children's time too
    found = {**variant.measure(seed), "cpu_s": sum(os.times()[:4]) - started}
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(found), encoding="utf-8")
    aside.replace(path)
    return found


def collect(claim: Claim, seeds: int) -> dict[str, dict[int, Result]]:
    """What is measured by now, of `seeds` seeds or the claim's number, if that is larger."""
    every = range(max(seeds, claim.seeds))
    return {
        name: {
            seed: measured(variant, seed) for seed in every if result_file(variant, seed).exists()
        }
        for name, variant in claim.variants.items()
    }


def section(claim: Claim, results: Mapping[str, Mapping[int, Result]]) -> list[str]:
    """The claim, the paper's numbers, ours with intervals, and the verdict, as lines of Markdown."""
    lines = [
        f"## {claim.number}. {claim.title}: {claim.verdict(results)}",
        "",
        f"*{claim.statement}* ({claim.source})",
    ]
    lines += [
        "",
        claim.setup,
        "",
        "| what | paper | wanted | ours | verdict |",
        "|---|---|---|---|---|",
    ]
    for comparison in claim.comparisons:
        ours = interval(comparison.values(results))
        cells = [
            comparison.name,
            comparison.paper or "-",
            comparison.wanted,
            ours,
            comparison.verdict(results),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    header = ["variant", "seeds", *claim.metrics, "CPU s"]
    lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for name, by_seed in results.items():
        cells = [
            name,
            str(len(by_seed)),
            *(interval(shown(by_seed, metric)) for metric in claim.metrics),
        ]
        cells.append(short_number(mean(by_seed, "cpu_s")) if by_seed else "-")
        lines.append(f"| {' | '.join(cells)} |")
    if claim.reason and claim.verdict(results) != HOLDS:
        lines += ["", f"Likely reason: {claim.reason}"]
    return lines


def interval(values: Sequence[float]) -> str:
    """Mean and half width of the 95 % interval, with about three digits."""
    if not values:
        return "-"
    mean_, half = mean_and_half_width(values)
    digits = max(
        0,
        min(
            3, 2 - math.floor(math.log10(max(abs(mean_), half, 1e-9) if math.isfinite(half) else 1))
        ),
    )
    digits = 1 if digits < 1 and abs(mean_) < 1000 else digits
    return f"{mean_:,.{digits}f}" + (f" ± {half:,.{digits}f}" if math.isfinite(half) else "")


def due(claim: Claim, seeds: int, only: Sequence[str] = ()) -> list[tuple[str, int]]:
    """The variants and seeds that are not measured yet. Their keys name their data: all corpora are prepared here."""
    every = range(max(seeds, claim.seeds))
    wanted = [(name, seed) for seed in every for name in claim.variants if not only or name in only]
    return [
        (name, seed)
        for name, seed in wanted
        if not result_file(claim.variants[name], seed).exists()
    ]


def main(make: Callable[[bool], Claim]) -> None:
    """The command of one claim."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="more, if the claim has more")
    parser.add_argument("--full", action="store_true", help="sizes for a GPU")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="VARIANT", help="variants to measure"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    claim = make(arguments.full)
    if unknown := set(arguments.only) - set(claim.variants):
        parser.error(f"no variant {unknown.pop()!r}; there are: {', '.join(claim.variants)}")
    try:
        missing = due(claim, arguments.seeds, arguments.only)
        for number, (name, seed) in enumerate(missing, 1):
            found = measured(claim.variants[name], seed)
            values = ", ".join(
                f"{m} {mean({0: found}, m):.4g}" for m in claim.metrics if m in found
            )
            print(
                f"{number}/{len(missing)} {name}, seed {seed}: {values}; {found['cpu_s']:.0f} s",
                flush=True,
            )
    except XmcrayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(section(claim, collect(claim, arguments.seeds))))
