"""Answers of a bundle: load, predict, serve."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xmcray import config as configs
from xmcray.api.settings_sources import Location, Settings, merged, text_of
from xmcray.paths import bundle_at, kind_of

if TYPE_CHECKING:
    from xmcray.retrieval.retriever import Retriever


def load(
    path: Location,
    *,
    data: Location | None = None,
    threads: int | None = None,
    device: str | None = None,
    precision: Literal["float32", "bfloat16", "int8"] = "float32",
    rerank: Location | None = None,
) -> Retriever:
    """Opens a bundle, or that of a finished run, to search it.

    Args:
        path: bundle (folder or URL) or run.
        data: where the run's corpus is now; where the run found it if not given.
        threads: threads of torch and FAISS in this process; torch's own setting if not given.
        device: where the encoder and exhaustive searches run, such as "cuda:0"; the CPU if not
            given.
        precision: numbers that a transformer computes with.
        rerank: cross-encoder that reads the best answers again: folder or hub id.
    Raises:
        BundleError: a file of the bundle is malformed.
        RunError: the run is not finished.
        StorageError: there is no bundle, or a file was altered.
    """
    bundle = bundle_at(os.fspath(path), text_of(data))
    from xmcray.retrieval.retriever import Retriever

    retriever = Retriever.load(bundle, threads, device, precision=precision)
    return retriever.reranked_by(rerank)


def predict(
    path: Location,
    queries: Location,
    out: Location,
    k: int | None = None,
    config: Settings = (),
    *,
    texts: bool = False,
    min_probability: float | None = None,
    rerank: Location | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> int:
    """Answers a file of queries, on Ray Data; the same call continues an interrupted one.

    Args:
        path: bundle (folder or URL) or finished run.
        queries: file or folder of text, or title and content: Parquet, JSONL.
        out: folder or URL for predictions.npz and Parquet files.
        k: answers per query; 10, or all labels if fewer, if not given.
        config: settings `memory.*`, in place of those of the bundle's memory.
        texts: also write the queries' texts.
        min_probability: leave out answers of a calibrated bundle that are less probable.
        rerank: cross-encoder that reads the best answers again: folder or hub id.
        workers: processes that answer; as many as there are free CPUs, at most 8, if not given.
        progress: show rows on stderr if that is a terminal.
    Returns:
        The number of queries.
    Raises:
        ConfigError: k is not in 1 .. L, or the bundle has no memory or no probabilities.
        DataError: no queries, or a malformed row.
        RunError: there is unfinished work of another bundle, input or setting.
        StorageError: `out` exists, the bundle is damaged, or the disk is full.
    """
    from xmcray.prediction import predict as run_prediction

    return run_prediction(
        bundle_at(os.fspath(path)),
        Path(queries),
        os.fspath(out),
        k,
        settings=merged(config),
        texts=texts,
        min_probability=min_probability,
        rerank=text_of(rerank),
        workers=workers,
        progress=progress,
    )


def serve(
    bundles: Location | Mapping[str, Location],
    config: Settings = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int = 0,
    accept_open_ports: bool = False,
    ready: Callable[[str, Path], None] | None = None,
) -> None:
    """Answers over HTTP, in this process or on Ray Serve, until SIGTERM or SIGINT.

    Args:
        bundles: bundle (folder or URL) or finished run, or several by name, the default first.
        config: settings of the server, see `serving.settings.ServeConfig`.
        host: address to listen on; beyond loopback only with tokens of your own.
        port: port of HTTP.
        grpc_port: port of gRPC; 0 for none.
        accept_open_ports: allow a proxy that opens ports to everyone.
        ready: called with the URL and the file of the readers' token when requests are answered.
    Raises:
        ConfigError: a setting is unknown or out of range, or ports would be open to everyone.
        ResourceError: the port is taken.
        RunError: there is neither a run nor a bundle, or the run is not finished.
        StorageError: a bundle is damaged.
    """
    from xmcray.serving.run import serve_forever
    from xmcray.serving.settings import TOKEN, ServeConfig

    by_name = bundles if isinstance(bundles, Mapping) else {"default": bundles}
    given = {name: os.fspath(path) for name, path in by_name.items()}
    settings = configs.build(ServeConfig, configs.overlay({"bundles": given}, merged(config)))
    # Once the settings are checked, because a bundle at a URL is copied to this machine.
    paths = {name: _bundle_to_serve(path) for name, path in settings.bundles.items()}
    settings = dataclasses.replace(settings, bundles=paths)
    token_file = Path(settings.token_file or Path(settings.state_dir) / TOKEN)

    def on_ready(url: str) -> None:
        if ready is not None:
            ready(url, token_file)

    serve_forever(
        settings,
        host,
        port,
        grpc_port=grpc_port,
        accept_open_ports=accept_open_ports,
        ready=on_ready,
    )


def _bundle_to_serve(path: str) -> str:
    """The bundle at a path, or in the folder of a finished run.

    Raises:
        RunError: there is neither a run nor a bundle, or the run is not finished.
    """
    bundle = bundle_at(path)
    # The state folder compares it with what was served before, so it is spelt as the user would.
    return str(Path(path) / "bundle") if kind_of(path) == "run" else bundle
