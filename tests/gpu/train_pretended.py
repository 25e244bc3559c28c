"""Trains runs on a pretended CUDA device, and counts what their steps cost.

    LD_PRELOAD=stand_in.so python train_pretended.py FOLDER

The folder has a corpus, and cases.json: method and settings of each run, by name. The results are
written into results.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pretended_cuda
import torch
from pretended_cuda import PretendedCuda, counts

from xmcray.data.corpus import Corpus
from xmcray.training.launch import train_here
from xmcray.training.run import RunConfig, open_or_create
from xmcray.training.step import Stepper

_KINDS = ("launches", "syncs", "copies")
_uncounted_step = Stepper.step


def train(folder: Path, name: str, method: str, settings: list[str]) -> dict[str, Any]:
    """Trains one run; returns its steps, and the largest counts of any step but the first."""
    corpus = Corpus.open(folder / "corpus")
    config = RunConfig.resolve(method, {}, settings)
    run = open_or_create(folder / "runs" / name, config, corpus, "auto")
    costs: list[dict[str, Counter[str]]] = []
    devices: set[str] = set()

    def counted_step(self: Stepper, *args: Any) -> Any:
        before = {kind: Counter(getattr(counts, kind)) for kind in _KINDS}
        output = _uncounted_step(self, *args)
        costs.append({kind: getattr(counts, kind) - before[kind] for kind in _KINDS})
        devices.add(str(output.total.device))
        devices.update(str(table.weight_SD.device) for table in self.method.tables.values())
        return output

    Stepper.step = counted_step  # type: ignore[method-assign]
    with PretendedCuda():
        result = train_here(run, corpus)
    most: dict[str, Any] = {}
    for kind in _KINDS:
        # The first step also makes the state of the optimiser.
        most[kind] = max((cost[kind] for cost in costs[1:]), key=Counter.total)
    return {"steps": result["steps"], "devices": sorted(devices), **most}


def mixture() -> dict[str, str]:
    """Adds tensors of two devices, which has to fail."""
    with PretendedCuda():
        try:
            torch.ones(2, device="cuda") + torch.ones(2)
        except pretended_cuda.MixedDevicesError:
            return {"error": traceback.format_exc()}
    return {}


def main() -> None:
    """Trains the cases; one that fails does not stop the others."""
    folder = Path(sys.argv[1])
    pretended_cuda.install()
    cases = json.loads((folder / "cases.json").read_text())
    results: dict[str, Any] = {"mixture": mixture()}
    for name, (method, settings) in cases.items():
        try:
            results[name] = train(folder, name, method, settings)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
