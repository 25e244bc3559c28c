"""What a server with --collect-events has kept: events export."""

from __future__ import annotations

import argparse
import dataclasses

from xmcray import api
from xmcray.cli.arguments import add_json
from xmcray.cli.output import show_json, show_line, show_next
from xmcray.errors import ConfigError


def events_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("action", metavar="export", choices=("export",))
    verb.add_argument(
        "state_dir", metavar="STATE", help="state folder of the server, which may run"
    )
    verb.add_argument("--out", required=True, metavar="RAW", help="folder of raw files to write")
    verb.add_argument(
        "--model", default="default", metavar="NAME", help="its model (default: %(default)s)"
    )
    verb.add_argument(
        "--data",
        metavar="CORPUS",
        help="corpus that the files will be appended to: texts of its labels are left out, and its"
        " query texts stay in their splits",
    )
    verb.add_argument(
        "--after",
        type=int,
        default=0,
        metavar="N",
        help="leave out the events that an earlier export ended with (default: %(default)s)",
    )
    verb.add_argument(
        "--hold-out",
        type=float,
        default=0.1,
        metavar="X",
        help="share of the texts that become test queries (default: %(default)s)",
    )
    verb.add_argument(
        "--grade",
        action="append",
        default=[],
        metavar="EVENT=X",
        help="relevance of click (default: 1), accept (2) or purchase (3)",
    )
    verb.add_argument(
        "--texts",
        metavar="FILE",
        help="texts, one a line, that redacted searches may have had",
    )
    add_json(verb, "the counts")


def events(options: argparse.Namespace) -> None:
    """Writes raw files of the feedback in an event log."""
    exported = api.events(
        options.state_dir,
        options.out,
        model=options.model,
        data=options.data,
        after=options.after,
        hold_out=options.hold_out,
        grades=dict(map(_grade, options.grade)),
        texts=options.texts,
    )
    if options.json:
        show_json(dataclasses.asdict(exported))
        return
    show_line(
        f"{options.out}: {exported.train:,} training and {exported.test:,} test queries from events"
        f" {exported.first} to {exported.last}, {exported.left_out:,} left out"
    )
    command = ["xmcray", "prepare", options.out]
    if options.data:
        command += ["--append", options.data]
    show_next([*command, "--out", "CORPUS2"])


def _grade(assignment: str) -> tuple[str, float]:
    """The event and the relevance of click=0.5."""
    name, _, value = assignment.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--grade is {assignment!r}, expected one such as click=0.5") from None
