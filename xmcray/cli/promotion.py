"""A new bundle in the place of the one that is served: promote."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from xmcray import api
from xmcray.cli.arguments import add_json
from xmcray.cli.output import show, show_json, show_line
from xmcray.errors import BundleError

if TYPE_CHECKING:
    from xmcray.training.promotion import Verdict


def promote_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("old", metavar="OLD", help="the bundle in use, or its run")
    verb.add_argument("new", metavar="NEW", help="the bundle that may replace it, or its run")
    verb.add_argument("--data", metavar="CORPUS", help="its newest test queries decide")
    verb.add_argument(
        "--last", type=int, default=5000, metavar="N", help="newest queries (default: %(default)s)"
    )
    verb.add_argument(
        "--metric", default="P@5", metavar="M", help="what decides (default: %(default)s)"
    )
    verb.add_argument(
        "--margin",
        type=float,
        default=0.9,
        metavar="X",
        help="points of the metric that NEW may lose (default: %(default)s)",
    )
    verb.add_argument("--url", metavar="URL", help="server that answers from OLD (default: none)")
    verb.add_argument("--model", metavar="NAME", help="its model (default: the first)")
    verb.add_argument("--token-file", metavar="FILE", help="token of the server's readers")
    verb.add_argument("--admin-token-file", metavar="FILE", help="token of its administrators")
    verb.add_argument(
        "--roll-back", action="store_true", help="without a test, let the server answer from OLD"
    )
    add_json(verb, "the comparison")


def promote(options: argparse.Namespace) -> None:
    """Tests a bundle against the one in use, and swaps it in if it is not worse."""
    try:
        promotion = api.promote(
            options.old,
            options.new,
            options.data,
            last=options.last,
            metric=options.metric,
            margin=options.margin,
            url=options.url,
            model=options.model,
            token_file=options.token_file,
            admin_token_file=options.admin_token_file,
            roll_back=options.roll_back,
        )
    except BundleError as error:
        # The comparison says why the bundle was refused.
        verdict = getattr(error, "verdict", None)
        if verdict is not None:
            _show(options, verdict)
        raise
    if promotion.verdict is not None:
        _show(options, promotion.verdict)
    if promotion.version is None or options.json:
        return
    if promotion.num_annotated:
        show_line(
            f"labels of {promotion.bundle} that got their attributes from {options.old}:"
            f" {promotion.num_annotated:,}"
        )
    show_line(f"{options.url} answers from {promotion.bundle} ({promotion.version[:12]})")
    if not options.roll_back:
        show_line(f"to go back: {shlex.join(_roll_back(options))}")


def _show(options: argparse.Namespace, verdict: Verdict) -> None:
    import dataclasses

    from xmcray.evaluation.table import comparison_table

    if options.json:
        show_json({**dataclasses.asdict(verdict), "accepted": verdict.accepted})
        return
    show(comparison_table(verdict.comparison, "new", "old"))
    if verdict.accepted:
        show_line(f"the new bundle is not worse: {verdict}")


def _roll_back(options: argparse.Namespace) -> list[str]:
    """The command that undoes a promotion."""
    words = ["xmcray", "promote", options.old, options.new, "--roll-back", "--url", options.url]
    for name in ("model", "token_file", "admin_token_file"):
        value = getattr(options, name)
        if value:
            words += [f"--{name.replace('_', '-')}", value]
    return words
