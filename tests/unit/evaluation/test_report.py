"""The report page: complete, escaped, self-contained, and calm about what is missing."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsed_page import Page

from xmcray.errors import StorageError
from xmcray.evaluation.charts import Series, bar_chart, line_chart, short_number, ticks
from xmcray.evaluation.report import write_report

EVIL = '<script>alert("1")</script>'
STEPS: list[dict[str, Any]] = [
    *(
        {"step": s, "epoch": 0, "loss": 5.0 / (s + 1), "queries_per_s": 100.0, "negatives_age": s}
        for s in range(700)
    ),
    {"step": 350, "P@1": 0.25, "P@5": 0.125},
    {"step": 699, "P@1": 0.5, "P@5": 0.25},
]
METRICS: dict[str, Any] = {
    **{
        "P@1": 0.4321,
        "PSP@5": 0.3,
        "macroF1@5(0,10]": 0.2,
        "queries": 40,
        "left_out": 2,
        "A": 0.6,
        "B": 2.6,
    },
    "intervals": {"P@1": [0.4, 0.4567]},
    "segments": [
        {
            "name": EVIL,
            "range": "(0,10]",
            "labels": 3,
            "positives": 0,
            "P@5": 0.0,
            "recall@5": None,
            "macroF1@5": 0.2,
        }
    ],
    "deciles": [
        {
            "decile": 1,
            "min_count": 0,
            "max_count": 1,
            "labels": 3,
            "positives": 9,
            "P@5": 0.1,
            "recall@5": 0.2,
        }
    ],
    "index_recall": {"queries": 10, "recall@10": 0.987},
}


def page(path: Path, **given: Any) -> str:
    write_report(
        path,
        **{"title": "run", "steps": STEPS, "metrics": METRICS, "config": {}, "facts": {}, **given},
    )
    return path.read_text(encoding="utf-8")


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    text = page(
        tmp_path / "r.html",
        config={"optimisation": {"lr": 0.1, "off": {}}},
        facts={"corpus": "abc123"},
    )
    for part in (
        "43.21",
        "40.00 to 45.67",
        "98.70",
        "PSP with A = 0.6, B = 2.6",
        "optimisation.lr",
        "abc123",
        "2 left out",
    ):
        assert part in text, part
    assert Page(text).charts == [
        "Training loss",
        "Validation precision",
        "Throughput",
        "Age of the negatives",
        "Tail, torso and head labels",
        "Contribution of each tenth of the labels to P@5",
    ]


def test_user_text_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    text = page(tmp_path / "r.html", title=EVIL, config={EVIL: EVIL}, facts={EVIL: EVIL})
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6
    assert Page(text).foreign == []
    assert "url(" not in text
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


def test_missing_parts_are_left_out(tmp_path: Path) -> None:
    empty = page(tmp_path / "r.html", steps=[], metrics=None)
    assert Page(empty).charts == []
    assert "nothing recorded yet" in empty
    assert "<h2>" not in empty
    only_loss = page(
        tmp_path / "r.html", steps=[{"step": 1, "loss": 2.0, "P@1": None}], metrics={"P@1": 0.5}
    )
    assert Page(only_loss).charts == ["Training loss"]
    assert "constants not recorded" in only_loss


def test_a_resumed_run_shows_its_newest_values(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": 7.0}, {"step": 2, "loss": 9.0}, {"step": 2, "loss": 5.0}]
    assert "last 5<" in page(tmp_path / "r.html", steps=steps)


def test_losses_that_are_not_numbers_are_counted_not_drawn(tmp_path: Path) -> None:
    steps = [{"step": s, "loss": float("nan") if s > 3 else 1.0} for s in range(6)]
    text = page(tmp_path / "r.html", steps=steps)
    assert "2 values not finite, not drawn" in text
    assert not re.search(r'(points|[xy]\d?)="[^"]*nan', text)


def test_the_folder_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        page(tmp_path / "file" / "r.html")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 7), (-3, 3), (1e-4, 2e-4), (0, 123456), (99.5, 100)]
)
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    places = ticks(low, high)
    assert 3 <= len(places) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in places)
    mantissa = (places[1] - places[0]) / 10 ** np.floor(np.log10(places[1] - places[0]) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-6


def test_lines_keep_their_ends_and_stay_short() -> None:
    steps = np.arange(100_000.0)
    chart = line_chart("t", [Series("a", steps, np.sin(steps))], y_title="y")
    assert len(chart) < 30_000
    assert "band" in chart


def test_a_single_point_and_a_constant_are_drawn() -> None:
    assert "<circle" in line_chart(
        "t", [Series("a", np.array([5.0]), np.array([0.0]))], y_title="y"
    )
    flat = line_chart(
        "t", [Series("a", np.arange(3.0), np.full(3, 2.0))], y_title="y", from_zero=False
    )
    assert "<polyline" in flat


def test_a_bar_is_as_high_as_its_value() -> None:
    chart = bar_chart("t", ["a", "b"], {"s": [2.0, 1.0]}, y_title="y", x_title="x")
    high, low = (float(value) for value in re.findall(r'<rect [^>]*height="([\d.]+)"', chart))
    assert high == pytest.approx(2 * low, abs=0.2)


def test_numbers_are_short() -> None:
    assert [short_number(v) for v in (0, 0.025, 950, 2000, 12500, 1.5e6, 3e9)] == [
        *("0", "0.025", "950", "2,000", "12.5k", "1.5M", "3G")
    ]
