"""Every job script, by the real `ray job submit`, on a local head that wants a token; then jobs that are lost.

    python benchmarks/soak_jobs.py                 # half an hour
    python benchmarks/soak_jobs.py --quick         # does it work? prepare, one method and one stop: five minutes

1. Each script works on the sample, and is refused without the token.
2. A training is stopped by `ray job stop` (SIGTERM) at random steps, its driver is killed, its head is killed and a new
   one started; each time the same command is submitted again. It must end with the weights of an undisturbed run, byte
   for byte. For SIGTERM the table says how long it took until the checkpoint was there: at most 25 s are allowed.
3. Secrets that were planted in the environment of the head and of the submitting shell are in none of the files left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import data_sets
from common import new_parser, refuse_if_busy, set_options, write_table
from heads import RAY, Head, head
from planted import write_planted
from processes import When, descendants, last_step

from xmcray.data.sample import write_sample
from xmcray.methods.registry import method_names
from xmcray.storage.manifest import read_manifest

SMALL = ["optim.epochs=2", "cluster.cpus_per_worker=0.5", "cluster.threads_per_process=1"]
LOST = [
    "encoder.dim=64",
    "optim.batch_size=128",
    "optim.epochs=6",
    "negatives.uniform=100",
    "negatives.hard=10",
]
LOST += [
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "negatives.start_epoch=2",
    "log.every=1",
]
LOST += ["negatives.refresh_every=1", "negatives.wait_s=120", "log.validate_every=0", *SMALL[1:]]
PARTS = ("scripts", "lost")
PATIENCE_S = 600
ALLOWED_S = 25
SECRETS = {
    name: f"planted-{name.lower()}-0123456789"
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
}


def main() -> None:
    parser = new_parser(__doc__, out="soak_jobs.md")
    parser.add_argument("--quick", action="store_true", help="prepare, ASTRA, and one stop")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: both)")
    parser.add_argument(
        "--stops", type=int, default=5, help="by SIGTERM, at random steps (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    os.environ.update(SECRETS)
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    rows: list[list[object]] = []
    if "scripts" in arguments.parts:
        with head() as found:
            scripts(found, folder, method_names()[:1] if arguments.quick else method_names(), rows)
    if "lost" in arguments.parts:
        rows += lost(
            folder,
            1 if arguments.quick else arguments.stops,
            random.Random(arguments.seed),
            arguments.quick,
        )
    leaks = secrets_in(folder)
    rows.append(
        ["secrets in the files of all runs", "none" if not leaks else " ".join(leaks), "", ""]
    )
    good = all(
        row[1] in ("succeeded", "byte-equal", "none") and row[3] in ("yes", "") for row in rows
    )
    notes = [
        "the sample, for interrupted trainings planted data; 2 workers, a head on loopback with a token; SIGTERM to"
        f" checkpoint: {ALLOWED_S} s allowed",
        load,
    ]
    write_table(
        arguments.out,
        "Jobs",
        ["what", "result", "seconds", "refused without token, or in time"],
        rows,
        notes,
    )
    if not good:
        raise SystemExit(f"error: not everything went well; files are in {folder}")
    shutil.rmtree(folder)


def scripts(found: Head, folder: Path, methods: Sequence[str], rows: list[list[object]]) -> None:
    """Each script once with the token and once without."""
    write_sample(folder / "raw")
    corpus = folder / "corpus"
    settings = set_options(SMALL)
    jobs: list[list[object]] = [["prepare", folder / "raw", "--out", corpus]]
    for method in methods:
        train = [f"train_{method}", "--data", corpus, "--out", folder / method, "--workers", 2]
        jobs.append([*train, "--config", f"preset:{method}/sample", *settings])
    queries = folder / "raw" / "test.jsonl"
    jobs += [
        ["evaluate", folder / methods[0], "--data", corpus, "--json", folder / "measured.json"],
        ["export", folder / methods[0], "--out", folder / "bundle"],
        ["predict", folder / "bundle", queries, "--out", folder / "predictions", "-k", 10],
    ]
    if len(methods) > 1:
        space = ["--space", "tune/spaces/renee.yaml", "--out", folder / "sweep", "--trials", 2]
        jobs.append(
            [
                "tune",
                "renee",
                "--data",
                corpus,
                *space,
                "--config",
                "preset:renee/sample",
                *settings[:2],
            ]
        )
    for script, *options in jobs:
        started = time.perf_counter()
        code, text = followed(submit(found, script, *options))
        seconds = time.perf_counter() - started
        refused = followed(submit(found, script, *options, token=False))
        no = "yes" if refused[0] and "AuthenticationError" in refused[1] else "**no**"
        rows.append(
            [
                f"jobs/{script}.py",
                "succeeded" if code == 0 else f"**{last_line(text)}**",
                f"{seconds:.0f}",
                no,
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)


def lost(folder: Path, stops: int, draw: random.Random, quick: bool) -> list[list[object]]:
    """Trainings that are interrupted, and submitted again until they are done."""
    write_planted(
        folder / "planted", num_queries=2000 if quick else 6000, num_labels=500 if quick else 2000
    )
    rows: list[list[object]] = []
    with head() as found:
        corpus = folder / "planted-corpus"
        code, text = followed(submit(found, "prepare", folder / "planted", "--out", corpus))
        assert code == 0, text
        train: list[object] = [
            "train_astra",
            "--data",
            corpus,
            "--workers",
            2,
            "--no-evaluate",
            *set_options(LOST),
            "--out",
        ]
        code, text = followed(submit(found, *train, folder / "undisturbed"))
        assert code == 0, text
        expected = weights(folder / "undisturbed")
        steps = last_step(folder / "undisturbed")
        for number in range(stops):
            run = folder / f"stopped-{number}"
            step = draw.randrange(1, steps * 4 // 5)
            rows.append(stopped(found, train, run, step, expected))
            print(*rows[-1], sep=" | ", flush=True)
        if not quick:
            run = folder / "driver"
            step = draw.randrange(1, steps * 4 // 5)
            watcher = When(lambda: last_step(run) >= step, lambda: kill_driver(found))
            followed(submit(found, *train, run))
            watcher.close()
            code, _ = followed(submit(found, *train, run))
            rows.append(
                [
                    f"driver killed at step {step}",
                    judged(code, run, expected),
                    "",
                    "yes" if watcher.done else "no",
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
    if not quick:
        run = folder / "head"
        step = draw.randrange(1, steps * 4 // 5)
        with head() as found:
            watcher = When(lambda: last_step(run) >= step, lambda: kill_all(found))
            followed(submit(found, *train, run))
            watcher.close()
        with head() as found:
            code, _ = followed(submit(found, *train, run))
        rows.append(
            [
                f"head killed at step {step}",
                judged(code, run, expected),
                "",
                "yes" if watcher.done else "no",
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def stopped(
    found: Head, train: list[object], run: Path, step: int, expected: dict[str, str]
) -> list[object]:
    """One `ray job stop` at a step; seconds until its checkpoint was there."""
    requests_s: list[float] = []

    def stop() -> None:
        requests_s.append(time.time())
        command = [RAY, "job", "stop", run.name]
        subprocess.run(
            command,
            env=found.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    watcher = When(lambda: last_step(run) >= step, stop)
    _, text = followed(submit(found, *train, run, name=run.name))
    watcher.close()
    newest = max(
        (path.stat().st_mtime for path in (run / "checkpoints").glob("step-*/manifest.json")),
        default=0.0,
    )
    saved_s = newest - requests_s[0] if requests_s else -1.0
    said = "terminated: " in text and "the same command continues it" in text
    code, _ = followed(submit(found, *train, run))
    in_time = "yes" if said and 0 <= saved_s <= ALLOWED_S else "**no**"
    return [
        f"`ray job stop` at step {step}",
        judged(code, run, expected),
        f"{saved_s:.1f}",
        in_time,
    ]


def submit(
    found: Head, script: object, *options: object, token: bool = True, name: str = ""
) -> subprocess.Popen[str]:
    """`ray job submit` of a script, followed."""
    command = [RAY, "job", "submit", "--working-dir", ".", "--runtime-env", "jobs/runtime_env.yaml"]
    command += ["--submission-id", name] if name else []
    command += ["--", "python", f"jobs/{script}.py", *(str(option) for option in options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=data_sets.ROOT, env=found.environment(token), text=True, **pipes
    )


def followed(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code of `ray job submit` and all it printed."""
    try:
        text, _ = job.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        text, _ = job.communicate()
    return job.returncode, text


