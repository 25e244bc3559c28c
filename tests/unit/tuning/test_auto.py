"""`xmcray auto`: one bundle and one page within a time, and nothing that is finished is done twice."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corpora import planted_corpus
from shell import Shell

from xmcray.data.corpus import Corpus
from xmcray.errors import OutOfMemoryError, RunError
from xmcray.retrieval.retriever import Retriever
from xmcray.training import part_weights
from xmcray.training.launch import train
from xmcray.training.preemption import StopFlag, Terminated
from xmcray.training.run_config import RunConfig
from xmcray.tuning import auto_bundle, lanes, portfolio, study
from xmcray.tuning.auto import auto
from xmcray.tuning.auto_results import BASELINE, finished_with_less
from xmcray.tuning.auto_search import CandidateSearch
from xmcray.tuning.lanes import Lanes, Watch
from xmcray.tuning.pacing import Limits, Pacer, score_at_rung
from xmcray.tuning.portfolio import Candidate
from xmcray.tuning.study import METRIC, Budget, Clock
from xmcray.tuning.sweep import Trial, Validation

SMALL = {
    "encoder.dim": 8,
    "encoder.bigram_buckets": 50,
    "optim.batch_size": 32,
    "optim.epochs": 4,
    "optim.warmup_steps": 0,
    "negatives.hard": 0,
    "cluster.threads_per_process": 1,
}
ASTRA = {"negatives.uniform": 10, "optim.lr": 0.05}
# So low rates teach neither the encoder nor the rows anything.
BEHIND = {"negatives.uniform": 10, "optim.lr": 1e-9, "method.classifier.lr": 1e-9}
CANDIDATES = [
    Candidate("astra", "sample", "static", ASTRA),
    Candidate("dexml", "sample", "static", {"optim.lr": 0.05}),
    Candidate("astra", "sample", "static", BEHIND),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("corpus"), num_queries=301, num_labels=31)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "candidates", lambda *_: CANDIDATES)
    # Words alone suffice for planted data, but every part is to stay.
    monkeypatch.setattr(part_weights, "WEIGHTS", (0.5, 1.0))
    monkeypatch.setattr(part_weights, "LARGEST_P_VALUE", 2.0)


def run_auto(
    corpus: Corpus, out: Path, budget_s: float = 600, **settings: object
) -> dict[str, Any]:
    overrides = {**SMALL, **settings}
    return auto(corpus, out, budget_s, ["astra", "dexml"], overrides, lambda _: None)


def recorded(trained: list[str], before: Callable[[int], None] = lambda _: None) -> Any:
    """`Lanes.train`, in this process, which notes what it trains; `before` gets the number of calls."""

    def noting(
        _: Lanes, corpus: str, out: Path, config: RunConfig, refit: bool, watch: Watch
    ) -> None:
        before(len(trained))
        trained.append(str(out))
        with watch(out, StopFlag(out).hoist), contextlib.suppress(Terminated):
            train(corpus, out, config, refit=refit)

    return noting


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """One training after the other, in this process."""
    monkeypatch.setattr(lanes, "number_of_lanes", lambda: 1)
    monkeypatch.setattr(Lanes, "train", recorded([]))


def test_a_killed_study_goes_on_and_repeats_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_lane: None
) -> None:
    whole = run_auto(corpus, tmp_path / "whole")
    trained: list[str] = []

    def kill(call: int) -> None:
        if call == 1:
            raise Terminated("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "train", recorded(trained, kill))
        with pytest.raises(RunError, match=r"no training was finished within 0\.0 min.*--budget"):
            run_auto(corpus, tmp_path / "killed", budget_s=1e-6)
        with pytest.raises(Terminated):
            run_auto(corpus, tmp_path / "killed")
        assert not (tmp_path / "killed" / "bundle").exists()
        patch.setattr(Lanes, "train", recorded(trained))
        result = run_auto(corpus, tmp_path / "killed")
    assert len(trained) == len(set(trained)), "each run is trained once"
    assert result["choice"] == whole["choice"]
    assert result["test"] == whole["test"]
    # Once more: there is nothing left to do.
    monkeypatch.setattr(Lanes, "train", recorded(trained, lambda _: pytest.fail("trained again")))
    monkeypatch.setattr(auto_bundle, "fuse", lambda *_, **__: pytest.fail("fused again"))
    again = run_auto(corpus, tmp_path / "killed")
    assert again["test"] == whole["test"]
    check_results(tmp_path / "killed", again)


def check_results(folder: Path, result: dict[str, Any]) -> None:
    """The bundle answers, the page loads nothing, and a trial that is behind was stopped."""
    assert len(Retriever.load(folder / "bundle").search(["w3x1 w3x2"], 5)[0]) == 5
    states = {trial["name"]: trial["state"] for trial in result["trials"]}
    assert states == {
        "astra-0000": "finished",
        "dexml-0001": "finished",
        "astra-0002": "stopped",
    }
    names = [row["name"] for row in result["test"]["results"]]
    assert names[0] == "bundle"
    assert names[-1] == BASELINE
    assert all(0.3 < row["P@1"] <= 1 for row in result["test"]["results"])
    assert result["bundle"]["refitted"], "there was time for it"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "src=" not in page
    for heading in ("On the test split", "By how much", "Parts of the bundle", "What was tried"):
        assert heading in page
    assert json.loads((folder / "results.json").read_text())["choice"] == result["choice"]


class FakeClock(Clock):
    """Time that passes when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "clock.json")
        self.now_s = 0.0

    @property
    def spent_s(self) -> float:
        return self.now_s

    def seconds_of(self, name: str) -> float:
        return self.now_s

    def tick(self) -> None:
        pass


