"""`xmcray auto`: trains candidates, refits the best ones and fuses a bundle within a time budget.

    search   the candidates of portfolio.py, in order (auto_search.py)
    bundle   the best trial of each method, fused; then their refits (auto_bundle.py)
    results  the bundle, its best trial alone and a simple baseline on the test split
             (auto_results.py)

Every step leaves files (study.py), so that a restart continues where the last call stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmcray.data.corpus import Corpus
from xmcray.storage.work_folder import locked
from xmcray.tuning.auto_bundle import BundleMaker
from xmcray.tuning.auto_results import finished_with_less, write_results
from xmcray.tuning.auto_search import CandidateSearch, Say
from xmcray.tuning.lanes import Lanes
from xmcray.tuning.space import Values
from xmcray.tuning.study import STUDY_FOLDER, Budget, Study, minutes


def auto(
    corpus: Corpus,
    out: str | Path,
    budget_s: float,
    methods: Sequence[str],
    overrides: Values,
    say: Say,
) -> dict[str, Any]:
    """Finds a good bundle for a corpus within a time; continues what an earlier call began.

    Args:
        corpus: the prepared data.
        out: folder of the study.
        budget_s: seconds that all calls together may take.
        methods: names of the methods that may be tried.
        overrides: settings of all trials, by dotted name.
        say: called with a line whenever a trial or a step has ended.
    Returns:
        The content of results.json.
    Raises:
        ConfigError: a method does not accept the overrides.
        RunError: the folder holds something else, or no training fits into the time.
        Terminated: SIGTERM came; the same call continues.
    """
    path = Path(out).absolute()
    lanes = Lanes()
    with locked(path, STUDY_FOLDER):
        study = Study.open_or_create(path, corpus, methods, overrides)
        budget = Budget(budget_s, finished_with_less(path, budget_s))
        try:
            skipped = CandidateSearch(study, budget, lanes, say).run()
            BundleMaker(study, budget, lanes, say).run()
            result = write_results(study, budget, skipped)
        finally:
            study.clock.tick()
    say(f"{minutes(result['spent_s'])} of {minutes(budget_s)} spent")
    return result
