"""Proof that a refactoring changes nothing: trains every method on the embedded sample and hashes what comes of it.

    python benchmarks/sameness.py --record benchmarks/results/sameness.json
    python benchmarks/sameness.py --record benchmarks/results/sameness.json --methods prime
    python benchmarks/sameness.py --compare benchmarks/results/sameness.json
    python benchmarks/sameness.py --compare benchmarks/results/sameness.json --methods astra --workers 0

A fingerprint has three parts: the tensors and index files of the bundle, the losses of the run,
and the answers to the first test queries. Training, export and search go through the command line,
so the same script runs on any commit. Tensors are hashed without their names and files without
their manifest: a renamed setting or file is no difference, another bit is.

Hashes are comparable on one kind of processor only, because kernels differ between instruction
sets. A recording names its processor, and --compare refuses a recording of another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import torch
from common import new_parser, set_options
from safetensors import safe_open

from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample

XMCRAY = str(Path(sys.executable).with_name("xmcray"))
NUM_QUERIES = 100
TOP_K = 20
MACHINE = "machine"  # the key of a recording that is no fingerprint

# Small, but with every moving part: hard negatives and clusters, and a switch to a second version.
SETTINGS = (
    "encoder.dim=64",
    "optim.epochs=5",
    "optim.batch_size=128",
    "negatives.start_epoch=2",
    "negatives.refresh_every=2",
    "negatives.cluster_size=8",
    "log.every=1",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A training whose results are hashed: `settings` come after `SETTINGS`."""

    method: str
    preset: str
    settings: tuple[str, ...] = ("negatives.hard=8",)


CASES = {
    "astra": Case("astra", "astra/sample"),
    "renee": Case("renee", "renee/sample", ()),
    "unidec": Case("unidec", "unidec/sample"),
    "dexml": Case("dexml", "dexml/sample"),
    "dexml-ance": Case("dexml", "dexml/ance-sample"),
    "dexml-cache": Case("dexml", "dexml/sample", ("method.columns=cache", "method.cache_hard=64")),
    "prime": Case("prime", "prime/sample"),
    "rae": Case("rae", "rae/sample"),
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--corpus", type=Path, help="a prepared sample (default: prepare one)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the fingerprints")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="fail where they differ")
    options = parser.parse_args()
    expected: dict[str, object] = {}
    if options.compare:
        expected = json.loads(options.compare.read_text(encoding="utf-8"))
        if expected.get(MACHINE, kernels()) != kernels():
            print(f"{options.compare} was recorded on {expected[MACHINE]}; this is {kernels()}")
            raise SystemExit(2)
    fingerprints: dict[str, object] = {MACHINE: kernels()}
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or prepare_sample(Path(folder))
        for name in options.methods:
            for workers in options.workers:
                key = f"{name}, {workers} workers"
                fingerprints[key] = fingerprint(
                    CASES[name], workers, corpus, Path(folder) / f"{name}-{workers}"
                )
                print(key, json.dumps(fingerprints[key]), flush=True)
    if options.record:
        record(fingerprints, options.record)
    if options.compare:
        different = [
            key for key in fingerprints if fingerprints[key] != expected.get(key, kernels())
        ]
        for key in different:
            print(f"{key} differs from {expected.get(key)}")
        print(f"{len(fingerprints) - 1 - len(different)} fingerprints are equal")
        raise SystemExit(1 if different else 0)


def record(fingerprints: dict[str, object], path: Path) -> None:
    """Writes the fingerprints; those of other methods stay if this machine recorded them."""
    recorded: dict[str, object] = {}
    if path.exists():
        recorded = json.loads(path.read_text(encoding="utf-8"))
    if recorded.get(MACHINE) != fingerprints[MACHINE]:
        recorded = {}
    path.write_text(json.dumps(recorded | fingerprints, indent=1) + "\n", encoding="utf-8")


def kernels() -> str:
    """What the bits of a result depend on besides the code."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    libraries = f"torch {torch.__version__}, faiss {faiss.__version__}, numpy {np.__version__}"
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{processor[1] if processor else 'unknown'}, {instructions}, {libraries}"


def prepare_sample(folder: Path) -> Path:
    """The embedded sample as a corpus."""
    (folder / "raw").mkdir()
    write_sample(folder / "raw")
    run("prepare", str(folder / "raw"), "--out", str(folder / "corpus"))
    return folder / "corpus"


def fingerprint(case: Case, workers: int, corpus: Path, path: Path) -> dict[str, str]:
    """Trains, exports and searches, and hashes the results."""
    overrides = set_options([*SETTINGS, *case.settings])
    source = ["--data", str(corpus), "--config", f"preset:{case.preset}", *overrides]
    target = ["--out", str(path), "--workers", str(workers), "--no-evaluate"]
    run("train", case.method, *source, *target)
    run("export", str(path), "--out", str(path / "exported"))
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
    texts = Corpus.open(corpus).split("test").texts(np.arange(NUM_QUERIES))
    results = json.loads(run("search", str(bundle), "-k", str(TOP_K), "--json", "--", *texts))
    for result in results:
        for answer in result["answers"]:
            # The recording is of labels and scores, and older than probabilities.
            answer.pop("probability", None)
    return sha256(json.dumps(results, indent=1, ensure_ascii=False).encode() + b"\n")


def sha256(content: bytes) -> str:
    """In hexadecimal digits; enough of them to tell two contents apart."""
    return hashlib.sha256(content).hexdigest()[:24]


def run(*arguments: str) -> bytes:
    """Standard output of a verb of xmcray."""
    # Sums depend on the number of threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [XMCRAY, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout


if __name__ == "__main__":
    main()
