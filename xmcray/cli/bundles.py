"""The verbs that use a bundle: memory, fuse, calibrate, labels, search, predict, serve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmcray import api, config
from xmcray.cli.arguments import add_corpus, add_json, given
from xmcray.cli.output import show, show_json, show_line, show_next
from xmcray.cli.reranking import add_rerank
from xmcray.errors import ConfigError

if TYPE_CHECKING:
    from xmcray.retrieval.answers import FoundLabel

DEFAULT_K = 10
MAX_VOTERS = 3  # training queries that are printed under an answer
# Settings of a server that have an option of their own.
SERVER_OPTIONS = (
    "mode",
    "replicas",
    "threads",
    "state_dir",
    "token_file",
    "admin_token_file",
    "upload",
    "collect_events",
)


def memory_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "encoder", metavar="ENCODER", help="a run, a bundle, the folder of an encoder, or a hub id"
    )
    verb.add_argument(
        "--data",
        required=True,
        metavar="CORPUS",
        help="corpus whose training queries vote",
    )
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    _add_memory(verb)


def memory(options: argparse.Namespace) -> None:
    """Writes a bundle whose training queries vote."""
    api.memory(options.encoder, options.data, options.out, config.merge({}, options.set))
    show_next(["xmcray", "search", options.out, "TEXT", "--explain"])


def fuse_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "paths",
        metavar="RUN",
        nargs="+",
        help="runs, or bundles whose runs held the same queries out",
    )
    verb.add_argument(
        "--data",
        required=True,
        metavar="CORPUS",
        nargs="+",
        action="extend",
        help="the corpus that they were trained on; if tokenizers differ, one prepared with each",
    )
    verb.add_argument("--out", required=True, metavar="NEW", help="folder or URL to write")
    verb.add_argument(
        "--metric",
        default="P@1+P@5+PSP@5",
        metavar="A+B",
        help="weights maximise the mean of these metrics on held-out queries (default: %(default)s)",
    )
    add_json(verb, "the weights and why")


def fuse(options: argparse.Namespace) -> None:
    """Writes a bundle that answers by the weighted sum of several parts."""
    choice = api.fuse(options.paths, options.data, options.out, metric=options.metric)
    if options.json:
        show_json(choice.plain())
        return
    from xmcray.evaluation.table import parts_table

    rows = [(test.part, test.weight, test.without, test.p_value) for test in choice.tests]
    show(parts_table(rows, choice.metrics, choice.alone, choice.queries))
    show_next(["xmcray", "evaluate", options.out, "--data", options.data[0]])


def calibrate_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "path",
        metavar="BUNDLE",
        help="a run, or a bundle whose run held queries out; changes at one moment",
    )
    add_corpus(verb)
    verb.add_argument(
        "--out", metavar="NEW", help="write another bundle, folder or URL, and leave it as it is"
    )


def calibrate(options: argparse.Namespace) -> None:
    """Gives the answers of a bundle probabilities."""
    calibration = api.calibrate(options.path, options.data, options.out)
    bundle = options.out or options.path
    show_line(f"{bundle}: probabilities fitted on {calibration.curves.queries:,} held-out queries")
    show_next(["xmcray", "evaluate", bundle, "--data", options.data])


def labels_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "change", metavar="add|remove|annotate", choices=("add", "remove", "annotate")
    )
    verb.add_argument(
        "path",
        metavar="BUNDLE",
        help="changes at one moment; a search that has it open continues with the old version",
    )
    verb.add_argument(
        "what",
        metavar="LABELS.jsonl|UID",
        nargs="+",
        help="add: files of uid, text, attributes; annotate: of uid and attributes; remove: uids",
    )
    verb.add_argument(
        "--out",
        metavar="NEW",
        help="write another bundle, folder or URL, and leave BUNDLE as it is",
    )


def labels(options: argparse.Namespace) -> None:
    """Changes the labels of a bundle."""
    num_labels = api.labels(options.change, options.path, options.what, options.out)
    bundle = options.out or options.path
    show_line(f"bundle {bundle} has {num_labels:,} labels")
    show_next(["xmcray", "search", bundle, "TEXT"])


def search_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="BUNDLE", help="a bundle, or a finished run")
    verb.add_argument("texts", metavar="TEXT", nargs="+")
    _add_k(verb, "text")
    verb.add_argument(
        "--explain",
        action="store_true",
        help="name the training queries that voted, and what each part gave",
    )
    _add_memory(verb)
    _add_min_probability(verb)
    add_rerank(verb)
    add_json(verb, "the answers")


def search(options: argparse.Namespace) -> None:
    """Answers texts."""
    if options.k is not None and options.k < 1:
        raise ConfigError(f"-k is {options.k}, expected at least 1")
    retriever = api.load(options.path, rerank=options.rerank)
    from xmcray.retrieval.votes import changed_memory

    # --set changes single settings of the bundle's own memory.
    base = retriever.memory.config if retriever.memory else None
    changes = config.merge({}, options.set)
    k = options.k
    if k is None:
        k = min(DEFAULT_K, retriever.num_labels)
    answers_by_text = retriever.search(
        options.texts,
        k,
        memory=changed_memory(base, changes) if changes else None,
        explain=options.explain,
        min_probability=options.min_probability,
    )
    results = list(zip(options.texts, answers_by_text, strict=True))
    if options.json:
        plain_results = []
        for text, answers in results:
            plain_answers = [_plain(answer) for answer in answers]
            plain_results.append({"query": text, "answers": plain_answers})
        show_json(plain_results)
        return
    from xmcray.evaluation.table import answer_table

    for text, answers in results:
        rows = []
        for answer in answers:
            shown = answer.score
            if answer.probability is not None:
                shown = answer.probability
            rows.append((shown, answer.uid, answer.text))
            # What each part added to the score comes first.
            for part, gain in (answer.parts or {}).items():
                rows.append((gain, f"  {part}", ""))
            # Voters are listed under their answer, indented, in the same columns.
            voters = (answer.voters or ())[:MAX_VOTERS]
            rows += [(voter.weight, f"  by {voter.uid}", voter.text) for voter in voters]
        show(answer_table(text, rows))


def _plain(answer: FoundLabel) -> dict[str, Any]:
    """An answer as JSON, without what was not requested or is not there."""
    import dataclasses

    values = dataclasses.asdict(answer)
    for name in ("probability", "voters", "parts"):
        if values[name] is None:
            del values[name]
    return values


def predict_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
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
    _add_k(verb, "query")
    _add_memory(verb)
    _add_min_probability(verb)
    add_rerank(verb)
    verb.add_argument("--texts", action="store_true", help="also write the queries' texts")
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that answer (default: free CPUs, at most 8)",
    )


def predict(options: argparse.Namespace) -> None:
    """Answers a file of queries."""
    num_queries = api.predict(
        options.path,
        options.queries,
        options.out,
        options.k,
        config.merge({}, options.set),
        texts=options.texts,
        min_probability=options.min_probability,
        rerank=options.rerank,
        workers=options.workers,
    )
    show_line(
        f"{num_queries:,} queries answered in {options.out}: predictions.npz, predictions-*.parquet"
    )
    show_next(["xmcray", "evaluate", f"{options.out}/predictions.npz", "--data", "CORPUS"])


def serve_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "bundles",
        metavar="[NAME=]BUNDLE",
        nargs="+",
        help="bundles (folders or URLs) or finished runs; the first is the default",
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
        help="port of gRPC; with replicas it needs --accept-open-ports",
    )
    verb.add_argument("--mode", help="single, composed or auto (default: by the number of labels)")
    verb.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="processes that answer (default: 1)",
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
    verb.add_argument(
        "--collect-events",
        action="store_true",
        default=None,
        help="keep searches and feedback in the state folder; see docs/continual.md",
    )
    verb.add_argument("--upload", metavar="URL", help="keep a copy of the label log there")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A=B",
        help="any other setting of the server; see docs/settings.md",
    )
    verb.add_argument(
        "--accept-open-ports",
        action="store_true",
        help="allow a proxy that opens ports to everyone",
    )


def serve(options: argparse.Namespace) -> None:
    """Answers over HTTP until it is interrupted."""
    bundles: dict[str, str] = {}
    for argument in options.bundles:
        name, path = _name_and_path(argument)
        if name in bundles:
            raise ConfigError("several bundles go by one name; write each as NAME=BUNDLE")
        bundles[name] = path

    # The address is printed only when requests are answered, because scripts wait for this line.
    def ready(url: str, token_file: Path) -> None:
        show_line(f"serving {', '.join(bundles)} on {url}")
        show_line(f"token: {token_file}")

    api.serve(
        bundles,
        # --set comes last: it may also override an option.
        config.merge(given(options, SERVER_OPTIONS), options.set),
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
        accept_open_ports=options.accept_open_ports,
        ready=ready,
    )


def _name_and_path(bundle: str) -> tuple[str, str]:
    """NAME=BUNDLE as its two parts; a path or URL may contain an equals sign too."""
    # What precedes the equals sign is a name only if it cannot be the start of a path.
    name, equals, path = bundle.partition("=")
    if equals and not set("/.:") & set(name):
        return name, path
    return "default", bundle


def _add_k(verb: argparse.ArgumentParser, per: str) -> None:
    verb.add_argument(
        "-k",
        type=int,
        metavar="N",
        help=f"answers per {per} (default: {DEFAULT_K}, or all labels if fewer)",
    )


def _add_min_probability(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--min-probability",
        type=float,
        metavar="P",
        help="leave out answers of a calibrated bundle that are less probable",
    )


def _add_memory(verb: argparse.ArgumentParser) -> None:
    """Adds --set for the settings of a memory."""
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="memory.weight, memory.temperature, memory.keys or memory.joint",
    )
    verb.add_argument("--memory", action=_Renamed, help=argparse.SUPPRESS)


class _Renamed(argparse.Action):
    """Refuses --memory A=B and names its new form."""

    def __call__(
        self,
        parser: object,
        options: object,
        value: object,
        option: object = None,
    ) -> None:
        raise ConfigError(f"--memory {value} is now written --set memory.{value}")
