"""Mutation testing of losses, sampling and negatives (tier N).

    python benchmarks/mutations.py                       # all mutations, half an hour on 2 cores
    python benchmarks/mutations.py --only row_table      # those whose file or meaning holds this text; prints only
    python benchmarks/mutations.py --list                # makes all mutations and runs nothing

A mutation is one changed line. `mutations.yaml` lists mistakes that somebody could make with these methods, found by
their text: if a line changes so that a text is gone, the script ends with an error and the list has to follow. Further
mutations are drawn by operators (`mutation_operators.py`). Each is applied to a copy of the package in a temporary
folder, and the quick tests of its file run until the first one fails. Mutations that change no result are argued in
`mutations.yaml`, too.

Why neither mutmut (3.8) nor cosmic-ray (8.7): neither says which test catches a mutation, neither takes mutations from a
list, cosmic-ray starts a process that imports torch for each mutation, and mutmut chooses tests by a run of all of them.
"""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from common import new_parser, refuse_if_busy, write_table
from mutation_operators import Mutation, chosen_mutation, count_statements, drawn_mutations

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.yaml")
CACHE = Path(os.environ.get("XMCRAY_BENCHMARK_CACHE", ROOT / "runs" / "benchmarks"))
COPIED = ("xmcray", "tests", "benchmarks", "pyproject.toml")
# Imported once, before the processes of the tests are forked; the package itself never is.
PRELOADED = ("torch", "ray", "pyarrow.parquet", "safetensors.torch", "scipy.sparse", "tokenizers")
HEADER = ("file", "mistake", "line", "caught by", "s")
MUST_CATCH = 0.95
POLL_S = 0.02
TIMEOUT_S = 600.0  # of the tests of one file, which take a minute at most


@dataclass(frozen=True)
class Outcome:
    """How the tests of a file ended.

    Attributes:
        test: the test that failed first; None if all passed.
        reason: how it ended: "failed", "timeout", "crashed" or "passed".
        seconds: until then.
    """

    test: str | None
    reason: str
    seconds: float


@dataclass(frozen=True)
class Tested:
    """A mutation that was tested.

    Attributes:
        mutation: the mutation.
        outcome: of its tests.
        reason: why it changes no result that is promised; "" if it does.
    """

    mutation: Mutation
    outcome: Outcome
    reason: str

    @property
    def is_caught(self) -> bool:
        """Whether a test failed."""
        return self.outcome.test is not None

    @property
    def is_equivalent(self) -> bool:
        """Whether it was not caught, and need not be."""
        return not self.is_caught and bool(self.reason)


@dataclass(frozen=True)
class Job:
    """A run of the tests of one file.

    Attributes:
        key: of its outcome.
        file: path below the package.
        mutation: what is changed; None tests the file as it is.
    """

    key: str
    file: str
    mutation: Mutation | None

    @property
    def is_drawn(self) -> bool:
        """Whether operators drew its mutation."""
        return self.mutation is not None and not self.mutation.chosen


class Outcomes:
    """Outcomes in a file, so that a list of hours can be interrupted.

    Args:
        path: where they are kept.
        resume: whether those of an earlier run count.
        only: whether there will be no others.
    """

    def __init__(self, path: Path, resume: bool, only: bool) -> None:
        self.path = path
        self.only = only
        self.by_key: dict[str, Outcome] = {}
        if (resume or only) and path.is_file():
            for key, fields in json.loads(path.read_text()).items():
                self.by_key[key] = Outcome(**fields)

    def key(self, source: str, tests: Sequence[str]) -> str:
        """Names the text of a file together with that of its tests."""
        parts = [source]
        for test in tests:
            path = ROOT / "tests" / test.split("::")[0]
            parts += [test, path.read_text(encoding="utf-8")]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def add(self, key: str, outcome: Outcome) -> None:
        """Keeps an outcome."""
        self.by_key[key] = outcome
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {key: dataclasses.asdict(outcome) for key, outcome in self.by_key.items()}
        self.path.write_text(json.dumps(texts, indent=1) + "\n")


