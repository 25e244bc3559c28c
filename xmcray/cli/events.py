"""What a server with --collect-events has kept: events export."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Container
from pathlib import Path

from xmcray.cli.arguments import add_json
from xmcray.cli.output import show, show_json, show_next
from xmcray.errors import ConfigError, readable


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
        help="corpus that the files will be appended to: texts of its labels are left out",
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
    from xmcray.serving.event_export import export_events

    if options.after < 0 or not 0 <= options.hold_out < 1:
        raise ConfigError(
            f"--after is {options.after} and --hold-out {options.hold_out:g}, expected a number of"
            " an event and a share below 1"
        )
    texts: list[str] = []
    if options.texts:
        with readable(f"{options.texts} cannot be read", "name a file of texts", ConfigError):
            texts = Path(options.texts).read_text(encoding="utf-8").splitlines()
    exported = export_events(
        options.state_dir,
        options.model,
        options.out,
        after=options.after,
        grades=_grades(options.grade),
        hold_out=options.hold_out,
        corpus_labels=_labels_of(options.data) if options.data else (),
        texts=texts,
    )
    if options.json:
        show_json(dataclasses.asdict(exported))
        return
    show(
        f"{options.out}: {exported.train:,} training and {exported.test:,} test queries from events"
        f" {exported.first} to {exported.last}, {exported.left_out:,} left out"
    )
    command = ["xmcray", "prepare", options.out]
    if options.data:
        command += ["--append", options.data]
    show_next([*command, "--out", "CORPUS2"])


def _grades(assignments: list[str]) -> dict[str, float]:
    from xmcray.serving.event_export import GRADES

    grades = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        try:
            grade = float(value)
        except ValueError:
            grade = 0.0
        if name not in GRADES or not 0 < grade < float("inf"):
            raise ConfigError(
                f"--grade is {assignment!r}, expected one of {', '.join(GRADES)} and a number above"
                " 0, such as click=0.5"
            )
        grades[name] = grade
    return grades


def _labels_of(path: str) -> Container[str]:
    """The uids of a corpus."""
    import numpy as np

    from xmcray.data.corpus import Corpus

    corpus = Corpus.open(path, verify=False)
    return set(corpus.label_uids(np.arange(corpus.card.num_labels)))
