"""Separate environments for libraries that xmcray is compared with, made when they are first needed.

CACHE/peers/linear/              virtual environment with libpecos
CACHE/peers/sentences/           virtual environment with sentence-transformers
CACHE/peers/linear/packages.txt  what is installed there
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import data_sets

# The torch of this environment, so that both sides compute with the same kernels. Any other may be a
# build with gigabytes of CUDA.
TORCH = f"torch=={importlib.metadata.version('torch')}"
# libpecos 1.2.8 was compiled against the first numpy.
LINEAR = ("libpecos==1.2.8", "numpy<2", "scipy<1.14", "scikit-learn", TORCH)
SENTENCES = (
    "sentence-transformers[train]==6.2.0",
    TORCH,
    f"transformers=={importlib.metadata.version('transformers')}",
)
PACKAGES = {"linear": LINEAR, "sentences": SENTENCES}


def run_script(environment: str, script: str, words: list[str | Path], threads: int) -> None:
    """Runs a script of this folder in one of the environments.

    Args:
        environment: "linear" or "sentences".
        script: name of the file.
        words: its arguments.
        threads: of every library in it.

    Raises:
        subprocess.CalledProcessError: the script failed.
    """
    python = python_of(environment)
    number = str(threads)
    settings = {**os.environ, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    # This checkout is no part of the peers' environment.
    settings.pop("PYTHONPATH", None)
    path = Path(__file__).parent / script
    subprocess.run([python, path, *words], env=settings, check=True)


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which is made if it is missing or has other packages."""
    folder = data_sets.CACHE / "peers" / environment
    packages = "\n".join(PACKAGES[environment])
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{environment}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / "packages.txt"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == packages:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES[environment]], check=True)
        # Written last: without it the environment is made anew.
        stamp.write_text(packages, encoding="utf-8")
    return python