def test_no_training_begins_while_the_seconds_of_others_are_counted(tmp_path: Path) -> None:
    has_ticked = threading.Event()
    is_counting = threading.Event()

    class Seconds(dict[str, float]):
        def get(self, name: str, default: Any = None) -> Any:
            if threading.current_thread() is not second:
                is_counting.set()
                second.join(0.1)
            return super().get(name, default)

    class SlowClock(Clock):
        def tick(self) -> None:
            super().tick()
            if threading.current_thread() is second:
                has_ticked.set()
                is_counting.wait(0.1)

    clock = SlowClock(tmp_path / "clock.json")
    block = clock.counting("second")
    second = threading.Thread(target=block.__enter__)
    with clock.counting("first"):
        clock._seconds = Seconds()
        second.start()
        has_ticked.wait()
        clock.tick()
    second.join()
    assert clock._running == {"second"}


@pytest.mark.parametrize("seconds", ['{"astra-0000": "x"}', "[1]", "null"])
def test_a_damaged_clock_is_one_line(seconds: str, tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    path.write_text(f'{{"spent_s": 1.0, "seconds": {seconds}}}')
    with pytest.raises(RunError, match=r"clock\.json is damaged .*; remove it to count from 0"):
        Clock(path)


def paced(folder: Path, limits: Limits, records: list[tuple[float, dict[str, Any]]]) -> Pacer:
    """What a pacer of 6 epochs says to records at some times; it asks to end if it has a reason."""
    clock = FakeClock(folder)
    pacer = Pacer(clock, "astra-0000", 6, limits)
    flag = StopFlag(folder)
    flag.path.unlink(missing_ok=True)
    with pacer.watch(folder, flag.hoist):
        for now_s, record in records:
            clock.now_s = now_s
            pacer.hear(record)
    assert flag.raised == bool(pacer.reason)
    return pacer


def test_a_training_that_needs_too_long_ends(tmp_path: Path) -> None:
    # Building takes 20 s, then a step takes 1 s; 60 steps are 6 epochs.
    steps = [(20.0 + step, {"step": step, "last_step": 60}) for step in (0, 5, 10)]
    assert paced(tmp_path, Limits(math.inf, allowed_s=81), steps).reason == ""
    slow = paced(tmp_path, Limits(math.inf, allowed_s=79), steps)
    assert slow.reason == "too slow"
    assert slow.epoch_s == pytest.approx(10)


def test_a_training_that_is_behind_ends_after_a_third(tmp_path: Path) -> None:
    def validation(epoch: int, score: float) -> tuple[float, dict[str, Any]]:
        values = dict.fromkeys(METRIC.split("+"), score)
        return 1.0, {"step": 10 * (epoch + 1), "epoch": epoch, **values}

    limits = Limits(math.inf, rival=lambda: 0.3)
    for second, reason in ((0.3, "behind"), (0.31, "")):
        # After the first epoch nothing is compared yet.
        records = [validation(0, 0.1), validation(1, second)]
        assert paced(tmp_path, limits, records).reason == reason
    # A training that goes on has what it reached before.
    past = dict.fromkeys(METRIC.split("+"), 0.4)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 10, "epoch": 0, **past}) + "\n")
    assert paced(tmp_path, limits, [validation(1, 0.2)]).reason == ""
    curve = (Validation(1, 0.1), Validation(2, 0.3), Validation(3, 0.5))
    trial = Trial(0, {}, "finished", curve=curve)
    assert score_at_rung(trial, epochs=6) == 0.3
    assert score_at_rung(trial, epochs=12) == -math.inf, "it is not there yet"
    # Validated every fifth epoch, so not before a third of 12 epochs.
    rarely = Trial(0, {}, "finished", curve=(Validation(5, 0.1), Validation(10, 0.3)))
    assert score_at_rung(rarely, epochs=12) == 0.1
    early = Trial(0, {}, "stopped", curve=(Validation(3, 0.1),))
    assert score_at_rung(early, epochs=12) == -math.inf


