"""The command line: `xmcray VERB ...`.

Each verb imports what it needs when it runs, so that help and error messages come quickly.

Exit codes: 0 done; 2 a mistake of the user, one line on stderr; 130 interrupted; 143 SIGTERM; 1
anything else. After 130 and 143, the same command continues.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from xmcray import __version__, config, credentials, logs
from xmcray.cli import (
    auto,
    bundles,
    continual,
    distilling,
    doctor,
    events,
    hub,
    mcp,
    planning,
    promotion,
    reranking,
    shipped,
    training,
    tuning,
)
from xmcray.cli.output import drop_output, output_errors
from xmcray.errors import ConfigError, XmcrayError, memory_errors
from xmcray.storage.path_errors import system_errors
from xmcray.terminal import printable
from xmcray.training.preemption import EXIT_CODE, Terminated, handling, signals_are_kept

__all__ = ["VERBS", "Verb", "command", "main", "parser"]


INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Verb:
    """One command.

    Attributes:
        run: does what the command is for.
        add_arguments: adds its arguments to a parser.
        help: one line.
        example: a whole command.
    """

    run: Callable[[argparse.Namespace], None]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str
    example: str


class _Parser(argparse.ArgumentParser):
    """Reports mistakes and failures as all others are: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help or the version; argparse's own method drops what cannot be written."""
        with output_errors():
            print(message, end="", file=file, flush=True)


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command in a process of its own, which ends with the command's exit code."""
    _prepare_streams()
    code = main(argv)
    if code in (INTERRUPTED, EXIT_CODE):
        # A start of Ray that was interrupted leaves threads in its library, and they can crash the
        # interpreter while it takes that down. Nothing is left to do, so it does not.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _prepare_streams() -> None:
    """Makes stdout and stderr streams that take any text."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The shell has closed it. Otherwise the next file would get its number.
            devnull = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
            setattr(sys, name, devnull)
        elif hasattr(stream, "reconfigure"):
            # Characters that the terminal's encoding lacks are written as escapes.
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sigterm = _Sigterm()
    try:
        with handling(signal.SIGTERM, sigterm), signals_are_kept(), logs.on_stderr():
            return _run(arguments, sigterm)
    except ConfigError as error:  # from logs.on_stderr: the variable that sets the log format
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2


class _Sigterm:
    """Handles SIGTERM, with which a scheduler ends a job.

    As an exception, the signal runs every `finally` on its way out.

    Attributes:
        notice: the exception, once the signal has come.
    """

    def __init__(self) -> None:
        self.notice: Terminated | None = None

    def __call__(self, *_: object) -> NoReturn:
        self.notice = Terminated("terminated; the same command starts it again")
        raise self.notice


def _run(arguments: list[str], sigterm: _Sigterm) -> int:
    try:
        # argparse would list all verbs; the nearest one says more.
        if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            raise ConfigError(config.unknown("verb", arguments[0], list(VERBS)))
        _refuse_bytes(arguments)
        if "search" not in arguments[:1]:  # its arguments are texts, which may look like anything
            credentials.refuse(arguments, "the command line")
        options = parser().parse_args(arguments)
        with memory_errors(), system_errors():
            options.run(options)
        with output_errors():
            # A reader that has gone away is noticed here and not at exit. stdout may be None.
            print(end="", flush=True)
    except XmcrayError as error:
        # A message may quote a URL of the user, and logs are kept longer than terminals.
        message = " ".join(str(error).split())
        _print_last_line(credentials.mask(message), logging.ERROR)
        return 2
    except KeyboardInterrupt as interrupt:
        # Ray raises a plain KeyboardInterrupt for both signals.
        notice = interrupt if isinstance(interrupt, Terminated) else sigterm.notice
        if notice is not None:
            _print_last_line(str(notice), logging.WARNING)
            return EXIT_CODE
        _print_last_line(
            "interrupted; the same command starts it again (a training continues where it was)",
            logging.WARNING,
        )
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        drop_output()
    except Exception:
        # A program that reads JSON lines gets the traceback as one of them.
        if not logs.as_json():
            raise
        logging.getLogger("xmcray").exception("a mistake of xmcray itself")
        return 1
    return 0


def _refuse_bytes(arguments: Sequence[str]) -> None:
    """Raises ConfigError if an argument is not UTF-8, which neither Ray nor JSON can hold."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"argument {argument[:80]!a} is not UTF-8, expected text; rename the file, or"
                " type the text again"
            ) from None


