"""`python -m xmcray VERB ...`: the command line of the Python that is named."""

from __future__ import annotations

from xmcray.cli import command

if __name__ == "__main__":
    command()
