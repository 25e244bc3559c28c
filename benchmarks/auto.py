"""What `xmcray auto` reaches within its time, compared with the best rows of methods.py and its simple methods.

    python benchmarks/auto.py                                  # six sets, 20 minutes each, the sample 5
    python benchmarks/auto.py --set sample cdnjs-keywords
    python benchmarks/auto.py --set sample --minutes 2 --anyway
    python benchmarks/auto.py --minutes 0                      # prints the table of what there is

A study is kept in the cache, and an interrupted one goes on. Its bundle is measured on the whole test split. The budget is
wall time, so a busy machine trains less in it. results/auto.json keeps all measurements; results/auto.md is the table.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import sys
from typing import Any

import data_sets
from common import RESULTS, new_parser, refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.whole_files import write_json
from xmcray.training.outcome import measure_bundle
from xmcray.tuning.auto import auto
from xmcray.tuning.portfolio import DEFAULT_METHODS, SET_SIZES
from xmcray.tuning.study import METRICS

STORE = RESULTS / "auto.json"
MINUTES = 20.0
SAMPLE_MINUTES = 5.0
HEADER = ["set", "minutes", "members", "validation", *METRICS, "less the best row", "less floors"]
NOTES = (
    "percent on the whole test split, with 95 % bootstrap intervals; validation: mean of the three metrics on the"
    " held-out queries that chose the weights",
    "minutes: spent of the budget of wall time, everything included but this measurement",
    "less the best row: than the row of methods.md with the best validation, whose trainings had no limit of time;"
    " P@1 / P@5 / PSP@5",
    "less floors: than the best of XR-Linear, TF-IDF memory and their fusion in each metric",
    "the presets that `auto` starts from were chosen by validation on these sets",
)


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument("--set", dest="sets", nargs="+", choices=SET_SIZES, default=list(SET_SIZES))
    parser.add_argument("--minutes", type=float, help="of each set; 0 measures nothing")
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    data_sets.offer_minilm()
    for name in options.sets:
        default = SAMPLE_MINUTES if name == "sample" else MINUTES
        minutes = default if options.minutes is None else options.minutes
        if minutes:
            corpus = data_sets.corpus(name)
            if corpus is not None:
                keep({"set": name, **measured(corpus, minutes), "load": load})
    rows = stored()
    loads = [f"{row['set']}, {row['date']}: {row['load']}" for row in rows]
    write_table("auto.md", "xmcray auto", HEADER, [cells(row) for row in rows], [*NOTES, *loads])


def stored() -> list[dict[str, Any]]:
    """All measurements, in the order of the sets."""
    if not STORE.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(STORE.read_text(encoding="utf-8"))["results"]
    return sorted(rows, key=lambda row: list(SET_SIZES).index(row["set"]))


def keep(row: dict[str, Any]) -> None:
    """Replaces the row of a set; several processes may measure at the same time."""
    with (data_sets.CACHE / "auto.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [other for other in stored() if other["set"] != row["set"]]
        write_json(STORE, {"results": [*others, row]})


def measured(corpus: Corpus, minutes: float) -> dict[str, Any]:
    """Runs a study, and measures its bundle on all test queries."""
    out = data_sets.CACHE / "auto" / f"{corpus.card.name}-{minutes:g}"
    result = auto(
        corpus, out, 60 * minutes, DEFAULT_METHODS, {}, lambda line: print(line, file=sys.stderr)
    )
    evaluation = measure_bundle(Retriever.load(out / "bundle"), corpus, "test")
    test = {}
    for metric in METRICS:
        low, high = evaluation.intervals[metric]
        test[metric] = {"value": evaluation.metrics[metric], "low": low, "high": high}
    trials = {}
    for trial in result["trials"]:
        names = ("preset", "encoder", "epochs", "state", "score", "seconds")
        trials[trial["name"]] = {name: trial[name] for name in names}
    return {
        "budget_minutes": minutes,
        "spent_minutes": round(result["spent_s"] / 60, 1),
        "members": result["bundle"]["members"],
        "refitted": result["bundle"]["refitted"],
        "weights": {part["part"]: part["weight"] for part in result["choice"]["tests"]},
        "validation": result["choice"]["metrics"],
        "trials": trials,
        "left_out": len(result["left_out"]),
        "test": test,
        "date": str(datetime.date.today()),
    }


def cells(row: dict[str, Any]) -> list[object]:
    """A line of the table."""
    validation = sum(row["validation"].values()) / len(METRICS)
    test = []
    for metric in METRICS:
        value = row["test"][metric]
        interval = f"[{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
        test.append(f"{100 * value['value']:.1f} {interval}")
    minutes = f"{row['spent_minutes']:.1f} of {row['budget_minutes']:g}"
    members = []
    for name in row["members"]:
        refit = ", refitted" if name in row["refitted"] else ""
        members.append(f"{name}{refit}")
    shown = "; ".join(members)
    return [row["set"], minutes, shown, f"{100 * validation:.1f}", *test, *differences(row)]


def differences(row: dict[str, Any]) -> list[str]:
    """The test less the chosen row of methods.json, and less the best floor of each metric."""
    methods = json.loads((RESULTS / "methods.json").read_text(encoding="utf-8"))["results"]
    of_set = [other for other in methods if other["set"] == row["set"]]
    chosen = [other for other in of_set if other["chosen"]]
    floors = [other for other in of_set if other["variant"] == "floor"]
    texts = []
    for others in (chosen, floors):
        points = []
        for metric in METRICS:
            best = max((o["test"][metric]["value"] for o in others), default=math.nan)
            points.append(f"{100 * (row['test'][metric]['value'] - best):+.1f}")
        texts.append(" / ".join(points) if others else "-")
    return texts


if __name__ == "__main__":
    main()
