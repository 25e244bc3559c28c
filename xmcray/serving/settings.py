"""Settings of a served application: from the command line, from `args` of a Serve config file, or from a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xmcray import storage
from xmcray.config import check_choice, check_range
from xmcray.errors import ConfigError
from xmcray.nn.compact import PRECISIONS
from xmcray.retrieval.bundle import KIND, read_settings
from xmcray.serving.schema import MAX_BODY, MAX_K, MAX_TEXTS

MODES = ("auto", "single", "composed")
LONG_TEXTS = ("truncate", "refuse")
MAX_PARTS = 8
COMPOSED_LABELS = 2_000_000  # from here on `auto` gives each part its own deployment


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How bundles are served.

    Attributes:
        bundles: folder or URL by model name; the first one answers requests that name none.
        mode: "single" answers in one process, "composed" gives encoder, index shards and fusion their own deployments,
            "auto" chooses by the number of labels.
        parts: searchers of the composed mode, each with its share of the index shards; 0 is one per shard, at most 8.
        replicas, max_replicas: of the ingress; with more than `replicas` Serve scales between the two.
        state_dir: local folder of the label log, of what was swapped in, and of tokens that nobody gave.
        token_file, admin_token_file: see security.py; files in `state_dir` that are made if needed, if not given.
        upload: folder or URL that gets copies of the label log; nobody gets any if not given.
        threads: of one process.
        encoder: how transformers compute, "float32", "bfloat16" or "int8" (see `Retriever.load`).
        in_flight: requests that one ingress replica works on or keeps waiting; more are refused with 503.
        deadline_ms: for requests that name no time of their own.
        max_texts, max_k, max_body, max_tokens: of a request, and of a text.
        long_texts: "truncate" answers by the first tokens and says so, "refuse" answers with 422.
        recall_floor: of a swap that names none.
        keep_s: how long a version that was replaced stays for requests that began with it.
        swap_s: longest time in which all replicas must have loaded a new version.
    """

    bundles: Mapping[str, str]
    mode: str = "auto"
    parts: int = 0
    replicas: int = 1
    max_replicas: int = 0
    state_dir: str = "serve-state"
    token_file: str | None = None
    admin_token_file: str | None = None
    upload: str | None = None
    threads: int = 1
    encoder: str = "float32"
    in_flight: int = 64
    deadline_ms: int = 10_000
    max_texts: int = MAX_TEXTS
    max_k: int = MAX_K
    max_body: int = MAX_BODY
    max_tokens: int = 512
    long_texts: str = "truncate"
    recall_floor: float = 0.5
    keep_s: float = 30.0
    swap_s: float = 300.0
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bundles:
            raise ConfigError("no bundle to serve; name one, or several as NAME=BUNDLE")
        check_choice("mode", self.mode, MODES)
        check_choice("long_texts", self.long_texts, LONG_TEXTS)
        check_choice("encoder", self.encoder, PRECISIONS)
        for name in ("keep_s", "swap_s"):
            check_range(name, getattr(self, name), low=0)
        if self.max_replicas:
            check_range("max_replicas", self.max_replicas, low=self.replicas)
        for name in ("replicas", "threads", "in_flight", "deadline_ms", "max_tokens"):
            check_range(name, getattr(self, name), low=1)
        check_range("parts", self.parts, 0, 256)
        check_range("max_texts", self.max_texts, 1, MAX_TEXTS)
        check_range("max_k", self.max_k, 1, MAX_K)
        check_range("max_body", self.max_body, 1024, MAX_BODY)
        check_range("recall_floor", self.recall_floor, 0, 1)


def authority(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def composed_parts(config: ServeConfig) -> int:
    """Searchers of the composed mode; 0 in the single mode."""
    if config.mode == "single":
        return 0
    settings = [
        read_settings(storage.open_artifact(b, KIND, contents=False)[0])
        for b in config.bundles.values()
    ]
    if config.mode == "auto" and max(s.num_labels for s in settings) < COMPOSED_LABELS:
        return 0
    return config.parts or min(MAX_PARTS, max(len(s.shards) for s in settings))
