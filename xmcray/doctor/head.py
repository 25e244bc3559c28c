"""Asks a Ray head for its nodes and prints them as JSON: `python -m xmcray.doctor.head HOST:PORT`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ray import _raylet

ALIVE = 0


def main(address: str) -> None:
    """Prints {"open": whether the head accepts clients without a token, "nodes": [...]}."""
    raylet: Any = _raylet
    known_nodes = raylet.GcsClient(address=address).get_all_node_info(timeout=10).values()
    nodes = [
        {
            "address": node.node_manager_address,
            "head": bool(node.is_head_node),
            "resources": dict(node.resources_total),
        }
        for node in known_nodes
        if node.state == ALIVE
    ]
    is_open = os.environ.get("RAY_AUTH_MODE", "").lower() != "token"
    print(json.dumps({"open": is_open, "nodes": nodes}))


if __name__ == "__main__":
    main(sys.argv[1])
