"""Results of trainings, kept with the code: what one machine has measured no other one measures again."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping

from common import RESULTS
from data_sets import CACHE, fingerprint

from xmcray.data.corpus import Corpus
from xmcray.training.run_config import RunConfig

Result = Mapping[str, float]
KEPT = (
    "kept results may be those of another machine than the one named here, and so may their minutes"
)


class Store:
    """A JSON file of benchmarks/results, with a line for each result.

    Several processes may write into one file at a time.
    """

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.json"

    def get(self, name: str) -> Result | None:
        """A result; None if no machine has measured it."""
        return self._read().get(name)

    def put(self, name: str, result: Result) -> None:
        """Adds a result."""
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "store.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = {**self._read(), name: result}
            lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results)]
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            unfinished.replace(self.path)

    def _read(self) -> dict[str, Result]:
        if not self.path.is_file():
            return {}
        results: dict[str, Result] = json.loads(self.path.read_text(encoding="utf-8"))
        return results


def training_name(corpus: Corpus, config: RunConfig) -> str:
    """Names the result of a training: its set, and its fingerprint."""
    return f"{corpus.card.name} {fingerprint(config, corpus)}"