class Recorder:
    """A plugin of pytest that keeps in a file which test runs and which one failed first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._keep("running", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._keep("failed", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._keep("failed", f"import of {report.nodeid}")

    def _keep(self, state: str, nodeid: str) -> None:
        if not self.failed:
            self.failed = state == "failed"
            self.path.write_text(json.dumps([state, nodeid]))


class Slot:
    """A copy of the repository, in which one process at a time runs tests.

    Args:
        folder: where the copy is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "runs", "*.png")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy(source, folder / name)
        # Files change within a second and keep their size, so bytecode must go by their contents.
        compileall.compile_dir(
            folder / "xmcray",
            quiet=1,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        )
        self.mutation: Mutation | None = None
        self._source = ""
        self._pid = 0
        self._started = 0.0

    @property
    def free(self) -> bool:
        """Whether no process runs."""
        return not self._pid

    def start(self, mutation: Mutation | None, tests: Sequence[str]) -> None:
        """Starts the tests with a mutation, or with the package as it is."""
        self.mutation = mutation
        if mutation is not None:
            path = self._mutated_file(mutation)
            self._source = path.read_text(encoding="utf-8")
            path.write_text(mutation.apply(self._source), encoding="utf-8")
        self._state.unlink(missing_ok=True)
        self._started = time.monotonic()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _run_tests(self.folder, tests, self._state)

    def poll(self) -> Outcome | None:
        """The outcome once the tests have ended; the copy is then as it was."""
        seconds = time.monotonic() - self._started
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        if not ended and seconds < TIMEOUT_S:
            return None
        # Ranks and other processes of a test are in the session of the one that was forked here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not ended:
            os.waitpid(self._pid, 0)
        self._pid = 0
        state = "passed"
        test = None
        if self._state.is_file():
            state, test = json.loads(self._state.read_text())
        if self.mutation is not None:
            self._mutated_file(self.mutation).write_text(self._source, encoding="utf-8")
        if not ended:
            return Outcome(test, "timeout", seconds)
        if os.waitstatus_to_exitcode(status) == pytest.ExitCode.OK:
            return Outcome(None, "passed", seconds)
        # A test that was running when the process ended has crashed it.
        reason = "failed" if state == "failed" else "crashed"
        return Outcome(test, reason, seconds)

    def _mutated_file(self, mutation: Mutation) -> Path:
        return self.folder / "xmcray" / mutation.file

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--drawn", type=int, default=40, help="mutations drawn by operators")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn mutations")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", metavar="TEXT", help="part of a file, meaning or line")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep outcomes of unchanged files with unchanged tests",
    )
    parser.add_argument(
        "--kept", action="store_true", help="run nothing, write the table of an interrupted run"
    )
    arguments = parser.parse_args()
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    try:
        mutations = all_mutations(listed, arguments.drawn, arguments.seed)
        equivalent = equivalence_reasons(listed)
    except ValueError as error:
        print(f"error: {LIST.name}: {error}; bring the list up to date", file=sys.stderr)
        raise SystemExit(2) from None
    if arguments.only:
        mutations = [m for m in mutations if arguments.only in f"{m.file} {m.meaning} {m.before}"]
    if arguments.list:
        for mutation in mutations:
            print(f"{mutation.file}:{mutation.line}  {mutation.meaning}")
            print_change(mutation)
        print(f"{len(mutations)} mutations")
        return
    load = refuse_if_busy(anyway=True)
    kept = Outcomes(CACHE / "mutations.json", arguments.resume, arguments.kept)
    outcomes = run_all(mutations, listed["tests"], arguments.processes, kept)
    tested = []
    for mutation, outcome in zip(mutations, outcomes, strict=True):
        if outcome is not None:
            tested.append(Tested(mutation, outcome, equivalent.get(mutation.key, "")))
    num_caught = sum(result.is_caught for result in tested)
    num_equivalent = sum(result.is_equivalent for result in tested)
    num_mistakes = len(tested) - num_equivalent
    share = num_caught / max(1, num_mistakes)
    summary = (
        f"{num_caught} of {len(tested)} mutations are caught; {num_equivalent} of the others change no result that is"
        f" promised; {num_caught} of {num_mistakes} = {100 * share:.1f} % (must be 95 %)"
    )
    if not arguments.only:
        title = "Mutations of losses, sampling and negatives"
        num_untested = len(mutations) - len(tested)
        notes = [summary, *notes_of(tested, num_untested, len(listed["tests"]), load)]
        table = [row(result) for result in tested]
        write_table("mutations.md", title, HEADER, table, notes)
    print(summary)
    if share < MUST_CATCH:
        raise SystemExit(1)


