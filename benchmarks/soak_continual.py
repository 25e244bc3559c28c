"""The cycle from feedback to a promoted bundle under SIGKILL, and a server that collects events.

    python benchmarks/soak_continual.py                # everything: about a quarter of an hour
    python benchmarks/soak_continual.py --part events  # one part
    python benchmarks/soak_continual.py --kills 4      # fewer kills of each part
    python benchmarks/soak_continual.py --without-ray  # on a machine that is too busy to start Ray in a minute

    events    a server that redacts texts, killed while users search and give feedback: every acknowledged
              event must be in the log, and no text of a query in any file
    cycle     `xmcray continual`, killed once in each step of a cycle and started again: raw files, corpus,
              checkpoint and bundle must have the bytes of an undisturbed cycle; the server must answer
              every search from the old bundle until the new one is promoted

Correctness only: it may run on a busy machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import data_sets
from common import new_parser, refuse_if_busy, set_options, write_table
from load import free_port

from xmcray.cli import main as xmcray
from xmcray.client import Client, ClientError
from xmcray.data.corpus import Corpus
from xmcray.serving.event_files import read_lines

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import TEXTS, write_bundle_of
from corpora import grown_corpora
from processes import descendants, kill_family

KILLS = 20
USERS = 2
TURNS = 5  # of a cycle that ends with an error
KILL_S = 3.0  # of feedback between two kills, at most
SECRET = "planted-secret"
STEPS = ("events", "prepare", "train", "promote")
SETTINGS = ["encoder.dim=16", "optim.batch_size=32", "negatives.uniform=8", "negatives.hard=0"]
COMMAND = [sys.executable, "-c", "import sys; from xmcray.cli import main; sys.exit(main())"]
WITHOUT_RAY = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(data_sets.ROOT / "tests")!r})
from corpora import appended
from xmcray.data import pipeline
def append(corpus, manifest, source, out, **options):
    return appended(corpus, source.path, Path(out))
pipeline.append = append
"""


@dataclass
class Tally:
    """What a part did; `wrong` must stay empty.

    Attributes:
        kills: number of kills.
        done: acknowledged events, or cycles.
        errors: turns of a cycle that ended with one line, as on a machine that is too busy.
        wrong: what must not have happened.
        notes: for the reader.
    """

    kills: int = 0
    done: int = 0
    errors: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: str = ""


def main() -> None:
    parser = new_parser(__doc__, out="soak_continual.md")
    parser.add_argument("--part", choices=("events", "cycle"))
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each part, at most")
    parser.add_argument("--without-ray", action="store_true", help="append in one process")
    options = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    notes = [load, "correctness only: the machine may have been busy"]
    if options.without_ray:
        COMMAND[-1] = WITHOUT_RAY + COMMAND[-1]
        notes.append("`prepare --append` without Ray: the steps of the driver, in one process")
    rows: list[list[object]] = []
    parts = {"events": soak_events, "cycle": soak_cycle}
    for name, soak in parts.items():
        if options.part in (None, name):
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="xmcray-soak.") as folder:
                deadline = begin + 60 * options.minutes
                tally = soak(Path(folder), options.kills, deadline)
            outcome = "; ".join(tally.wrong) or "nothing wrong"
            seconds = round(time.monotonic() - begin)
            rows.append([name, tally.kills, tally.done, outcome, seconds, tally.notes])
    header = ["part", "kills", "acknowledged events or cycles", "outcome", "seconds", "seen"]
    write_table(options.out, "Events and the cycle under SIGKILL", header, rows, notes)
    if any(row[3] != "nothing wrong" for row in rows):
        raise SystemExit(1)


# --- Events ---