def test_a_training_that_is_validated_rarely_is_compared_once(tmp_path: Path) -> None:
    def validation(epochs_done: int, score: float) -> tuple[float, dict[str, Any]]:
        values = dict.fromkeys(METRIC.split("+"), score)
        return 1.0, {"step": 10 * epochs_done, "epoch": epochs_done - 1, **values}

    rivals = iter([0.3, 1.0])
    limits = Limits(math.inf, rival=lambda: next(rivals))
    # A third of 6 epochs are 2, and the validation after that is the third.
    ahead = [validation(3, 0.4), validation(5, 0.4)]
    assert paced(tmp_path, limits, ahead).reason == ""
    assert next(rivals) == 1.0, "compared once"
    behind = Limits(math.inf, rival=lambda: 0.3)
    assert paced(tmp_path, behind, [validation(3, 0.2)]).reason == "behind"
    # There is nothing to save after the last epoch.
    assert paced(tmp_path, behind, [validation(6, 0.2)]).reason == ""
    # A training that goes on was compared before.
    past = dict.fromkeys(METRIC.split("+"), 0.2)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 30, "epoch": 2, **past}) + "\n")
    assert paced(tmp_path, behind, [validation(5, 0.2)]).reason == ""


@pytest.fixture
def too_slow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every training takes too long; its epochs, in the settings and to be trained, are noted here."""
    tried = []

    def never_done(
        _: Lanes, __: str, ___: Path, config: RunConfig, refit: bool, watch: Watch
    ) -> None:
        tried.append((config.optim.epochs, config.optim.num_epochs))
        pacer = watch.__self__  # type: ignore[attr-defined]
        assert pacer.epochs == config.optim.num_epochs
        pacer.reason = "too slow"
        # Three quarters of the 360 seconds of the search are two epochs and a half.
        pacer.epoch_s = 108.0

    monkeypatch.setattr(Lanes, "train", never_done)
    monkeypatch.setattr(study, "candidates", lambda *_: CANDIDATES[:1])
    return tried


def test_a_training_that_is_too_slow_is_tried_with_fewer_epochs_again_and_again(
    corpus: Corpus, tmp_path: Path, too_slow: list[tuple[int, int]]
) -> None:
    with pytest.raises(RunError, match="no training was finished"):
        run_auto(corpus, tmp_path / "study")
    assert too_slow == [(4, 4), (2, 2), (1, 1)]

    # More time continues all of them.
    with pytest.raises(RunError, match="no training was finished"):
        run_auto(corpus, tmp_path / "study", budget_s=1200)
    assert too_slow == 2 * [(4, 4), (2, 2), (1, 1)]


def test_a_training_with_fewer_epochs_stops_after_its_last_one(
    corpus: Corpus, tmp_path: Path, too_slow: list[tuple[int, int]]
) -> None:
    with pytest.raises(RunError, match="no training was finished"):
        run_auto(corpus, tmp_path / "study", **{"optim.stop_epoch": 3})
    assert too_slow == [(4, 3), (2, 2), (1, 1)]


def test_fewer_epochs_that_the_settings_do_not_accept_are_not_tried(
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    too_slow: list[tuple[int, int]],
) -> None:
    # Hard negatives from the fourth epoch on, and no others: two epochs would have positives alone.
    values = {"negatives.uniform": 0, "negatives.start_epoch": 3}
    candidate = Candidate("astra", "sample", "static", values)
    monkeypatch.setattr(study, "candidates", lambda *_: [candidate])
    with pytest.raises(RunError, match="no training was finished"):
        run_auto(corpus, tmp_path / "study", **{"negatives.hard": 10})
    assert too_slow == [(4, 4)]


def test_a_failed_refit_leaves_the_trial_in_the_bundle(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_lane: None
) -> None:
    trained = recorded([])

    def failing(
        lanes: Lanes, data: str, out: Path, config: RunConfig, refit: bool, watch: Watch
    ) -> None:
        if refit:
            raise OutOfMemoryError("too large")
        trained(lanes, data, out, config, refit, watch)

    monkeypatch.setattr(Lanes, "train", failing)
    said: list[str] = []
    result = auto(corpus, tmp_path / "study", 600, ["astra", "dexml"], SMALL, said.append)
    for member in result["bundle"]["members"]:
        assert f"{member} refit failed (too large)" in said
    assert result["bundle"]["refitted"] == []

    # A call with more time refits them, also if an earlier release noted the refit of another trial.
    fused = json.loads((tmp_path / "study/fused.json").read_text())
    fused["refitted"] = ["astra-0002"]
    (tmp_path / "study/fused.json").write_text(json.dumps(fused))
    monkeypatch.setattr(Lanes, "train", trained)
    again = auto(corpus, tmp_path / "study", 600, ["astra", "dexml"], SMALL, said.append)
    assert again["bundle"]["members"] == result["bundle"]["members"]
    assert again["bundle"]["refitted"] == again["bundle"]["members"]


def test_of_a_larger_budget_the_added_time_is_divided(tmp_path: Path) -> None:
    assert finished_with_less(tmp_path, 900) == 0
    (tmp_path / "results.json").write_text('{"budget_s": 600, "spent_s": 580}')
    assert finished_with_less(tmp_path, 600) == 0
    assert finished_with_less(tmp_path, 900) == 580
    assert Budget(900, 580).search_end_s == pytest.approx(580 + 0.6 * 320)
    (tmp_path / "results.json").write_text('{"budget_s": 600}')
    with pytest.raises(RunError, match=r"results\.json is damaged"):
        finished_with_less(tmp_path, 900)


def test_trainings_that_all_fail_end_the_study_with_the_first_reason(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_lane: None
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OutOfMemoryError("too large")

    monkeypatch.setattr(Lanes, "train", failing)
    with pytest.raises(RunError, match="all 3 trainings failed, the first because too large;"):
        run_auto(corpus, tmp_path / "study")

    def reason(_: CandidateSearch, candidate: Candidate) -> str:
        return "the time was over" if candidate.method == "dexml" else ""

    # A candidate for which there was no time may still be trained.
    monkeypatch.setattr(CandidateSearch, "_reason_to_skip", reason)
    with pytest.raises(RunError, match="no training was finished"):
        run_auto(corpus, tmp_path / "short")


def test_a_training_is_compared_with_earlier_ones_alone() -> None:
    def attempt(number: int, score: float) -> SimpleNamespace:
        trial = Trial(number, {}, "unfinished", curve=(Validation(2, score),))
        config = SimpleNamespace(optim=SimpleNamespace(num_epochs=6))
        candidate = SimpleNamespace(method="astra")
        return SimpleNamespace(trial=trial, config=config, candidate=candidate)

    # The repetition of the second one, with fewer epochs, has no score yet.
    earlier, second, later = attempt(0, 0.3), attempt(1, 0.5), attempt(2, 0.9)
    repetition = attempt(1 + study.SHORTER, 0.0)
    attempts = [earlier, second, later, repetition]
    fake_study: Any = SimpleNamespace(attempts=lambda method: attempts)
    nothing: Any = None
    search = CandidateSearch(fake_study, nothing, nothing, nothing)
    scores = [search._rival_score(each) for each in (earlier, second, later, repetition)]
    assert scores == [-math.inf, 0.3, 0.5, 0.3]


def test_presets_of_about_the_size_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (num_labels, num_train) in portfolio.SET_SIZES.items():
        assert portfolio.nearest_presets(num_labels, num_train)[0] == name
    for can_distil in (True, False):
        monkeypatch.setattr(portfolio, "_can_distil", lambda can=can_distil: can)
        card = type("Card", (), {"num_labels": 2000, "num_train": 3000})
        corpus: Any = type("Corpus", (), {"card": card})
        chosen = portfolio.candidates(corpus)
        defaults = portfolio.DEFAULT_METHODS
        assert tuple(candidate.method for candidate in chosen[: len(defaults)]) == defaults
        has_distilled = any("encoder.init_from" in candidate.values for candidate in chosen)
        assert has_distilled == can_distil
        # Only names such as "optim.lr" are settings of a trial.
        names = {name for candidate in chosen for name in candidate.values}
        assert [name for name in names if "." not in name] == []


@pytest.mark.parametrize(
    ("overrides", "encoder"),
    [
        ({"encoder.init_from": ""}, "static"),
        ({"encoder.init_from": "owner/small"}, "static, distilled from small"),
        ({"encoder.name": "folder/of/mine/"}, "mine"),
    ],
)
def test_candidates_with_the_same_settings_are_tried_once(
    overrides: dict[str, Any], encoder: str
) -> None:
    distilled = {**ASTRA, "encoder.init_from": portfolio.DISTILLED_FROM}
    starts = [
        Candidate("astra", "sample", "static", {**ASTRA, "encoder.init_from": ""}),
        Candidate("astra", "sample", "static, distilled from all-MiniLM-L6-v2", distilled),
        Candidate("dexml", "sample", "static", distilled),
    ]
    chosen = portfolio.with_overrides(starts, {"encoder.init_from": "", **overrides})
    assert [candidate.method for candidate in chosen] == ["astra", "dexml"]
    assert {candidate.encoder for candidate in chosen} == {encoder}


def test_a_study_keeps_each_training_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distilled = {**ASTRA, "encoder.init_from": portfolio.DISTILLED_FROM}
    starts = [
        Candidate("astra", "sample", "static, distilled from all-MiniLM-L6-v2", distilled),
        Candidate("astra", "sample", "static", ASTRA),
    ]
    monkeypatch.setattr(study, "candidates", lambda *_: starts)
    overrides = {**SMALL, "encoder.init_from": ""}
    made = study.Study.open_or_create(tmp_path, corpus, ["astra"], overrides)
    (candidate,) = made.candidates
    assert candidate.encoder == "static"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--budget soon", "budget is 'soon', expected a time such as 90s, 20m or 2h"),
        ("--methods astro", "astro"),
        ("--set optim.epoch=3", "optim.epoch"),
        ("--set memory.weight=0.3", "memory.weight is chosen by validation for the whole bundle"),
        (
            "--set data.validation=0",
            "data.validation=0 and data.validation_from=0 hold out no query with a positive",
        ),
    ],
)
def test_mistakes_are_one_line(
    corpus: Corpus,
    tmp_path: Path,
    shell: Shell,
    arguments: str,
    message: str,
) -> None:
    out = tmp_path / "study"
    assert message in shell.error(f"auto --data {corpus.path} --out {out} {arguments}")
    assert not out.exists()


def test_another_study_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunError, match=r"holds notes\.txt and no study"):
        run_auto(corpus, tmp_path)


def test_a_study_is_the_same_whatever_the_order_of_its_methods(
    corpus: Corpus, tmp_path: Path
) -> None:
    def opened(*methods: str) -> study.Study:
        return study.Study.open_or_create(tmp_path, corpus, methods, SMALL)

    first = opened("astra", "rae")
    assert opened("rae", "astra", "rae").candidates == first.candidates
    # As earlier releases wrote it.
    file = tmp_path / "auto.json"
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "methods": ["astra", "rae"]}))
    assert opened("rae", "astra").candidates == first.candidates
    with pytest.raises(RunError, match="was started with methods"):
        opened("rae")