def _print_last_line(text: str, level: int) -> None:
    if logs.as_json():
        logging.getLogger("xmcray").log(level, text)
        return
    # Scripts look for "error:", which an interruption is not.
    prefix = "error: " if level == logging.ERROR else ""
    print(f"{prefix}{printable(text)}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    top = _Parser(
        prog="xmcray",
        description="Train and serve retrieval over millions of labels.",
        allow_abbrev=False,  # an abbreviation would change its meaning with the next option
    )
    top.add_argument("--version", action="version", version=f"xmcray {__version__}")
    subparsers = top.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)
    for name, verb in VERBS.items():
        subparser = subparsers.add_parser(
            name,
            help=verb.help,
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            epilog=f"example:\n  {verb.example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run)
    if "_ARGCOMPLETE" in os.environ:
        shipped.complete(top)
    return top


VERBS = {
    "quickstart": Verb(
        training.quickstart,
        training.quickstart_options,
        "train on the documentation of installed packages and answer five queries",
        "xmcray quickstart --out runs/quickstart",
    ),
    "prepare": Verb(
        training.prepare,
        training.prepare_options,
        "turn raw files into a corpus",
        "xmcray prepare raw/msdocs --out corpora/msdocs --max-len 64",
    ),
    "train": Verb(
        training.train,
        training.train_options,
        "train a method on a corpus; the same command continues an interrupted run",
        "xmcray train astra --data corpora/msdocs --out runs/a --workers 2 --set optim.epochs=20",
    ),
    "plan": Verb(
        planning.plan,
        planning.plan_options,
        "memory, time and cost of a training before it runs",
        "xmcray plan astra --labels 1.3e6 --queries 2.2e6 --tokens-per-text 12 --workers 8 --device a100-80gb",
    ),
    "tune": Verb(
        tuning.tune,
        tuning.tune_options,
        "search the settings of a method or a bundle by validation; the same command continues it",
        "xmcray tune astra --data corpora/msdocs --out sweeps/a --trials 32",
    ),
    "auto": Verb(
        auto.auto,
        auto.auto_options,
        "find a good bundle for a corpus within a time; the same command continues it",
        "xmcray auto --data corpora/msdocs --out auto/msdocs --budget 20m",
    ),
    "evaluate": Verb(
        training.evaluate,
        training.evaluate_options,
        "measure a run or a bundle, and compare it with another",
        "xmcray evaluate runs/a --data corpora/msdocs --compare runs/b",
    ),
    "export": Verb(
        training.export,
        training.export_options,
        "write the bundle of a finished run, or with --to label vectors for a vector database",
        "xmcray export runs/a --out bundles/a",
    ),
    "memory": Verb(
        bundles.memory,
        bundles.memory_options,
        "let the training queries of a corpus vote, with any encoder and without training",
        "xmcray memory runs/a --data corpora/msdocs --out bundles/a-memory --set memory.weight=0.5",
    ),
    "fuse": Verb(
        bundles.fuse,
        bundles.fuse_options,
        "let label vectors, training queries and words answer together, with weights by validation",
        "xmcray fuse runs/a --data corpora/msdocs --out bundles/a-fused",
    ),
    "calibrate": Verb(
        bundles.calibrate,
        bundles.calibrate_options,
        "give the answers of a bundle probabilities, by queries that its run held out",
        "xmcray calibrate bundles/a --data corpora/msdocs",
    ),
    "train-reranker": Verb(
        reranking.train_reranker,
        reranking.train_reranker_options,
        "train a cross-encoder that reads a bundle's best answers again",
        "xmcray train-reranker runs/a --data corpora/msdocs --model cross-encoder/ms-marco-MiniLM-L6-v2 --out rerankers/a",
    ),
    "distil": Verb(
        distilling.distil,
        distilling.distil_options,
        "train a static encoder to answer like a bundle's transformer, at a fraction of its time",
        "xmcray distil runs/a --into static --data corpora/msdocs --out bundles/a-static",
    ),
    "labels": Verb(
        bundles.labels,
        bundles.labels_options,
        "add labels to a bundle, remove some, or set their attributes, without training",
        "xmcray labels add bundles/a new_labels.jsonl",
    ),
    "search": Verb(
        bundles.search,
        bundles.search_options,
        "answer texts from a bundle",
        'xmcray search bundles/a "solve a sparse linear system" -k 5',
    ),
    "predict": Verb(
        bundles.predict,
        bundles.predict_options,
        "answer a file of queries; the same command continues an interrupted one",
        "xmcray predict bundles/a queries.parquet --out predictions/a -k 100",
    ),
    "serve": Verb(
        bundles.serve,
        bundles.serve_options,
        "answer over HTTP: one process, or Ray Serve",
        "xmcray serve bundles/a --port 8000",
    ),
    "events": Verb(
        events.events,
        events.events_options,
        "turn searches and feedback that a server has collected into raw files",
        "xmcray events export serve-state --data corpora/msdocs --out raw/feedback",
    ),
    "mcp": Verb(
        mcp.mcp,
        mcp.mcp_options,
        "offer a server's search as a tool of the Model Context Protocol",
        "xmcray mcp http://127.0.0.1:8000 --token-file serve-state/token",
    ),
    "promote": Verb(
        promotion.promote,
        promotion.promote_options,
        "swap in a new bundle if it is not worse on the newest queries, or go back to the old one",
        "xmcray promote runs/a runs/b --data corpora/msdocs-2 --url http://127.0.0.1:8000 --admin-token-file admin",
    ),
    "continual": Verb(
        continual.continual,
        continual.continual_options,
        "export events, append, go on training and promote, on a schedule; a stopped cycle goes on",
        "xmcray continual --config cycle.yaml --out cycles",
    ),
    "push": Verb(
        hub.push,
        hub.push_options,
        "write a bundle or a corpus to the Hugging Face Hub, with its card",
        "xmcray push runs/a hf://acme/docs-retriever --data corpora/msdocs",
    ),
    "doctor": Verb(
        doctor.doctor,
        doctor.doctor_options,
        "check this machine or a cluster: what would break a run or let others in, and the remedy",
        "xmcray doctor --cluster http://127.0.0.1:8265 --gpus 8",
    ),
    "files": Verb(
        shipped.files,
        shipped.files_options,
        "list, print or copy the files that come with xmcray: cluster files, job scripts, dashboards",
        "xmcray files cluster/aws.yaml > aws.yaml",
    ),
    "schema": Verb(
        shipped.schema,
        shipped.schema_options,
        "print the JSON Schema of a method's settings, for editors",
        "xmcray schema astra > astra.schema.json",
    ),
    "completion": Verb(
        shipped.completion,
        shipped.completion_options,
        "print the script by which a shell completes verbs and options",
        "xmcray completion bash > ~/.local/share/bash-completion/completions/xmcray",
    ),
}
