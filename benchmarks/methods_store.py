"""The measurements of methods.py: results/methods.json has a row for each."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from common import RESULTS

from xmcray.storage.whole_files import write_json

METRICS = ("P@1", "P@5", "PSP@5")
SETS = (
    "sample",
    "cdnjs-keywords",
    "tate-subjects",
    "wordnet-hypernyms",
    "msdocs-seealso",
    "msdocs-links",
)
STORE = RESULTS / "methods.json"
ALONE = "alone"
WITH_MEMORY = "with memory"
FUSED = "fused"
FLOOR = "floor"
Row = dict[str, Any]


def stored(store: Path) -> list[Row]:
    """All measurements, by set, the floors first."""
    if not store.is_file():
        return []
    rows: list[Row] = json.loads(store.read_text(encoding="utf-8"))["results"]
    return rows


def is_measured(store: Path, name: str, method: str, key: str) -> bool:
    """Whether a method was measured on a set with these settings, in all of its variants."""
    # The last variant is there only if all of them are.
    wanted = {"set": name, "method": method, "settings": key, "variant": FUSED}
    return any(wanted.items() <= row.items() for row in stored(store))


def keep(store: Path, name: str, method: str, new_rows: Sequence[Row]) -> None:
    """Replaces the rows of a method on a set; several processes may measure at the same time."""
    if store == Path(os.devnull):
        return
    with (data_sets.CACHE / "methods.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = []
        for row in stored(store):
            is_replaced = row["set"] == name and row["method"] == method
            if not is_replaced:
                rows.append(row)
        rows += new_rows
        rows.sort(key=order)
        choose(rows)
        write_json(store, {"results": rows})


def order(row: Row) -> tuple[int, bool, str, bool, str]:
    """Sets in their order, the floors first, then methods by name, alone before the others."""
    is_method = row["variant"] != FLOOR
    is_variant = row["variant"] != ALONE
    return SETS.index(row["set"]), is_method, row["method"], is_variant, row["variant"]


def choose(rows: Sequence[Row]) -> None:
    """Marks the row of each set with the best validation."""
    for name in SETS:
        candidates = [row for row in rows if row["set"] == name]
        best = max(candidates, key=validation_mean, default=None)
        for row in candidates:
            row["chosen"] = row is best and row["validation"] is not None


def validation_mean(row: Row) -> float:
    values = row["validation"]
    return -math.inf if values is None else float(np.mean([values[name] for name in METRICS]))
