"""What a path on the command line names."""

from __future__ import annotations

from pathlib import Path

from xmcray.errors import RunError


def kind_of(path: str) -> str:
    """Whether a path names a run, a bundle or a file of predictions."""
    if path.endswith(".npz"):
        return "predictions"
    if (Path(path) / "run.json").is_file():
        return "run"
    if "://" in path or (Path(path) / "manifest.json").is_file():
        return "bundle"
    found = "is neither" if Path(path).exists() else "does not exist"
    raise RunError(f"{path} {found}, expected a run (run.json) or a bundle (manifest.json)")


def bundle_at(path: str, data: str | None = None) -> str:
    """The bundle at a path, or in the folder of a finished run; `data`: where the run's corpus is now."""
    if not (Path(path) / "run.json").is_file():
        return path
    from xmcray.data.corpus import Corpus
    from xmcray.training.outcome import bundle_of
    from xmcray.training.run import Run

    return bundle_of(Run.open(path), Corpus.open(data) if data else None)
