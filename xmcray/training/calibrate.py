"""Gives the answers of an existing bundle their probabilities."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xmcray.data.corpus import Corpus
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.calibration import Calibration
from xmcray.retrieval.labels import open_for_change
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.artifact import open_artifact
from xmcray.training.export import check_refit, selected_bundle
from xmcray.training.held_out import held_out_by
from xmcray.training.outcome import bundle_of, check_fits
from xmcray.training.probability_curves import fit_calibration
from xmcray.training.run import Run


def calibrate(path: str, corpus: Corpus, out: str | Path | None = None) -> Calibration:
    """Writes probabilities into a bundle, at one moment, or into a copy of it.

    Args:
        path: a run, or folder or URL of a bundle whose run held queries out. The bundle of a run
            with --refit gets the curves of RUN/selection, which has not seen the held-out queries.
        corpus: the one that it was made from.
        out: folder or URL of the new bundle; the bundle itself if not given.
    Raises:
        ConfigError: no query was held out, a refit ended so early that its selection is another
            model, or the bundle is at a URL and there is no `out`.
        DataError: bundle and corpus do not belong together.
        StorageError: the bundle is damaged or being changed, `out` is not empty, or the disk is
            full.
    """
    judge: str | Path = path
    if (Path(path) / "run.json").is_file():
        run = Run.open(path)
        path = bundle_of(run, corpus)
        selected = selected_bundle(run, corpus)
        if selected is not None:
            check_refit(run)
            judge = selected
        else:
            judge = path
    with open_for_change(path, out) as source:
        check_fits(source.retriever, corpus)
        folder, manifest = open_artifact(judge, KIND)
        rows = held_out_by(str(judge), manifest.about, corpus).validation_rows
        calibration = fit_calibration(Retriever.of_folder(folder), corpus, rows)
        calibrated = dataclasses.replace(source.retriever, calibration=calibration)
        source.publish({"calibrated": calibration.curves.queries}, calibrated)
    return calibration
