"""The committed preset of the embedded sample, refitted: what the quickstart promises."""

from pathlib import Path

import pytest
from corpora import corpus_of

from xmcray.config import load_yaml
from xmcray.data.sample import write_sample
from xmcray.training.launch import train
from xmcray.training.outcome import finish
from xmcray.training.run import RunConfig


@pytest.mark.timeout(600)  # half a minute on an idle machine
def test_sample_reaches_its_floors(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    write_sample(tmp_path / "raw")
    corpus = corpus_of(tmp_path / "raw", tmp_path / "corpus")
    config = RunConfig.resolve("astra", load_yaml("preset:astra/sample"), ["cluster.workers=0"])
    run = train(corpus.path, tmp_path / "run", config, refit=True)
    found = finish(run, corpus)
    assert found is not None
    metrics = found.to_json()
    assert metrics["P@1"] >= 0.62
    assert metrics["P@5"] >= 0.34
