"""A claim of a paper as an experiment: variants, measured once for each seed; comparisons; a verdict from intervals.

A script of this folder defines `claim(full)` and calls `main(claim)`:

    python benchmarks/claims/c05_marked_token.py                     # measures what is missing, prints the section
    python benchmarks/claims/c05_marked_token.py --only softmax --seeds 5
    python benchmarks/claims/c05_marked_token.py --full              # sizes for a GPU

Every finished measurement is a JSON file in the cache (`data_sets.CACHE`), so a script can be
stopped and started again. benchmarks/results/claims.json keeps them with the code; with `--fresh`
only measurements of this machine count. `all.py` runs all scripts and writes docs/claims.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import functools
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
import numpy.typing as npt
import scipy.stats
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other benchmarks' parts

import data_sets
from common import RESULTS, mean_and_half_width
from pictures import rows_of_intervals

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.errors import XmcrayError
from xmcray.evaluation.charts import short_number
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import Run, RunConfig

Float64Array = npt.NDArray[np.float64]
Result = Mapping[str, Any]
"""Measures by name: numbers, or lists of numbers for a curve.

Numbers with an @ are shares and shown in percent. The key "hits" holds, by the name of a precision,
the number of hits of each test query as a string of digits. The key "chosen" names what validation
chose.
"""

STORE = RESULTS / "claims.json"
HIT_CUTOFFS = (1, 5)  # one digit per query is enough
_RESAMPLES = 4000
_MADE_HERE = ("sample", "planted")  # corpora that need no files
HELD_OUT = 0.1  # share of the training queries that a choice is made by

HOLDS = "holds"
FAILS = "fails"
INCONCLUSIVE = "inconclusive"
MISSING = "not measured"
FRESH = "XMCRAY_FRESH_CLAIMS"  # an environment variable, because claims are measured by several processes


class Variant(Protocol):
    """Something measured once for each seed."""

    def key(self, seed: int) -> str:
        """Names the measurement: equal for equal settings and data."""

    def measure(self, seed: int) -> Result:
        """Measures it; may take minutes."""


def present(*names: str) -> list[str]:
    """Those corpora that this machine has or can make; says which are missing.

    Prepares none of them: that is left to the measurements, so that all claims are listed quickly.
    """
    available = []
    for name in names:
        if is_present(name):
            available.append(name)
        else:
            print(f"{name} left out: no folder of that name in {data_sets.DATA}")
    return available


@functools.cache
def open_corpus(name: str) -> Corpus:
    """A corpus by name, opened once, because every measurement's key needs it.

    Raises:
        SystemExit: this machine lacks the data; the message is printed.
    """
    corpus = data_sets.corpus(name)
    if corpus is None:
        raise SystemExit(2)
    return corpus


@functools.cache
def preset_values(name: str) -> Mapping[str, Any]:
    """The settings of a preset, read once."""
    return configs.load_yaml(f"preset:{name}")


def is_present(name: str) -> bool:
    """Whether this machine has a corpus or can make it."""
    return name in _MADE_HERE or (data_sets.DATA / name).is_dir()


def answers(
    run: Run, corpus: Corpus, split: str = "test", bundle: str = "bundle"
) -> dict[str, Any]:
    """The metrics of a finished run by exact search; `bundle` is its folder in the run's."""
    folder = run.path / bundle
    if not folder.exists():
        export_run(run, folder, corpus)
    evaluation = measure_bundle(Retriever.load(folder), corpus, split, exact=True)
    metrics = {name: value for name, value in evaluation.metrics.items() if value is not None}
    return {**metrics, "hits": hits_by_query(evaluation.per_query)}


def hits_by_query(values: QueryValues, suffix: str = "") -> dict[str, str]:
    """The hits of each query among its first answers, one digit per query.

    Args:
        values: what each query adds to the main metrics.
        suffix: Added to the names.
    """
    digits = {}
    for k in HIT_CUTOFFS:
        precision_Q = values.gain_QM[:, MAIN_METRICS.index(f"P@{k}")]
        hits = np.rint(precision_Q * k).astype(int)
        digits[f"P@{k}{suffix}"] = "".join(map(str, hits))
    return digits


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
            *data_sets.measured_settings(torch.get_num_threads()),
            f"cluster.device={'auto' if self.full else 'cpu'}",
        ]
        values = preset_values(self.preset) if self.preset else {}
        settings = self.settings(seed) if callable(self.settings) else self.settings
        return RunConfig.resolve(self.method, values, [*common, *settings])

    def open(self, seed: int) -> Corpus:
        return self.corpus(seed) if callable(self.corpus) else open_corpus(self.corpus)

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


