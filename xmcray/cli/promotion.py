"""A new bundle in the place of the one that is served: promote."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from xmcray.cli.arguments import add_json
from xmcray.cli.output import show, show_json
from xmcray.errors import BundleError, ConfigError
from xmcray.paths import bundle_at

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
    if options.roll_back and not options.url:
        raise ConfigError("--roll-back changes what a server answers from; name it with --url")
    if options.url and not options.admin_token_file:
        raise ConfigError("a swap needs the administrator's token; add --admin-token-file FILE")
    if options.last < 1 or not 0 <= options.margin <= 100:
        raise ConfigError(
            f"--last is {options.last} and --margin {options.margin:g}, expected at least one query"
            " and 0 to 100 points"
        )
    old = bundle_at(options.old)
    new = bundle_at(options.new)
    if options.roll_back:
        _swap(options, new, old)
        return
    if not options.data:
        raise ConfigError("the test needs queries; add --data CORPUS")
    verdict = _judge(options, old, new)
    _show(options, verdict)
    verdict.check()
    if options.url:
        _swap(options, old, new)


def _judge(options: argparse.Namespace, old: str, new: str) -> Verdict:
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training.promotion import check_metric, judge, measure_newest

    check_metric(options.metric)
    corpus = Corpus.open(options.data)
    evaluations = []
    for bundle in (old, new):
        with counting("newest test queries", options.last) as progress:
            evaluations.append(measure_newest(bundle, corpus, options.last, progress))
    before, after = evaluations
    return judge(before, after, options.metric, options.margin / 100)


def _show(options: argparse.Namespace, verdict: Verdict) -> None:
    import dataclasses

    from xmcray.evaluation.table import comparison_table

    if options.json:
        show_json({**dataclasses.asdict(verdict), "accepted": verdict.accepted})
        return
    show(comparison_table(verdict.comparison, "new", "old"))
    if verdict.accepted:
        show(f"the new bundle is not worse: {verdict}")


def _swap(options: argparse.Namespace, before: str, after: str) -> None:
    """Lets the server answer from `after`, if it answers from `before` now."""
    from xmcray.client import Client
    from xmcray.retrieval.bundle import KIND
    from xmcray.storage import is_url, open_artifact

    after_path = after if is_url(after) else str(Path(after).absolute())
    _, manifest = open_artifact(before, KIND, contents=False)
    _, wanted = open_artifact(after, KIND, contents=False)
    with Client(
        options.url, token_file=options.token_file, admin_token_file=options.admin_token_file
    ) as client:
        models = [m for m in client.models() if options.model in (None, m.model)]
        if not models:
            raise ConfigError(f"{options.url} has no model {options.model!r}; name one of its own")
        served = models[0].version
        if served not in (manifest.sha256, wanted.sha256):
            raise BundleError(
                f"{options.url} answers from another bundle ({served[:12]}), expected {before}"
                f" ({manifest.sha256[:12]}); name the one in use as OLD"
            )
        if served != wanted.sha256:
            # The test has compared the answers; the server's own probe would refuse new labels.
            client.swap(
                after_path,
                model=models[0].model,
                version=wanted.sha256,
                recall_floor=0.0,
            )
    if options.json:
        return
    show(f"{options.url} answers from {after} ({wanted.sha256[:12]})")
    if not options.roll_back:
        print(f"to go back: {shlex.join(_roll_back(options))}")


def _roll_back(options: argparse.Namespace) -> list[str]:
    """The command that undoes a promotion."""
    words = ["xmcray", "promote", options.old, options.new, "--roll-back", "--url", options.url]
    for name in ("model", "token_file", "admin_token_file"):
        value = getattr(options, name)
        if value:
            words += [f"--{name.replace('_', '-')}", value]
    return words
