"""Asks a Ray head for its nodes and prints them as JSON: `python -m xmcray.doctor.head HOST:PORT`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ray import _raylet

ALIVE = 0


def main(address: str) -> None:
    """Prints {"open": whether it asks for no token, "nodes": [...]}."""
    raylet: Any = _raylet
    nodes = raylet.GcsClient(address=address).get_all_node_info(timeout=10).values()
    found = [
        {
            "address": node.node_manager_address,
            "head": bool(node.is_head_node),
            "resources": dict(node.resources_total),
        }
        for node in nodes
        if node.state == ALIVE
    ]
    print(
        json.dumps({"open": os.environ.get("RAY_AUTH_MODE", "").lower() != "token", "nodes": found})
    )


if __name__ == "__main__":
    main(sys.argv[1])
