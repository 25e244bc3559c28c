"""TensorBoard, MLflow and W&B behind one interface. None of them is needed, and each is an extra of the package.

What they have in common: one run of ours is one run of theirs, found again by its id; the settings are told once, when
it begins. Where their data goes is said by their own environment variables (MLFLOW_TRACKING_URI, WANDB_MODE ...).
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

Name = Literal["tensorboard", "mlflow", "wandb"]
_MODULES: dict[str, str] = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
_PROJECT = "xmcray"
_TELL_NOBODY = {  # about our users: neither to the trackers' authors nor on the terminal
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
_GIVE_UP_SOON = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Tracker(Protocol):
    """A connection to one run in a tracker. Any of these may raise whatever the tracker raises."""

    def tell(self, values: Mapping[str, float], step: int, order: int, time: float) -> None:
        """Some values at a step; `order` grows with every call over all connections, `time` is seconds since 1970."""

    def close(self, finished: bool) -> None:
        """Ends the connection; `finished`: the run is."""


def check(names: Sequence[str]) -> None:
    """Raises ConfigError where a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.track names {name}, which is not installed; pip install 'xmcray[{name}]', or leave it out"
            )


def connect(name: str, run: Run, after: int) -> Tracker:
    """The run in a tracker, begun there if it does not know it.

    Args:
        after: step that it was told last; 0 for nothing.
    """
    for variable, value in {**_TELL_NOBODY, **_GIVE_UP_SOON}.items():
        os.environ.setdefault(variable, value)
    module = importlib.import_module(_MODULES[name])
    tracker: Tracker = _KINDS[name](module, run, after)
    return tracker


def settings_of(run: Run) -> dict[str, Any]:
    """What a tracker shows as the settings of a run, by dotted name; secrets in URLs masked."""
    about = {"corpus": run.corpus, "corpus_sha256": run.corpus_sha256, "xmcray": __version__}
    values = {**_flat(run.config.to_dict()), **about}
    return {
        name: mask(value) if isinstance(value, str) else value for name, value in values.items()
    }


class _TensorBoard:
    """Event files in RUN/trackers/tensorboard."""

    def __init__(self, module: Any, run: Run, after: int) -> None:
        folder = folder_of(run) / "tensorboard"
        self._writer = module.SummaryWriter(folder, purge_step=after + 1 if after else None)
        if not after:
            shown = yaml.safe_dump(settings_of(run), sort_keys=False)
            self._writer.add_text(
                "settings", "".join(f"    {line}\n" for line in shown.splitlines())
            )

    def tell(self, values: Mapping[str, float], step: int, order: int, time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class _MLflow:
    """A run with the tag xmcray.run in the experiment MLFLOW_EXPERIMENT_NAME (xmcray)."""

    def __init__(self, module: Any, run: Run, after: int) -> None:
        for noisy in ("alembic", "mlflow"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        self._client = (
            module.MlflowClient()
        )  # not the fluent interface, which notes the command line too
        self._metric = module.entities.Metric
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        known = self._client.search_runs([number], f"tags.`xmcray.run` = '{run.id}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        tags = {"xmcray.run": run.id, "mlflow.source.name": _PROJECT}
        self._id = self._client.create_run(number, run_name=name_of(run), tags=tags).info.run_id
        parameters = [
            module.entities.Param(name, str(value)) for name, value in settings_of(run).items()
        ]
        for start in range(0, len(parameters), 100):  # as many as a request may carry
            self._client.log_batch(self._id, params=parameters[start : start + 100])

    def tell(self, values: Mapping[str, float], step: int, order: int, time: float) -> None:
        metrics = [
            self._metric(_mlflow_name(name), value, int(1000 * time), step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class _WandB:
    """A run with our run's id in the project WANDB_PROJECT (xmcray).

    Online if WANDB_MODE says so or there is an API key; otherwise in RUN/trackers/wandb, from where `wandb sync` sends
    it. Never asks for a key.
    """

    def __init__(self, module: Any, run: Run, after: int) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if _wandb_key() else "offline")
        quiet = {"silent": True, "console": "off", "init_timeout": 20, "finish_timeout": 20}
        # neither source code nor command line, packages or machine: the settings are all that is told
        reticent = {
            "disable_git": True,
            "disable_code": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
        }
        folder = folder_of(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.id,
            name=name_of(run),
            dir=str(folder),
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=module.Settings(
                **quiet, **reticent, x_disable_stats=True, x_save_requirements=False
            ),
        )
        self._run.config.update(settings_of(run), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # W&B's own step must grow with every call

    def tell(self, values: Mapping[str, float], step: int, order: int, time: float) -> None:
        self._run.log({**values, "step": step, "_timestamp": time}, step=order, commit=True)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


_KINDS: dict[str, Any] = {"tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _WandB}


def folder_of(run: Run) -> Path:
    """Where a run keeps what is for trackers alone."""
    return run.path / "trackers"


def name_of(run: Run) -> str:
    """What trackers call a run: its folder, and of the first half of a refit that it is one."""
    path = run.path
    return f"{path.parent.name}/{SELECTION}" if path.name == SELECTION else path.name


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(
            _flat(value, f"{where}{key}.")
            if isinstance(value, Mapping)
            else {f"{where}{key}": value}
        )
    return flat


def _mlflow_name(name: str) -> str:
    """MLflow takes neither "P@1" nor "macroF1@5(0,10]"."""
    return re.sub(r"[^\w\-. :/]+", "_", name.replace("@", "_at_")).strip("_")


def _wandb_key() -> bool:
    """Whether somebody is signed in, as W&B itself looks for it, but without a question to the user."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