@contextlib.contextmanager
def serving(
    bundle: Path, state: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own; yields it and its URL."""
    port = free_port()
    words = ["serve", str(bundle), "--port", str(port), "--state-dir", str(state)]
    with subprocess.Popen(
        [*COMMAND, *words, "--collect-events", *options], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("serving "), line
        try:
            yield server, f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def soak_events(folder: Path, kills: int, deadline: float) -> Tally:
    """Kills a server that collects events."""
    bundle = write_bundle_of(folder / "bundle", "texts")
    state = folder / "state"
    draw = random.Random(0)
    tally = Tally()
    acknowledged: dict[int, tuple[str, str]] = {}
    while tally.kills < kills and time.monotonic() < deadline:
        with serving(bundle, state, "--set", "redact_events=true") as (server, url):
            users = []
            for number in range(USERS):
                arguments = (url, state, number, acknowledged)
                users.append(threading.Thread(target=use, args=arguments))
                users[-1].start()
            threading.Event().wait(draw.uniform(0.2, KILL_S))
            server.kill()
            for user in users:
                user.join()
        tally.kills += 1
    events = {}
    for line in read_lines(state / "default" / "events", "default"):
        events.update(enumerate(line.operations, line.first))
    for number, (label, event) in acknowledged.items():
        stored = events.get(number, {})
        if (stored.get("label"), stored.get("event")) != (label, event):
            tally.wrong.append(f"event {number} is lost")
    num_files = 0
    for path in state.rglob("*"):
        if path.is_file():
            num_files += 1
            if SECRET.encode() in path.read_bytes():
                tally.wrong.append(f"a text is in {path.name}")
    tally.done = len(acknowledged)
    tally.notes = f"{len(events):,} events in the log, no text of a query in {num_files} files"
    return tally


def use(url: str, state: Path, user: int, acknowledged: dict[int, tuple[str, str]]) -> None:
    """Searches and gives feedback until the server is gone."""
    draw = random.Random(time.monotonic_ns() + user)
    with Client(url, token_file=state / "token", retries=0) as client:
        while True:
            try:
                text = f"{draw.choice(TEXTS)} {SECRET}-{draw.random()}"
                search = client.search([text], k=5)
                label = str(draw.choice(search.results[0].answers).uid)
                event = draw.choice(("click", "accept", "purchase", "reject"))
                number = client.feedback(search.request_id, label, event).number
                acknowledged[number] = (label, event)
            except ClientError:
                return


# --- The cycle ---


def soak_cycle(folder: Path, kills: int, deadline: float) -> Tally:
    """Kills cycles, each once in each of its steps."""
    corpus, _ = grown_corpora(folder, 15)
    run = folder / "a"
    words = ["train", "astra", "--workers", "0", "--data", str(corpus.path), "--out", str(run)]
    assert xmcray([*words, *set_options([*SETTINGS, "optim.epochs=2"])]) == 0
    state = folder / "state"
    with serving(run / "bundle", state) as (_, url), clients(url, state) as client:
        for text in corpus.split("train").texts(range(60)):
            search = client.search([f"{text} "], k=2)
            for answer in search.results[0].answers:
                client.feedback(search.request_id, str(answer.uid), "accept")
    tally = Tally()
    lasted = dict.fromkeys(STEPS, 5.0)
    reference = one_cycle(folder, folder / "0", corpus, (), lasted, tally)
    round_number = 0
    while tally.kills < kills and time.monotonic() < deadline:
        round_number += 1
        cycles = folder / str(round_number)
        digests = one_cycle(folder, cycles, corpus, STEPS, lasted, tally)
        for name, digest in reference.items():
            if digests.get(name) != digest:
                tally.wrong.append(f"cycle {round_number} has another {name}")
        shutil.rmtree(cycles)
    tally.notes = (
        f"{len(reference)} files compared in each cycle; {tally.errors} turns ended in one line"
    )
    return tally


@contextlib.contextmanager
def clients(url: str, state: Path) -> Iterator[Client]:
    """A client of readers."""
    with Client(url, token_file=state / "token") as client:
        yield client


def one_cycle(
    folder: Path,
    cycles: Path,
    corpus: Corpus,
    killed_steps: Sequence[str],
    lasted: dict[str, float],
    tally: Tally,
) -> dict[str, str]:
    """One cycle with a server of its own.

    Args:
        folder: has the run `a` and the state folder with the feedback.
        cycles: folder of the cycle.
        corpus: what the cycle appends to.
        killed_steps: steps in which the cycle is killed, once in each.
        lasted: seconds that each step takes; without kills they are measured.
        tally: counts kills, cycles and what went wrong.
    Returns:
        Hashes of the files that the cycle wrote, by name.
    """
    cycles.mkdir()
    state = cycles / "state"
    shutil.copytree(folder / "state", state)
    roots = f"bundle_roots=[{folder}]"
    draw = random.Random(cycles.name)
    with serving(folder / "a" / "bundle", state, "--set", roots) as (_, url):
        settings = {
            "data": str(corpus.path),
            "run": str(folder / "a"),
            "state": str(state),
            "url": url,
            "token_file": str(state / "token"),
            "admin_token_file": str(state / "admin-token"),
            "min_queries": 1,
            "events": ["--hold-out", "0.3"],
            "train": [
                "--workers",
                "0",
                "--set",
                "optim.epochs=20",
                "--set",
                "log.checkpoint_every=5",
            ],
            "promote": ["--margin", "100"],
        }
        config = cycles / "cycle.yaml"
        config.write_text(json.dumps(settings))
        words = ["continual", "--once", "--config", str(config), "--out", str(cycles / "out")]
        with searching(url, state, cycles / "out", tally):
            for step in killed_steps:
                tally.kills += run_until(words, step, draw.uniform(0, lasted[step]))
            begun = run_whole(words, tally)
    # The last kill may have come after the report, so that there was nothing left to do.
    report = json.loads((cycles / "out" / "cycle-0001" / "report.json").read_text())
    if report["outcome"] != "promoted":
        tally.wrong.append(f"a cycle ended with {report['outcome']}")
    tally.done += 1
    if not killed_steps:
        lasted.update(begun)
    digests = {}
    for path in sorted((cycles / "out" / "cycle-0001").rglob("*")):
        # The id of a run is random; its bundle's manifest and its records name it, or times.
        is_compared = path.suffix in (".safetensors", ".npy", ".parquet", ".jsonl", ".faiss")
        if is_compared and path.name != "metrics.jsonl":
            name = str(path.relative_to(cycles / "out"))
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def run_until(words: list[str], step: str, seconds: float) -> int:
    """Runs a cycle, and kills it so long after a step has begun; returns the number of kills."""
    for _ in range(TURNS):
        code = run_turn(words, step, seconds)
        if code != 2:
            return int(code == -9)
    return 0


def run_turn(words: list[str], step: str, seconds: float) -> int:
    """One turn of `run_until`; returns its exit code."""
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as cycle:
        assert cycle.stdout is not None
        for line in cycle.stdout:
            if line.startswith(f"$ xmcray {step} "):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    cycle.wait(seconds)
                family = descendants(cycle.pid)
                cycle.kill()
                # Ray ends its processes when its driver dies; what is left would disturb the next one.
                kill_family(family)
                break
        return cycle.wait()


def run_whole(words: list[str], tally: Tally) -> dict[str, float]:
    """Runs a cycle to its end; returns how long each step took."""
    # On a busy machine Ray may need longer than the pipeline of `prepare` waits. As on a schedule,
    # the next turn goes on with that step.
    for _ in range(TURNS):
        begun: list[tuple[str, float]] = []
        line = ""
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as cycle:
            assert cycle.stdout is not None
            for line in cycle.stdout:
                if line.startswith("$ xmcray "):
                    begun.append((line.split()[2], time.monotonic()))
        if cycle.returncode != 2:
            break
        tally.errors += 1
    if cycle.returncode:
        tally.wrong.append(f"a cycle ended with {cycle.returncode}: {line.strip()}")
    ends = [at for _, at in begun[1:]] + [time.monotonic()]
    return {step: end - at for (step, at), end in zip(begun, ends, strict=True)}


@contextlib.contextmanager
def searching(url: str, state: Path, out: Path, tally: Tally) -> Iterator[None]:
    """Searches all the time: every answer is from the old bundle, and then from the new one."""
    done = threading.Event()
    versions: list[str] = []
    failures: list[str] = []

    def search() -> None:
        with clients(url, state) as client:
            while not done.wait(0.02):
                try:
                    version = client.search(["text"]).version
                except ClientError as error:
                    failures.append(str(error))
                    continue
                if version not in versions[-1:]:
                    versions.append(version)

    thread = threading.Thread(target=search)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    tally.wrong += failures[:1]
    manifests = [out.parents[1] / "a" / "bundle", out / "cycle-0001" / "run" / "bundle"]
    wanted = [json.loads((path / "manifest.json").read_text())["sha256"] for path in manifests]
    if versions != wanted:
        tally.wrong.append(
            f"answers came from {len(versions)} bundles, expected the old and the new"
        )


if __name__ == "__main__":
    main()
