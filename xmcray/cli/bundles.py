"""What is done with a bundle: memory, labels, search, predict, serve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmcray import config
from xmcray.cli.output import show, show_json, show_next
from xmcray.cli.paths import bundle_at
from xmcray.errors import ConfigError

if TYPE_CHECKING:
    from xmcray.retrieval.votes import MemoryConfig

MEMORY = "a setting of the memory: weight, temperature, keys or joint"
ANSWERS = 10  # by default
VOTERS = 3  # printed under an answer


def memory_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "encoder", metavar="ENCODER", help="a run, a bundle, the folder of an encoder, or a hub id"
    )
    verb.add_argument(
        "--data", required=True, metavar="CORPUS", help="whose training queries are remembered"
    )
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)


def memory(options: argparse.Namespace) -> None:
    """A bundle whose training queries vote."""
    from xmcray import storage
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training.memory import memory_bundle

    settings = _memory_config(options)
    storage.refuse_existing(options.out)
    corpus = Corpus.open(options.data)
    with counting(
        "training queries and labels", corpus.card.num_train + corpus.card.num_labels
    ) as progress:
        memory_bundle(options.encoder, corpus, options.out, settings, progress=progress)
    show_next(["xmcray", "search", options.out, "TEXT", "--explain"])


def _memory_config(
    options: argparse.Namespace, base: MemoryConfig | None = None
) -> MemoryConfig | None:
    """The settings of --memory over `base` or the defaults; None if there are none."""
    if not options.memory:
        return None
    from xmcray.retrieval.votes import MemoryConfig

    values = config.merge(config.dump(base or MemoryConfig()), options.memory)
    return config.build(MemoryConfig, values, "memory.")


def labels_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "change", metavar="add|remove|annotate", choices=("add", "remove", "annotate")
    )
    verb.add_argument(
        "path",
        metavar="BUNDLE",
        help="changes at one moment; a search that has it open goes on with it",
    )
    files = "add: files of uid, text, attributes; annotate: of uid and attributes; remove: uids"
    verb.add_argument("what", metavar="LABELS.jsonl|UID", nargs="+", help=files)
    verb.add_argument(
        "--out",
        metavar="NEW",
        help="write another bundle, folder or URL, and leave BUNDLE as it is",
    )


def labels(options: argparse.Namespace) -> None:
    """Changes the labels of a bundle."""
    from xmcray.retrieval.labels import (
        add_labels,
        annotate_labels,
        read_attribute_sets,
        read_new_labels,
        remove_labels,
    )

    if options.change == "add":
        left = add_labels(options.path, read_new_labels(options.what), options.out)
    elif options.change == "annotate":
        left = annotate_labels(options.path, read_attribute_sets(options.what), options.out)
    else:
        left = remove_labels(options.path, options.what, options.out)
    show(f"bundle {options.out or options.path} has {left:,} labels")
    show_next(["xmcray", "search", options.out or options.path, "TEXT"])


def search_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument("path", metavar="BUNDLE", help="a bundle, or a finished run")
    verb.add_argument("texts", metavar="TEXT", nargs="+")
    verb.add_argument(
        "-k", type=int, metavar="N", help="answers per text (default: 10, or all labels if fewer)"
    )
    verb.add_argument(
        "--explain", action="store_true", help="with a memory: name the training queries that voted"
    )
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)
    verb.add_argument("--json", action="store_true", help="print the answers as JSON")


def search(options: argparse.Namespace) -> None:
    """Answers texts."""
    if options.k is not None and options.k < 1:
        raise ConfigError(f"-k is {options.k}, expected at least 1")
    import dataclasses

    from xmcray.retrieval.retriever import Retriever

    retriever = Retriever.load(bundle_at(options.path))
    memory = _memory_config(options, retriever.memory.config if retriever.memory else None)
    k = min(ANSWERS, retriever.num_labels) if options.k is None else options.k
    found = retriever.search(options.texts, k, memory=memory, explain=options.explain)
    if options.json:
        plain = [[dataclasses.asdict(answer) for answer in answers] for answers in found]
        for values in (a for answers in plain for a in answers if a["voters"] is None):
            del values["voters"]  # not asked for
        show_json(
            [{"query": text, "answers": a} for text, a in zip(options.texts, plain, strict=True)]
        )
        return
    from xmcray.evaluation.table import answer_table

    for text, answers in zip(options.texts, found, strict=True):
        rows = []
        for answer in answers:
            rows.append((answer.score, answer.uid, answer.text))
            rows += [(v.weight, f"  by {v.uid}", v.text) for v in (answer.voters or ())[:VOTERS]]
        show(answer_table(text, rows))


def predict_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument("path", metavar="BUNDLE", help="a bundle, or a finished run")
    verb.add_argument(
        "queries",
        metavar="QUERIES",
        help="file or folder of text, or title and content: Parquet, JSONL",
    )
    verb.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder or URL for predictions.npz and Parquet files",
    )
    verb.add_argument(
        "-k", type=int, metavar="N", help="answers per query (default: 10, or all labels if fewer)"
    )
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)
    verb.add_argument("--texts", action="store_true", help="also write the queries' texts")
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that answer (default: free CPUs, at most 8)",
    )


def predict(options: argparse.Namespace) -> None:
    """Answers a file of queries."""
    from xmcray.predict import predict

    how: dict[str, Any] = {
        "memory": options.memory,
        "texts": options.texts,
        "workers": options.workers,
    }
    rows = predict(bundle_at(options.path), options.queries, options.out, options.k, **how)
    show(f"{rows:,} queries answered in {options.out}: predictions.npz, predictions-*.parquet")
    show_next(["xmcray", "evaluate", f"{options.out}/predictions.npz", "--data", "CORPUS"])


def serve_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "bundles",
        metavar="[NAME=]BUNDLE",
        nargs="+",
        help="folders or URLs; the first is the default",
    )
    verb.add_argument(
        "--host", default="127.0.0.1", help="beyond loopback only with tokens of your own"
    )
    verb.add_argument("--port", type=int, default=8000, metavar="N", help="(default: %(default)s)")
    verb.add_argument(
        "--grpc-port",
        type=int,
        default=0,
        metavar="N",
        help="gRPC; of replicas: --accept-open-ports",
    )
    verb.add_argument("--mode", help="single, composed or auto (default: by the number of labels)")
    verb.add_argument(
        "--replicas", type=int, metavar="N", help="processes that answer (default: 1)"
    )
    verb.add_argument("--threads", type=int, metavar="N", help="of each process (default: 1)")
    verb.add_argument(
        "--state-dir", metavar="DIR", help="label log, swaps and tokens (default: serve-state)"
    )
    verb.add_argument(
        "--token-file", metavar="FILE", help="mode 0600 (default: made in the state folder)"
    )
    verb.add_argument(
        "--admin-token-file", metavar="FILE", help="mode 0600 (default: made in the state folder)"
    )
    verb.add_argument("--upload", metavar="URL", help="keep a copy of the label log there")
    verb.add_argument(
        "--set", action="append", default=[], metavar="A=B", help="any other setting of the server"
    )
    verb.add_argument(
        "--accept-open-ports",
        action="store_true",
        help="allow a proxy that opens ports to everyone",
    )


def serve(options: argparse.Namespace) -> None:
    """Answers over HTTP until it is interrupted."""
    from xmcray.serving.run import serve_forever
    from xmcray.serving.settings import ServeConfig

    named = [
        (name, path) if equals else ("default", name)
        for name, equals, path in map(_parted, options.bundles)
    ]
    bundles = dict(named)
    if len(bundles) < len(named):
        raise ConfigError("several bundles go by one name; write each as NAME=BUNDLE")
    names = ("mode", "replicas", "threads", "state_dir", "token_file", "admin_token_file", "upload")
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = config.build(ServeConfig, config.merge({**values, "bundles": bundles}, options.set))

    def ready(url: str) -> None:
        print(f"serving {', '.join(bundles)} on {url}", flush=True)
        print(f"token: {settings.token_file or Path(settings.state_dir) / 'token'}", flush=True)

    ports = {"grpc_port": options.grpc_port, "accept_open_ports": options.accept_open_ports}
    serve_forever(settings, options.host, options.port, **ports, ready=ready)


def _parted(bundle: str) -> tuple[str, str, str]:
    """NAME=BUNDLE; a path or URL may hold an equals sign of its own."""
    name, equals, path = bundle.partition("=")
    return (name, equals, path) if equals and not set("/.:") & set(name) else (bundle, "", "")
