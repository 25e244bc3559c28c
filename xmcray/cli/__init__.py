"""The command line: `xmcray VERB ...`. Each verb imports what it needs when it runs, so that help and errors are quick.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from xmcray import __version__, config
from xmcray.cli import bundles, training
from xmcray.cli.training import METHODS
from xmcray.errors import ConfigError, XmcrayError

__all__ = ["METHODS", "VERBS", "main", "parser"]


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            raise ConfigError(config.unknown("verb", arguments[0], list(VERBS)))
        options = parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except XmcrayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command starts it again (a training continues where it was)", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = _Parser(prog="xmcray", description="Train and serve retrieval over millions of labels.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"xmcray {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)
    for name, (run, options, text, example) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        options(verb)
        verb.set_defaults(run=run)
    return top


VERBS: dict[str, tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None], str, str]] = {
    "quickstart": (
        training.quickstart,
        training.quickstart_options,
        "train on the documentation of installed packages and answer five queries",
        "xmcray quickstart --out runs/quickstart",
    ),
    "prepare": (
        training.prepare,
        training.prepare_options,
        "turn raw files into a corpus",
        "xmcray prepare raw/msdocs --out corpora/msdocs --max-len 64",
    ),
    "train": (
        training.train,
        training.train_options,
        "train a method on a corpus; the same command continues an interrupted run",
        "xmcray train astra --data corpora/msdocs --out runs/a --workers 2 --set optim.epochs=20",
    ),
    "evaluate": (
        training.evaluate,
        training.evaluate_options,
        "measure a run or a bundle, and compare it with another",
        "xmcray evaluate runs/a --data corpora/msdocs --compare runs/b",
    ),
    "export": (
        training.export,
        training.export_options,
        "write the bundle of a finished run, or with --to label vectors for a vector database",
        "xmcray export runs/a --out bundles/a",
    ),
    "memory": (
        bundles.memory,
        bundles.memory_options,
        "let the training queries of a corpus vote, with any encoder and without training",
        "xmcray memory runs/a --data corpora/msdocs --out bundles/a-memory --memory weight=0.5",
    ),
    "labels": (
        bundles.labels,
        bundles.labels_options,
        "add labels to a bundle, remove some, or say what they can be filtered by, without training",
        "xmcray labels add bundles/a new_labels.jsonl",
    ),
    "search": (
        bundles.search,
        bundles.search_options,
        "answer texts from a bundle",
        'xmcray search bundles/a "solve a sparse linear system" -k 5',
    ),
    "predict": (
        bundles.predict,
        bundles.predict_options,
        "answer a file of queries; the same command continues an interrupted one",
        "xmcray predict bundles/a queries.parquet --out predictions/a -k 100",
    ),
    "serve": (
        bundles.serve,
        bundles.serve_options,
        "answer over HTTP, on Ray Serve",
        "xmcray serve bundles/a --port 8000",
    ),
}
