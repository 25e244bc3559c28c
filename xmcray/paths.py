"""The artifacts that paths name: runs, bundles and predictions."""

from __future__ import annotations

from pathlib import Path

from xmcray.errors import RunError


def kind_of(path: str) -> str:
    """The kind of artifact at a path: "run", "bundle" or "predictions".

    Raises:
        RunError: there is neither.
    """
    if path.endswith(".npz"):
        return "predictions"
    if (Path(path) / "run.json").is_file():
        return "run"
    # No run is at a URL. Whether a bundle is there shows when it is opened.
    if "://" in path or (Path(path) / "manifest.json").is_file():
        return "bundle"
    problem = "is neither a run nor a bundle" if Path(path).exists() else "does not exist"
    raise RunError(
        f"{path} {problem}, expected a run (run.json) or a bundle (manifest.json); `xmcray train`"
        " makes both"
    )


def bundle_at(path: str, data: str | None = None) -> str:
    """The bundle at a path, or in the folder of a finished run.

    Args:
        path: of a bundle or a run.
        data: where the run's corpus is now, if it has moved.
    """
    if not (Path(path) / "run.json").is_file():
        return path
    from xmcray.data.corpus import Corpus
    from xmcray.training.outcome import bundle_of
    from xmcray.training.run import Run

    return bundle_of(Run.open(path), Corpus.open(data) if data else None)
