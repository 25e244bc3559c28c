"""Settings of a served application: from the command line, from `args` of a Serve config file, or
from a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from xmcray import credentials
from xmcray.config import check_choice, check_range
from xmcray.errors import ConfigError
from xmcray.nn.compact import PRECISIONS
from xmcray.retrieval.bundle import KIND, read_settings
from xmcray.serving.schema import MAX_BODY, MAX_K, MAX_NAME, MAX_TEXTS
from xmcray.storage.artifact import open_artifact
from xmcray.storage.remote import is_url

MODES = ("auto", "single", "composed")
LONG_TEXTS = ("truncate", "refuse")
# Files of the state folder: the tokens that are made if none are given.
TOKEN = "token"
ADMIN_TOKEN = "admin-token"
MAX_SEARCHERS = 8
MIN_EVENT_BYTES = 1 << 20
# A name of the Hugging Face Hub: of a model, or of its owner and the model.
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
COMPOSED_LABELS = 2_000_000  # from here on, `auto` chooses the composed mode


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of a served application. Relative paths count from the working folder of the command.

    Attributes:
        bundles: folder or URL by model name; the first one answers requests that name none.
        mode: "single" answers in one process; "composed" gives the encoder and the index shards
            deployments of their own; "auto" chooses by the number of labels.
        parts: number of searchers in the composed mode, each with its share of the index shards; 0
            for one per shard, at most 8.
        replicas: replicas of the ingress.
        max_replicas: if larger than `replicas`, Serve scales between the two.
        state_dir: local folder of the label log, of what was swapped in, and of tokens that were
            not given.
        token_file: tokens of readers (security.py); made in `state_dir` if not given.
        admin_token_file: tokens of administrators; made in `state_dir` if not given.
        bundle_roots: folders and URLs below which administrators may swap in and write bundles, in
            addition to the folders of `bundles` and `state_dir`.
        upload: folder or URL for copies of the label log; no copies if not given.
        threads: threads of one process.
        search_nice: by how much the thread of searches gives way to the event loop, from 0 to 19 as
            in `nice`. With 0, searches can make refusals late under overload. With more, other
            processes that want the same cores take more from searches.
        rerank: a cross-encoder that reads the best answers again: folder or hub id; none if empty.
            In the composed mode it is a deployment of its own, "Reranker".
        encoder: how transformers compute: "float32", "bfloat16" or "int8" (see `Retriever.load`).
        in_flight: requests in progress or waiting in one ingress replica; more are refused with
            503.
        deadline_ms: time limit of a request, milliseconds; it may ask for less.
        max_connections: open connections of one process that listens itself, half of them for gRPC
            if it has a port; the one of HTTP that has been idle longest is closed for a new one.
        max_texts: texts of a request.
        max_k: labels per text.
        max_answers: labels per request: the number of its texts times k.
        max_body: bytes of a request.
        max_tokens: tokens of a text that are read.
        long_texts: "truncate" answers by the first tokens and says so; "refuse" answers with 422.
        recall_floor: least recall of a swap that names none.
        keep_s: seconds for which a replaced version stays for requests that began with it.
        swap_s: seconds within which all replicas must have loaded a new version.
        collect_events: whether searches and feedback are written to the event log (event_log.py).
        redact_events: whether the event log holds keyed hashes in the place of queries' texts.
        events_days: days for which an event is kept, at most.
        events_bytes: bytes of the event log of one model; its oldest files are removed beyond.
        options: options of Ray Serve by name of the deployment.
    """

    bundles: Mapping[str, str]
    mode: str = "auto"
    parts: int = 0
    replicas: int = 1
    max_replicas: int = 0
    state_dir: str = "serve-state"
    token_file: str | None = None
    admin_token_file: str | None = None
    bundle_roots: tuple[str, ...] = ()
    upload: str | None = None
    threads: int = 1
    search_nice: int = 10
    rerank: str = ""
    encoder: str = "float32"
    in_flight: int = 64
    deadline_ms: int = 10_000
    max_connections: int = 512
    max_texts: int = MAX_TEXTS
    max_k: int = MAX_K
    max_answers: int = 6_400
    max_body: int = MAX_BODY
    max_tokens: int = 512
    long_texts: str = "truncate"
    recall_floor: float = 0.5
    keep_s: float = 30.0
    swap_s: float = 300.0
    collect_events: bool = False
    redact_events: bool = False
    events_days: float = 30.0
    events_bytes: int = 1 << 30
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The state folder, Ray and messages would keep it.
        credentials.refuse(credentials.texts(vars(self)), "a setting of the server")
        if not self.bundles:
            raise ConfigError("no bundle to serve; name one, or several as NAME=BUNDLE")
        if "" in self.bundles:
            raise ConfigError("a bundle has an empty name, expected NAME=BUNDLE or BUNDLE")
        longest = max(self.bundles, key=len)
        if len(longest) > MAX_NAME:
            raise ConfigError(
                f"a bundle has a name of {len(longest)} letters, {longest[:20]!r}..., expected at"
                f" most {MAX_NAME}, so that requests can name it; choose a shorter name"
            )
        for name in (TOKEN, ADMIN_TOKEN):
            if name in self.bundles:
                raise ConfigError(
                    f"a bundle has the name {name!r}, which is a file of tokens in the state"
                    " folder; choose another name"
                )
        check_choice("mode", self.mode, MODES)
        check_choice("long_texts", self.long_texts, LONG_TEXTS)
        check_choice("encoder", self.encoder, PRECISIONS)
        for name in ("keep_s", "swap_s"):
            check_range(name, getattr(self, name), low=0)
        check_range("threads", self.threads, 1, 4_096)
        check_range("search_nice", self.search_nice, 0, 19)
        for name in (
            "replicas",
            "in_flight",
            "deadline_ms",
            "max_tokens",
            "max_answers",
        ):
            check_range(name, getattr(self, name), low=1)
        check_range("max_connections", self.max_connections, low=2)
        if self.max_replicas:
            check_range("max_replicas", self.max_replicas, low=self.replicas)
        check_range("parts", self.parts, 0, 256)
        check_range("max_texts", self.max_texts, 1, MAX_TEXTS)
        check_range("max_k", self.max_k, 1, MAX_K)
        check_range("max_body", self.max_body, 1024, MAX_BODY)
        check_range("recall_floor", self.recall_floor, 0, 1)
        check_range("events_days", self.events_days, low=0.01)
        check_range("events_bytes", self.events_bytes, low=MIN_EVENT_BYTES)


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """The settings whose paths no longer depend on the working folder.

    Processes on Ray may run in another one than the command.
    """
    return _with_paths(config, lambda _, location: absolute(location))


