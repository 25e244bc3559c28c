"""Cross-encoders that read answers again: train-reranker, and --rerank of other verbs."""

from __future__ import annotations

import argparse

from xmcray import api
from xmcray.cli.arguments import add_corpus, given
from xmcray.cli.output import show_line, show_next

NUMBERS = ("queries", "epochs", "batch_size", "negatives", "candidates", "max_len", "seed")


def add_rerank(verb: argparse.ArgumentParser) -> None:
    """Adds --rerank."""
    verb.add_argument(
        "--rerank",
        metavar="MODEL",
        help="let a cross-encoder read the best answers again: what `xmcray train-reranker` wrote, or"
        " a folder or hub id",
    )


def train_reranker_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="RUN", help="a run, or a bundle whose run held queries out")
    add_corpus(verb)
    verb.add_argument("--out", required=True, metavar="RERANKER", help="folder or URL to write")
    verb.add_argument(
        "--model", required=True, metavar="M", help="transformer to start from: folder or hub id"
    )
    meanings = {
        "queries": "training queries that are used at most",
        "epochs": "passes over them",
        "batch_size": "queries of a step",
        "negatives": "hard negatives of a query",
        "candidates": "answers that are read",
        "max_len": "tokens of a query and a label together",
        "seed": "of the draws and of new weights",
    }
    for name in NUMBERS:
        option = f"--{name.replace('_', '-')}"
        verb.add_argument(option, type=int, metavar="N", help=meanings[name])
    verb.add_argument("--lr", type=float, metavar="X", help="highest learning rate")


def train_reranker(options: argparse.Namespace) -> None:
    """Trains a cross-encoder on a bundle's hard negatives."""
    outcome = api.train_reranker(
        options.path,
        options.data,
        options.out,
        options.model,
        given(options, (*NUMBERS, "lr")),
    )
    before = " / ".join(f"{100 * value:.1f}" for value in outcome.before)
    after = " / ".join(f"{100 * value:.1f}" for value in outcome.after)
    show_line(
        f"P@1 / P@5 on held-out queries: {after}, without it {before}; weight of the bundle's score:"
        f" {outcome.weight:.3g}"
    )
    show_next(["xmcray", "search", options.path, "TEXT", "--rerank", options.out])
