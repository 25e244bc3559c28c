"""Proof that a refactoring changes nothing: trains every method on the embedded sample and hashes what comes of it.

    python benchmarks/sameness.py --record before.json
    python benchmarks/sameness.py --compare before.json
    python benchmarks/sameness.py --methods astra --workers 0

A fingerprint has three parts: the tensors and index files of the bundle, the losses of the run, and the answers to the
first test queries. Only the command line is used, so the same script runs on any commit. Tensors are hashed
without their names and files without their manifest: a renamed setting or file is no difference, another bit is.

Hashes are comparable on one kind of processor only, because kernels differ between instruction sets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

XMCRAY = (str(Path(sys.executable).with_name("xmcray")),)
NUM_QUERIES = 100
TOP_K = 20

# Small, and yet every moving part takes part: hard negatives, clusters, two versions of both, and a switch between them.
SMALL = (
    "encoder.dim=64",
    "optim.epochs=5",
    "optim.batch_size=128",
    "negatives.start_epoch=2",
    "negatives.refresh_every=2",
    "negatives.cluster_size=8",
    "log.every=1",
)
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name: (method, preset, settings besides SMALL)
    "astra": ("astra", "astra/sample", ("negatives.hard=8",)),
    "renee": ("renee", "renee/sample", ()),
    "unidec": ("unidec", "unidec/sample", ("negatives.hard=8",)),
    "dexml": ("dexml", "dexml/sample", ("negatives.hard=8",)),
    "dexml-ance": ("dexml", "dexml/ance-sample", ("negatives.hard=8",)),
    "prime": ("prime", "prime/sample", ("negatives.hard=8",)),
    "rae": ("rae", "rae/sample", ("negatives.hard=8",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--corpus", type=Path, help="a prepared sample (default: one is prepared)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the fingerprints there")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="fail unless the fingerprints equal these"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or prepare_sample(Path(folder))
        fingerprints = {}
        for name in options.methods:
            for workers in options.workers:
                key = f"{name}, {workers} workers"
                fingerprints[key] = fingerprint(name, workers, corpus, Path(folder))
                print(key, json.dumps(fingerprints[key]), flush=True)
    if options.record:
        options.record.write_text(json.dumps(fingerprints, indent=1) + "\n", encoding="utf-8")
    if options.compare:
        compare(fingerprints, json.loads(options.compare.read_text(encoding="utf-8")))


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Exits with code 1 and one line for each fingerprint that differs."""
    different = [
        f"{key}: {part} differs"
        for key, parts in found.items()
        for part, value in parts.items()
        if expected[key][part] != value
    ]
    print("\n".join(different) or f"{len(found)} fingerprints are equal")
    raise SystemExit(1 if different else 0)


def prepare_sample(folder: Path) -> Path:
    """The embedded sample as a corpus."""
    raw = folder / "raw"
    code = f"from pathlib import Path; from xmcray.data.sample import write_sample; write_sample(Path({str(raw)!r}))"
    run(sys.executable, "-c", code)
    run(*XMCRAY, "prepare", str(raw), "--out", str(folder / "corpus"))
    return folder / "corpus"


def fingerprint(name: str, workers: int, corpus: Path, folder: Path) -> dict[str, str]:
    """Trains, exports and searches, and hashes the results."""
    method, preset, settings = CASES[name]
    path = folder / f"{name}-{workers}"
    overrides = []
    for setting in (*SMALL, *settings):
        overrides += ["--set", setting]
    command = (
        "train",
        method,
        "--data",
        str(corpus),
        "--out",
        str(path),
        "--workers",
        str(workers),
    )
    run(*XMCRAY, *command, "--config", f"preset:{preset}", *overrides, "--no-evaluate")
    run(*XMCRAY, "export", str(path), "--out", str(path / "exported"))
    return {
        "bundle": bundle_hash(path / "exported"),
        "losses": losses_hash(path / "metrics.jsonl"),
        "answers": answers_hash(path / "exported", corpus),
    }


def bundle_hash(bundle: Path) -> str:
    """Of all tensors, without their names, and of the index files."""
    hashes = []
    for file in bundle.rglob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            hashes += [sha256(tensors.get_tensor(name).tobytes()) for name in tensors.keys()]  # noqa: SIM118
    hashes += [sha256(file.read_bytes()) for file in bundle.rglob("*.faiss")]
    return sha256("".join(sorted(hashes)).encode())


def losses_hash(metrics: Path) -> str:
    """Of the loss of every step and of every validation, bit by bit."""
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept.append(
            {key: record[key] for key in ("step", "loss", "P@1", "nDCG@5") if key in record}
        )
    return sha256(json.dumps(kept).encode())


def answers_hash(bundle: Path, corpus: Path) -> str:
    """Of labels and scores that the bundle answers the first test queries with."""
    code = "import json, sys; import numpy as np; from xmcray.data.corpus import Corpus\n"
    code += f"texts = Corpus.open({str(corpus)!r}).split('test').texts(np.arange({NUM_QUERIES}))\n"
    code += "json.dump(texts, sys.stdout)"
    texts = json.loads(run(sys.executable, "-c", code))
    answers = run(*XMCRAY, "search", str(bundle), "-k", str(TOP_K), "--json", "--", *texts)
    return sha256(answers)


def sha256(content: bytes) -> str:
    """In hexadecimal digits; enough of them to tell two contents apart."""
    return hashlib.sha256(content).hexdigest()[:24]


def run(*command: str) -> bytes:
    """Standard output of a command; one thread, because sums depend on the number of threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout


if __name__ == "__main__":
    main()