def last_validation(run: Run, corpus: Corpus) -> Result:
    """The metrics of the queries that a run held out, at its end."""
    records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    validations = [record for record in records if "P@1" in record]
    return validations[-1]  # type: ignore[no-any-return]


def choose_once(key: str, names: Sequence[str], validation: Callable[[str], float]) -> str:
    """The name with the largest validation, which is measured once on a machine.

    Args:
        key: names the choice.
        names: of the candidates; of equal ones the first is chosen.
        validation: name -> the number that decides.
    """
    path = _folder() / f"{key}-choice.json"
    with path.with_suffix(".lock").open("w") as lock:
        # Of several processes that measure seeds, one chooses and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            values = {name: validation(name) for name in names}
            path.write_text(json.dumps(values), encoding="utf-8")
    stored: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return max(stored, key=stored.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A training with those of a few settings that are best on held-out training queries.

    The choice is made once, with seed 0 and a tenth of the training queries held out. Every seed is
    then trained on all training queries, with the chosen settings.

    Attributes:
        training: the settings that all candidates share.
        candidates: dotted settings of each candidate, by name.
        metric: which decides; of equal candidates the first one wins.
    """

    training: Training
    candidates: Mapping[str, Sequence[str]]
    metric: str = "P@1"

    def with_settings(self, *settings: str) -> Training:
        """The training with more settings."""
        common = self.training.settings
        assert not callable(common), "candidates are chosen for all seeds at once"
        return dataclasses.replace(self.training, settings=[*common, *settings])

    def key(self, seed: int) -> str:
        keys = [self.with_settings(*settings).key(seed) for settings in self.candidates.values()]
        text = json.dumps([keys, self.metric])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-chosen"

    def measure(self, seed: int) -> Result:
        name = self.choose()
        training = self.with_settings(*self.candidates[name])
        return {**training.measure(seed), "chosen": name}

    def choose(self) -> str:
        """The name of the candidate with the best validation; trains each of them if need be."""

        def validation(name: str) -> float:
            settings = [*self.candidates[name], f"data.validation={HELD_OUT}"]
            training = self.with_settings(*settings)
            training = dataclasses.replace(training, measure_run=last_validation)
            return float(training.measure(0)[self.metric])

        return choose_once(self.key(0), list(self.candidates), validation)


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
        scale = 100.0 if "@" in self.metric and not self.ratio else 1.0
        values = []
        for ours, theirs in self._pairs(results):
            number = ours[self.metric]
            if theirs is not None:
                other = theirs[self.against_metric or self.metric]
                number = number / other if self.ratio else number - other
            values.append(scale * number)
        return values

    def interval(self, results: Mapping[str, Mapping[int, Result]]) -> tuple[float, float]:
        """The 95 % interval of the mean, over seeds and, for a precision, over test queries too."""
        difference_SQ = self._by_query(results)
        if difference_SQ is not None:
            return two_level_interval(difference_SQ)
        mean, half = mean_and_half_width(self.values(results))
        return mean - half, mean + half

    def verdict(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """`holds` if the whole interval is in the range, `fails` if none of it is.

        Fewer than two seeds have no verdict.
        """
        if len(self.values(results)) < 2:
            return MISSING
        low, high = self.interval(results)
        if self.low <= low and high <= self.high:
            return HOLDS
        return FAILS if high < self.low or low > self.high else INCONCLUSIVE

    def _pairs(
        self, results: Mapping[str, Mapping[int, Result]]
    ) -> list[tuple[Result, Result | None]]:
        """Of each seed, the variant's result and the one that it is compared with, if any."""
        ours = results.get(self.of, {})
        if not self.against and not self.against_metric:
            return [(ours[seed], None) for seed in sorted(ours)]
        theirs = results.get(self.against or self.of, {})
        return [(ours[seed], theirs[seed]) for seed in sorted(ours) if seed in theirs]

    def _by_query(self, results: Mapping[str, Mapping[int, Result]]) -> Float64Array | None:
        """[seeds, queries], our number in percent points; None if the queries are not known."""
        if self.ratio:
            return None
        rows = []
        for ours, theirs in self._pairs(results):
            row = _shares(ours, self.metric)
            if theirs is not None:
                other = _shares(theirs, self.against_metric or self.metric)
                row = None if row is None or other is None else row - other
            if row is None:
                return None
            rows.append(row)
        # A seed that changes the test queries cannot be paired by query.
        if len(rows) < 2 or len({len(row) for row in rows}) > 1:
            return None
        return 100.0 * np.stack(rows)

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
        seeds: at least so many are measured; more where a training is short or seeds differ much.
        slow: variants that take over a minute; they have the seeds that are asked for and no more.
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
    seeds: int = 5
    slow: Sequence[str] = ()
    reason: str = ""
    plot: Callable[[Mapping[str, Mapping[int, Result]]], str] | None = None

    def seeds_of(self, variant: str, seeds: int) -> range:
        """The seeds of a variant if `seeds` of them are asked for."""
        return range(seeds if variant in self.slow else max(seeds, self.seeds))

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


def two_level_interval(number_SQ: Float64Array) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean over seeds and queries.

    Seeds and queries are resampled independently, and their deviations are added. A bootstrap of
    few seeds is too narrow, so the deviations of seeds are widened to the width that Student's t
    gives the same seeds.

    Args:
        number_SQ: [seeds, queries].
    """
    num_seeds, num_queries = number_SQ.shape
    generator = np.random.default_rng(0)
    mean = number_SQ.mean()
    drawn_seeds = generator.integers(num_seeds, size=(_RESAMPLES, num_seeds))
    seed_deviation = number_SQ.mean(axis=1)[drawn_seeds].mean(axis=1) - mean
    student = scipy.stats.t.ppf(0.975, num_seeds - 1) / scipy.stats.norm.ppf(0.975)
    seed_deviation *= student * math.sqrt(num_seeds / (num_seeds - 1))
    mean_of_query = number_SQ.mean(axis=0)
    query_deviation = np.empty(_RESAMPLES)
    for resample in range(_RESAMPLES):
        drawn_queries = generator.integers(num_queries, size=num_queries)
        query_deviation[resample] = mean_of_query[drawn_queries].mean() - mean
    low, high = np.quantile(mean + seed_deviation + query_deviation, [0.025, 0.975])
    return float(low), float(high)


def _shares(result: Result, metric: str) -> Float64Array | None:
    """[queries], a precision of each query; None if the result does not keep it."""
    digits = result.get("hits", {}).get(metric)
    if digits is None:
        return None
    cutoff = int(metric.split("@")[1].split()[0])
    return np.array([int(digit) for digit in digits]) / cutoff


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
    """Where this machine keeps a measurement."""
    return _folder() / f"{variant.key(seed)}.json"


@functools.cache
def stored_results() -> dict[str, Result]:
    """The measurements that are kept with the code, by key; none if XMCRAY_FRESH_CLAIMS is set."""
    if os.environ.get(FRESH) or not STORE.exists():
        return {}
    return json.loads(STORE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def known_result(variant: Variant, seed: int) -> Result | None:
    """A measurement that was made before; None if there is none."""
    path = result_file(variant, seed)
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    return stored_results().get(path.stem)


def measured(variant: Variant, seed: int) -> Result:
    """A measurement that was made before, or that is made now."""
    known = known_result(variant, seed)
    if known is not None:
        return known
    cpu_s_before = sum(os.times()[:4])  # with the time of child processes
    result = variant.measure(seed)
    cpu_s_here = sum(os.times()[:4]) - cpu_s_before
    # A child of another process has counted its own.
    result = {**result, "cpu_s": cpu_s_here + result.get("cpu_s", 0.0)}
    path = result_file(variant, seed)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.replace(path)
    return result


def collect(claim: Claim, seeds: int) -> dict[str, dict[int, Result]]:
    """What is measured by now, of `seeds` seeds or the claim's number, if that is larger."""
    results: dict[str, dict[int, Result]] = {}
    for name, variant in claim.variants.items():
        results[name] = {}
        for seed in claim.seeds_of(name, seeds):
            result = known_result(variant, seed)
            if result is not None:
                results[name][seed] = result
    return results


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
        ours = number_and_interval(comparison, results)
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
    for name, by_seed in results.items():
        chosen = {result["chosen"] for result in by_seed.values() if "chosen" in result}
        if chosen:
            lines += ["", f"Chosen on validation, {name}: {', '.join(sorted(chosen))}."]
    if claim.reason and claim.verdict(results) != HOLDS:
        lines += ["", f"Likely reason: {claim.reason}"]
    return lines


def number_and_interval(comparison: Comparison, results: Mapping[str, Mapping[int, Result]]) -> str:
    """Mean and interval of a comparison, as 2.8 [1.4, 4.1]."""
    values = comparison.values(results)
    if len(values) < 2:
        return interval(values)
    low, high = comparison.interval(results)
    mean = float(np.mean(values))
    digits = 1 if max(abs(low), abs(high)) >= 10 else 2
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


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
    missing = []
    for name, variant in claim.variants.items():
        if only and name not in only:
            continue
        wanted_seeds = claim.seeds_of(name, seeds)
        missing += [(name, seed) for seed in wanted_seeds if known_result(variant, seed) is None]
    # The first seeds of all variants come first, so that an early stop leaves every comparison some.
    return sorted(missing, key=lambda pair: pair[1])


def main(make: Callable[[bool], Claim]) -> None:
    """The command of one claim."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="more, if the claim has more")
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
