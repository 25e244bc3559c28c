"""TensorBoard, MLflow and W&B behind one interface. None of them is needed, and each is an extra of
the package.

One run of ours is one run of theirs, found again by its id. Settings are sent once, when it begins.
The trackers' own environment variables (MLFLOW_TRACKING_URI, WANDB_MODE ...) say where their data
goes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import yaml

from xmcray import __version__
from xmcray.credentials import mask
from xmcray.errors import ConfigError
from xmcray.training.run import SELECTION, Run
from xmcray.types import spans

Name = Literal["tensorboard", "mlflow", "wandb"]
_PROJECT = "xmcray"
_ENVIRONMENT = {
    # Nothing about our users goes to the trackers' authors, and nothing is printed on the terminal.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    # A server that does not answer is given up soon; it is tried again later.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_MLFLOW_BATCH = 100  # parameters that one request may carry


class Tracker(Protocol):
    """A connection to one run in a tracker. All methods may raise whatever the tracker raises."""

    def log(self, metrics: Mapping[str, float], step: int, order: int, time: float) -> None:
        """Sends some metrics of a step.

        Args:
            metrics: numbers by name.
            step: training step.
            order: grows with every call over all connections.
            time: seconds since 1970.
        """

    def close(self, finished: bool) -> None:
        """Ends the connection; `finished` says whether the run has ended."""


def check(names: Sequence[str]) -> None:
    """Raises ConfigError if a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.track names {name}, which is not installed; pip install 'xmcray[{name}]', or leave it out"
            )


def connect(name: str, run: Run, after: int) -> Tracker:
    """Connects to the run in a tracker, which begins it if it does not know it.

    Args:
        name: of the tracker.
        run: our run.
        after: last step that the tracker has got; 0 for none.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if name == "tensorboard":
        return _TensorBoard(run, after)
    return _MLflow(run) if name == "mlflow" else _WandB(run)


def settings_of(run: Run) -> dict[str, Any]:
    """Returns the settings that a tracker shows for a run, by dotted name; secrets in URLs are
    masked.
    """
    values = _flat(run.config.to_dict())
    values["corpus"] = run.corpus
    values["corpus_sha256"] = run.corpus_sha256
    values["xmcray"] = __version__
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = mask(value)
    return values


class _TensorBoard:
    """Event files in RUN/trackers/tensorboard."""

    def __init__(self, run: Run, after: int) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        folder = folder_of(run) / "tensorboard"
        # A resumed run repeats steps, whose events of the first time TensorBoard must not show.
        purge_step = after + 1 if after else None
        self._writer = module.SummaryWriter(folder, purge_step=purge_step)
        if not after:
            settings = yaml.safe_dump(settings_of(run), sort_keys=False)
            as_code = "".join(f"    {line}\n" for line in settings.splitlines())  # in Markdown
            self._writer.add_text("settings", as_code)

    def log(self, metrics: Mapping[str, float], step: int, order: int, time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class _MLflow:
    """A run with the tag xmcray.run in the experiment MLFLOW_EXPERIMENT_NAME (xmcray)."""

    def __init__(self, run: Run) -> None:
        module: Any = importlib.import_module("mlflow")
        for noisy in ("alembic", "mlflow"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        # Not MLflow's fluent interface, which would also record the command line.
        self._client = module.MlflowClient()
        self._entities = module.entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id
        # MLflow chooses the ids of its runs itself, so a tag finds the run again.
        earlier = self._client.search_runs([experiment_id], f"tags.`xmcray.run` = '{run.id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            self._id = self._create_run(experiment_id, run)

    def _create_run(self, experiment_id: str, run: Run) -> str:
        tags = {"xmcray.run": run.id, "mlflow.source.name": _PROJECT}
        created = self._client.create_run(experiment_id, run_name=name_of(run), tags=tags)
        run_id: str = created.info.run_id
        settings = settings_of(run).items()
        parameters = [self._entities.Param(name, str(value)) for name, value in settings]
        for span in spans(len(parameters), _MLFLOW_BATCH):
            request = parameters[span]
            self._client.log_batch(run_id, params=request)
        return run_id

    def log(self, metrics: Mapping[str, float], step: int, order: int, time: float) -> None:
        milliseconds = int(1000 * time)
        batch = []
        for name, value in metrics.items():
            # MLflow accepts neither "P@1" nor "macroF1@5(0,10]".
            readable = name.replace("@", "_at_")
            plain = re.sub(r"[^\w\-. :/]+", "_", readable).strip("_")
            batch.append(self._entities.Metric(plain, value, milliseconds, step))
        self._client.log_batch(self._id, metrics=batch)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class _WandB:
    """A run with our run's id in the project WANDB_PROJECT (xmcray).

    Online if WANDB_MODE says so or there is an API key; otherwise in RUN/trackers/wandb, from where
    `wandb sync` sends it. Never asks for a key.
    """

    def __init__(self, run: Run) -> None:
        module: Any = importlib.import_module("wandb")
        default_mode = "online" if _has_wandb_key() else "offline"
        mode = os.environ.get("WANDB_MODE") or default_mode
        settings = module.Settings(
            silent=True,
            console="off",
            init_timeout=20,
            finish_timeout=20,
            # Neither source code nor command line, packages or machine is sent; the settings are
            # enough.
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        folder = folder_of(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.id,
            name=name_of(run),
            dir=str(folder),
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=settings,
        )
        self._run.config.update(settings_of(run), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # W&B's own step must grow with every call

    def log(self, metrics: Mapping[str, float], step: int, order: int, time: float) -> None:
        self._run.log({**metrics, "step": step, "_timestamp": time}, step=order, commit=True)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def folder_of(run: Run) -> Path:
    """Returns the folder for files of trackers."""
    return run.path / "trackers"


def name_of(run: Run) -> str:
    """Returns the name of a run in trackers: its folder, with the folder above for the first half
    of a refit.
    """
    path = run.path
    return f"{path.parent.name}/{SELECTION}" if path.name == SELECTION else path.name


def _flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{section}{key}."))
        else:
            flat[f"{section}{key}"] = value
    return flat


def _has_wandb_key() -> bool:
    """Looks for an API key as W&B itself does, but without asking the user."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlsplit(url).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
