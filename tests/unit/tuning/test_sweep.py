"""A sweep's folder: what is written once, what a restart reads, which trial is best, and what the page shows."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.exceptions
import yaml
from corpora import planted_corpus
from parsed_page import Page
from shell import Shell

from xmcray.errors import ConfigError, OutOfMemoryError, ResourceError, RunError
from xmcray.training.run_config import ClusterConfig, RunConfig
from xmcray.tuning.report import importance, write_report
from xmcray.tuning.search import Guide, TrialStopper, asha, eviction_errors, proposals, share
from xmcray.tuning.space import NumberRange, parse_space
from xmcray.tuning.sweep import Sweep, SweepConfig, Trial, Validation
from xmcray.tuning.trial import Reporter

EVIL = '<script>alert("1")</script>'
BODY = {"optim.lr": {"log_uniform": [1e-4, 1e-2]}, "method.init": {"choice": ["random", "zeros"]}}


def config(*settings: str, **changed: object) -> SweepConfig:
    values = RunConfig.resolve("astra", {}, ["optim.epochs=9", *settings]).to_dict()
    known = {
        "method": "astra",
        "corpus": "/c",
        "corpus_sha256": "c",
        "settings": values,
        "space": BODY,
        "metric": "P@1",
    }
    return SweepConfig(**{**known, **changed})


def make(
    folder: Path,
    curves: dict[int, list[float]],
    states: dict[int, str] | None = None,
    **changed: object,
) -> Sweep:
    """A sweep whose trials have validated so often, in steps of ten."""
    sweep = Sweep.open_or_create(folder, config(**changed))
    for number, curve in curves.items():
        sweep.draw(
            number,
            {"optim.lr": 1e-4 * 10**number, "method.init": "zeros" if number % 2 else "random"},
        )
        run = sweep.run_path(number)
        (run / "checkpoints").mkdir(parents=True)
        lines = [{"step": 10 * (i + 1), "epoch": i, "P@1": score} for i, score in enumerate(curve)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        state = (states or {}).get(number, "finished")
        if state == "finished":
            (run / "result.json").write_text("{}")
        if state != "unfinished":
            sweep.end(number, state, "why" if state == "failed" else "")  # type: ignore[arg-type]
    return sweep


def test_the_best_is_one_that_was_trained_to_the_end(tmp_path: Path) -> None:
    states = {1: "stopped", 2: "failed", 3: "unfinished"}
    sweep = make(
        tmp_path, {0: [0.1, 0.5, 0.4], 1: [0.9], 2: [0.95], 3: [0.99], 4: [0.2, 0.6, 0.6]}, states
    )
    assert [trial.number for trial in sweep.ranked()] == [4, 0, 1, 3, 2]
    assert sweep.trial(4).best == (2, 0.6), "of equal ones the earlier"
    assert sweep.trial(0).steps == 30
    sweep.write_results()
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert "cluster" not in best
    again = RunConfig.resolve("astra", best)
    assert (again.optim.lr, again.method.init, again.optim.epochs) == (1.0, "random", 9)
    sweep.prune(keep=1)
    assert [(sweep.run_path(n) / "checkpoints").exists() for n in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert (sweep.run_path(0) / "metrics.jsonl").exists()


def test_a_restart_reads_what_was_written(tmp_path: Path) -> None:
    sweep = make(tmp_path, {0: [0.1], 1: [0.2]}, {1: "unfinished"})
    again = Sweep.open_or_create(
        tmp_path, config("cluster.workers=0", "log.every=3", corpus="/elsewhere")
    )
    assert again.trials() == sweep.trials()
    assert Sweep.open(tmp_path).config.corpus == "/elsewhere", "trials read where the corpus is now"
    with pytest.raises(AssertionError, match="ends once"):
        again.end(0, "finished")
    for changed, message in (
        (config("optim.epochs=3"), "settings.optim.epochs = 9, now 3"),
        (config("log.validate_every=3"), "settings.log.validate_every = 1, now 3"),
        (config(space={"optim.lr": {"uniform": [0, 1]}}), "space.method.init = .*, now None"),
        (config(seed=1), "seed = 0, now 1"),
        (config(corpus_sha256="d"), "corpus_sha256 = c, now d"),
    ):
        with pytest.raises(
            RunError, match=f"holds a sweep with {message}; use the same settings or another --out"
        ):
            Sweep.open_or_create(tmp_path, changed)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        Sweep.open(tmp_path)


def test_what_was_drawn_stays_drawn_and_ended_trials_do_not_come_back(tmp_path: Path) -> None:
    sweep = make(tmp_path, {0: [0.1], 1: [0.2]}, {1: "unfinished"})
    ended: list[Trial] = []
    guide = Guide(sweep, [1, 2, 3], keep=1, on_end=ended.append)
    assert [guide.suggest(name) for name in "abc"] == [{"number": 1}, {"number": 2}, {"number": 3}]
    assert guide.suggest("d") == Guide.FINISHED
    (tmp_path / "fresh").mkdir()
    fresh = Guide(Sweep.open_or_create(tmp_path / "fresh", config()), [0, 1, 2, 3], 1, ended.append)
    for name in "abcd":
        fresh.suggest(name)
    assert sweep.trial(2).values == fresh.sweep.trial(2).values, (
        "a function of seed and number alone"
    )
    guide.note_error("b", "OutOfMemoryError", "too much")
    guide.on_trial_complete("b")
    guide.on_trial_complete("c", error=True)
    guide.note_error("a", "StorageError", "the disk is full")
    guide.on_trial_complete("a")
    assert [(trial.number, trial.state) for trial in ended] == [(2, "failed"), (3, "failed")]
    assert "too much" in sweep.trial(2).message
    assert "died" in sweep.trial(3).message
    assert sweep.trial(1).state == "unfinished", (
        "a full disk is not the trial's fault: it goes on another time"
    )
    assert "disk" in str(guide.problem)
    assert guide.suggest("e") == Guide.FINISHED


def test_the_first_trials_have_the_values_that_the_sweep_gives(tmp_path: Path) -> None:
    given = {"optim.lr": 2e-3, "method.init": "zeros"}
    sweep = Sweep.open_or_create(tmp_path, config(first=(given,)))
    guide = Guide(Sweep.open(tmp_path), [0, 1], 1, lambda trial: None)
    guide.suggest("a")
    guide.suggest("b")
    assert sweep.trial(0).values == given
    assert sweep.trial(1).values == guide.proposals.propose(1)


def test_a_trial_that_would_need_too_much_time_is_stopped(tmp_path: Path) -> None:
    guide = Guide(make(tmp_path, {}), [0], 1, lambda trial: None)
    limited = TrialStopper(guide, 100.0)
    assert limited("a", {"expected_cpu_s": 101.0})
    assert not limited("a", {"expected_cpu_s": 99.0})
    assert not TrialStopper(guide, 0.0)("a", {"expected_cpu_s": 1e9}), "0 is no limit"


def test_a_stopped_trial_has_a_reason(tmp_path: Path) -> None:
    sweep = Sweep.open_or_create(tmp_path, config())
    guide = Guide(sweep, [0, 1], 1, lambda trial: None)
    guide.suggest("expensive")
    guide.suggest("behind")
    assert TrialStopper(guide, 100.0)("expensive", {"expected_cpu_s": 1234.5})
    guide.on_trial_complete("expensive")
    guide.on_trial_complete("behind")
    reason = "it would take 1,234 s of CPU time, and --trial-cpu-s allows 100"
    assert sweep.trial(0).message == reason
    assert sweep.trial(1).message == "it was behind others after as many epochs"


@pytest.mark.parametrize(
    ("state", "said"), [("stopped", "was stopped because why"), ("failed", "failed because why")]
)
def test_a_sweep_in_which_no_trial_has_a_score_is_one_line(
    state: str, said: str, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_sweep(sweep: Sweep, *_: object) -> None:
        for number in range(2):
            sweep.draw(number, {"optim.lr": 0.1})
            sweep.end(number, state, "why")  # type: ignore[arg-type]

    monkeypatch.setattr("xmcray.tuning.search.run_sweep", run_sweep)
    corpus = planted_corpus(tmp_path, num_queries=201, num_labels=31)
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: {uniform: [0, 1]}\n")
    command = f"tune astra --data {corpus.path} --space {space} --out {tmp_path}/sweep"
    assert shell.error(command) == f"none of 2 trials has a score; the first {said}"
    # What was tried can be read all the same.
    assert (tmp_path / "sweep" / "report.html").is_file()
    assert not (tmp_path / "sweep" / "best.yaml").exists()


def test_the_time_of_a_trial_follows_from_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, float]] = []
    cpu_s = iter([10.0, 12.0, 15.0, 16.0])
    monkeypatch.setattr("xmcray.tuning.trial.tune.report", reports.append)
    monkeypatch.setattr("xmcray.tuning.trial.time.process_time", lambda: next(cpu_s))
    reporter = Reporter("P@1", limit_cpu_s=100.0)
    reporter.hear({"step": 100, "last_step": 900, "epoch": 0, "P@1": 0.5})
    assert reports[0]["expected_cpu_s"] == 0, "the past of a resumed trial took no time here"
    reporter = Reporter("P@1", limit_cpu_s=100.0)
    reporter.start_training()
    # 2 seconds for 20 steps are 90 for 900; 5 seconds for 40 steps are 112.5.
    for step in (20, 40, 60):
        reporter.hear({"step": step, "last_step": 900, "epoch": 0, "loss": 1.0})
    assert [report["expected_cpu_s"] for report in reports[1:]] == [112.5]
    reporter.hear({"step": 80, "last_step": 900, "epoch": 0, "P@1": 0.5})
    assert (reports[-1]["score"], reports[-1]["expected_cpu_s"]) == (0.5, 90.0)


def test_trials_are_compared_by_the_mean_of_several_metrics(tmp_path: Path) -> None:
    sweep = make(tmp_path, {0: [0.2]}, metric="P@1+PSP@5")
    record = {"step": 20, "epoch": 1, "P@1": 0.2, "PSP@5": 0.6}
    with (sweep.run_path(0) / "metrics.jsonl").open("w") as file:
        file.write(json.dumps(record) + "\n")
    assert sweep.trial(0).curve == ((2, pytest.approx(0.4)),)
    with pytest.raises(ConfigError, match="unknown metric 'P@2'"):
        config(metric="P@1+P@2")


def test_the_scheduler_knows_the_past(tmp_path: Path) -> None:
    sweep = make(tmp_path, {n: [0.5, 0.6] for n in range(4)}, {0: "finished", 3: "unfinished"})
    bad, good = (dataclasses.make_dataclass("T", ["trial_id"])(name) for name in ("bad", "good"))
    scheduler = asha(sweep)
    for trial in (bad, good):
        scheduler.on_trial_add(None, trial)
    assert scheduler.on_trial_result(None, bad, {"epoch": 1, "score": 0.1}) == "STOP"
    assert scheduler.on_trial_result(None, good, {"epoch": 1, "score": 0.6}) == "CONTINUE"
    (tmp_path / "alone").mkdir()
    alone = asha(make(tmp_path / "alone", {}))
    alone.on_trial_add(None, bad)
    assert alone.on_trial_result(None, bad, {"epoch": 1, "score": 0.1}) == "CONTINUE"


def test_the_longest_trial_that_is_possible_decides_the_rungs(tmp_path: Path) -> None:
    # A trial of 9 epochs cannot stop after 30.
    space = {
        "optim.epochs": {"choice": [9, 90]},
        "optim.stop_epoch": {"choice": [3, 30]},
    }
    scheduler = asha(make(tmp_path, {n: [0.5] * 5 for n in range(4)}, space=space))
    bad = SimpleNamespace(trial_id="bad")
    scheduler.on_trial_add(None, bad)
    # Trials are compared after a ninth of 30 epochs.
    assert scheduler.on_trial_result(None, bad, {"epoch": 2, "score": 0.1}) == "CONTINUE"
    assert scheduler.on_trial_result(None, bad, {"epoch": 3, "score": 0.1}) == "STOP"


def test_shares_of_a_cluster() -> None:
    def nodes(*resources: dict[str, float]) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": r} for r in resources] + [
            {"Alive": False, "Resources": {"CPU": 64.0}}
        ]

    two = nodes({"CPU": 2.0})
    alone = share(ClusterConfig(workers=0), two)
    assert (dict(alone.resources), alone.slots, alone.cluster["threads_per_process"]) == (
        {"CPU": 1.0},
        2,
        1,
    )
    nested = share(ClusterConfig(workers=2, cpus_per_worker=0.5), two)
    assert (set(nested.resources), nested.slots) == ({"memory"}, 2), (
        "the training reserves for its workers itself"
    )
    assert (
        share(ClusterConfig(workers=0, cpus_per_worker=3), nodes({"CPU": 4.0}, {"CPU": 2.0})).slots
        == 1
    )
    # In 0.3 CPUs a tenth fits three times, although 0.3 // 0.1 is 2.
    assert share(ClusterConfig(workers=0, cpus_per_worker=0.1), nodes({"CPU": 0.3})).slots == 3
    # Where GPUs are left, the index actor of each worker takes one too.
    eight = nodes({"CPU": 16.0, "GPU": 8.0})
    assert [share(ClusterConfig(workers=n), eight).slots for n in (1, 2, 4, 8)] == [
        4,
        2,
        1,
        1,
    ]
    assert share(ClusterConfig(workers=2), eight, may_use_index=False).slots == 4
    searched_elsewhere = ClusterConfig(workers=2, index_resource="CPU")
    assert share(searched_elsewhere, eight).slots == 4
    marked = nodes({"CPU": 16.0}, {"CPU": 1.0, "index": 4.0})
    assert share(ClusterConfig(workers=2), marked).slots == 2
    gpus = share(ClusterConfig(workers=0), nodes({"CPU": 16.0, "GPU": 4.0}))
    assert (gpus.slots, gpus.cluster["device"]) == (4, "gpu")
    assert (
        share(ClusterConfig(workers=0, device="cpu"), nodes({"CPU": 16.0, "GPU": 4.0})).slots == 16
    )
    with pytest.raises(
        ResourceError,
        match=r"no trial is feasible: it needs 3 x \(1 CPU\), .* have 2 CPU; lower",
    ):
        share(ClusterConfig(workers=3), two)
    with pytest.raises(ResourceError, match="2 CPU, 0 GPU"):
        share(ClusterConfig(workers=0, device="gpu"), two)


def test_the_page_of_a_sweep(tmp_path: Path) -> None:
    space = parse_space(
        {"optim.lr": {"log_uniform": [1e-4, 1e-2]}, EVIL: {"choice": ["a", "b"]}}, "here"
    )
    spread = [10 ** (-4 + 2 * i / 11) for i in range(12)]
    trials = [
        Trial(
            i,
            {"optim.lr": lr, EVIL: "ab"[i % 2]},
            "finished",
            curve=(Validation(1, i / 20), Validation(2, 0.9 - i / 20)),
            steps=20,
        )
        for i, lr in enumerate(spread)
    ]
    others = {"optim.lr": 1e-3, EVIL: "a"}
    stopped = Trial(12, others, "stopped", curve=(Validation(1, 0.3),), steps=10)
    failed = Trial(13, others, "failed", EVIL)
    write_report(tmp_path / "r.html", EVIL, "P@1", space, [*trials, stopped, failed], "Best: so.")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.charts == ["Parallel coordinates", "Importance of the settings"]
    assert page.foreign == []
    assert EVIL not in text
    assert text.count("<polyline") == 13
    assert text.count('class="cut"') == 1
    assert text.count('class="best"') == 1
    assert "14 trials (12 finished, 1 stopped, 1 failed), 250 training steps. Best: so." in text
    write_report(tmp_path / "empty.html", "none", "P@1", space, [failed])
    assert Page((tmp_path / "empty.html").read_text()).charts == []


def test_importance_is_that_of_the_last_common_epoch() -> None:
    space = {"x": NumberRange(low=0, high=1), "y": NumberRange(low=0, high=1)}
    values = [{"x": i / 10, "y": (7 * i % 11) / 10} for i in range(11)]
    trials = []
    for i, v in enumerate(values):
        curve = (Validation(1, -((v["x"] - 0.5) ** 2)), Validation(2, v["y"]))
        trials.append(Trial(i, v, "finished", curve=curve))
    shares = importance(space, trials)
    assert list(shares) == ["y", "x"]
    assert shares["y"] == pytest.approx(1)
    early = [
        dataclasses.replace(trials[0], state="stopped", curve=trials[0].curve[:1]),
        *trials[1:],
    ]
    shares = importance(space, early)
    assert list(shares) == ["x", "y"]
    assert shares["x"] == pytest.approx(1), "an optimum inside the range counts as well as a slope"
    assert shares["y"] < 0.3
    assert importance(space, trials[:4]) == {}


def test_no_optuna(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    sweep = Sweep.open_or_create(tmp_path, config(search="optuna"))
    with pytest.raises(
        ResourceError, match=r"run pip install 'xmcray\[tune\]', or use --search random"
    ):
        Guide(sweep, [0], 1, lambda _: None)
    with pytest.raises(ConfigError, match="search is 'grid', expected one of random, optuna"):
        config(search="grid")


@pytest.mark.parametrize(
    "content",
    ['{"values": ', "[]", "{}", "null", '{"values": 1}', '{"values": {}, "state": "odd"}'],
)
def test_a_damaged_ledger_is_one_line(tmp_path: Path, content: str) -> None:
    sweep = Sweep.open_or_create(tmp_path, config())
    sweep.draw(0, {"optim.lr": 0.1})
    entry = tmp_path / "ledger" / "0000.json"
    entry.write_text(content)
    # A copy that someone made is no trial.
    entry.with_name("0000-copy.json").write_text(content)
    with pytest.raises(RunError, match=r"0000\.json is damaged.*remove it"):
        sweep.trials()


@pytest.mark.parametrize(
    "record",
    [
        '{"step": 3, "P@1": 0.5}',
        '{"step": 3, "epoch": null, "P@1": 0.5}',
        '{"step": 3, "epoch": 0, "P@1": "x"}',
    ],
)
def test_damaged_records_of_a_trial_are_one_line(tmp_path: Path, record: str) -> None:
    sweep = Sweep.open_or_create(tmp_path, config())
    sweep.draw(0, {"optim.lr": 0.1})
    run = sweep.run_path(0)
    run.mkdir()
    (run / "metrics.jsonl").write_text(record)
    with pytest.raises(RunError, match=r"0000/metrics\.jsonl is damaged .*; remove .* anew$"):
        sweep.trials()


def test_a_restart_draws_nothing_a_second_time(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sweep = Sweep.open_or_create(tmp_path, config(search="optuna"))
    drawn = []
    for number in range(4):
        # A new source each time, as after a kill; no trial has ended.
        drawn.append(proposals(sweep).propose(number))
        sweep.draw(number, drawn[-1])
    assert all(first != second for first, second in itertools.combinations(drawn, 2))


def test_a_full_memory_ends_a_sweep_with_one_line() -> None:
    """As Tune 2.60 passes on what Ray says of an actor that it has ended."""
    cause = ray.exceptions.OutOfMemoryError("1 worker(s) were killed")
    with (
        pytest.raises(OutOfMemoryError, match="the same command continues the sweep"),
        eviction_errors(),
    ):
        raise RuntimeError(f"Caught unexpected exception: {cause}") from cause
    with pytest.raises(RuntimeError, match="another"), eviction_errors():
        raise RuntimeError("another") from ValueError("cause")
