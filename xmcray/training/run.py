"""The folder a run lives in.

RUN/run.json          id, method, corpus and its hash, resolved configuration: written at the start,
                      and again if the corpus has moved
RUN/config.yaml       the same configuration, to be read and used again with --config
RUN/metrics.jsonl     a record every few steps (loss, speed, age of the negatives), and one for each
                      validation
RUN/checkpoints/      step-00000340/ ..., the newest two
RUN/negatives/        the ledger (negatives/ledger.py)
RUN/result.json       the finished run in numbers: steps, seconds, memory
RUN/bundle/           the finished run as a bundle
RUN/metrics.json      its evaluation, for programs
RUN/report.html       its evaluation, for people
RUN/selection/        of a refit: the run with validation that chose the number of epochs
RUN/trackers/         files of TensorBoard and W&B, and what each tracker has received
RUN/start/            with --from: the checkpoint of step 0, made of another run (start.py)
RUN/vectors/          vectors of all texts by a frozen encoder (nn/frozen.py), until the run ends
RUN/lock              held by the process that trains
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xmcray import config as configs
from xmcray import errors
from xmcray.data.corpus import Corpus
from xmcray.errors import RunError, XmcrayError, readable
from xmcray.storage.manifest import MANIFEST
from xmcray.storage.whole_files import read_json, write_json, write_text
from xmcray.storage.work_folder import FolderKind, contents
from xmcray.training.run_config import RunConfig

_MISTAKE = "mistake.json"
SELECTION, VECTORS = "selection", "vectors"
START = "start"
# A killed process may leave these before the folder has a run.json.
RUN_FOLDER = FolderKind("run", "run.json", (SELECTION, VECTORS, START))
# Settings that a run may go on with other values of: where it trains, what it records, and how much it computes at
# once, which change its result by rounding alone; and those that the message of a failed refresh says to change.
_MAY_CHANGE = (
    "cluster.",
    "log.",
    "optim.micro_batch =",
    "method.chunk_labels =",
    "negatives.index =",
    "negatives.max_age =",
    "negatives.wait_s =",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder.

    Attributes:
        path: Absolute.
        id: Random; names the run's actors and Ray storage.
        config: Resolved configuration.
        corpus: Absolute path or URL of the data.
        corpus_sha256: Hash of the corpus that the run was started with.
        start: The run that this one goes on from, with the hashes of checkpoints; None if it
            starts anew.
    """

    path: Path
    id: str
    config: RunConfig
    corpus: str
    corpus_sha256: str
    start: Mapping[str, Any] | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        config: RunConfig,
        corpus: Corpus,
        start: Mapping[str, Any] | None = None,
    ) -> Run:
        """Starts a folder, which must not exist or must hold nothing but a lock and a start."""
        run_id = secrets.token_hex(6)
        run = cls(path.absolute(), run_id, config, corpus.origin, corpus.sha256, start)
        body = {
            "id": run.id,
            "config": config.to_dict(),
            "corpus": run.corpus,
            "corpus_sha256": run.corpus_sha256,
        }
        if start is not None:
            body["start"] = dict(start)
        # First, because with it alone the folder already is a run.
        write_json(path / "run.json", body)
        run.write_config()
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Reads run.json.

        Raises:
            RunError: the folder is not a run.
        """
        folder = Path(path).absolute()
        try:
            body = read_json(folder / "run.json")
            values = body["config"]
            config = RunConfig.resolve(values["method_name"], values, is_stored=True)
            corpus = str(body["corpus"])
            start = body.get("start")
            return cls(folder, body["id"], config, corpus, body["corpus_sha256"], start)
        except (FileNotFoundError, NotADirectoryError):
            if (folder / MANIFEST).is_file():
                raise RunError(
                    f"{path} has a {MANIFEST} and no run.json: it is a bundle or a corpus, expected a run;"
                    " name the run that it comes from"
                ) from None
            raise RunError(
                f"{path} is not a run: it has no run.json; train with --out {path} first"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RunError(f"{path}/run.json is damaged; train again with another --out") from None

    def __fspath__(self) -> str:
        return str(self.path)

    def write_config(self) -> None:
        """Writes config.yaml if it is not there, whole or not at all."""
        path = self.path / "config.yaml"
        if path.exists():
            return
        text = yaml.safe_dump(self.config.to_dict(), sort_keys=False)
        write_text(path, text)

    def with_corpus_at(self, origin: str) -> Run:
        """Writes to run.json where the corpus is now."""
        path = self.path / "run.json"
        write_json(path, {**read_json(path), "corpus": origin})
        return dataclasses.replace(self, corpus=origin)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def negatives(self) -> Path:
        """Folder of the ledger."""
        return self.path / "negatives"

    @property
    def vectors(self) -> Path:
        """Folder of a frozen encoder's vectors; a refit and its selection share one.

        So do all runs with the same `encoder.vectors_folder` and corpus.
        """
        shared = self.config.encoder.vectors_folder
        if shared:
            return Path(shared) / self.corpus_sha256[:32]
        owner = self.path.parent if self.path.name == SELECTION else self.path
        return owner / VECTORS

    def remove_vectors(self) -> None:
        """Removes a frozen encoder's vectors, unless other runs may use them."""
        if not self.config.encoder.vectors_folder:
            shutil.rmtree(self.vectors, ignore_errors=True)

    def result(self) -> dict[str, Any] | None:
        """result.json, or None while the run is not finished."""
        path = self.path / "result.json"
        with readable(f"{path} is damaged", "put a copy of it back, or train again", RunError):
            if not path.exists():
                return None
            result = read_json(path)
            late_step = result.get("schedule_broken_at_step")
            return {
                **result,
                "steps": int(result["steps"]),
                "seconds": float(result.get("seconds", 0.0)),
                "peak_memory_mb": float(result.get("peak_memory_mb", 0.0)),
                "schedule_broken_at_step": None if late_step is None else int(late_step),
            }

    def metrics(self) -> dict[str, Any] | None:
        """metrics.json, or None if the bundle was not measured."""
        path = self.path / "metrics.json"
        with readable(f"{path} is damaged", "evaluate the run again", RunError):
            return dict(read_json(path)) if path.exists() else None


