"""The configuration of a run and the folder it lives in.

RUN/run.json          id, method, corpus hash, resolved configuration: written once, at the start
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
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from xmcray import config as configs
from xmcray import errors
from xmcray.config import check_choices, check_range, check_ranges
from xmcray.data.batches import DataConfig
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, RunError, XmcrayError, readable
from xmcray.methods.registry import method_entry
from xmcray.negatives.plan import NegativesConfig
from xmcray.nn.encoder import EncoderConfig
from xmcray.nn.heads import FusionConfig
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import MANIFEST
from xmcray.storage.whole_files import read_json, write_json, write_text
from xmcray.storage.work_folder import FolderKind, contents
from xmcray.training.optim import OptimConfig

if TYPE_CHECKING:
    from xmcray.methods.base import MethodEntry

MOST_WORKERS = 65_536
_EXCHANGE_S = 300.0
_MISTAKE = "mistake.json"
OPTIONAL_SECTIONS: Mapping[str, type[Any]] = {"memory": MemoryConfig, "fusion": FusionConfig}
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


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`.

    Attributes:
        workers: training processes; 0 trains in this process, without Ray.
        min_workers: training goes on with as few as these when nodes are lost, and with up to
            `workers` when there is room again; each change goes on from the newest checkpoint. 0
            waits until there is room for all of them.
        resize_every_s: seconds between two checks for room for more workers.
        wait_s: seconds without room for the workers (for `min_workers` of them, if that is set)
            after which the run ends; 0 is 240, and 3,600 on a cluster with an autoscaler.
        device: "auto" gives each worker a GPU when the cluster has enough of them.
        cpus_per_worker: CPUs that Ray reserves for a worker.
        threads_per_process: torch, OpenMP and FAISS threads of every process; 0 is cores /
            (workers + index actors) on one machine and `cpus_per_worker` on several, also if an
            autoscaler has yet to start them.
        max_failures: worker failures after which the run ends; a lost node is one.
        stall_s: seconds without a sign of life from a worker after which it counts as failed. A
            worker that lives but takes no step for so long is named in a warning; when it keeps
            the others waiting for 300 s (or `stall_s`, if that is more) plus `negatives.wait_s`,
            that is a failure too.
        index_resource: resource that marks nodes for index actors, one unit for each. If no node
            has it, they take GPUs that trainers leave, or share the trainers' GPUs if there are no
            others. Without GPUs they go to any node, first to those without GPU. "CPU" keeps them
            off GPUs.
        index_nice: how far index actors yield the CPU to the trainer (0-19).
        copy_corpus: each node copies the corpus to its own disk once, although it lies in a
            folder; a URL is always copied.
    """

    workers: int = 2
    min_workers: int = 0
    resize_every_s: float = 60.0
    wait_s: float = 0.0
    device: Literal["auto", "cpu", "gpu"] = "auto"
    cpus_per_worker: float = 1.0
    threads_per_process: int = 0
    max_failures: int = 3
    stall_s: float = 60.0
    index_resource: str = "index"
    index_nice: int = 5
    copy_corpus: bool = False

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "cluster",
            workers=(0, MOST_WORKERS),
            min_workers=(0, self.workers),
            resize_every_s=0,
            wait_s=0,
            cpus_per_worker=0,
            threads_per_process=(0, 4_096),
            max_failures=0,
            stall_s=1,
            index_nice=(0, 19),
        )
        check_choices(self, "cluster")

    def threads_on_one_machine(self, workers: int, num_shards: int) -> int:
        """Threads of each process where all share this machine; together they have its cores.

        Args:
            workers: training processes; 0 is this process, in which a thread makes the index.
            num_shards: index actors.
        """
        if self.threads_per_process:
            return self.threads_per_process
        num_processes = workers + num_shards if workers else 2
        return max(1, (os.cpu_count() or 1) // num_processes)

    @property
    def index_may_use_gpu(self) -> bool:
        """Whether hard negatives may be searched on GPUs."""
        return self.index_resource != "CPU"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Section `log`.

    Attributes:
        every: steps between records of metrics.jsonl.
        checkpoint_every: steps between checkpoints; 0 is once an epoch.
        keep: checkpoints that stay.
        validate_every: epochs between validations; 0 is only at the end.
        track: "tensorboard", "mlflow", "wandb" or a list of them: trackers that get the records.
    """

    every: int = 20
    checkpoint_every: int = 0
    keep: int = 2
    validate_every: int = 1
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "log",
            every=1,
            checkpoint_every=0,
            keep=1,
            validate_every=0,
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run depends on besides the corpus.

    `method` is an instance of the method's `config_type`.

    The last two sections are None if the method does not have them.
    """

    method_name: str
    method: Any
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)
    memory: MemoryConfig | None = None
    fusion: FusionConfig | None = None

    @classmethod
    def resolve(
        cls,
        method_name: str,
        values: Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        is_stored: bool = False,
    ) -> RunConfig:
        """A configuration from YAML values and dotted overrides.

        Args:
            method_name: name of the method.
            values: by section.
            overrides: assignments such as "optim.epochs=3".
            is_stored: whether an earlier release may have trained with it, which accepted epochs that
                are refused now.
        Raises:
            ConfigError: unknown method or key, or a value out of range.
        """
        entry = method_entry(method_name)
        config = cls.unresolved(method_name, values, overrides)
        if not entry.uses_hard(config.method):
            # No index is built for what no loss takes.
            negatives = dataclasses.replace(config.negatives, hard=0)
            config = dataclasses.replace(config, negatives=negatives)
        config._check_encoder(entry)
        entry.check_negatives(config.method, config.negatives)
        if not is_stored:
            check_range("optim.stop_epoch", config.optim.stop_epoch, 0, config.optim.epochs)
            if entry.needs_negatives(config.method):
                config.refuse_positives_alone()
        return config

    @classmethod
    def unresolved(
        cls, method_name: str, values: Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> RunConfig:
        """`resolve` without its checks of how settings fit together.

        `negatives.hard` stays even if these settings do not use hard negatives, because trials of a
        sweep may.
        """
        entry = method_entry(method_name)
        merged = configs.merge(configs.overlay(entry.defaults, values), overrides)
        written_for = merged.pop("method_name", method_name)
        if written_for != method_name:
            raise ConfigError(
                f"the configuration is for method {written_for}, not for {method_name}; train"
                f" {written_for}, or choose one for {method_name} (presets: preset:{method_name}/...)"
            )
        settings = merged.pop("method", {})
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"method is {settings!r}, expected a section with the settings of {method_name}"
            )
        method = configs.build(entry.config_type, settings, "method.")
        sections = {f.name: f for f in dataclasses.fields(cls)}
        merged = {"method_name": method_name, "method": method, **merged}
        unknown = [key for key in merged if key not in sections]
        if unknown:
            raise ConfigError(configs.unknown("setting", str(unknown[0]), list(sections)))
        for section in OPTIONAL_SECTIONS:
            if section in entry.sections:
                merged.setdefault(section, {})
            elif section in merged:
                raise ConfigError(f"{method_name} has no settings {section}.*; leave them out")
        return configs.build(cls, merged)

    def _check_encoder(self, entry: MethodEntry) -> None:
        """Raises ConfigError for settings of the encoder that the method has no use for."""
        if self.encoder.separate_labels and not entry.uses_label_texts:
            raise ConfigError(
                f"encoder.separate_labels is for methods that encode label texts, and {self.method_name}"
                " has a classifier row for each label; leave it out"
            )
        if self.encoder.matryoshka and not entry.has_prefixes(self.method):
            raise ConfigError(
                f"encoder.matryoshka is set, but {self.method_name} with these settings compares more"
                " than the encoder's own columns, expected astra, renee, or dexml without a cache; leave"
                " it out"
            )

    def without_effect(self) -> list[str]:
        """Names of settings that are set, and that nothing reads with the other settings."""
        names = [f"encoder.{name}" for name in self.encoder.without_effect()]
        entry = method_entry(self.method_name)
        uses_fusion = entry.uses_fusion(self.method)
        if self.fusion not in (None, FusionConfig()) and not uses_fusion:
            names.append("fusion.text_weight")
        default = entry.defaults.get("negatives", {}).get("uniform", NegativesConfig().uniform)
        if self.negatives.uniform != default and not entry.needs_negatives(self.method):
            names.append("negatives.uniform")
        return names

    def refuse_positives_alone(self) -> None:
        """Raises ConfigError if no epoch has a negative."""
        negatives = self.negatives
        num_epochs = self.optim.num_epochs
        if negatives.num_epochs_without(num_epochs) < num_epochs:
            return
        found = "negatives.uniform and negatives.hard are 0"
        advice = "raise one"
        if negatives.hard:
            found = (
                f"negatives.uniform is 0, and hard negatives begin after {negatives.start_epoch}"
                f" epochs, of which the run has {num_epochs}"
            )
            advice = "raise negatives.uniform, lower negatives.start_epoch"
        raise ConfigError(
            f"{found}: rows would only meet positives; {advice}, or set method.exact=true"
        )

    @property
    def exchange_limit_s(self) -> float:
        """Seconds after which an exchange of ranks fails, once training has begun."""
        # Rank 0 may wait for a version of the negatives while the others wait for it.
        return self.negatives.wait_s + max(self.cluster.stall_s, _EXCHANGE_S)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `resolve(method_name, values)` gives an equal configuration."""
        sections = configs.dump(self)
        return {name: values for name, values in sections.items() if values is not None}


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
    for change in sorted(configs.differences(run.config.to_dict(), config.to_dict())):
        if not change.startswith(_MAY_CHANGE):
            raise RunError(
                f"{path} was started with {change}; use the same settings or another --out"
            )
    run.write_config()
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
