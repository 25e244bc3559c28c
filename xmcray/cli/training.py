"""From raw files to a measured bundle: quickstart, prepare, train, evaluate, export."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from xmcray import api
from xmcray.api import ENCODER_SYSTEMS, VECTOR_SYSTEMS
from xmcray.cli.arguments import (
    add_config,
    add_corpus,
    add_json,
    assignments,
    given,
    merged_settings,
)
from xmcray.cli.output import show, show_json, show_line, show_metrics, show_next, show_text
from xmcray.cli.reranking import add_rerank
from xmcray.methods.registry import check_method_name, method_names
from xmcray.paths import kind_of
from xmcray.storage.path_errors import check_file
from xmcray.storage.whole_files import write_json

if TYPE_CHECKING:
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import ComparisonRow, Evaluation

# Settings of `prepare` that have an option of their own.
PREPARE_OPTIONS = tuple(api.PrepareOptions.__annotations__)


def quickstart_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "--out",
        default="runs/quickstart",
        metavar="DIR",
        help="folder to write (default: %(default)s)",
    )


def quickstart(options: argparse.Namespace) -> None:
    """Runs all steps, from raw files to answers, on the embedded sample."""
    from xmcray.quickstart import quickstart

    quickstart(options.out)


def prepare_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "source",
        metavar="SRC",
        help="folder of raw files, also hf://datasets/OWNER/NAME, or a corpus of an older release to"
        " write with few large files",
    )
    verb.add_argument("--out", required=True, metavar="CORPUS", help="folder or URL to write")
    verb.add_argument(
        "--append",
        metavar="CORPUS",
        help="put the rows of SRC after those of this corpus; labels are matched by uid",
    )
    verb.add_argument(
        "--format",
        metavar="F",
        help="layout of the raw files (default: detected); datasets opens tables of any layout",
    )
    _add_datasets(verb)
    verb.add_argument("--name", help="name in the card (default: that of SRC)")
    verb.add_argument("--licence", help="licence in the card (default: unknown)")
    _add_tokens(verb)
    verb.add_argument(
        "--propensity",
        type=float,
        nargs=2,
        metavar=("A", "B"),
        help="constants (default: 0.55 1.5)",
    )
    verb.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        help="malformed rows: stop (default), or record and skip",
    )
    verb.add_argument(
        "--on-leak",
        choices=("keep", "drop"),
        help="training queries with the text of a test query: count them (default), or leave them out",
    )
    add_json(verb, "the card")


def _add_datasets(verb: argparse.ArgumentParser) -> None:
    """Adds how a table of --format datasets is read."""
    verb.add_argument(
        "--columns",
        metavar="A=B,C=D",
        help="its columns, such as text=title,labels=tags; see docs/data.md",
    )
    verb.add_argument(
        "--configuration", metavar="NAME", help="its configuration, if it has several"
    )
    verb.add_argument(
        "--splits",
        metavar="A=B,C=D",
        help="its splits for train, test and labels (default: train and, if there is one, test)",
    )


def _add_tokens(verb: argparse.ArgumentParser) -> None:
    """Adds how texts become tokens."""
    verb.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="tokens kept of a query (default: 128)",
    )
    verb.add_argument(
        "--label-max-len",
        type=int,
        metavar="N",
        help="tokens kept of a label text, never more than --max-len (default: 32)",
    )
    verb.add_argument(
        "--tokenizer", metavar="T", help="wordpiece (default), or a model's hub id or folder"
    )
    verb.add_argument(
        "--query-prompt",
        metavar="TEXT",
        help="put before each query (default: what the model of --tokenizer declares)",
    )
    verb.add_argument(
        "--label-prompt",
        metavar="TEXT",
        help="put before each label text (default: what the model of --tokenizer declares)",
    )
    verb.add_argument("--vocab-size", type=int, metavar="N", help="largest vocabulary to train")


def prepare(options: argparse.Namespace) -> None:
    """Turns raw files into a corpus."""
    names = ("format", "name", "licence", "configuration", *PREPARE_OPTIONS)
    settings = given(options, names)
    for name in ("columns", "splits"):
        if getattr(options, name):
            settings[name] = assignments(options, name)
    if options.propensity:
        # argparse gives a list, and settings are immutable.
        settings["propensity"] = tuple(options.propensity)
    corpus = api.prepare(options.source, options.out, append_to=options.append, **settings)
    _show_corpus(options, corpus)


def _show_corpus(options: argparse.Namespace, corpus: Corpus) -> None:
    from xmcray.data.writer import statistics_table

    if options.json:
        show_json({**dataclasses.asdict(corpus.card), "sha256": corpus.sha256})
        return
    show(statistics_table(corpus.card))
    # Its defaults suit most sets; those of a classifier depend on the set.
    show_next(["xmcray", "train", "dexml", "--data", options.out, "--out", "RUN"])


def train_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(method_names()))
    add_corpus(verb)
    verb.add_argument("--out", required=True, metavar="RUN", help="folder of the run")
    add_config(verb)
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="training processes; 0 trains here, without Ray",
    )
    verb.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="never: RUN must be empty",
    )
    verb.add_argument(
        "--restart",
        action="store_true",
        help="train from the start if all checkpoints of RUN are damaged",
    )
    verb.add_argument(
        "--refit",
        action="store_true",
        help="then train on all of train for the best number of epochs",
    )
    verb.add_argument(
        "--from",
        dest="source",
        metavar="RUN",
        help="go on from this finished run, with its settings; labels are matched by uid",
    )
    verb.add_argument("--no-evaluate", action="store_true", help="leave the test split alone")
    verb.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as YAML, as --config takes them, and train nothing",
    )
    add_json(verb, "the metrics")


def train(options: argparse.Namespace) -> None:
    """Trains a method, exports the bundle and measures it."""
    check_method_name(options.method)
    settings = merged_settings(options)
    start = {"workers": options.workers, "source": options.source}
    if options.print_config:
        resolved, _ = api.run_settings(options.method, options.data, settings, **start)
        show_text(yaml.safe_dump(resolved.to_dict(), sort_keys=False))
        return
    run = api.train(
        options.method,
        options.data,
        options.out,
        settings,
        resume=options.resume,
        restart=options.restart,
        refit=options.refit,
        evaluate=not options.no_evaluate,
        **start,
    )
    # A run that leaves the test split alone has a bundle and no metrics.
    metrics = None if options.no_evaluate else run.metrics()
    if options.json:
        show_json(metrics)
        return
    if metrics is not None:
        show_metrics({Path(options.out).name: metrics})
    show_line(f"bundle {options.out}/bundle, report {options.out}/report.html")
    show_next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])


def evaluate_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="RUN_OR_BUNDLE")
    verb.add_argument("--data", required=True, metavar="CORPUS")
    verb.add_argument("--split", default="test", choices=("train", "test"))
    verb.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write metrics.json there, or print it; with --compare also the tests",
    )
    verb.add_argument(
        "--compare",
        metavar="OTHER",
        nargs="+",
        action="extend",
        help="runs, bundles or predictions (.npz): paired tests",
    )
    verb.add_argument(
        "--slices",
        metavar="FILE",
        help="JSON lines of uid and attributes of queries: metrics for each value",
    )
    verb.add_argument(
        "--predictions", metavar="FILE", help="write the answers as a sparse .npz, queries x labels"
    )
    verb.add_argument(
        "--exact", action="store_true", help="compare all labels instead of using the index"
    )
    add_rerank(verb)


def evaluate(options: argparse.Namespace) -> None:
    """Measures a run, a bundle or stored answers, and compares it with others."""
    paths = [options.path, *(options.compare or ())]
    # A name that leads nowhere is refused before the first path is measured.
    kinds = [kind_of(path) for path in paths]
    # "-" is stdout.
    json_file = None if options.json == "-" else options.json
    if json_file:
        check_file(json_file)
    evaluations: list[Evaluation] = []
    for path, kind in zip(paths, kinds, strict=True):
        is_first = not evaluations
        evaluation = api.evaluate(
            path,
            options.data,
            split=options.split,
            # Stored answers to compare with are searched by nothing.
            exact=options.exact and (is_first or kind != "predictions"),
            # Only the answers of the first path are written; the others are there to compare with.
            predictions=options.predictions if is_first else None,
            slices=options.slices if is_first else None,
            # Compared with others, also with the same bundle without it.
            rerank=options.rerank if is_first else None,
        )
        evaluations.append(evaluation)
    comparisons: list[list[ComparisonRow]] = []
    if options.compare:
        from xmcray.evaluation.evaluate import compare_several

        comparisons = compare_several(evaluations[0], evaluations[1:])
    metrics = evaluations[0].to_json()
    content = {**metrics, **_comparisons_json(options, comparisons)}
    if json_file:
        write_json(Path(json_file), content)
    if options.json == "-":
        show_json(content)
        return
    show_metrics({Path(options.path).name: metrics}, deciles=True)
    if comparisons:
        from xmcray.evaluation.table import comparison_table

        first, *others = _short_names(paths)
        for other, rows in zip(others, comparisons, strict=True):
            show(comparison_table(rows, first, other, len(others)))


def _short_names(paths: Sequence[str]) -> list[str]:
    """The last names of paths, so many that different paths differ."""
    num_parts = 1
    while True:
        names = ["/".join(Path(path).parts[-num_parts:]) for path in paths]
        if len(set(names)) == len({Path(path) for path in paths}):
            return names
        num_parts += 1


def _comparisons_json(
    options: argparse.Namespace, comparisons: list[list[ComparisonRow]]
) -> dict[str, Any]:
    """The part of the JSON that has the tests; empty without --compare."""
    if not comparisons:
        return {}
    tests = []
    for other, rows in zip(options.compare, comparisons, strict=True):
        tests.append({"other": other, "metrics": [dataclasses.asdict(row) for row in rows]})
    return {"comparisons": tests}


def export_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "path", metavar="RUN", help="folder of a finished run; with --to also a bundle"
    )
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument(
        "--data", metavar="CORPUS", help="where the corpus is now (default: where the run found it)"
    )
    add_config(
        verb,
        config_help="index.* settings, such as best.yaml of a sweep",
        set_help="one index.* setting, over --config",
    )
    verb.add_argument(
        "--to",
        choices=(*VECTOR_SYSTEMS, *ENCODER_SYSTEMS),
        help="label vectors for a vector database, or the encoder, in place of a bundle",
    )

    verb.add_argument(
        "--dim",
        type=int,
        metavar="N",
        help="keep the first N columns of a bundle's vectors; RUN may be a bundle",
    )


def export(options: argparse.Namespace) -> None:
    """Writes the bundle of a run, its label vectors for a vector database, or its encoder."""
    written = api.export(
        options.path,
        options.out,
        merged_settings(options),
        data=options.data,
        to=options.to,
        dim=options.dim,
    )
    if options.dim is not None:
        show_line(
            f"{options.out} has no probabilities, because its scores are new; `xmcray calibrate` makes"
            " them if its run held queries out (of a run with --refit, cut RUN/selection)"
        )
    if options.to is None:
        show_next(["xmcray", "search", options.out, "TEXT"])
    elif options.to in ENCODER_SYSTEMS:
        trust = f", trust_remote_code={written.needs_code}" if written.needs_code else ""
        show_line(f'open it with SentenceTransformer("{options.out}"{trust})')
    else:
        show_line(
            f"{written.num_vectors:,} label vectors; {options.out}/README.md says how to load them"
            f" into {options.to}"
        )
