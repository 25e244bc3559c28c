"""The verdict on a paper's claim is read off the interval over seeds, and pairs the seeds."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder / "claims"), str(folder), *sys.path])
    import claim

    return claim


@pytest.fixture
def variants(claim: Any) -> Any:
    import variants

    return variants


@pytest.fixture
def paired_results() -> dict[str, Any]:
    """Seeds vary by 30 points, but their differences are between 0.8 and 1.2 points.

    Their interval is 1.0 ± 0.196: the standard error is 0.158 / sqrt(5), and Student's t with 4
    degrees of freedom is 2.776. Seed 5 has no partner.
    """
    a = [0.51, 0.812, 0.308, 0.611, 0.409, 0.9]
    b = [0.50, 0.800, 0.300, 0.600, 0.400]
    return {"a": by_seed(a), "b": by_seed(b)}


def test_the_store_has_the_measurements_of_the_page() -> None:
    """The page is written from them, so a page that is committed without them counts others."""
    root = Path(__file__).parents[2]
    stores = (root / "benchmarks" / "results" / "claims").glob("*.json")
    num_kept = sum(len(json.loads(store.read_text(encoding="utf-8"))) for store in stores)
    page = (root / "docs" / "claims.md").read_text(encoding="utf-8")
    assert f"of CPU time for all {num_kept} measurements" in page


def by_seed(precisions: list[float]) -> dict[int, dict[str, float]]:
    return {seed: {"P@1": precision} for seed, precision in enumerate(precisions)}


def test_seeds_are_compared_in_pairs(claim: Any, paired_results: Any) -> None:
    differences = claim.Comparison(of="a", against="b").values(paired_results)
    assert differences == pytest.approx([1.0, 1.2, 0.8, 1.1, 0.9])


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"low": 0.8}, "holds"),
        ({"low": 0.81}, "inconclusive"),
        ({"low": 1.19}, "inconclusive"),
        ({"low": 1.2}, "fails"),
        ({"high": 1.2}, "holds"),
        ({"high": 1.19}, "inconclusive"),
        ({"high": 0.8}, "fails"),
        ({"low": -1, "high": 1}, "inconclusive"),
    ],
)
def test_verdicts_follow_the_interval_of_paired_differences(
    claim: Any, paired_results: Any, limits: dict[str, float], verdict: str
) -> None:
    comparison = claim.Comparison(of="a", against="b", **limits)
    assert comparison.verdict(paired_results) == verdict


def test_four_seeds_decide_nothing(claim: Any) -> None:
    comparison = claim.Comparison(of="a", low=0)
    assert comparison.verdict({"a": by_seed([0.5] * 4)}) == "not measured"
    assert comparison.verdict({"a": by_seed([0.5] * 5)}) == "holds"


def test_a_claim_can_be_about_a_ratio(claim: Any, paired_results: Any) -> None:
    ratio = claim.Comparison(of="a", against="b", ratio=True, low=1)
    assert ratio.values(paired_results) == pytest.approx(
        [1.02, 1.015, 1.02667, 1.01833, 1.0225], abs=1e-4
    )
    assert ratio.verdict(paired_results) == "holds"


def test_few_test_queries_widen_the_interval_of_a_precision(claim: Any) -> None:
    # All seeds agree that 60 of 100 queries are answered: sqrt(0.6 * 0.4 / 100) = 4.9 points.
    hits = {"P@1": "11100" * 20}
    results = {"a": {seed: {"P@1": 0.6, "hits": hits} for seed in range(5)}}
    low, high = claim.Comparison(of="a").interval(results)
    assert (low, high) == pytest.approx((60 - 1.96 * 4.9, 60 + 1.96 * 4.9), abs=0.8)


def test_seeds_alone_give_students_interval(claim: Any) -> None:
    # Every query is answered alike within a seed, so nothing but seeds differs.
    difference_S = np.array([1.0, 1.2, 0.8, 1.1, 0.9])
    difference_SQ = np.repeat(difference_S[:, None], 50, axis=1)

    low, high = claim.two_level_interval(difference_SQ)

    standard_error = difference_S.std(ddof=1) / math.sqrt(5)
    half_width = scipy.stats.t.ppf(0.975, 4) * standard_error
    assert (low, high) == pytest.approx((1 - half_width, 1 + half_width), abs=0.02)


@pytest.mark.parametrize(("num_queries", "could"), [(100, "are unlikely to"), (100_000, "could")])
def test_an_inconclusive_comparison_says_whether_seeds_or_queries_are_too_few(
    claim: Any, num_queries: int, could: str
) -> None:
    # Two of five seeds answer half of the queries, three of them 52 %.
    results: dict[str, dict[int, Any]] = {"a": {}}
    for seed, hits_of_50 in enumerate([25, 26, 25, 26, 26]):
        hits = ("1" * hits_of_50 + "0" * (50 - hits_of_50)) * (num_queries // 50)
        results["a"][seed] = {"P@1": hits_of_50 / 50, "hits": {"P@1": hits}}
    comparison = claim.Comparison(of="a", low=50.5)
    assert comparison.verdict(results) == "inconclusive"
    assert comparison.undecided(results).startswith(f"More seeds {could} decide P@1 of a: the test")
    assert claim.Comparison(of="a", low=0).undecided(results) == ""


def test_every_claim_names_its_variants_and_their_settings_resolve(
    claim: Any, variants: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No corpus is opened, so all claims are there on a machine without the large data sets.
    monkeypatch.setattr(variants, "is_present", lambda name: True)
    # Random texts are written with a transformer, which takes seconds.
    import random_texts

    monkeypatch.setattr(random_texts, "corpus", lambda *rest: (None, Path("model")))
    scripts = sorted(Path(claim.__file__).parent.glob("c[0-9][0-9]_*.py"))

    claims = [importlib.import_module(script.stem).make(False) for script in scripts]

    assert [made.number for made in claims] == list(range(1, len(scripts) + 1))
    for made in claims:
        for comparison in made.comparisons:
            assert comparison.of in made.variants, made.title
            assert not comparison.against or comparison.against in made.variants, made.title
        assert set(made.slow) <= set(made.variants), made.title
        for training in trainings(variants, made.variants):
            training.config(seed=0)  # raises if a setting is unknown or out of range


def trainings(variants: Any, of_claim: Mapping[str, Any]) -> Iterator[Any]:
    """The trainings of a claim, and every candidate of those that validation chooses."""
    for variant in of_claim.values():
        if isinstance(variant, variants.Training):
            yield variant
        if isinstance(variant, variants.Chosen):
            for settings in variant.candidates.values():
                yield variant.with_settings(*settings)


def test_validation_chooses_once_for_all_seeds(
    variants: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(variants.data_sets, "CACHE", tmp_path)
    values = {"low": 0.1, "high": 0.3, "as high": 0.3}
    measured = []

    def validation(name: str) -> float:
        measured.append(name)
        return values[name]

    first = variants.choose_once("key", list(values), validation)
    second = variants.choose_once("key", list(values), validation)

    assert first == second == "high"
    assert measured == ["low", "high", "as high"]


def untitled(claim: Any, **changed: Any) -> Any:
    """A claim of which only these attributes matter."""
    attributes = dict.fromkeys(("title", "statement", "source", "setup"), "")
    return claim.Claim(number=1, variants={}, **attributes, **changed)


def test_slow_variants_have_fewer_seeds(claim: Any) -> None:
    made = untitled(claim, comparisons=[], seeds=10, slow=["long"])
    assert made.seeds_of("long", 5) == range(5)
    assert made.seeds_of("short", 5) == range(10)


def test_the_store_keeps_what_the_verdict_needs(claim: Any) -> None:
    comparison = claim.Comparison(of="a", metric="P@1", against="b", against_metric="text P@1")
    made = untitled(claim, comparisons=[comparison])
    hits = {"P@1": "1100", "text P@1": "0100", "P@5": "5432"}
    by_seed = {seed: {"P@1": 0.5, "text P@1": 0.25, "hits": hits} for seed in range(3)}

    def stored(variant: str) -> dict[int, Any]:
        metrics = made.compared(variant)
        return {
            seed: claim.unpacked(claim.packed(result, metrics)) for seed, result in by_seed.items()
        }

    stored_a = stored("a")
    stored_b = stored("b")
    assert stored_a[0]["hits"] == {"P@1": "1100"}
    assert stored_b[0]["hits"] == {"text P@1": "0100"}
    expected = comparison.interval({"a": by_seed, "b": by_seed})
    assert comparison.interval({"a": stored_a, "b": stored_b}) == expected
