"""On a cluster that is a head alone, data pipelines wait for the autoscaler's first node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from local_nodes import environment

# The nodes of this script are Ray's fake ones, in a cluster of its own.
SCRIPT = """
import sys
from pathlib import Path

from local_nodes import AutoscaledNodes

from xmcray.data.pipeline import prepare
from xmcray.data.formats import detect

nodes = AutoscaledNodes({"index": ({"CPU": 1}, 1)}, idle_s=60)
try:
    source = detect(Path(sys.argv[1]))
    # Less than a node takes to start.
    corpus = prepare(source, sys.argv[2], name="first", stall_s=0.5, progress=False)
    print("labels:", corpus.card.num_labels)
finally:
    nodes.close()
"""


def test_preparing_waits_for_the_first_node(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "labels.jsonl").write_text('{"uid": "a", "text": "red"}\n{"uid": "b", "text": "blue"}\n')
    query = '{"uid": "q%d", "text": "a red kettle", "labels": ["a"]}\n'
    (raw / "train.jsonl").write_text("".join(query % number for number in range(20)))

    with environment() as variables:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(raw), str(tmp_path / "corpus")],
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    assert "labels: 2" in done.stdout, done.stderr
