"""The second step of `xmcray auto`: fuses the best trials to a bundle, and then their refits."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.errors import RunError, XmcrayError
from xmcray.retrieval.parts import MEMBER_PARTS
from xmcray.storage.whole_files import exchange, publish, write_json
from xmcray.training.fuse import fuse
from xmcray.training.launch import refit_config
from xmcray.training.part_weights import Choice
from xmcray.training.run import SELECTION, Run
from xmcray.tuning.auto_search import Say
from xmcray.tuning.lanes import Lanes
from xmcray.tuning.pacing import Limits, Pacer
from xmcray.tuning.study import SHORTER, Attempt, Budget, Study, is_finished, minutes
from xmcray.tuning.sweep import FATAL

# Most trials that are fused. Encoding queries and choosing weights takes longer with each of them.
MAX_MEMBERS = 5
MAX_MEMBERS_OF_LARGE = 3
LARGE = 100_000  # training queries plus labels
FUSE_QUERIES = 1000  # held-out queries by which weights are chosen


@dataclass(frozen=True)
class BundleMaker:
    """Writes DIR/bundle.

    Attributes:
        study: folder of all trials.
        budget: how the time is divided.
        lanes: processes that train refits.
        say: called with a line when a fusion or a refit has ended.
    """

    study: Study
    budget: Budget
    lanes: Lanes
    say: Say

    def run(self) -> None:
        """Fuses the best trial of each method, refits the members as time allows, and fuses again.

        Raises:
            RunError: there is no finished trial.
        """
        best = self._best()
        names = [attempt.name for attempt in best]
        fused = self.study.fused()
        if fused is None or fused["trials"] != names:
            fused = self._fuse(best, names)
        members = [attempt for attempt in best if attempt.name in fused["members"]]
        fuse_s = fused["seconds"]
        self.lanes.map(lambda member: self._refit(member, fuse_s), members)
        # Earlier releases also wrote the refits of trials that have no part in the bundle.
        has_new_refit = bool(set(self._refitted(members)) - set(fused["refitted"]))
        left_s = self.budget.seconds - self.study.clock.spent_s
        if has_new_refit and fuse_s < left_s:
            # The weights stay: the refits have seen the held-out queries by which they are chosen.
            self._fuse(members, names, fused)

    def _best(self) -> list[Attempt]:
        """The trials that are fused, in the order of the methods."""
        card = self.study.corpus.card
        is_large = card.num_train + card.num_labels > LARGE
        limit = MAX_MEMBERS_OF_LARGE if is_large else MAX_MEMBERS
        # Not by score: what label vectors reach alone says little about what they add to others.
        best = self.study.best_of_methods()[:limit]
        if not best:
            trials = [attempt.trial for attempt in self.study.attempts()]
            begun = {trial.number % SHORTER for trial in trials}
            are_all_begun = len(begun) == len(self.study.candidates)
            if are_all_begun and all(trial.state == "failed" for trial in trials):
                # More time would not help: a failed trial is not repeated.
                raise RunError(
                    f"all {len(trials)} trainings failed, the first because {trials[0].message};"
                    " start again with another --out"
                )
            raise RunError(
                f"no training was finished within {minutes(self.budget.search_end_s)}, the time of the"
                " search; the same command with a larger --budget continues"
            )
        return best

    def _refitted(self, attempts: Sequence[Attempt]) -> list[str]:
        """Names of the trials whose refit is finished."""
        return [attempt.name for attempt in attempts if is_finished(self.study.refit_path(attempt))]

    def _fuse(
        self,
        attempts: Sequence[Attempt],
        considered: Sequence[str],
        before: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes DIR/bundle and fused.json; returns the content of fused.json.

        Args:
            attempts: trials to fuse. Of a trial whose refit is finished, the refit is fused.
            considered: names of the trials among which members were chosen.
            before: an earlier result for the same members, whose weights stay.
        """
        started = time.monotonic()
        fresh = self._clean_folder()
        choice = None if before is None else Choice.read(before["choice"])
        runs = [str(self.study.newest_path(attempt)) for attempt in attempts]
        with self.study.clock.counting("fuse"):
            choice = fuse(
                runs,
                self.study.corpus,
                fresh,
                most_queries=FUSE_QUERIES,
                choice=choice,
                threads=len(os.sched_getaffinity(0)),
            )
        in_bundle = _members(choice, attempts)
        members = [attempt.name for attempt in in_bundle]
        seconds = time.monotonic() - started
        body = {
            "trials": list(considered),
            "members": members,
            "refitted": self._refitted(in_bundle),
            "seconds": seconds,
            "choice": choice.plain(),
        }
        self._publish(fresh, body)
        mean = 100 * np.mean(list(choice.metrics.values()))
        names = " + ".join(members) or "words alone"
        self.say(f"fused {names}: {mean:.2f} on validation, {minutes(seconds)}")
        return body

    def _clean_folder(self) -> Path:
        """Folder for the next bundle; files of a killed call are removed."""
        fresh = self.study.path / "bundle.new"
        shutil.rmtree(fresh, ignore_errors=True)
        return fresh

    def _publish(self, fresh: Path, body: Mapping[str, Any]) -> None:
        """Replaces the last bundle with a new one, and then fused.json."""
        bundle = self.study.path / "bundle"
        if bundle.exists():
            exchange(fresh, bundle)
            shutil.rmtree(fresh)
        else:
            publish(fresh, bundle)
        write_json(self.study.path / "fused.json", body)

    def _refit(self, attempt: Attempt, fuse_s: float) -> None:
        """Trains a member once more, on all training queries, if there is time for it.

        Args:
            attempt: the member's trial.
            fuse_s: seconds that are kept for the next fusion.
        """
        path = self.study.refit_path(attempt)
        if is_finished(path):
            return
        clock = self.study.clock
        name = f"{attempt.name} refit"
        end_s = self.budget.refit_end_s - fuse_s
        # A refit trains only up to the best epoch of the trial. It may have begun in an earlier call.
        num_epochs = refit_config(Run.open(attempt.run_path)).optim.num_epochs
        whole_s = attempt.seconds * num_epochs / attempt.config.optim.num_epochs
        expected_s = whole_s - clock.seconds_of(name)
        if clock.spent_s + expected_s > end_s:
            self.say(f"{attempt.name} is not refitted: it needs about {minutes(expected_s)}")
            return
        selection = path / SELECTION
        if not selection.is_symlink():
            # There `train` looks for the finished trial, and `fuse` for its held-out queries.
            path.mkdir(parents=True, exist_ok=True)
            selection.symlink_to(os.path.relpath(attempt.run_path, path))
        config = attempt.config
        pacer = Pacer(clock, name, config.optim.num_epochs, Limits(end_s))
        try:
            self.lanes.train(self.study.corpus.origin, path, config, refit=True, watch=pacer.watch)
        except FATAL:
            raise
        except XmcrayError as error:
            # The bundle has the trial instead.
            self.say(f"{name} failed ({error})")
            return
        state = "finished" if is_finished(path) else "out of time"
        self.say(f"{name} {state}, {minutes(clock.seconds_of(name))}")


def _members(choice: Choice, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The trials that have a part in the bundle."""
    used = set(choice.config.used())
    members = []
    for attempt in attempts:
        # The parts of words belong to no member.
        own_parts = {f"{attempt.candidate.method}.{part}" for part in MEMBER_PARTS}
        if len(attempts) == 1:
            # The parts of a single member may have no prefix.
            own_parts.update(MEMBER_PARTS)
        if own_parts & used:
            members.append(attempt)
    return members
