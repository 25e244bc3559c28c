"""The configuration of a run: a section for each part of a training, checked and merged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from xmcray import config as configs
from xmcray.config import check_choices, check_range, check_ranges
from xmcray.data.batches import DataConfig
from xmcray.errors import ConfigError
from xmcray.methods.registry import method_entry
from xmcray.negatives.plan import NegativesConfig
from xmcray.nn.encoder import EncoderConfig
from xmcray.nn.heads import FusionConfig
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.optim import OptimConfig

if TYPE_CHECKING:
    from xmcray.methods.base import MethodEntry

MOST_WORKERS = 65_536
_EXCHANGE_S = 300.0
OPTIONAL_SECTIONS: Mapping[str, type[Any]] = {"memory": MemoryConfig, "fusion": FusionConfig}


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