def check_absolute_paths(config: ServeConfig) -> None:
    """Raises ConfigError if a path depends on the working folder, a default too.

    `serve deploy` lets a process of the cluster build the application, in a folder of Ray's. A
    relative folder of `rerank` is noticed unless it looks like a hub id, as "rerankers/a" does.
    """

    def check(name: str, location: str) -> str:
        if location != absolute(location) and not Path(location).is_absolute():
            raise ConfigError(
                f"{name} is {location!r}, expected an absolute path or a URL, because the cluster does"
                f" not know the folder of the command; set {name} so in args of the Serve config"
            )
        return location

    # Only for the check of each path: nothing is changed.
    _with_paths(config, check)


def _with_paths(config: ServeConfig, change: Callable[[str, str], str]) -> ServeConfig:
    """The settings with other paths.

    Args:
        config: the settings.
        change: gives the new path for the name of a setting and its path.
    """
    bundles = {}
    for name, bundle in config.bundles.items():
        bundles[name] = change(f"bundle {name}", bundle)
    roots = tuple(change("bundle_roots", root) for root in config.bundle_roots)
    rerank = config.rerank
    if rerank and (Path(rerank).is_dir() or not HUB_ID.fullmatch(rerank)):
        rerank = change("rerank", rerank)
    return replace(
        config,
        bundles=bundles,
        state_dir=change("state_dir", config.state_dir),
        token_file=config.token_file and change("token_file", config.token_file),
        admin_token_file=config.admin_token_file
        and change("admin_token_file", config.admin_token_file),
        bundle_roots=roots,
        upload=config.upload and change("upload", config.upload),
        rerank=rerank,
    )


def absolute(location: str) -> str:
    """A folder or URL that no longer depends on the working folder."""
    # What has "::" is a chain of file systems, which some settings refuse.
    return location if is_url(location) or "::" in location else str(Path(location).absolute())


def authority(host: str, port: int) -> str:
    """Host and port, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def num_searchers(config: ServeConfig) -> int:
    """Number of searchers in the composed mode; 0 in the single mode."""
    if config.mode == "single":
        return 0
    num_labels = 0
    num_shards = 0
    for bundle in config.bundles.values():
        settings = read_settings(open_artifact(bundle, KIND, contents=False)[0])
        num_labels = max(num_labels, settings.num_labels)
        num_shards = max(num_shards, len(settings.shards))
    if config.mode == "auto" and num_labels < COMPOSED_LABELS:
        return 0
    return config.parts or min(MAX_SEARCHERS, num_shards)