def open_or_create(
    path: Path,
    config: RunConfig,
    corpus: Corpus,
    resume: str,
    source: Run | None = None,
    write_start: Callable[[], Mapping[str, Any]] | None = None,
) -> Run:
    """The run to train: a new one, or the one that was interrupted. The caller holds the lock.

    Args:
        path: Folder of the run.
        config: Resolved configuration.
        corpus: What is trained on.
        resume: "auto" continues a run of the same corpus and configuration; "never" demands an
            empty folder.
        source: The run to go on from, if any.
        write_start: With `source`, writes the start of a new run and returns what run.json says.

    Raises:
        RunError: not empty under "never", not a run, or a run of another corpus or configuration.
    """
    if resume == "never":
        refuse_contents(path)
    # A process that was killed while it started may have left temporary files.
    for name in ("run.json", "config.yaml"):
        for temporary in path.glob(f".{name}.*"):
            temporary.unlink()
    if contents(path) <= set(RUN_FOLDER.parts):
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path / START, ignore_errors=True)
        start = write_start() if write_start else None
        return Run.create(path, config, corpus, start)
    run = Run.open(path)
    source_id = source.id if source else None
    if source_id != (run.start or {}).get("id"):
        first_run = "without --from" if run.start is None else f"--from {run.start['run']}"
        raise RunError(f"{path} was started {first_run}; say so again or choose another --out")
    if run.corpus_sha256 != corpus.sha256:
        raise RunError(f"{path} was trained on another corpus ({run.corpus}); choose another --out")
    if run.config.method_name != config.method_name:
        raise RunError(
            f"{path} was started with method {run.config.method_name}, now {config.method_name}; use the"
            " same method or another --out"
        )
    for change in sorted(configs.differences(run.config.to_dict(), config.to_dict())):
        if not change.startswith(_MAY_CHANGE):
            raise RunError(
                f"{path} was started with {change}; use the same settings or another --out"
            )
    run.write_config()
    if run.corpus != corpus.origin:
        # The same corpus at another place. Workers, and what reads the run later, open it there.
        run = run.with_corpus_at(corpus.origin)
    return dataclasses.replace(run, config=config)


def refuse_contents(path: Path) -> None:
    """Raises RunError if the folder holds anything but a lock."""
    if contents(path):
        raise RunError(
            f"{path} is not empty and --resume never was given; remove it or choose another --out"
        )


def discard(run: Run) -> None:
    """Removes the files of a run that never reached a checkpoint, so that its folder is free again."""
    if run.checkpoints.exists():
        return
    clear_progress(run)
    run.remove_vectors()
    shutil.rmtree(run.path / START, ignore_errors=True)
    # In this order: without run.json, config.yaml would be taken for something else.
    for name in ("config.yaml", "run.json"):
        (run.path / name).unlink(missing_ok=True)
    if not any(run.path.iterdir()):
        run.path.rmdir()


def clear_progress(run: Run) -> None:
    """Removes all that training has written, so that the run starts at its first step."""
    for name in ("checkpoints", "negatives", "ray", "trackers"):
        shutil.rmtree(run.path / name, ignore_errors=True)
    for name in ("metrics.jsonl", "interruptions.jsonl"):
        (run.path / name).unlink(missing_ok=True)


def note_mistake(run: Run, error: XmcrayError) -> None:
    """Keeps a user's mistake where all ranks and the driver find it; on a full disk it may be lost."""
    body = {"kind": type(error).__name__, "message": str(error)}
    with contextlib.suppress(OSError, XmcrayError):
        write_json(run.path / _MISTAKE, body)


def noted_mistake(run: Run) -> XmcrayError | None:
    """What `note_mistake` kept."""
    path = run.path / _MISTAKE
    with readable(f"{path} is damaged", "remove it", RunError):
        if not path.exists():
            return None
        body = read_json(path)
        kind = getattr(errors, body["kind"], XmcrayError)
        is_mistake = isinstance(kind, type) and issubclass(kind, XmcrayError)
        return kind(body["message"]) if is_mistake else XmcrayError(body["message"])


def forget_mistake(run: Run) -> None:
    """Removes what `note_mistake` kept."""
    (run.path / _MISTAKE).unlink(missing_ok=True)
