"""Asks a Ray head for its nodes and prints them as JSON: `python -m xmcray.doctor.head HOST:PORT`.

It is a process of its own because Ray aborts a process that has no token for a head that wants one.
"""

from __future__ import annotations

import json
import os
import sys

from xmcray.ray_adapter.private import nodes_of_head


def main(address: str) -> None:
    """Prints {"open": whether the head accepts clients without a token, "nodes": [...]}."""
    nodes = nodes_of_head(address)
    is_open = os.environ.get("RAY_AUTH_MODE", "").lower() != "token"
    print(json.dumps({"open": is_open, "nodes": nodes}))


if __name__ == "__main__":
    main(sys.argv[1])
