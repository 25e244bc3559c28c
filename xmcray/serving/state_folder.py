"""The folder in which the coordinator keeps what it decided about a model.

STATE_DIR/MODEL/head.json   the bundle that was swapped in last
STATE_DIR/MODEL/labels/     the log of label operations (label_log.py)
STATE_DIR/MODEL/events/     the log of events, if they are collected (event_log.py)
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from xmcray.errors import readable
from xmcray.serving.event_log import EventLog
from xmcray.serving.label_log import LabelLog
from xmcray.serving.log_place import LogPlace
from xmcray.serving.settings import ServeConfig, absolute
from xmcray.storage.remote import is_url
from xmcray.storage.whole_files import fsync, read_json, write_json

EVENTS = "events"
LABELS = "labels"


class StateFolder:
    """The state of one model.

    Args:
        config: settings.
        model: name of the model.
    """

    def __init__(self, config: ServeConfig, model: str) -> None:
        self._model = model
        self._config = config
        self._configured = absolute(config.bundles[model])
        self._name = folder_name(model)
        self._path = Path(config.state_dir) / self._name
        self._head_file = self._path / "head.json"
        self._upload = config.upload

    def bundle(self) -> tuple[str, str | None]:
        """The bundle to serve, and the version that it had if it was swapped in.

        It is what was swapped in last, unless another bundle was configured since.

        Raises:
            StorageError: the file that says so is damaged.
        """
        failure = f"{self._head_file} is damaged, expected the bundle that was swapped in last"
        # Not guessed: an older bundle could lack labels that were acknowledged.
        with readable(failure, f"remove the file to serve {self._configured}"):
            if not self._head_file.exists():
                return self._configured, None
            head = read_json(self._head_file)
            configured = head["configured"]
            bundle = str(head["bundle"])
            version = str(head["version"])
        if _is_same(configured, self._configured):
            return bundle, version
        return self._configured, None

    def remember(self, bundle: str, version: str) -> None:
        """Writes down what is swapped in.

        Args:
            bundle: folder or URL of the new bundle.
            version: its SHA-256.
        """
        head = {"configured": self._configured, "bundle": bundle, "version": version}
        write_json(self._head_file, head)

    @property
    def swap_advice(self) -> str:
        """What to do if the bundle that was swapped in cannot be loaded."""
        return (
            f"it was swapped in last: put it back, or remove {self._head_file} to serve"
            f" {self._configured}"
        )

    def forget_swap(self) -> None:
        """Forgets what was swapped in, because another bundle was configured and is served now."""
        if self._head_file.exists():
            self._head_file.unlink()
            fsync(self._path)

    def open_events(self) -> EventLog | None:
        """Opens the event log; None if events are not collected."""
        config = self._config
        if not config.collect_events:
            return None
        return EventLog(
            self._path / EVENTS,
            self._model,
            redact=config.redact_events,
            max_days=config.events_days,
            max_bytes=config.events_bytes,
        )

    def open_log(self, start_after: LogPlace) -> LabelLog:
        """Opens the log; see `LabelLog`."""
        upload_url = f"{self._upload.rstrip('/')}/{self._name}" if self._upload else None
        return LabelLog(
            self._path / LABELS,
            self._model,
            start_after=start_after,
            upload_url=upload_url,
        )


def _is_same(before: str, now: str) -> bool:
    """Whether the same bundle was configured before.

    Args:
        before: as it was written down; earlier versions left paths as they were given.
        now: an absolute path, or a URL.
    """
    if is_url(before) or is_url(now):
        return before == now
    # As paths: a slash at the end makes no difference.
    if Path(before).is_absolute():
        return Path(before) == Path(now)
    names = Path(before).parts
    last_names = Path(now).parts
    # "." has no names, and may be any folder.
    return last_names[len(last_names) - len(names) :] == names


def folder_name(model: str) -> str:
    """Name of the folder of a model; no two models share one."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", model):
        return model
    # Slashes and dots could lead out of the folder, and a letter may take several bytes of a name.
    return f"model-{hashlib.sha256(model.encode()).hexdigest()[:16]}"
