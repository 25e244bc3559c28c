"""Entry of the scripts in `jobs/`: one verb of the command line, run as a Ray job."""

from __future__ import annotations

import sys
from typing import NoReturn

from xmcray import cli


def run_job(*arguments: str) -> NoReturn:
    """Runs `xmcray ARGUMENTS` followed by the options of the script, and exits with its code.

    Args:
        arguments: The verb, and what the script fixes.
    """
    cli.command([*arguments, *sys.argv[1:]])
