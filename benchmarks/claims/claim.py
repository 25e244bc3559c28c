"""A claim of a paper as an experiment: variants, measured once for each seed; comparisons; a verdict from intervals.

A script of this folder defines `claim(full)` and calls `main(claim)`:

    python benchmarks/claims/c05_marked_token.py                     # measures what is missing, prints the section
    python benchmarks/claims/c05_marked_token.py --only softmax --seeds 5
    python benchmarks/claims/c05_marked_token.py --full              # sizes for a GPU

Every finished measurement is a JSON file in the cache (`data_sets.CACHE`), so a script can be
stopped and started again. benchmarks/results/claims keeps them with the code; with `--fresh`
only measurements of this machine count. `all.py` runs all scripts and writes docs/claims.md.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import lzma
import math
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other benchmarks' parts

import data_sets
from common import RESULTS, mean_and_half_width
from pictures import rows_of_intervals
from variants import Result, Variant, claims_folder

from xmcray.errors import XmcrayError
from xmcray.evaluation.charts import short_number

Float64Array = npt.NDArray[np.float64]
STORE = RESULTS / "claims"
_RESAMPLES = 4000
LEAST_SEEDS = 5  # so that a claim that is measured over several days has no verdict in between
HOLDS = "holds"
FAILS = "fails"
INCONCLUSIVE = "inconclusive"
MISSING = "not measured"
FRESH = "XMCRAY_FRESH_CLAIMS"  # an environment variable, because claims are measured by several processes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the paper says about a variant, or about the difference of two, as a range for our number.

    Attributes:
        of: the variant.
        metric: its measure.
        against: the variant it is compared with, seed by seed; "" takes the value itself.
        against_metric: the other variant's measure; "" takes the same one.
        ratio: the quotient instead of the difference.
        low: least number that agrees with the claim, in percent points for shares.
        high: the largest such number.
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

        Fewer than `LEAST_SEEDS` have no verdict.
        """
        if len(self.values(results)) < LEAST_SEEDS:
            return MISSING
        return self._verdict_of(*self.interval(results))

    def undecided(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """Whether more seeds could decide a comparison, as a sentence; "" if it is decided."""
        if self.verdict(results) != INCONCLUSIVE:
            return ""
        difference_SQ = self._by_query(results)
        if difference_SQ is None:
            return f"More seeds could decide {self.name}: its interval is over seeds alone."
        low, high = query_interval(difference_SQ)
        could = "are unlikely to" if self._verdict_of(low, high) == INCONCLUSIVE else "could"
        return (
            f"More seeds {could} decide {self.name}: the test queries alone leave"
            f" [{low:.2f}, {high:.2f}]."
        )

    def _verdict_of(self, low: float, high: float) -> str:
        """Of an interval, whatever the number of seeds."""
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
        seeds_of_both = sorted(ours.keys() & theirs.keys())
        return [(ours[seed], theirs[seed]) for seed in seeds_of_both]

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
        ours = f"{self.metric} of {self.of}"
        if not self.against and not self.against_metric:
            return ours
        theirs = self.against or self.of
        if self.against_metric:
            theirs = f"{self.against_metric} of {theirs}"
        sign = "/" if self.ratio else "-"
        return f"{ours} {sign} {theirs}"

    @property
    def wanted(self) -> str:
        bounds = [("≥", self.low), ("≤", self.high)]
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
        number: in the list of claims.
        title: a few words.
        statement: what the paper says.
        source: where it says so.
        variants: what is measured, by name.
        comparisons: what must hold of them.
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

    def compared(self, variant: str) -> set[str]:
        """The measures of a variant that a comparison uses."""
        metrics = set()
        for comparison in self.comparisons:
            if variant == comparison.of:
                metrics.add(comparison.metric)
            if variant == (comparison.against or comparison.of):
                metrics.add(comparison.against_metric or comparison.metric)
        return metrics

    def verdict(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """`fails` if one comparison does, `holds` if all do; not before all are measured."""
        verdicts = {comparison.verdict(results) for comparison in self.comparisons}
        # The first of these that occurs decides.
        order = (FAILS, MISSING, INCONCLUSIVE, HOLDS)
        return next(verdict for verdict in order if verdict in verdicts)

    def chart(self, results: Mapping[str, Mapping[int, Result]]) -> str:
        """The plot, as the charts give it."""
        if self.plot is not None:
            return self.plot(results)
        blocks: dict[str, dict[str, tuple[float, float]]] = {}
        for metric in self.metrics:
            blocks[metric] = {}
            for name, by_seed in results.items():
                values = shown(by_seed, metric)
                if values:
                    blocks[metric][name] = mean_and_half_width(values)
        return rows_of_intervals(self.title, blocks)


def two_level_interval(number_SQ: Float64Array) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean over seeds and queries.

    Seeds and queries are resampled independently, and their deviations are added. A bootstrap of
    few seeds is too narrow, so the deviations of seeds are widened to the width that Student's t
    gives the same seeds.

    Args:
        number_SQ: [seeds, queries].
    """
    num_seeds = len(number_SQ)
    generator = np.random.default_rng(0)
    mean = number_SQ.mean()
    mean_of_seed = number_SQ.mean(axis=1)
    drawn_seeds = generator.integers(num_seeds, size=(_RESAMPLES, num_seeds))
    seed_deviation = mean_of_seed[drawn_seeds].mean(axis=1) - mean
    student = scipy.stats.t.ppf(0.975, num_seeds - 1) / scipy.stats.norm.ppf(0.975)
    seed_deviation *= student * math.sqrt(num_seeds / (num_seeds - 1))
    resampled = _resampled_queries(number_SQ, generator)
    low, high = np.quantile(resampled + seed_deviation, [0.025, 0.975])
    return float(low), float(high)


def query_interval(number_SQ: Float64Array) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean over queries, of which the seeds are not resampled.

    Args:
        number_SQ: [seeds, queries].
    """
    low, high = np.quantile(_resampled_queries(number_SQ, np.random.default_rng(0)), [0.025, 0.975])
    return float(low), float(high)


def _resampled_queries(number_SQ: Float64Array, generator: np.random.Generator) -> Float64Array:
    """[resamples], the mean over seeds and as many drawn queries."""
    mean_of_query = number_SQ.mean(axis=0)
    num_queries = len(mean_of_query)
    means = np.empty(_RESAMPLES)
    for resample in range(_RESAMPLES):
        drawn_queries = generator.integers(num_queries, size=num_queries)
        means[resample] = mean_of_query[drawn_queries].mean()
    return means


def _shares(result: Result, metric: str) -> Float64Array | None:
    """[queries], a precision of each query; None if the result does not keep it."""
    digits = result.get("hits", {}).get(metric)
    if digits is None:
        return None
    # A metric has a name such as "P@5" or "P@5 lambda=0".
    cutoff = int(metric.split("@")[1].split()[0])
    return np.array([int(digit) for digit in digits]) / cutoff


def shown(by_seed: Mapping[int, Result], metric: str) -> list[float]:
    """The values of the seeds, in percent for shares."""
    scale = 100.0 if "@" in metric else 1.0
    return [scale * result[metric] for result in by_seed.values() if metric in result]


def mean(by_seed: Mapping[int, Result], metric: str) -> float:
    """The mean over seeds, in percent for shares; nan if it was not measured."""
    values = shown(by_seed, metric)
    return float(np.mean(values)) if values else math.nan


def result_file(variant: Variant, seed: int) -> Path:
    """Where this machine keeps a measurement."""
    return claims_folder() / f"{variant.key(seed)}.json"


@functools.cache
def stored_results() -> dict[str, Result]:
    """The measurements that are kept with the code, by key; none if XMCRAY_FRESH_CLAIMS is set."""
    if os.environ.get(FRESH):
        return {}
    results: dict[str, Result] = {}
    for file in STORE.glob("*.json"):
        for key, result in json.loads(file.read_text(encoding="utf-8")).items():
            results[key] = unpacked(result)
    return results


def packed(result: Result, compared: Container[str]) -> Result:
    """A measurement for the store.

    With a digit for each test query its hits are most of it, so only those of compared measures
    are kept.
    """
    if "hits" not in result:
        return result
    hits = {metric: digits for metric, digits in result["hits"].items() if metric in compared}
    text = lzma.compress(json.dumps(hits).encode(), preset=9)
    return {**result, "hits": base64.b85encode(text).decode()}


def unpacked(result: Result) -> Result:
    """A measurement as `packed` left it in the store."""
    if "hits" not in result:
        return result
    text = lzma.decompress(base64.b85decode(result["hits"]))
    return {**result, "hits": json.loads(text)}


def known_result(variant: Variant, seed: int) -> Result | None:
    """A measurement that was made before; None if there is none."""
    return result_of(variant.key(seed))


def result_of(key: str) -> Result | None:
    """A measurement that was made before, by the key of its variant; None if there is none."""
    path = claims_folder() / f"{key}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    return stored_results().get(key)


def measured(variant: Variant, seed: int) -> Result:
    """A measurement that was made before, or that is made now."""
    stored_result = known_result(variant, seed)
    if stored_result is not None:
        return stored_result
    data_sets.offer_minilm()
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
        intervals = [interval(shown(by_seed, metric)) for metric in claim.metrics]
        cpu_s = short_number(mean(by_seed, "cpu_s")) if by_seed else "-"
        cells = [name, str(len(by_seed)), *intervals, cpu_s]
        lines.append(f"| {' | '.join(cells)} |")
    for name, by_seed in results.items():
        chosen = {result["chosen"] for result in by_seed.values() if "chosen" in result}
        if chosen:
            lines += ["", f"Chosen on validation, {name}: {', '.join(sorted(chosen))}."]
    for comparison in claim.comparisons:
        sentence = comparison.undecided(results)
        if sentence:
            lines += ["", sentence]
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
    center, half = mean_and_half_width(values)
    is_bounded = math.isfinite(half)
    largest = max(abs(center), half, 1e-9) if is_bounded else 1
    # Three digits of the larger number, and one decimal place at least, except for thousands.
    digits = min(3, max(0, 2 - math.floor(math.log10(largest))))
    if digits == 0 and abs(center) < 1000:
        digits = 1
    text = f"{center:,.{digits}f}"
    return f"{text} ± {half:,.{digits}f}" if is_bounded else text


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
    unknown = set(arguments.only) - set(claim.variants)
    if unknown:
        parser.error(f"no variant {unknown.pop()!r}; there are: {', '.join(claim.variants)}")
    try:
        missing = due(claim, arguments.seeds, arguments.only)
        for number, (name, seed) in enumerate(missing, 1):
            result = measured(claim.variants[name], seed)
            metrics = [metric for metric in claim.metrics if metric in result]
            values = [f"{metric} {mean({seed: result}, metric):.4g}" for metric in metrics]
            progress = f"{number}/{len(missing)} {name}, seed {seed}"
            cpu_s = f"{result['cpu_s']:.0f} s"
            print(f"{progress}: {', '.join(values)}; {cpu_s}", flush=True)
    except XmcrayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(section(claim, collect(claim, arguments.seeds))))
