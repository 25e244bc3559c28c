"""distil: a bundle that answers like another one, with an encoder for a CPU."""

from __future__ import annotations

import argparse

from xmcray import api, config
from xmcray.cli.arguments import add_corpus
from xmcray.cli.output import show_line, show_next


def distil_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="BUNDLE", help="a bundle with a transformer, or a run")
    verb.add_argument("--into", required=True, metavar="KIND", help="kind of encoder: static")
    add_corpus(verb)
    verb.add_argument("--out", required=True, metavar="NEW", help="folder or URL to write")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A=B",
        help="epochs, batch_size, lr, seed and others, see docs/encoders.md",
    )


def distil(options: argparse.Namespace) -> None:
    """Trains a static encoder to answer like a bundle's transformer."""
    outcome = api.distil(
        options.path,
        options.data,
        options.out,
        config.merge({}, options.set),
        into=options.into,
    )
    student = " / ".join(f"{100 * value:.1f}" for value in outcome.student)
    teacher = " / ".join(f"{100 * value:.1f}" for value in outcome.teacher)
    seen = "" if outcome.unseen_by_teacher else ", which was trained on them"
    show_line(
        f"P@1 / P@5 on {outcome.queries:,} held-out queries: {student}, of {options.path}"
        f" {teacher}{seen}"
    )
    show_next(["xmcray", "evaluate", options.out, "--data", options.data])