def all_mutations(listed: dict[str, Any], count: int, seed: int) -> list[Mutation]:
    """The chosen mutations and `count` drawn ones, by file and line.

    Raises:
        ValueError: a chosen one does not fit the package.
    """
    sources = {}
    for file, tests in listed["tests"].items():
        for test in tests:
            if not (ROOT / "tests" / test.split("::")[0]).is_file():
                raise ValueError(f"{test} of {file} does not exist")
        sources[file] = (ROOT / "xmcray" / file).read_text(encoding="utf-8")
    mutations = []
    for file, entries in listed["mutations"].items():
        for entry in entries:
            mutation = chosen_mutation(sources[file], file, **entry)
            mutations.append(mutation)
    keys = {mutation.key for mutation in mutations}
    # Larger files get more of the drawn mutations.
    sizes = {file: count_statements(source) for file, source in sources.items()}
    total = sum(sizes.values())
    for file, source in sources.items():
        share = max(1, round(count * sizes[file] / total)) if count else 0
        drawn = drawn_mutations(source, file, share, seed)
        mutations += [mutation for mutation in drawn if mutation.key not in keys]
    return sorted(mutations, key=lambda mutation: (mutation.file, mutation.line))


def equivalence_reasons(listed: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """Why some mutations change no result that is promised, by the mutation's key.

    Raises:
        ValueError: the file lacks the line.
    """
    reasons = {}
    for entry in listed["equivalent"]:
        source = (ROOT / "xmcray" / entry["file"]).read_text(encoding="utf-8")
        if entry["before"] not in [line.strip() for line in source.splitlines()]:
            raise ValueError(f"{entry['file']} lacks the line {entry['before']!r}")
        reasons[entry["file"], entry["before"], entry["after"]] = entry["because"]
    return reasons


def run_all(
    mutations: Sequence[Mutation], tests: dict[str, list[str]], processes: int, kept: Outcomes
) -> list[Outcome | None]:
    """Outcomes in the order of the mutations; None for one that no run has come to.

    Raises:
        SystemExit: (code 2) the tests of a file fail without a mutation.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    assert "xmcray" not in sys.modules, "the processes of the tests would share the package"
    sources = {file: (ROOT / "xmcray" / file).read_text(encoding="utf-8") for file in tests}
    keys = []
    for mutation in mutations:
        file = mutation.file
        keys.append(kept.key(mutation.apply(sources[file]), tests[file]))
    jobs: dict[str, Job] = {}
    for file in tests:
        of_file = [number for number, mutation in enumerate(mutations) if mutation.file == file]
        if of_file:
            # Tests that fail without a mutation would catch everything.
            key = kept.key(sources[file], tests[file])
            jobs[key] = Job(key, file, None)
        for number in of_file:
            jobs[keys[number]] = Job(keys[number], file, mutations[number])
    missing = [] if kept.only else [job for job in jobs.values() if job.key not in kept.by_key]
    # Drawn mutations come last, because a run may be cut off.
    missing.sort(key=lambda job: job.is_drawn)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        slots = [Slot(Path(folder) / str(number)) for number in range(processes)]
        ended_jobs = _outcomes(slots, missing, tests)
        for num_ended, (job, outcome) in enumerate(ended_jobs, start=1):
            if job.mutation is not None or outcome.reason == "passed":
                kept.add(job.key, outcome)
            verdict = f"{outcome.test or 'passed'}, {outcome.seconds:.0f} s"
            print(f"{num_ended}/{len(missing)} {job.file}: {verdict}", flush=True)
            if job.mutation is None:
                if outcome.reason != "passed":
                    message = f"{outcome.test} {outcome.reason} without a mutation"
                    print(f"error: {message}", file=sys.stderr)
                    raise SystemExit(2)
            elif outcome.test is None:
                print(f"    SURVIVED line {job.mutation.line}: {job.mutation.meaning}")
                print_change(job.mutation)
    return [kept.by_key.get(key) for key in keys]


def print_change(mutation: Mutation) -> None:
    print(f"    - {mutation.before.strip()}")
    print(f"    + {mutation.after.strip()}")


def row(result: Tested) -> list[str]:
    """The row of the table for a mutation."""
    mutation = result.mutation
    outcome = result.outcome
    if outcome.test is not None:
        name = outcome.test.removeprefix("tests/").replace("::", " ", 1)
        caught_by = f"`{name}`"
        if outcome.reason != "failed":
            caught_by += f" ({outcome.reason})"
    elif result.reason:
        caught_by = f"equivalent: {result.reason}"
    else:
        caught_by = "**none**"
    mistake = mutation.meaning if mutation.chosen else f"drawn: {mutation.meaning}"
    change = f"`{mutation.before.strip()}` → `{mutation.after.strip()}`"
    cells = [mutation.file, mistake, change, caught_by, f"{outcome.seconds:.0f}"]
    return [cell.replace("|", "\\|") for cell in cells]


def notes_of(tested: Sequence[Tested], num_untested: int, num_files: int, load: str) -> list[str]:
    """Settings, time and what was not run."""
    num_chosen = sum(result.mutation.chosen for result in tested)
    num_drawn = len(tested) - num_chosen
    num_golden = 0
    for result in tested:
        if result.outcome.test is not None and "test_curves" in result.outcome.test:
            num_golden += 1
    minutes = sum(result.outcome.seconds for result in tested) / 60
    return [
        f"{num_chosen} mutations are from `mutations.yaml`, {num_drawn} were drawn by operators;"
        f" {num_untested} others were not reached",
        f"{num_golden} are caught by a recorded curve alone, all others by a test that says what is right",
        f"{minutes:.0f} minutes of tests, on two processes; {load}",
        "each runs the tests of its file until the first fails, the quickest and most particular ones first: the table"
        " names one test, and others may fail, too",
        f"not run: tests on Ray, of a transformer and of the commands; files other than these {num_files}",
    ]


def _outcomes(
    slots: Sequence[Slot], jobs: Sequence[Job], tests: dict[str, list[str]]
) -> Iterator[tuple[Job, Outcome]]:
    """Runs jobs in the slots; gives each one that has ended, with its outcome."""
    waiting = list(jobs)
    running: dict[int, Job] = {}
    while waiting or running:
        for number, slot in enumerate(slots):
            if not slot.free:
                outcome = slot.poll()
                if outcome is not None:
                    yield running.pop(number), outcome
            if slot.free and waiting:
                job = waiting.pop(0)
                running[number] = job
                slot.start(job.mutation, tests[job.file])
        time.sleep(POLL_S)


def _run_tests(folder: Path, tests: Sequence[str], state: Path) -> None:
    """Runs in the forked process, which ends here."""
    os.setsid()
    os.chdir(folder)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Only the copy's package can be imported.
    others = [path for path in sys.path if path and not (Path(path) / "xmcray").is_dir()]
    sys.path[:] = [str(folder), *others]
    options = ["-x", "-p", "no:cacheprovider", "--rootdir", str(folder), "--basetemp", "basetemp"]
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        import xmcray

        assert Path(xmcray.__file__).parent == folder / "xmcray"
        paths = [f"tests/{test}" for test in tests]
        code = pytest.main([*options, *paths], plugins=[Recorder(state)])
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