def kill_driver(found: Head) -> None:
    """SIGKILL to the job's own process."""
    for pid, command in descendants(found.pid).items():
        if "jobs/train_astra.py" in command and "sh -c" not in command:
            os.kill(pid, signal.SIGKILL)


def kill_all(found: Head) -> None:
    """SIGKILL to the head and everything below it."""
    for pid in [found.pid, *descendants(found.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def judged(code: int, run: Path, expected: dict[str, str]) -> str:
    """Whether a run that was submitted again came to the weights of the undisturbed one."""
    if code or not (run / "result.json").is_file():
        return "**not finished**"
    return "byte-equal" if weights(run) == expected else "**other weights**"


def weights(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor file of the last checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = read_manifest(newest, "checkpoint").files
    return {
        name: entry.sha256 for name, entry in files.items() if name.endswith(".safetensors")
    } | {"": newest.name}


def secrets_in(folder: Path) -> list[str]:
    """Files that hold one of the planted secrets."""
    planted = [value.encode() for value in SECRETS.values()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        str(path.relative_to(folder))
        for path in files
        if any(value in path.read_bytes() for value in planted)
    ]


def last_line(text: str) -> str:
    """What the job said last, or else Ray."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return (errors or text.strip().splitlines() or ["nothing"])[-1]


if __name__ == "__main__":
    main()
