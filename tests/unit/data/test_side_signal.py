"""Which side vectors say something about labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of
from planted import write_planted, write_side_vectors

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.side_signal import SideSignal, _directions, side_signal


def signal_of(
    folder: Path, *, planted: bool, of_labels: bool = True, share: float = 1.0
) -> SideSignal:
    """Of the side vectors of a small corpus, which a share of its training queries have."""
    raw = folder / "raw"
    write_planted(raw, 300, 30, filtered=0, only_in_test=0)
    write_side_vectors(raw, 16, planted=planted)
    if not of_labels:
        (raw / "labels.vectors.npy").unlink()
    path = raw / "train.vectors.npy"
    vectors = np.load(path)
    vectors[int(share * len(vectors)) :] = 0
    np.save(path, vectors)
    corpus = corpus_of(raw, folder / "corpus", vocab_size=500)
    signal = side_signal(TrainingData(corpus, DataConfig(validation=0)))
    assert signal is not None
    return signal


@pytest.mark.parametrize("of_labels", [True, False])
def test_vectors_of_queries_that_share_a_label_are_alike(tmp_path: Path, of_labels: bool) -> None:
    signal = signal_of(tmp_path, planted=True, of_labels=of_labels)
    assert not signal.is_noise
    # Some random queries share a label too, and many queries have several labels.
    assert 0.1 < signal.alike < 0.8


def test_queries_without_a_vector_do_not_count(tmp_path: Path) -> None:
    signal = signal_of(tmp_path, planted=True, share=0.2)
    assert not signal.is_noise
    assert signal.alike > 0.1


def test_vectors_of_noise_are_noise(tmp_path: Path) -> None:
    signal = signal_of(tmp_path, planted=False)
    assert signal.is_noise
    assert abs(signal.alike) < 0.05


def test_a_vector_of_tiny_numbers_has_a_direction() -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    vectors[3] = 1e-25  # its squares are 0 in float32
    assert np.isfinite(_directions(vectors)).all()
